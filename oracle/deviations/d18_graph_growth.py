"""Hybrid models: while a batch decodes, a graph that is never evaluated grows on their caches."""
import io
import mlx.core as mx
from mlx_lm.generate import BatchGenerator
from mlx_lm.models.cache import ArraysCache
from mlx_lm.models.qwen3_5 import TextModel, TextModelArgs

mx.random.seed(0)
model = TextModel(TextModelArgs(
    model_type="qwen3_5", hidden_size=64, num_hidden_layers=4, intermediate_size=128,
    num_attention_heads=4, num_key_value_heads=2, head_dim=16, rms_norm_eps=1e-6, vocab_size=320,
    linear_num_value_heads=4, linear_num_key_heads=2, linear_key_head_dim=32,
    linear_value_head_dim=32, linear_conv_kernel_dim=4, full_attention_interval=4,
))
batch = BatchGenerator(model)
batch.insert([[5, 6, 7, 8], [9, 10, 11, 12]], [1000, 1000])


def nodes():  # behind the counter of the last recurrent layer
    layers = batch._generation_batch.prompt_cache
    dot = io.StringIO()
    recurrent = [layer for layer in layers if isinstance(layer, ArraysCache)]
    mx.export_to_dot(dot, recurrent[-1].left_padding)
    return dot.getvalue().count("label")


counts = []
for _ in range(3):
    for _ in range(10):
        batch.next()
    counts.append(nodes())
print(f"expected: {counts[:1] * 3} graph nodes after 10, 20, 30 tokens")
print(f"actual:   {counts} graph nodes after 10, 20, 30 tokens")
