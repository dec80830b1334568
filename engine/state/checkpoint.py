"""Owned, immutable copies of what one row remembers, valid at exactly one token boundary."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import mlx.core as mx

from ..errors import BadInput
from .forms import FORMS
from .layouts import Cache, layout_of, leaves

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
