"""Ragged prompts on a sliding-window model cannot be prefilled if the last chunk is one token."""
import mlx.core as mx
from mlx_lm.generate import PromptProcessingBatch
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.models.gemma3_text import Model, ModelArgs

args = ModelArgs(
    model_type="gemma3_text", hidden_size=64, num_hidden_layers=2, intermediate_size=128,
    num_attention_heads=4, head_dim=16, num_key_value_heads=2, vocab_size=320,
    sliding_window=8, sliding_window_pattern=2,
)
mx.random.seed(0)
model = Model(args)


def prefill(step):
    rows = [make_prompt_cache(model) for _ in range(2)]
    batch = PromptProcessingBatch(model, [0, 1], rows, prefill_step_size=step)
    try:
        batch.prompt([[5, 6, 7], [1, 2, 3, 4, 5]])
    except RuntimeError as error:
        return str(error)
    return f"{batch.tokens} are in the cache"


print("expected:", prefill(step=5))
print("actual:  ", prefill(step=4))
