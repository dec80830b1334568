"""Under speculation max_tokens=-1 (no limit) and a prompt cache of the target alone raise."""
from itertools import islice
import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.generate import generate_step, speculative_generate_step
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.models.llama import Model, ModelArgs

SHARP = {"o_proj": 8, "down_proj": 8, "q_proj": 4, "k_proj": 4}  # so that context decides
args = ModelArgs(
    model_type="llama", hidden_size=64, num_hidden_layers=4, intermediate_size=128, head_dim=16,
    num_attention_heads=4, num_key_value_heads=2, rms_norm_eps=1e-5, vocab_size=320,
)
mx.random.seed(0)
model = Model(args)
model.load_weights([
    (name, weight * next((sharp for part, sharp in SHARP.items() if part in name), 1))
    for name, weight in tree_flatten(model.parameters())
])
prompt = mx.array([(7 * i * i + 3) % 300 + 10 for i in range(8)])


def first(tokens):
    try:
        return [token for token, *_ in islice(tokens, 6)]
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def options():  # without a limit; with a cache as make_prompt_cache(model) makes it
    return {"max_tokens": -1}, {"prompt_cache": make_prompt_cache(model)}


plain = [first(generate_step(prompt, model, **option)) for option in options()]
speculative = [first(speculative_generate_step(prompt, model, model, **o)) for o in options()]
print(f"expected: {plain}\nactual:   {speculative}")
