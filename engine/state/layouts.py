"""What each of mlx-lm's cache kinds can do.

One row per class, looked up by exact class: a subclass may keep its tokens elsewhere. A kind that
is not in the table is unknown: it decodes plainly and speculation over it is refused by name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mlx_lm.models.cache import ConcatenateKVCache, KVCache, QuantizedKVCache

Cache = Any
"""One of mlx-lm's cache objects; the library gives them no common base with types."""


@dataclass(frozen=True, slots=True)
class Layout:
    """One cache kind. `drop(cache, n)` forgets its last n tokens exactly; None: it cannot."""

    name: str
    drop: Callable[[Cache, int], None] | None


def _move_end(cache: Cache, n: int) -> None:
    """Columns behind the end are never read, and the next tokens overwrite them."""
    cache.offset -= n


def _cut_columns(cache: Cache, n: int) -> None:
    """A concatenating cache returns every column it holds, so the columns themselves must go.

    Its own `trim` moves only the offset and the next append brings the tokens back.
    """
    end = cache.offset - n
    cache.keys, cache.values = cache.keys[..., :end, :], cache.values[..., :end, :]
    cache.offset = end


LAYOUTS: Mapping[type, Layout] = {
    KVCache: Layout("plain", _move_end),
    QuantizedKVCache: Layout("quantized", _move_end),
    ConcatenateKVCache: Layout("concatenated", _cut_columns),
}


def layout_of(cache: Cache) -> Layout:
    """The table's row for a cache object, or one that can do nothing and carries its class name."""
    kind = type(cache)
    return LAYOUTS.get(kind) or Layout(kind.__name__, None)


def cannot_roll_back(caches: Sequence[Cache]) -> tuple[str, ...]:
    """Names of the kinds among `caches` that cannot forget a rejected token, sorted."""
    return tuple(sorted({layout_of(c).name for c in caches if layout_of(c).drop is None}))
