"""Rows that join, leave and change places: caches as values.

Every function builds new caches and leaves the ones it was given as they are, so whoever publishes
the result by one assignment has changed everything or nothing. Arrays are shared, never written.

`lifted` turns mlx-lm's own caches of one row into caches of many; `lowered` is the way back.
Source for what the native classes hold: mlx_lm/models/cache.py in the pinned release.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import (
    ArraysCache,
    CacheList,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
)

from ..errors import LawError
from .columns import Columns, Place, QuantizedColumns
from .layouts import Cache, handle, leaves

PlaceFor = Callable[[Place], Place]
"""One place for all layers that stand alike."""


def no_row_form(caches: Sequence[Cache]) -> tuple[str, ...]:
    """Names of the cache kinds among native `caches` that cannot stand beside other rows."""
    missing = [leaf for leaf in leaves(caches) if type(leaf) not in LIFT]
    kept = [c for c in leaves(caches) if type(c) is RotatingKVCache and c.keep]
    names = {type(leaf).__name__ for leaf in missing}
    return tuple(sorted(names | ({"RotatingKVCache with kept tokens"} if kept else set())))


def lifted(caches: Sequence[Cache]) -> list[Cache]:
    """One row's native caches as caches of many rows, of which there is one.

    Raises:
        LawError: a kind among them cannot stand beside other rows.
    """
    if names := no_row_form(caches):
        raise LawError(f"cache kind {', '.join(names)} has no row layout")
    places: list[Place] = []

    def place_for(place: Place) -> Place:
        if place not in places:
            places.append(place)
        return places[places.index(place)]

    return _each(caches, lambda leaf: LIFT[type(leaf)](leaf, place_for))


def lowered(caches: Sequence[Cache], row: int) -> list[Cache]:
    """One row as native caches with arrays of their own."""
    return _each(caches, lambda leaf: LOWER[type(leaf)](leaf, row))


def selected(caches: Sequence[Cache], keep: Sequence[int]) -> list[Cache]:
    """Those rows, in that order; at least one."""
    places: dict[int, Place] = {}

    def select(leaf: Cache) -> Cache:
        if isinstance(leaf, Columns):
            place = places.setdefault(id(leaf.place), leaf.place.selected(keep))
            return leaf.selected(place, keep)
        rows = mx.array(list(keep))
        return _recurrent([None if slot is None else slot[rows] for slot in leaf.cache])

    return _each(caches, select)


def joined(ours: Sequence[Cache], theirs: Sequence[Cache], counts: tuple[int, int]) -> list[Cache]:
    """Their rows behind ours; `counts` are the numbers of rows.

    Raises:
        LawError: a layer of theirs is of another kind than ours.
    """
    places: dict[tuple[int, int], Place] = {}
    others = iter(leaves(theirs))

    def join(leaf: Cache) -> Cache:
        other = next(others)
        if type(leaf) is not type(other):
            kinds = f"{type(leaf).__name__} and {type(other).__name__}"
            raise LawError(f"rows of {kinds} cannot be joined")
        if isinstance(leaf, Columns):
            # Layers that stand alike on one side may stand otherwise on the other.
            key = (id(leaf.place), id(other.place))
            place = places.setdefault(key, leaf.place.joined(other.place))
            return leaf.joined(place, other)
        return _recurrent(
            [_stacked(a, b, counts) for a, b in zip(leaf.cache, other.cache, strict=True)]
        )

    return _each(ours, join)


def places_of(caches: Sequence[Cache]) -> list[Place]:
    """The distinct places of the caches, in layer order."""
    found = {id(c.place): c.place for c in leaves(caches) if isinstance(c, Columns)}
    return list(found.values())


def _each(caches: Sequence[Cache], change: Callable[[Cache], Cache]) -> list[Cache]:
    return [
        CacheList(*_each(cache.caches, change)) if type(cache) is CacheList else change(cache)
        for cache in caches
    ]


def _stacked(
    ours: mx.array | None, theirs: mx.array | None, counts: tuple[int, int]
) -> mx.array | None:
    """A recurrent array of both. A row that has seen nothing starts from zeros, as in mlx-lm."""
    if ours is None and theirs is None:
        return None
    pair = []
    for array, other, count in ((ours, theirs, counts[0]), (theirs, ours, counts[1])):
        if array is None:
            assert other is not None
            array = mx.zeros((count, *other.shape[1:]), other.dtype)
        pair.append(array)
    return mx.concatenate(pair)


def _recurrent(slots: Sequence[mx.array | None]) -> Cache:
    cache: Any = ArraysCache(len(slots))
    cache.cache = list(slots)
    return cache


def _lift_plain(cache: Cache, place_for: PlaceFor) -> Columns:
    if cache.keys is None:
        return Columns(place_for(Place.empty(None)))
    planes = [handle(cache.keys), handle(cache.values)]
    return Columns(place_for(_place(None, cache.offset, cache.offset, planes)), planes)


def _lift_quantized(cache: Cache, place_for: PlaceFor) -> Columns:
    if cache.keys is None:
        place = place_for(Place.empty(None))
        return QuantizedColumns(place, None, cache.group_size, cache.bits)
    planes = [handle(part) for part in (*cache.keys, *cache.values)]
    place = place_for(_place(None, cache.offset, cache.offset, planes))
    return QuantizedColumns(place, planes, cache.group_size, cache.bits)


def _lift_ring(cache: Cache, place_for: PlaceFor) -> Columns:
    if cache.keys is None:
        return Columns(place_for(Place.empty(cache.max_size)))
    planes = [handle(cache._temporal_order(plane)) for plane in (cache.keys, cache.values)]
    held = min(cache.offset, planes[0].shape[2])
    return Columns(place_for(_place(cache.max_size, cache.offset, held, planes)), planes)


def _place(window: int | None, offset: int, held: int, planes: Sequence[Any]) -> Place:
    """A row's place in arrays of its own; mlx-lm leaves anything behind a row's end."""
    return Place(window, [offset], [held], [planes[0].shape[2]])


def _lower_columns(rows: Columns, row: int) -> Cache:
    window = rows.place.window
    cache: Any = KVCache() if window is None else RotatingKVCache(window)
    if rows.planes is None or not rows.place.offsets[row]:
        return cache
    keys, values = rows.row(row)
    cache.offset = rows.place.offsets[row]
    if window is not None:
        # A ring of that many tokens must hold exactly so many columns, or all of them.
        keys, values = (mx.contiguous(plane[:, :, -window:]) for plane in (keys, values))
        cache._idx = keys.shape[2]
    cache.keys, cache.values = keys, values
    return cache


def _lower_quantized(rows: QuantizedColumns, row: int) -> Cache:
    cache: Any = QuantizedKVCache(rows.group_size, rows.bits)
    if rows.planes is not None and rows.place.offsets[row]:
        parts = rows.row(row)
        cache.offset = rows.place.offsets[row]
        cache.keys, cache.values = parts[:3], parts[3:]
    return cache


def _lower_recurrent(rows: Cache, row: int) -> Cache:
    return _recurrent(
        [None if slot is None else mx.contiguous(slot[row : row + 1]) for slot in rows.cache]
    )


LIFT: Mapping[type, Callable[[Cache, PlaceFor], Cache]] = {
    KVCache: _lift_plain,
    QuantizedKVCache: _lift_quantized,
    RotatingKVCache: _lift_ring,
    ArraysCache: lambda cache, place_for: _recurrent([handle(slot) for slot in cache.cache]),
}

LOWER: Mapping[type, Callable[[Any, int], Cache]] = {
    Columns: _lower_columns,
    QuantizedColumns: _lower_quantized,
    ArraysCache: _lower_recurrent,
}
