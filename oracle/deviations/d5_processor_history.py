"""Under speculation logits processors see only the last token of the prompt, not all of it."""
import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.generate import generate_step, speculative_generate_step
from mlx_lm.models.llama import Model, ModelArgs
from mlx_lm.sample_utils import make_logits_processors

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
options = {
    "max_tokens": 16,
    "logits_processors": make_logits_processors(repetition_penalty=1.5, repetition_context_size=40),
}
prompt = mx.array([(7 * i * i + 3) % 300 + 10 for i in range(30)])
print("expected:", [token for token, _ in generate_step(prompt, model, **options)])
speculative = speculative_generate_step(prompt, model, model, num_draft_tokens=2, **options)
print("actual:  ", [token for token, _, _ in speculative])
