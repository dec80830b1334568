"""Small entries, and files in a folder of their own, for the tests of the tier's core."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from xxhash import xxh3_64_intdigest

from engine.cache.entry import (
    AttachmentHeader,
    Buffer,
    Entry,
    Generation,
    Identity,
    Reuse,
    TensorSpec,
    Tokens,
)
from engine.cache.files import Files, closing
from engine.cache.format import Header, plan, read_header, read_tensors, write_entry
from engine.cache.header import Origin, generation_namespace

IDENTITY = Identity("tiny/model", "f" * 64, "7" * 64)
ORIGIN = Origin(IDENTITY, 1_800_000_000)
CODEC = "test-v1"
FILES = Files()
TRIMMABLE = Reuse(trimmable=True)


def ids(tokens: Sequence[int]) -> Tokens:
    return np.array(tokens, np.int32)


def an_entry(
    tokens: Sequence[int] = (1, 2, 3),
    namespace: str = "plain",
    *,
    tensors: Sequence[TensorSpec] = (TensorSpec("0.0", "F32", (2, 3)), TensorSpec("0.1", "I8", ())),
    reuse: Reuse = TRIMMABLE,
    **more: Any,
) -> Entry:
    return Entry(namespace, ids(tokens), CODEC, ("kv 3",), reuse, tuple(tensors), **more)


def attached(tokens: Sequence[int] = (1, 2, 3), namespace: str = "plain") -> Entry:
    """An entry with a drafter's state beside the target's."""
    attachment = AttachmentHeader("ngram:3:1", {"policy": "a", "n": 3, "on": True}, ("1.0",))
    tensors = (TensorSpec("0.0", "BF16", (2,)), TensorSpec("1.0", "I32", (3,)))
    return an_entry(
        tokens, namespace, tensors=tensors, reuse=Reuse(False), attachments=(attachment,)
    )


def unfinished(key: str = "k", prompt: int = 2, tokens: Sequence[int] = (1, 2, 3)) -> Entry:
    """A generation that was interrupted behind a prompt of `prompt` of these tokens."""
    generated = (*tokens[prompt:], 9)
    generation = Generation(
        key, "plain", prompt, generated, 9, -5, True, (1, 2**32 - 1), "a journal"
    )
    return an_entry(tokens, generation_namespace(key), reuse=Reuse(False), generation=generation)


def content(entry: Entry, tensor: TensorSpec) -> Buffer:
    """Bytes that differ from tensor to tensor and from entry to entry."""
    seed = xxh3_64_intdigest(entry.tokens.tobytes() + tensor.name.encode())
    return np.random.default_rng(seed).integers(0, 256, tensor.nbytes, np.uint8)


def plain(entry: Entry) -> Entry:
    """The entry with values that can be compared: token ids as a tuple."""
    tokens: Any = tuple(entry.tokens.tolist())
    return replace(entry, tokens=tokens)


def written(path: Path, entry: Entry, files: Files = FILES, origin: Origin = ORIGIN) -> Header:
    """An entry's file at `path`."""
    folder = files.open_folder(str(path.parent))
    with closing(files, folder), closing(files, files.create(path.name, folder)) as file:
        return write_entry(files, file, plan(entry, origin), lambda t: content(entry, t))


def read_back(path: Path, *, verify: bool = True) -> tuple[Header, dict[str, bytes]]:
    """A file's header and the bytes of its tensors."""
    return read_image(path.read_bytes(), verify=verify)


def read_image(image: bytes, *, verify: bool = True) -> tuple[Header, dict[str, bytes]]:
    """The same of a file that is nowhere but in memory."""
    files, memory = Image(image=image), Memory()
    header = read_header(files, 0, len(image))
    read_tensors(files, 0, header, memory, verify=verify)
    return header, memory.found


class Memory:
    """A `Room`; `found` are the bytes by the tensors' names."""

    def __init__(self) -> None:
        self._rooms: dict[str, bytearray] = {}

    def __call__(self, tensors: Sequence[TensorSpec]) -> list[memoryview]:
        self._rooms = {tensor.name: bytearray(tensor.nbytes) for tensor in tensors}
        return [memoryview(room) for room in self._rooms.values()]

    @property
    def found(self) -> dict[str, bytes]:
        return {name: bytes(room) for name, room in self._rooms.items()}


@dataclass(frozen=True, slots=True)
class Image(Files):
    """A file's bytes."""

    image: bytes = b""

    def read(self, file: int, into: memoryview, offset: int) -> int:
        data = self.image[offset : offset + len(into)]
        into[: len(data)] = data
        return len(data)
