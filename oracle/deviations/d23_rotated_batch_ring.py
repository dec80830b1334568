"""A batch ring that has turned hides the oldest token of a padded row from several new ones."""
import mlx.core as mx
from mlx_lm.models.cache import BatchRotatingKVCache, RotatingKVCache

WINDOW, HELD, NEW = 8, 3, 3


def visible(cache, mask, row=0):  # the key of token t is t; what each new token may look at
    keys = cache.keys[row, 0, :, 0].astype(mx.int32).tolist()
    allowed = mx.broadcast_to(mask, (2, 1, *mask.shape[-2:]))[row, 0].tolist()
    return [[key for key, seen in zip(keys, line) if seen] for line in allowed]


def append(cache, tokens, rows=1):
    keys = mx.broadcast_to(mx.array(tokens, mx.float32)[None, None, :, None], (rows, 1, len(tokens), 1))
    mask = cache.make_mask(len(tokens), return_array=True)
    cache.update_and_fetch(keys, keys)
    return mask


short, full = RotatingKVCache(WINDOW), RotatingKVCache(WINDOW)
append(short, list(range(1, HELD)))
append(full, list(range(1, WINDOW + 1)))
batch = BatchRotatingKVCache.merge([short, full])
append(batch, [HELD], rows=2)  # one token: the ring turns
alone = batch.extract(0)
new = list(range(HELD + 1, HELD + NEW + 1))
expected = visible(alone, append(alone, new))
actual = visible(batch, append(batch, new, rows=2))
print("expected: the new tokens see", expected)
print("actual:   the new tokens see", actual)
