"""Tiny entries whose every byte follows from what they are, so that any reader can check any one.

An entry's version stands in its layout: two entries of the same tokens differ in all their bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from random import Random

import numpy as np
from xxhash import xxh3_64_intdigest

from engine.cache.entry import (
    AttachmentHeader,
    Entry,
    Generation,
    Identity,
    Read,
    Reuse,
    TensorSpec,
)
from engine.cache.header import generation_namespace

IDENTITY = Identity("tiny/model", "f" * 64, "7" * 64)
CODEC = "fuzz-v1"
TENSORS = (TensorSpec("0.0", "F16", (2, 5)), TensorSpec("0.1", "U8", (9,)))


def small(
    tokens: Sequence[int],
    namespace: str = "plain",
    version: int = 0,
    *,
    reuse: Reuse | None = None,
    tensors: Sequence[TensorSpec] = TENSORS,
) -> Entry:
    """An entry of some 50 bytes of tensors and a header of some 1,000."""
    ids = np.array(tokens, np.int32)
    layout = (f"version {version}",)
    return Entry(namespace, ids, CODEC, layout, reuse or Reuse(True), tuple(tensors))


def exact(tokens: Sequence[int], namespace: str = "plain", version: int = 0) -> Entry:
    """The same with a drafter's state: of one boundary."""
    entry = small(tokens, namespace, version, reuse=Reuse(False))
    attachment = AttachmentHeader("ngram", {"n": 3}, ("1.0",))
    tensors = (*entry.tensors, TensorSpec("1.0", "I32", (3,)))
    return replace(entry, tensors=tensors, attachments=(attachment,))


def unfinished(tokens: Sequence[int], key: str, prompt: int, version: int = 0) -> Entry:
    """An interrupted generation behind a prompt of `prompt` of these tokens."""
    entry = small(tokens, generation_namespace(key), version, reuse=Reuse(False))
    generated = (*map(int, tokens[prompt:]), 9)
    return replace(entry, generation=Generation(key, "plain", prompt, generated, 9, 5, True))


def content(entry: Entry, tensor: TensorSpec) -> bytes:
    """What the tensor of this entry holds."""
    said = f"{entry.namespace}|{entry.layout[0]}|{tensor.name}|".encode()
    seed = xxh3_64_intdigest(said + entry.tokens.tobytes())
    return Random(seed).randbytes(tensor.nbytes)


def read(entry: Entry) -> Read:
    """How a store gets the tensors of an entry."""
    return lambda tensor: memoryview(content(entry, tensor))


def version_of(entry: Entry) -> int:
    return int(entry.layout[0].removeprefix("version "))


class Checked:
    """A `Room` that compares: `whole` once it holds the right bytes of the entry's tensors."""

    def __init__(self, entry: Entry) -> None:
        self._entry = entry
        self._found: list[tuple[TensorSpec, bytearray]] = []

    def __call__(self, tensors: Sequence[TensorSpec]) -> list[memoryview]:
        self._found = [(tensor, bytearray(tensor.nbytes)) for tensor in tensors]
        return [memoryview(data) for _, data in self._found]

    @property
    def whole(self) -> bool:
        found = [(tensor, bytes(data)) for tensor, data in self._found]
        return found == [(t, content(self._entry, t)) for t in self._entry.tensors]
