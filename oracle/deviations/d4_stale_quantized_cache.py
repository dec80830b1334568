"""Speculation with kv_bits replaces caches in a copy of the list: the caller keeps stale ones."""
import mlx.core as mx
from mlx_lm.generate import speculative_generate_step
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.models.llama import Model, ModelArgs

args = ModelArgs(
    model_type="llama", hidden_size=64, num_hidden_layers=2, intermediate_size=128, head_dim=64,
    num_attention_heads=1, num_key_value_heads=1, rms_norm_eps=1e-5, vocab_size=320,
)
mx.random.seed(0)
model = Model(args)
prompt = mx.array([(7 * i * i + 3) % 300 + 10 for i in range(20)])


def held(**options):  # by each cache the caller handed in, after 8 tokens, with a perfect draft
    cache = make_prompt_cache(model) + make_prompt_cache(model)
    for _ in speculative_generate_step(
        prompt, model, model, num_draft_tokens=2, max_tokens=8, prompt_cache=cache, **options
    ):
        pass
    return f"the caller's caches hold {[layer.offset for layer in cache]} tokens"


print("expected:", held())
print("actual:  ", held(kv_bits=8, quantized_kv_start=0))
