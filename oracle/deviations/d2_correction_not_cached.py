"""The server caches a speculative answer under one token too many: asked again, it says another."""
import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.generate import speculative_generate_step
from mlx_lm.models.cache import LRUPromptCache, make_prompt_cache
from mlx_lm.models.llama import Model, ModelArgs

SHARP = {"o_proj": 8, "down_proj": 8, "q_proj": 4, "k_proj": 4}  # so that context decides
args = ModelArgs(
    model_type="llama", hidden_size=64, num_hidden_layers=4, intermediate_size=128, head_dim=16,
    num_attention_heads=4, num_key_value_heads=2, rms_norm_eps=1e-5, vocab_size=320,
)


def build(noise):
    mx.random.seed(0)
    model = Model(args)
    weights = dict(tree_flatten(model.parameters()))
    for name, weight in weights.items():
        weight = weight * next((sharp for part, sharp in SHARP.items() if part in name), 1)
        weights[name] = weight + noise * mx.std(weight) * mx.random.normal(weight.shape)
    model.load_weights(list(weights.items()))
    return model


def answer(prompt):  # as mlx_lm.server does with a draft model
    cache, rest = prompt_cache.fetch_nearest_cache("model", prompt)
    cache = cache or make_prompt_cache(target) + make_prompt_cache(draft)
    tokens = [token for token, _, _ in speculative_generate_step(
        mx.array(rest), target, draft, num_draft_tokens=2, max_tokens=12, prompt_cache=cache
    )]
    prompt_cache.insert_cache("model", prompt + tokens, cache)
    return tokens


target, draft, prompt_cache = build(0), build(0.3), LRUPromptCache()
prompt = [(7 * i * i + 3) % 300 + 10 for i in range(9)]
print("expected:", answer(prompt))
print("actual:  ", answer(prompt))
