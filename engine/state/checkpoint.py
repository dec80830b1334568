"""Owned, immutable copies of what one row remembers, valid at exactly one token boundary."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import mlx.core as mx

from ..errors import BadInput
from .layouts import Cache, layout_of

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


def capture_plain(caches: Sequence[Cache]) -> tuple[mx.array, ...]:
    """Keys and values [1, heads, tokens, dim] of each layer, in layer order, as own arrays.

    Raises:
        BadInput: a layer is no plain KV cache.
    """
    tensors: list[mx.array] = []
    for cache in caches:
        if layout_of(cache).name != "plain":
            raise BadInput(f"cache kind {layout_of(cache).name} has no checkpoint form")
        for array in cache.keys_and_values():
            # Compact, so that a small checkpoint does not keep the row's whole buffer alive.
            tensors.append(mx.contiguous(array))
    mx.eval(tensors)
    return tuple(tensors)


def restore_plain(caches: Sequence[Cache], tensors: Sequence[mx.array], tokens: int) -> None:
    """Fill fresh plain caches with what `capture_plain` returned after `tokens` tokens.

    Raises:
        BadInput: the number of arrays or their length does not fit.
    """
    if len(tensors) != 2 * len(caches):
        raise BadInput(f"checkpoint holds {len(tensors)} arrays, expected {2 * len(caches)}")
    if any(t.ndim != 4 or t.shape[2] != tokens for t in tensors):
        raise BadInput(f"a checkpoint array does not hold {tokens} tokens")
    for layer, cache in enumerate(caches):
        keys, values = tensors[2 * layer], tensors[2 * layer + 1]
        # Own array objects: a cache writes into the ones it holds.
        cache.state = (mx.contiguous(keys), mx.contiguous(values), tokens)
