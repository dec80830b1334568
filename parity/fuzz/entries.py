"""Entries for the tiers' machine, what they must say, and how they are found in files again."""

from __future__ import annotations

import base64
import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from engine.cache.codecs import encode
from engine.cache.entry import Identity, Reuse
from engine.cache.format import plan
from engine.cache.header import Origin
from engine.cache.stored import Stored
from engine.kept import as_tokens
from engine.state.checkpoint import Attachment, Checkpoint, capture_caches, restore_caches
from engine.state.layouts import Cache

from .history import Chunk, History, Reference, ask, difference
from .namespaces import Namespace
from .participants import counts
from .tier_list import Key, Line
from .worlds import TOLERANCE, WINDOW, World

IDENTITY = Identity("fuzz", "f" * 64, "0" * 64)

LONGEST = 3 * WINDOW
"""Tokens of an entry."""

SCHEMA = "standalone-draft-v1:fuzz"


@dataclass(frozen=True, slots=True)
class Sizes:
    """Bytes of a state of `WINDOW` tokens in RAM, and of the longest one's file."""

    state_bytes: int
    file_bytes: int

    def caps(self, ram: int, cold: int | None) -> tuple[int, int | None]:
        """A RAM tier for none, one, some, all; a colder tier that is small, or for all, or none."""
        own = (0, 2 * self.state_bytes, 6 * self.state_bytes, 1 << 30)[ram]
        return own, None if cold is None else (self.file_bytes // 2, 1 << 30)[cold]


@lru_cache
def sizes_of(reference: Reference) -> Sizes:
    """Measured on states of the reference's world."""

    def line(count: int, drafted: bool) -> Line:
        namespace, history = Namespace(""), History((tuple([0] * count),))
        caches = reference.fill(history)
        drafts = (companion(caches, count),) if drafted else ()
        return line_of(namespace, history, Stored.of(caches, count), drafts)

    return Sizes(line(WINDOW, False).nbytes, line(LONGEST, True).file_bytes)


def line_of(
    namespace: Namespace, history: History, stored: Stored, drafts: Sequence[Checkpoint]
) -> Line:
    """What the list model is to know of an entry: it keeps copies of its arrays."""
    tokens = as_tokens(history.tokens)
    arrays = [*stored.arrays, *(array for c in drafts for array in c.attachment.tensors)]
    copies = tuple(mx.array(array) for array in arrays)
    mx.eval(copies)
    entry, _ = encode(stored, namespace.name, tokens, drafts)
    reuse = replace(stored.reuse, trimmable=False) if drafts else stored.reuse
    return Line(
        namespace,
        history,
        reuse,
        nbytes=sum(array.nbytes for array in copies) + 2 * tokens.nbytes,  # here and in the index
        file_bytes=plan(entry, Origin(IDENTITY, 1_800_000_000)).size,
        drafted=bool(drafts),
        arrays=copies,
    )


def companion(caches: Sequence[Cache], count: int) -> Checkpoint:
    """A drafter's state: the model drafts for itself, and has its caches beside the target's."""
    layout, tensors = capture_caches(caches)
    return Checkpoint(count, Attachment(SCHEMA, {"layout": layout, "pending": False}, tensors))


def drafting(world: World, namespace: Namespace, checkpoint: Checkpoint) -> list[Cache]:
    """The drafter's caches.

    Raises:
        BadInput: the checkpoint is not one of these.
    """
    caches, count = world.fresh(), checkpoint.processed_tokens
    packing = namespace.packing
    if packing is not None and namespace.due(count):
        packing.converted(caches)
    attachment = checkpoint.attachment
    restore_caches(caches, str(attachment.metadata["layout"]), attachment.tensors, count)
    return caches


def says_otherwise(
    reference: Reference, namespace: Namespace, caches: Sequence[Cache], history: History
) -> str | None:
    """How caches differ from fresh ones that were given the history, in words; asks a copy."""
    if wrong := counts(caches) - {len(history)}:
        return f"layers count {sorted(wrong)}, expected {len(history)}"
    own: Any = copy.deepcopy(list(caches))
    expected = reference.answer(namespace.seen(history))
    return difference(expected, ask(reference.world, own), TOLERANCE)


def differing_reuse(stored: Stored, namespace: Namespace) -> str | None:
    """How a state's reuse is not what its kinds of cache allow, in words.

    Recurrent state cannot be cut back. Keys and values can, to any length; packed ones to no less
    than where packing starts. Of more tokens than a window or chunk holds nothing is said: what can
    be cut depends on how they were fed.
    """
    kinds, count = {held.kind for held in stored.leaves}, stored.num_tokens
    least = (namespace.start or 1) if namespace.due(count) else 1
    expected = Reuse("recurrent" not in kinds, least)
    if kinds & {"ring", "chunked"} and count > WINDOW:
        return None
    served, wanted = (
        [n for n in range(1, count + 1) if reuse.serves(n, count)]
        for reuse in (stored.reuse, expected)
    )
    return None if served == wanted else f"serves its first {served} tokens, expected {wanted}"


def same(one: mx.array, other: mx.array) -> bool:
    """Bit by bit."""
    return one.dtype == other.dtype and bool(mx.array_equal(one, other, equal_nan=True))


def cut(tokens: Chunk, widths: Sequence[int]) -> list[Chunk]:
    """Chunks of those widths, then what is left."""
    chunks = []
    for width in widths:
        chunks.append(tokens[:width])
        tokens = tokens[width:]
    return [chunk for chunk in (*chunks, tokens) if chunk]


def key_of(file: Path) -> Key:
    """The namespace and tokens of an entry's file, as mlx reads it."""
    loaded: Any = mx.load(str(file), return_metadata=True)
    fields = loaded[1]
    tokens = np.frombuffer(base64.b64decode(fields["0.tokens"]), np.int32)
    return fields["0.namespace"], tuple(tokens.tolist())
