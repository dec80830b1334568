"""LRUPromptCache: fetching is not counted as use, and some prefixes are not found."""
import mlx.core as mx
from mlx_lm.models.cache import ArraysCache, KVCache, LRUPromptCache


def state():  # of a recurrent model: it cannot be trimmed, only continued
    cache = ArraysCache(1)
    cache[0] = mx.zeros((1, 4))
    return [cache]


def attention(length):  # of a transformer: it can be trimmed
    cache = KVCache()
    cache.update_and_fetch(*[mx.zeros((1, 1, length, 4))] * 2)
    return [cache]


A, B, C = [1, 2, 3], [4, 5, 6], [7, 8, 9]
lru = LRUPromptCache(max_size=2)
lru.insert_cache("model", A, state())
lru.insert_cache("model", B, state())
for _ in range(3):
    lru.fetch_nearest_cache("model", [*A, 0])
lru.insert_cache("model", C, state())
evicted = [name for name, key in {"A": A, "B": B, "C": C}.items()
           if lru.fetch_nearest_cache("model", [*key, 0])[0] is None]

lru = LRUPromptCache()
lru.insert_cache("model", [1], state())
rest = lru.fetch_nearest_cache("model", [1, 2])[1]
lru.insert_cache("model", [5, 6, 7, 8], state())
lru.insert_cache("model", [5, 6, 9], attention(3))
hidden = lru.fetch_nearest_cache("model", [5, 6, 7])[1]
print("expected: evicted ['B'], still to compute [2] and [7]")
print(f"actual:   evicted {evicted}, still to compute {rest} and {hidden}")
