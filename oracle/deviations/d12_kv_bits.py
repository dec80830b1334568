"""kv_bits raises on sliding-window models, and a reused prefix changes what a llama says."""
import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.generate import generate_step
from mlx_lm.models import gemma3_text, llama
from mlx_lm.models.cache import make_prompt_cache

SHARP = {"o_proj": 8, "down_proj": 8, "q_proj": 4, "k_proj": 4}  # so that context decides
args = dict(hidden_size=64, num_hidden_layers=4, intermediate_size=128, num_attention_heads=4,
            num_key_value_heads=2, head_dim=64, rms_norm_eps=1e-5, vocab_size=320)
quantized = {"max_tokens": 8, "kv_bits": 4, "quantized_kv_start": 0}
prompt = mx.array([(7 * i * i + 3) % 300 + 10 for i in range(20)])


def say(model, prompt, cache=None):
    try:
        return [t for t, _ in generate_step(prompt, model, prompt_cache=cache, **quantized)]
    except NotImplementedError as error:
        return repr(error)


mx.random.seed(0)
sliding_args = gemma3_text.ModelArgs("gemma3_text", sliding_window_pattern=2, **args)
sliding = gemma3_text.Model(sliding_args)
model = llama.Model(llama.ModelArgs(model_type="llama", **args))
model.load_weights([
    (name, weight * next((sharp for part, sharp in SHARP.items() if part in name), 1))
    for name, weight in tree_flatten(model.parameters())
])
cache = make_prompt_cache(model)
cold = say(model, prompt)
for _ in generate_step(prompt[:12], model, prompt_cache=cache, **quantized | {"max_tokens": 0}):
    pass
warm, slid = say(model, prompt[12:], cache), say(sliding, prompt)
print("expected:", cold, "and of gemma3 8 tokens")
print("actual:  ", warm, "and of gemma3", slid if isinstance(slid, str) else f"{len(slid)} tokens")
