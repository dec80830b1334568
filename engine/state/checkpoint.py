"""Owned, immutable copies of what one row remembers, valid at exactly one token boundary."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from ..errors import BadInput
from .layouts import (
    CHUNKED,
    CONCATENATED,
    PLAIN,
    QUANTIZED,
    RECURRENT,
    RING,
    Cache,
    Layout,
    layout_of,
    leaves,
)

Metadata = Mapping[str, str | int | bool]


@dataclass(frozen=True, slots=True)
class Attachment:
    """What a drafter stores: a schema name, scalars, and arrays it will never change."""

    schema: str
    metadata: Metadata
    tensors: tuple[mx.array, ...]


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A drafter's state after exactly `processed_tokens` tokens. It is never trimmed."""

    processed_tokens: int
    attachment: Attachment


def require_schema(checkpoint: Checkpoint, schema: str) -> Attachment:
    """The attachment, if it was written under `schema`.

    Raises:
        BadInput: another drafter, version or policy wrote it.
    """
    attachment = checkpoint.attachment
    if attachment.schema != schema:
        raise BadInput(f"checkpoint schema is {attachment.schema!r}, expected {schema!r}")
    return attachment


def capture_caches(caches: Sequence[Cache]) -> tuple[str, tuple[mx.array, ...]]:
    """One row's caches as own arrays, and a line that says how they are laid out.

    The line has one word per leaf, in layer order: the kind, then numbers, joined by colons.

    Raises:
        BadInput: a layer is of an unknown kind.
    """
    words: list[str] = []
    tensors: list[mx.array] = []
    for leaf in leaves(caches):
        kind = layout_of(leaf)
        if kind not in FORMS:
            raise BadInput(f"cache kind {kind.name} has no checkpoint form")
        numbers, arrays = FORMS[kind].save(leaf)
        words.append(":".join([kind.name, *map(str, numbers)]))
        # Compact, so that a small checkpoint does not keep the row's whole buffer alive.
        tensors += [mx.contiguous(array) for array in arrays]
    mx.eval(tensors)
    return " ".join(words), tuple(tensors)


def restore_caches(
    caches: Sequence[Cache], layout: str, tensors: Sequence[mx.array], tokens: int
) -> None:
    """Fill fresh caches with what `capture_caches` returned after `tokens` tokens.

    Raises:
        BadInput: kinds, sizes, number of arrays or lengths do not fit. The caches may then be
            half filled and are to be dropped.
    """
    fresh, words = leaves(caches), layout.split()
    if len(words) != len(fresh):
        raise BadInput(f"checkpoint holds {len(words)} caches, expected {len(fresh)}")
    # Own array objects: a cache writes into the ones it holds.
    arrays = iter([mx.contiguous(tensor) for tensor in tensors])
    for leaf, word in zip(fresh, words, strict=True):
        kind = layout_of(leaf)
        name, *numbers = word.split(":")
        if name != kind.name or kind not in FORMS:
            raise BadInput(f"checkpoint holds a {name} cache where the model has {kind.name}")
        try:
            FORMS[kind].load(leaf, [int(number) for number in numbers], arrays, tokens)
        except BadInput:
            raise
        except StopIteration as error:
            raise BadInput(f"checkpoint holds {len(tensors)} arrays, too few") from error
        except ValueError as error:
            raise BadInput(f"a {name} cache of the checkpoint is malformed: {word}") from error
    if len(list(arrays)):
        raise BadInput(f"checkpoint holds {len(tensors)} arrays, too many")


@dataclass(frozen=True, slots=True)
class Form:
    """How one kind is stored: numbers and arrays out, and back into a fresh cache.

    A cache that holds nothing, as in a layer that the model never uses, has no numbers.
    """

    save: Callable[[Cache], tuple[list[int], list[mx.array]]]
    load: Callable[[Cache, list[int], Iterator[mx.array], int], None]


def _save_columns(cache: Cache) -> tuple[list[int], list[mx.array]]:
    if cache.keys is None:
        return [], []
    keys, values = cache.keys_and_values()
    return [cache.offset], [keys, values]


def _load_columns(
    cache: Cache, numbers: list[int], arrays: Iterator[mx.array], tokens: int
) -> None:
    if numbers:
        (cache.offset,) = numbers
        cache.keys, cache.values = _pair(arrays, cache.offset, tokens, cache.offset)


def _save_quantized(cache: Cache) -> tuple[list[int], list[mx.array]]:
    if cache.keys is None:
        return [], []
    keys, values = cache.keys_and_values()
    return [cache.offset, cache.group_size, cache.bits], [*keys, *values]


def _load_quantized(
    cache: Cache, numbers: list[int], arrays: Iterator[mx.array], tokens: int
) -> None:
    if numbers:
        cache.offset, group_size, bits = numbers
        _same("group size and bits", (group_size, bits), (cache.group_size, cache.bits))
        parts = [_pair(arrays, cache.offset, tokens, cache.offset) for _ in range(3)]
        flat = [array for pair in parts for array in pair]
        # Lists: the cache writes into their entries.
        cache.keys, cache.values = flat[:3], flat[3:]


def _save_ring(cache: Cache) -> tuple[list[int], list[mx.array]]:
    """Whole, as it lies: where the next token goes depends on that."""
    if cache.keys is None:
        return [], []
    numbers = [cache.offset, cache._idx, cache.max_size, cache.keep, cache.keys.shape[2]]
    return numbers, [cache.keys, cache.values]


def _load_ring(cache: Cache, numbers: list[int], arrays: Iterator[mx.array], tokens: int) -> None:
    if numbers:
        cache.offset, cache._idx, max_size, keep, columns = numbers
        _same("window and kept tokens", (max_size, keep), (cache.max_size, cache.keep))
        if columns < min(cache.offset, max_size) or not 0 <= cache._idx <= columns:
            raise ValueError(columns)
        cache.keys, cache.values = _pair(arrays, cache.offset, tokens, columns)


def _save_chunked(cache: Cache) -> tuple[list[int], list[mx.array]]:
    if cache.keys is None:
        return [], []
    numbers = [cache.offset, cache.start_position, cache.chunk_size]
    return numbers, list(cache.keys_and_values())


def _load_chunked(
    cache: Cache, numbers: list[int], arrays: Iterator[mx.array], tokens: int
) -> None:
    if numbers:
        cache.offset, cache.start_position, chunk_size = numbers
        _same("chunk size", chunk_size, cache.chunk_size)
        columns = cache.offset - cache.start_position
        cache.keys, cache.values = _pair(arrays, cache.offset, tokens, columns)


def _save_recurrent(cache: Cache) -> tuple[list[int], list[mx.array]]:
    """The numbers say which slots are filled."""
    if cache.left_padding is not None or cache.lengths is not None:
        raise BadInput("a recurrent cache with padding has no checkpoint form")
    filled = [slot for slot in cache.cache if slot is not None]
    return [int(slot is not None) for slot in cache.cache], filled


def _load_recurrent(cache: Cache, numbers: list[int], arrays: Iterator[mx.array]) -> None:
    _same("slots", len(numbers), len(cache.cache))
    cache.cache = [next(arrays) if filled else None for filled in numbers]
    if any(slot is not None and slot.shape[0] != 1 for slot in cache.cache):
        raise BadInput("a recurrent array of the checkpoint does not hold 1 row")


def _pair(
    arrays: Iterator[mx.array], offset: int, tokens: int, columns: int
) -> tuple[mx.array, mx.array]:
    """Keys and values [1, heads, columns, dim] of a cache that stands at `tokens`."""
    if offset != tokens:
        raise BadInput(f"a checkpoint cache stands at {offset} tokens, expected {tokens}")
    pair = next(arrays), next(arrays)
    if any(array.ndim != 4 or array.shape[2] != columns for array in pair):
        raise BadInput(f"a checkpoint array does not hold {columns} tokens")
    return pair


def _same(what: str, ours: Any, theirs: Any) -> None:
    if ours != theirs:
        raise BadInput(f"{what} of a checkpoint cache are {ours}, the model's are {theirs}")


FORMS: Mapping[Layout, Form] = {
    PLAIN: Form(_save_columns, _load_columns),
    CONCATENATED: Form(_save_columns, _load_columns),
    QUANTIZED: Form(_save_quantized, _load_quantized),
    RING: Form(_save_ring, _load_ring),
    CHUNKED: Form(_save_chunked, _load_chunked),
    RECURRENT: Form(
        _save_recurrent,
        lambda cache, numbers, arrays, tokens: _load_recurrent(cache, numbers, arrays),
    ),
}
