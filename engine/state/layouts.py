"""What each of mlx-lm's cache kinds can do, and how it goes back to an earlier boundary.

One row per class, looked up by exact class: a subclass may keep its tokens elsewhere. A kind that
is not in the table is unknown: it decodes plainly and speculation over it is refused by name.

Before each forward that may be taken back every cache is *marked*. A mark is numbers where the
rejected columns can simply be disowned, and array handles where a forward destroys what it writes
over. The way back never goes through `trim`, which is wrong for several kinds. The facts about the
classes are those of mlx_lm/models/cache.py in the pinned release.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import mlx.core as mx
from mlx_lm.models.cache import (
    ArraysCache,
    CacheList,
    ChunkedKVCache,
    ConcatenateKVCache,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
)

from .columns import Columns, Place, QuantizedColumns

Cache = Any
"""One of mlx-lm's cache objects, which have no common base with types, or our own in its place."""

A = TypeVar("A", mx.array, mx.array | None)

Mark = Any
"""What a kind's `mark` returned and its `back` understands."""


@dataclass(frozen=True, slots=True)
class Boundary:
    """One row's boundary in a transaction: `kept` tokens into forward number `forward`.

    That forward appended `width` tokens, kept < width; `dropped` tokens in all are to be forgotten.
    Where nothing is, the boundary lies before a forward that has not taken place: kept 0.
    """

    forward: int
    kept: int
    width: int
    dropped: int


@dataclass(frozen=True, slots=True)
class Layout:
    """One cache kind.

    `back(cache, marks, boundaries)` restores each row's boundary, given the marks taken before each
    forward; None: the kind cannot. `free`: a mark costs no copy of what it marks.
    """

    name: str
    mark: Callable[[Cache], Mark]
    back: Callable[[Cache, Sequence[Mark], Sequence[Boundary]], None] | None
    free: bool = True


def handle(array: A) -> A:
    """Another Python object for the same array, without a copy of the data.

    `a[i] = v` changes what the object `a` stands for: whoever shares the object sees it, whoever
    holds a handle of its own does not.
    """
    return copy.copy(array)


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


def _mark_ring(cache: Cache) -> Mark:
    return handle(cache.keys), handle(cache.values), cache.offset, cache._idx


def _back_ring(cache: Cache, marks: Sequence[Mark], bounds: Sequence[Boundary]) -> None:
    """Restore the ring before the forward and append the kept columns as a forward would.

    A window of several tokens stands at the end of the ring that it leaves behind.
    """
    (at,) = bounds
    following = [*marks[at.forward + 1 :], _mark_ring(cache)]
    keys, values, *_ = following[0]
    cache.keys, cache.values, cache.offset, cache._idx = marks[at.forward]
    if at.kept:
        start = keys.shape[2] - at.width
        kept = slice(start, start + at.kept)
        cache.update_and_fetch(keys[..., kept, :], values[..., kept, :])


def _mark_chunked(cache: Cache) -> Mark:
    """Arrays only if the next forward drops the front, which makes it write into new ones."""
    drops = cache.keys is not None and cache.offset - cache.start_position > cache.chunk_size
    arrays = (handle(cache.keys), handle(cache.values)) if drops else None
    return arrays, cache.start_position, cache.offset


def _back_chunked(cache: Cache, marks: Sequence[Mark], bounds: Sequence[Boundary]) -> None:
    """Bring back the front as it was, if a later forward dropped more of it; move the end."""
    (at,) = bounds
    for arrays, start, _ in marks[at.forward + (at.kept > 0) :]:
        if arrays is not None:
            (cache.keys, cache.values), cache.start_position = arrays, start
            break
    cache.offset = marks[at.forward][2] + at.kept


def _mark_recurrent(cache: Cache) -> Mark:
    return [handle(slot) for slot in cache.cache], handle(cache.left_padding), handle(cache.lengths)


def _back_recurrent(cache: Cache, marks: Sequence[Mark], bounds: Sequence[Boundary]) -> None:
    """Select each row's state before its forward; tokens of the forward itself need a replay."""
    states = [*marks, _mark_recurrent(cache)]
    forwards = [at.forward for at in bounds]
    cache.cache, cache.left_padding, cache.lengths = states[forwards[0]]
    if len(set(forwards)) > 1:
        slots = zip(*(states[forward][0] for forward in forwards), strict=True)
        cache.cache = [rows_of(slot) for slot in slots]


def rows_of(states: Sequence[mx.array | None]) -> mx.array | None:
    """Row r of the r-th array [B, ...]; zeros where nothing had been seen."""
    known = [state for state in states if state is not None]
    if not known:
        return None
    cold = mx.zeros_like(known[0])
    rows = [cold if state is None else state for state in states]
    return mx.concatenate([state[r : r + 1] for r, state in enumerate(rows)])


def _by_count(name: str, drop: Callable[[Cache, int], None]) -> Layout:
    """A kind that needs no mark: a handle would make every in-place write copy its buffer."""
    return Layout(
        name, lambda cache: None, lambda cache, marks, bounds: drop(cache, bounds[0].dropped)
    )


PLAIN = _by_count("plain", _move_end)
QUANTIZED = _by_count("quantized", _move_end)
CONCATENATED = _by_count("concatenated", _cut_columns)
RING = Layout("ring", _mark_ring, _back_ring, free=False)
CHUNKED = Layout("chunked", _mark_chunked, _back_chunked)
RECURRENT = Layout("recurrent", _mark_recurrent, _back_recurrent)
COLUMNS = Layout("columns", lambda cache: None, lambda cache, marks, bounds: None)
"""The place that columns stand in goes back, for all layers at once."""
PLACE = Layout(
    "place",
    lambda cache: None,
    lambda place, marks, bounds: place.drop([at.dropped for at in bounds]),
)

LAYOUTS: Mapping[type, Layout] = {
    KVCache: PLAIN,
    QuantizedKVCache: QUANTIZED,
    ConcatenateKVCache: CONCATENATED,
    RotatingKVCache: RING,
    ChunkedKVCache: CHUNKED,
    ArraysCache: RECURRENT,
    Columns: COLUMNS,
    QuantizedColumns: COLUMNS,
    Place: PLACE,
}


def layout_of(leaf: Cache) -> Layout:
    """The table's row for a cache object, or one that can do nothing and carries its class name."""
    kind = type(leaf)
    return LAYOUTS.get(kind) or Layout(kind.__name__, lambda cache: None, None)


def leaves(caches: Sequence[Cache]) -> list[Cache]:
    """The caches with each `CacheList` replaced, at any depth, by what it holds."""
    found: list[Cache] = []
    for cache in caches:
        found += leaves(cache.caches) if type(cache) is CacheList else [cache]
    return found


def unknown_kinds(caches: Sequence[Cache]) -> tuple[str, ...]:
    """Names of the kinds among `caches` that cannot go back at all, sorted."""
    layouts = map(layout_of, leaves(caches))
    return tuple(sorted({layout.name for layout in layouts if layout.back is None}))
