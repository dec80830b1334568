"""Speculation on a sliding-window model leaves plain decoding's text once the window is full."""
import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.generate import generate_step, speculative_generate_step
from mlx_lm.models.gemma4_text import Model, ModelArgs

SHARP = {"o_proj": 8, "down_proj": 8, "q_proj": 4, "k_proj": 4}  # so that context decides
args = ModelArgs(
    model_type="gemma4_text", hidden_size=64, num_hidden_layers=6, intermediate_size=128,
    num_attention_heads=4, head_dim=16, global_head_dim=32, num_key_value_heads=1,
    num_kv_shared_layers=2, hidden_size_per_layer_input=16, vocab_size=320,
    vocab_size_per_layer_input=320, sliding_window=32, sliding_window_pattern=3,
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


target, draft = build(0), build(0.05)
prompt = mx.array([(7 * i * i + 3) % 300 + 10 for i in range(28)])
plain = generate_step(prompt, target, max_tokens=16)
print("expected:", [token for token, _ in plain])
speculative = speculative_generate_step(prompt, target, draft, num_draft_tokens=2, max_tokens=16)
print("actual:  ", [token for token, _, _ in speculative])
