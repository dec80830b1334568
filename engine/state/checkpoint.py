"""Owned, immutable copies of what one row remembers, valid at exactly one token boundary."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import mlx.core as mx

from ..errors import BadInput
from .forms import Held, load, parse, save
from .layouts import Cache, leaves

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


def capture(caches: Sequence[Cache]) -> tuple[Held, ...]:
    """What one row's caches hold, leaf by leaf in layer order, in arrays of its own.

    Raises:
        BadInput: a layer is of an unknown kind.
    """
    # Compact, so that a small checkpoint does not keep the row's whole buffer alive.
    captured = [
        replace(held, arrays=tuple(map(mx.contiguous, held.arrays)))
        for held in map(save, leaves(caches))
    ]
    mx.eval([held.arrays for held in captured])
    return tuple(captured)


def restore(caches: Sequence[Cache], captured: Sequence[Held], tokens: int) -> None:
    """Fill fresh caches with what such caches held after `tokens` tokens.

    Raises:
        BadInput: kinds, sizes or lengths do not fit. The caches may then be half filled and are to
            be dropped.
    """
    fresh = leaves(caches)
    if len(captured) != len(fresh):
        raise BadInput(f"checkpoint holds {len(captured)} caches, expected {len(fresh)}")
    for leaf, held in zip(fresh, captured, strict=True):
        load(leaf, held, tokens)


def capture_caches(caches: Sequence[Cache]) -> tuple[str, tuple[mx.array, ...]]:
    """What `capture` returns as arrays, and a line that says how they are laid out.

    The line has one word per leaf, see `Held.word`.
    """
    captured = capture(caches)
    tensors = tuple(array for held in captured for array in held.arrays)
    return " ".join(held.word for held in captured), tensors


def restore_caches(
    caches: Sequence[Cache], layout: str, tensors: Sequence[mx.array], tokens: int
) -> None:
    """Fill fresh caches with what `capture_caches` returned after `tokens` tokens.

    Raises:
        BadInput: as for `restore`, or the arrays are too few or too many for the line.
    """
    restore(caches, parse(layout.split(), tensors), tokens)
