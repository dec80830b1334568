"""The form of each cache kind: how a cache gives out what it holds, takes it in, and is cut back.

What the numbers of a form are, each `_save` says by what it returns. Arrays are keys and values
[1, heads, columns, dim], or a quantized kind's three parts of each; recurrent ones are [1, ...].
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx

from ..errors import BadInput
from .layouts import CHUNKED, CONCATENATED, PLAIN, QUANTIZED, RECURRENT, RING, Cache, Layout

Numbers = tuple[int, ...]
Arrays = tuple[mx.array, ...]


@dataclass(frozen=True, slots=True)
class Form:
    """What `forms.py` needs to know of one kind.

    `number_of_arrays(numbers)` belong to those numbers, of which the first is how many tokens the
    cache has seen, if it is `positioned`. `cut_from` and `cut` are about caches with arrays. `load`
    raises `ValueError` where numbers and arrays do not fit each other, `BadInput` where they do not
    fit the cache.
    """

    save: Callable[[Cache], tuple[Sequence[int], Sequence[mx.array]]]
    load: Callable[[Cache, Numbers, Arrays], None]
    number_of_arrays: Callable[[Numbers], int]
    cut_from: Callable[[Numbers], int | None]
    cut: Callable[[Numbers, Arrays, int], tuple[Numbers, Arrays]]
    positioned: bool = True


def _save_columns(cache: Cache) -> tuple[Sequence[int], Sequence[mx.array]]:
    return (cache.offset,), _live(cache)


def _load_columns(cache: Cache, numbers: Numbers, arrays: Arrays) -> None:
    (cache.offset,) = numbers
    cache.keys, cache.values = _of_columns(arrays, cache.offset) or (None, None)


def _save_quantized(cache: Cache) -> tuple[Sequence[int], Sequence[mx.array]]:
    arrays = [part for parts in _live(cache) for part in parts]
    return (cache.offset, cache.group_size, cache.bits), arrays


def _load_quantized(cache: Cache, numbers: Numbers, arrays: Arrays) -> None:
    cache.offset, group_size, bits = numbers
    _same("group size and bits", (group_size, bits), (cache.group_size, cache.bits))
    if parts := _of_columns(arrays, cache.offset):
        # Lists: the cache writes into their entries.
        cache.keys, cache.values = parts[:3], parts[3:]


def _save_ring(cache: Cache) -> tuple[Sequence[int], Sequence[mx.array]]:
    """Whole, as it lies: where the next token goes depends on that."""
    arrays = (cache.keys, cache.values) if cache.offset else ()
    columns = cache.keys.shape[2] if arrays else 0
    return (cache.offset, cache._idx, cache.max_size, cache.keep, columns), arrays


def _load_ring(cache: Cache, numbers: Numbers, arrays: Arrays) -> None:
    cache.offset, cache._idx, max_size, keep, columns = numbers
    _same("window and kept tokens", (max_size, keep), (cache.max_size, cache.keep))
    if columns < min(cache.offset, max_size) or not 0 <= cache._idx <= columns:
        raise ValueError(columns)
    cache.keys, cache.values = _of_columns(arrays, columns) or (None, None)


def _ring_cut_from(numbers: Numbers) -> int | None:
    """Only while no token has been dropped: until then the next one goes behind the last."""
    offset, index, *_ = numbers
    return 1 if index == offset else None


def _cut_ring(numbers: Numbers, arrays: Arrays, n: int) -> tuple[Numbers, Arrays]:
    _, _, max_size, keep, _ = numbers
    return (n, n, max_size, keep, n), _first_columns(arrays, n)


def _save_chunked(cache: Cache) -> tuple[Sequence[int], Sequence[mx.array]]:
    return (cache.offset, cache.start_position, cache.chunk_size), _live(cache)


def _load_chunked(cache: Cache, numbers: Numbers, arrays: Arrays) -> None:
    cache.offset, cache.start_position, chunk_size = numbers
    _same("chunk size", chunk_size, cache.chunk_size)
    columns = cache.offset - cache.start_position
    cache.keys, cache.values = _of_columns(arrays, columns) or (None, None)


def _chunked_cut_from(numbers: Numbers) -> int:
    """The first boundary between chunks in what is held: a token sees its own chunk and no more."""
    _, start, chunk_size = numbers
    return max(1, -(-start // chunk_size) * chunk_size)


def _cut_chunked(numbers: Numbers, arrays: Arrays, n: int) -> tuple[Numbers, Arrays]:
    _, start, chunk_size = numbers
    return (n, start, chunk_size), _first_columns(arrays, n - start)


def _save_recurrent(cache: Cache) -> tuple[Sequence[int], Sequence[mx.array]]:
    """The numbers say which slots are filled."""
    if cache.left_padding is not None or cache.lengths is not None:
        raise BadInput("a recurrent cache with padding has no checkpoint form")
    filled = [slot for slot in cache.cache if slot is not None]
    return [int(slot is not None) for slot in cache.cache], filled


def _load_recurrent(cache: Cache, numbers: Numbers, arrays: Arrays) -> None:
    _same("slots", len(numbers), len(cache.cache))
    if any(array.ndim < 1 or array.shape[0] != 1 for array in arrays):
        raise BadInput("a recurrent array of the checkpoint does not hold 1 row")
    slots = iter(arrays)
    cache.cache = [next(slots) if filled else None for filled in numbers]


def _live(cache: Cache) -> Sequence[Any]:
    """Keys and values of the tokens that the cache stands behind; none if it holds none."""
    return cache.keys_and_values() if cache.offset else ()


def _of_columns(arrays: Arrays, columns: int) -> list[mx.array]:
    """The arrays, if they are [1, heads, columns, dim]."""
    if any(array.ndim != 4 or array.shape[2] != columns for array in arrays):
        raise BadInput(f"a checkpoint array does not hold {columns} tokens")
    if any(array.shape[0] != 1 for array in arrays):
        raise BadInput("a checkpoint array does not hold 1 row")
    return list(arrays)


def _first_columns(arrays: Arrays, n: int) -> Arrays:
    return tuple(array[:, :, :n] for array in arrays)


def _cut_columns(numbers: Numbers, arrays: Arrays, n: int) -> tuple[Numbers, Arrays]:
    return (n, *numbers[1:]), _first_columns(arrays, n)


def _same(what: str, ours: Any, theirs: Any) -> None:
    if ours != theirs:
        raise BadInput(f"{what} of a checkpoint cache are {ours}, the model's are {theirs}")


_COLUMNS = Form(
    _save_columns,
    _load_columns,
    number_of_arrays=lambda numbers: 2 if numbers[0] else 0,
    cut_from=lambda numbers: 1,
    cut=_cut_columns,
)

_FORMS: Mapping[Layout, Form] = {
    PLAIN: _COLUMNS,
    CONCATENATED: _COLUMNS,
    QUANTIZED: replace(
        _COLUMNS,
        save=_save_quantized,
        load=_load_quantized,
        number_of_arrays=lambda numbers: 6 if numbers[0] else 0,
    ),
    RING: replace(
        _COLUMNS, save=_save_ring, load=_load_ring, cut_from=_ring_cut_from, cut=_cut_ring
    ),
    CHUNKED: replace(
        _COLUMNS,
        save=_save_chunked,
        load=_load_chunked,
        cut_from=_chunked_cut_from,
        cut=_cut_chunked,
    ),
    RECURRENT: Form(
        _save_recurrent,
        _load_recurrent,
        number_of_arrays=lambda filled: sum(map(bool, filled)),
        cut_from=lambda filled: None if any(filled) else 1,
        cut=lambda filled, arrays, n: (filled, arrays),
        positioned=False,
    ),
}

FORMS: Mapping[str, Form] = {layout.name: form for layout, form in _FORMS.items()}
