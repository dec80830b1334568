"""Trimming: a full ring trims although it cannot, a concatenating cache keeps what it trimmed."""
import mlx.core as mx
from mlx_lm.models.cache import (
    ChunkedKVCache, ConcatenateKVCache, KVCache, RotatingKVCache, trim_prompt_cache,
)


def fill(cache, tokens):  # the key of token t is t
    for t in tokens:
        key = mx.full((1, 1, 1, 1), float(t))
        if isinstance(cache, ChunkedKVCache):
            cache.maybe_trim_front()  # as llama4 does before every token
        keys, _ = cache.update_and_fetch(key, key)
    return [int(key) for key in keys.flatten().tolist()]


ring = RotatingKVCache(max_size=8)
fill(ring, range(20))
before = ring.offset
ring.trim(5)

kept = ConcatenateKVCache()
fill(kept, range(6))
kept.trim(3)

layers = [KVCache(), ChunkedKVCache(4)]
for layer in layers:
    fill(layer, range(12))
said = trim_prompt_cache(layers, 10)
print(f"expected: ring of {before} tokens, keys {[0, 1, 2, 9]}, trimmed {[said] * 2}")
print(f"actual:   ring of {ring.offset} tokens, keys {fill(kept, [9])}, "
      f"trimmed {[12 - layer.offset for layer in layers]}")
