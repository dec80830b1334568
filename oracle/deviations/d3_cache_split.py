"""Gemma 4 with shared KV has fewer caches than layers: a caller's target and draft caches mix."""
import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.generate import generate_step, speculative_generate_step
from mlx_lm.models import gemma4_text, llama
from mlx_lm.models.cache import make_prompt_cache

SHARP = {"o_proj": 8, "down_proj": 8, "q_proj": 4, "k_proj": 4}  # so that context decides
gemma_args = gemma4_text.ModelArgs(
    model_type="gemma4_text", hidden_size=64, num_hidden_layers=6, intermediate_size=128,
    num_attention_heads=4, head_dim=16, global_head_dim=32, num_key_value_heads=1,
    num_kv_shared_layers=2, hidden_size_per_layer_input=16, vocab_size=320,
    vocab_size_per_layer_input=320, sliding_window=32, sliding_window_pattern=3,
)
llama_args = llama.ModelArgs(
    model_type="llama", hidden_size=64, num_hidden_layers=4, intermediate_size=128, head_dim=16,
    num_attention_heads=4, num_key_value_heads=2, rms_norm_eps=1e-5, vocab_size=320,
)


def build(family, args):
    mx.random.seed(0)
    model = family.Model(args)
    model.load_weights([
        (name, weight * next((sharp for part, sharp in SHARP.items() if part in name), 1))
        for name, weight in tree_flatten(model.parameters())
    ])
    return model


target, draft = build(gemma4_text, gemma_args), build(llama, llama_args)
prompt = mx.array([(7 * i * i + 3) % 300 + 10 for i in range(8)])
cache = make_prompt_cache(target) + make_prompt_cache(draft)  # as mlx_lm.server makes it
options = {"num_draft_tokens": 2, "max_tokens": 12, "prompt_cache": cache}
speculative = speculative_generate_step(prompt, target, draft, **options)
print("expected:", [token for token, _ in generate_step(prompt, target, max_tokens=12)])
print("actual:  ", [token for token, _, _ in speculative])
