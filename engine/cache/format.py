"""One entry, one file: a safetensors container, written and read a tensor at a time. No mlx here.

`FORMAT.md` shows the bytes. A file is read only after its header has proven whole by its hash; a
tensor is handed on only after its own hash, unless the caller wants none.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

import numpy as np
from xxhash import xxh3_128, xxh3_128_hexdigest

from ..errors import BadInput
from .entry import Entry, Read, Room, RunStep, TensorSpec, at_once, in_step, no_room
from .files import Descriptor, Files, read_all, write_all
from .header import Origin, Outline, check, entry_of, fields_of, outline_of
from .strict import MAX_PARTS, Damaged, Foreign, dump, load
from .tensors import check_tensors, tensor_fields, tensors_of

VERSION = "1"

MAX_HEADER_BYTES = 16 << 20
"""Some 3 million tokens; more is refused before memory is given to it."""

LENGTH_BYTES = 8
"""In front of the header: its length, little-endian."""

ALIGNMENT = 8
"""Of the first tensor; safetensors pads a header with spaces."""

BEGIN = b'{"__metadata__":{"0.header_hash":"'
"""How a header begins in every version, so that whatever one is, it can be told from damage."""

DIGITS = 32
"""Of a hash, xxh3_128 in hexadecimal."""

CHUNK = 1 << 20
"""Bytes hashed while they are still in the processor's cache from being read, or to be written."""

PIECE = 4 << 20
"""Bytes that one thread reads at once. The pieces are read in the file's order: disks want that."""

READERS = 3
"""Threads that read an entry of more than a chunk, a piece each."""

AHEAD = 8
"""Pieces that are read, or being read, while one is hashed."""

WINDOW = 8 << 20
"""Bytes that the system is told to bring to the disk before they are synced."""

FIRST_READ = 16 << 10
"""Enough for most headers in one call."""


@dataclass(frozen=True, slots=True)
class Header:
    """A file's header, proven whole.

    `digest` is its hash, `text` itself as it stands in the file, `size` the bytes of the file.
    """

    entry: Entry
    origin: Origin
    hashes: tuple[str, ...]
    digest: str
    text: bytes

    @property
    def data_start(self) -> int:
        return LENGTH_BYTES + len(self.text)

    @property
    def size(self) -> int:
        return self.data_start + self.entry.nbytes


def plan(entry: Entry, origin: Origin) -> Header:
    """The header of a file that is not written yet: all but its hashes is right.

    Raises:
        BadInput: the entry cannot be written.
    """
    check(entry)
    check_tensors(entry.tensors)
    planned = _header(entry, origin, ("0" * DIGITS,) * len(entry.tensors))
    if len(planned.text) > MAX_HEADER_BYTES:
        raise BadInput(f"a header of {len(planned.text)} bytes, of at most {MAX_HEADER_BYTES}")
    if sum(map(planned.text.count, b"[{,")) > MAX_PARTS:
        raise BadInput(f"a header of more than {MAX_PARTS} parts is not read")
    return planned


def write_entry(
    files: Files, file: Descriptor, planned: Header, read: Read, run_step: RunStep = at_once
) -> Header:
    """Write tensors one at a time, then the header in the room left for it.

    `read` runs inside `run_step`; hashing and writing do not, and hold no more than one tensor.

    Raises:
        OSError: a call failed.
        BadInput: `read` gave another number of bytes than the tensor has.
        Exception: whatever `read` or `run_step` raised.
    """
    entry, offset = planned.entry, planned.data_start
    hashes = []
    for tensor in entry.tensors:
        hashes.append(_write_tensor(files, file, _fetch(tensor, read, run_step), offset))
        offset += tensor.nbytes
    header = _header(entry, planned.origin, tuple(hashes))
    length = len(header.text).to_bytes(LENGTH_BYTES, "little")
    write_all(files, file, memoryview(length + header.text), 0)
    return header


def _write_tensor(files: Files, file: Descriptor, data: memoryview, offset: int) -> str:
    """Write a tensor there and return its hash."""
    hash_ = xxh3_128()
    for chunk in _chunks(data, CHUNK):
        hash_.update(chunk)
        write_all(files, file, chunk, offset)
        offset += len(chunk)
        if (late := offset % WINDOW) < len(chunk):
            # The disk works while the next ones are hashed, and the sync at the end is short.
            with contextlib.suppress(OSError):
                files.write_back(file, offset - late - WINDOW, WINDOW)
    return hash_.hexdigest()


def _fetch(tensor: TensorSpec, read: Read, run_step: RunStep) -> memoryview:
    data = in_step(run_step, lambda: read(tensor))
    if data.nbytes != tensor.nbytes:
        raise BadInput(f"{tensor.name}: {data.nbytes} bytes, not {tensor.nbytes}")
    # Any contiguous buffer will do, also of an element type that memoryview has no letter for.
    return np.frombuffer(data, np.uint8).data if data.nbytes else memoryview(b"")


def _header(entry: Entry, origin: Origin, hashes: tuple[str, ...]) -> Header:
    """The header as it is written. Its size does not depend on the hashes."""
    blank = "0" * DIGITS
    fields = {"0.header_hash": blank, "0.version": VERSION, "0.tensor_hashes": " ".join(hashes)}
    metadata = {"__metadata__": fields | fields_of(entry, origin)}
    text = dump(metadata | tensor_fields(entry.tensors)).encode("ascii")
    text += b" " * (-len(text) % ALIGNMENT)
    digest = xxh3_128_hexdigest(text)
    text = text.replace(BEGIN + blank.encode(), BEGIN + digest.encode(), 1)
    return Header(entry, origin, hashes, digest, text)


def read_header(files: Files, file: Descriptor, size: int) -> Header:
    """Read and validate the header of a regular file of `size` bytes, however hostile.

    Raises:
        Damaged: it is not as we write it, or the file is too long or too short for it.
        Foreign: the header is whole, but of another version.
        OSError: a call failed.
    """
    return parse(read_text(files, file, size), size)


def read_text(files: Files, file: Descriptor, size: int) -> bytes:
    """What stands behind a header's length, not looked into; see `read_header`."""
    head = bytearray(min(size, FIRST_READ))
    whole = read_all(files, file, memoryview(head), 0)
    length = int.from_bytes(head[:LENGTH_BYTES], "little")
    data_start = LENGTH_BYTES + length
    if not whole or not len(BEGIN) + DIGITS <= length <= min(MAX_HEADER_BYTES, size - LENGTH_BYTES):
        raise Damaged(f"a header of {length} bytes in a file of {size}")
    if head[LENGTH_BYTES:].startswith(BEGIN) and data_start > len(head):
        read = len(head)
        head += bytes(data_start - read)
        if not read_all(files, file, memoryview(head)[read:], read):
            raise Damaged("the file ends inside its header")
    return bytes(memoryview(head)[LENGTH_BYTES:data_start])


def parse(text: bytes, size: int) -> Header:
    """Validate the text of a header, of any codec; see `read_header`."""
    digest = _proven(text)
    fields, metadata = _fields(text, digest, unique=True)
    hashes = metadata.pop("0.tensor_hashes", "").split()
    data_start = LENGTH_BYTES + len(text)
    tensors = tensors_of(fields, size - data_start)
    entry, origin = entry_of(metadata, tensors)
    if list(map(len, hashes)) != [DIGITS] * len(tensors):
        raise Damaged(f"{len(hashes)} hashes for {len(tensors)} tensors, or too short ones")
    return Header(entry, origin, tuple(hashes), digest, text)


def outline(text: bytes, size: int, codec: str | None = None) -> tuple[Outline, str]:
    """A header's outline and hash; of its tensors, only where the last one ends is looked at.

    That tells a whole file from a damaged one. What someone may have written into the rest on
    purpose is found by `parse`, before an entry is handed out.

    Raises:
        Damaged: as for `read_header`, as far as it is looked at.
        Foreign: the header is whole, but of another version or, if that is given, codec.
    """
    digest = _proven(text)
    fields, metadata = _fields(text, digest, unique=False)
    found = outline_of(metadata, codec)
    try:
        last = next(reversed(fields.values()), {"data_offsets": [0, 0]})
        end = LENGTH_BYTES + len(text) + last["data_offsets"][1]
    except (TypeError, LookupError):
        raise Damaged("a last tensor without an end") from None
    if end != size:
        raise Damaged(f"tensors up to {end} in a file of {size} bytes")
    return found, digest


def _proven(text: bytes) -> str:
    """The hash in a header, if it is the header's."""
    body = len(BEGIN) + DIGITS
    digest = text[len(BEGIN) : body]
    hash_ = xxh3_128(BEGIN + b"0" * DIGITS)
    hash_.update(memoryview(text)[body:])
    if not text.startswith(BEGIN) or digest != hash_.hexdigest().encode():
        raise Damaged("the header is not what was written")
    return digest.decode()


def _fields(text: bytes, digest: str, *, unique: bool) -> tuple[dict[str, Any], dict[str, Any]]:
    """The tensors and the metadata of a proven header of our version."""
    try:
        fields = load(text.decode("ascii"), unique=unique)
    except UnicodeDecodeError:
        raise Damaged("the header is not ASCII") from None
    metadata = fields.pop("__metadata__")
    if not isinstance(metadata, dict) or metadata.pop("0.header_hash", None) != digest:
        raise Damaged("a header hash of another length, or metadata after it")
    if not {str}.issuperset(map(type, metadata.values())):
        raise Damaged("metadata that is not text")
    if metadata.pop("0.version", None) != VERSION:
        raise Foreign(f"another version of the format than {VERSION}")
    return fields, metadata


def read_tensors(
    files: Files, file: Descriptor, header: Header, room: Room = no_room, *, verify: bool = True
) -> None:
    """Fill the memory given for the tensors, several pieces at a time. All are read, wanted or not.

    Raises:
        Damaged: the file ends early or, with `verify`, a tensor's bytes are not what was written.
        OSError: a call failed.
        BadInput: the memory is not as long as the tensor.
        Exception: whatever `room` raised.
    """
    entry = header.entry
    hashes = {tensor.name: xxh3_128() for tensor in entry.tensors}
    pieces = _pieces(header, room(entry.tensors))
    with (
        _Source(files, files.duplicate(file), room) as source,
        ThreadPoolExecutor(READERS) as pool,
    ):
        done = _ahead(pool, source, pieces) if entry.nbytes > CHUNK else map(source.read, pieces)
        for piece in done:
            if verify:
                hashes[piece.name].update(piece.into)
    for (name, hash_), expected in zip(hashes.items(), header.hashes, strict=True):
        if verify and hash_.hexdigest() != expected:
            raise Damaged(f"the bytes of {name} are not what was written")


@dataclass(frozen=True, slots=True)
class _Piece:
    """Memory for a part of the tensor of that name, and where it stands in the file."""

    name: str
    into: memoryview
    offset: int


def _pieces(header: Header, memory: Sequence[memoryview | None]) -> Iterator[_Piece]:
    """All of them, in the file's order; what nobody wants gets a little memory, for a while."""
    tensors = header.entry.tensors
    for tensor, into in zip(tensors, memory, strict=True):
        if into is not None and into.nbytes != tensor.nbytes:
            raise BadInput(f"{tensor.name}: room for {into.nbytes} bytes, not {tensor.nbytes}")
    offset = header.data_start
    for tensor, into in zip(tensors, memory, strict=True):
        for chunk in _passing(tensor.nbytes) if into is None else _chunks(into, PIECE):
            yield _Piece(tensor.name, chunk, offset)
            offset += len(chunk)


def _passing(nbytes: int) -> Iterator[memoryview]:
    """Memory for so many bytes, so little at a time that all that is read ahead is a chunk."""
    count = CHUNK // (AHEAD + 2)
    return (memoryview(bytearray(min(nbytes - at, count))) for at in range(0, nbytes, count))


class _Source:
    """What pieces are read from: whoever reads holds on to all that it touches.

    A Ctrl-C can leave a thread that nobody waits for. It ends by itself, its file is a descriptor
    of its own until then, and the memory is there as long as `room` is.
    """

    def __init__(self, files: Files, file: Descriptor, room: Room) -> None:
        self._files, self._room = files, room
        self._file: Descriptor | None = file

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None or issubclass(kind, Exception):
            self._close()

    def __del__(self) -> None:
        self._close()

    def _close(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            with contextlib.suppress(OSError):
                self._files.close(file)

    def read(self, piece: _Piece) -> _Piece:
        assert self._file is not None
        if not read_all(self._files, self._file, piece.into, piece.offset):
            raise Damaged(f"the file ends inside {piece.name}")
        return piece


def _ahead(pool: Executor, source: _Source, pieces: Iterable[_Piece]) -> Iterator[_Piece]:
    """All pieces in order, each once it is read, while the next ones are being read."""
    waiting: deque[Callable[[], _Piece]] = deque()
    for piece in pieces:
        if len(waiting) > AHEAD:
            yield waiting.popleft()()
        try:
            waiting.append(pool.submit(source.read, piece).result)
        except RuntimeError:  # no thread is to be had, or none any more: the process ends
            waiting.append(partial(source.read, piece))
    while waiting:
        yield waiting.popleft()()


def _chunks(data: memoryview, count: int) -> Iterator[memoryview]:
    return (data[at : at + count] for at in range(0, len(data), count))
