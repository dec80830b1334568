"""Ragged prompts in several chunks: a Mamba-2 layer looks for its decay behind the chunk's end."""
import mlx.core as mx
from mlx_lm.generate import PromptProcessingBatch
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.models.mamba2 import Model, ModelArgs

HEADS = 4
args = ModelArgs(
    model_type="mamba2", num_heads=HEADS, head_dim=16, vocab_size=320, hidden_size=32,
    state_size=16, intermediate_size=64, num_hidden_layers=2, layer_norm_epsilon=1e-5,
    conv_kernel=4, n_groups=1, use_bias=False, use_conv_bias=True, tie_word_embeddings=True,
    time_step_rank=4, time_step_limit=(0.0, 10.0),
)
mx.random.seed(0)
model = Model(args)
short, long = [5], [11, 3, 7, 2]


def state(prompts, step):  # of the last prompt, in the first layer: [heads, head_dim, state_size]
    rows = [make_prompt_cache(model) for _ in prompts]
    batch = PromptProcessingBatch(model, list(range(len(rows))), rows, prefill_step_size=step)
    batch.prompt(prompts)
    return batch.prompt_cache[0].extract(len(rows) - 1)[1][0]


def same(one, other):  # by head, but for the last: what it finds there is not its own memory
    return [mx.allclose(a, b, atol=1e-6).item() for a, b in zip(one[:HEADS - 1], other)]


whole = state([short, long], step=4)
print("expected: heads that are as in one chunk:", same(whole, state([long], step=3)))
print("actual:   heads that are as in one chunk:", same(whole, state([short, long], step=3)))
