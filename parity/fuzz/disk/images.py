"""What a loss of power may leave of a log of calls: crash images.

The rules of a journalling file system, as POSIX leaves them to it: bytes are certain after the sync
of their file, names after the sync of their folder; until then each write and each change of a name
may have happened or not, in any combination. A write may have happened in part, or have lengthened
the file with zeros. A rename happens whole or not at all.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import TypeAlias

from .recording import (
    Acknowledged,
    Change,
    Created,
    MadeFolder,
    Removed,
    RemovedFolder,
    Renamed,
    Synced,
    SyncedFolder,
    Touched,
    Wrote,
)

NameChange: TypeAlias = MadeFolder | Created | Renamed | Removed | RemovedFolder


@dataclass(slots=True)
class _File:
    """`certain` are the bytes since the last sync; `writes` came later."""

    certain: bytes = b""
    writes: list[tuple[int, bytes]] = field(default_factory=list)
    mtimes: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Image:
    """Folders by path and files by path, with their bytes and mtime; None: whatever it is."""

    folders: frozenset[str]
    files: tuple[tuple[str, bytes, int | None], ...]

    @classmethod
    def of(cls, folder: Path) -> Image:
        """What stands in a folder now."""
        folders, files = {str(folder)}, []
        for place, below, names in os.walk(folder):
            folders |= {os.path.join(place, name) for name in below}
            for name in names:
                path = os.path.join(place, name)
                with open(path, "rb") as opened:
                    files.append((path, opened.read(), os.stat(path).st_mtime_ns))
        return cls(frozenset(folders), tuple(files))

    def materialise(self, origin: str, folder: Path) -> None:
        """Put what stood under `origin` into an existing folder."""
        for path in sorted(self.folders):
            if path != origin:
                os.mkdir(_moved(path, origin, folder), 0o700)
        for path, data, mtime in self.files:
            place = _moved(path, origin, folder)
            opened = os.open(place, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            os.write(opened, data)
            if mtime is not None:
                os.utime(opened, ns=(mtime, mtime))
            os.close(opened)


def _moved(path: str, origin: str, folder: Path) -> str:
    return os.path.join(folder, os.path.relpath(path, origin))


Bytes: TypeAlias = Callable[[bytes, Sequence[tuple[int, bytes]]], bytes]
"""What is left of a file of these bytes and these later writes."""


class Disk:
    """The state behind a growing log."""

    def __init__(self, origin: str) -> None:
        self.origin = origin
        self._files: dict[int, _File] = {}
        self._certain: list[NameChange] = []
        self._names: list[NameChange] = []

    @classmethod
    def of(cls, image: Image, origin: str, moved: str) -> tuple[dict[tuple[str, str], int], Disk]:
        """A disk on which all of an image is certain, and its files' numbers by folder and name."""
        disk, names = cls(moved), dict[tuple[str, str], int]()
        for path in sorted(image.folders - {origin}):
            folder, name = os.path.split(_moved(path, origin, Path(moved)))
            disk._certain.append(MadeFolder(folder, name))
        for number, (path, data, mtime) in enumerate(image.files, 1):
            folder, name = os.path.split(_moved(path, origin, Path(moved)))
            disk._files[number] = _File(data, mtimes=[] if mtime is None else [mtime])
            disk._certain.append(Created(folder, name, number))
            names[folder, name] = number
        return names, disk

    def apply(self, change: Change) -> None:
        if isinstance(change, (MadeFolder, Created, Renamed, Removed, RemovedFolder)):
            self._names.append(change)
            if isinstance(change, Created):
                self._files[change.file] = _File()
        elif isinstance(change, Wrote):
            self._files[change.file].writes.append((change.offset, change.data))
        elif isinstance(change, Touched):
            self._files[change.file].mtimes.append(change.mtime_ns)
        elif isinstance(change, Synced):
            file = self._files[change.file]
            file.certain = everything(file.certain, file.writes)
            file.writes.clear()
            del file.mtimes[:-1]
        elif isinstance(change, SyncedFolder):
            self._certain += [c for c in self._names if c.folder == change.folder]
            self._names = [c for c in self._names if c.folder != change.folder]
        else:
            assert isinstance(change, Acknowledged)

    def image(self, keep: Callable[[NameChange], bool], left: Bytes) -> Image:
        """With those names that `keep` keeps, and of each file what `left` leaves."""
        folders, names = {self.origin}, dict[tuple[str, str], int]()
        for change in [*self._certain, *filter(keep, self._names)]:
            place = change.folder, getattr(change, "name", "")
            if isinstance(change, MadeFolder):
                folders.add(os.path.join(*place))
            elif isinstance(change, RemovedFolder):
                folders.discard(os.path.join(*place))
            elif isinstance(change, Created):
                names[place] = change.file
            elif isinstance(change, Renamed):
                if names.get((change.folder, change.old)) == change.file:
                    del names[change.folder, change.old]
                names[change.folder, change.new] = change.file
            elif names.get(place) == change.file:
                del names[place]
        reached = {f for f in folders if all(p in folders for p in self._above(f))}
        files = [
            (os.path.join(folder, name), left(file.certain, file.writes), _last(file.mtimes))
            for (folder, name), number in sorted(names.items())
            if folder in reached and (file := self._files[number])
        ]
        return Image(frozenset(reached), tuple(files))

    def _above(self, folder: str) -> Iterator[str]:
        while folder != self.origin:
            folder = os.path.dirname(folder)
            yield folder


def _last(mtimes: list[int]) -> int | None:
    return mtimes[-1] if mtimes else None


def everything(data: bytes, writes: Sequence[tuple[int, bytes]]) -> bytes:
    if not writes:
        return data
    found = bytearray(data)
    for offset, piece in writes:
        found += bytes(max(offset + len(piece) - len(found), 0))
        found[offset : offset + len(piece)] = piece
    return bytes(found)


def nothing(data: bytes, _: Sequence[tuple[int, bytes]]) -> bytes:
    return data


def zeros(data: bytes, writes: Sequence[tuple[int, bytes]]) -> bytes:
    """As long as it was made, and nothing in it."""
    return everything(data, [(offset, bytes(len(piece))) for offset, piece in writes])


def some(random: Random) -> Bytes:
    """Any of the writes, some in part; as long as it was made, or not."""

    def left(data: bytes, writes: Sequence[tuple[int, bytes]]) -> bytes:
        kept = []
        for offset, piece in writes:
            part = random.choice((0, len(piece), len(piece), random.randint(0, len(piece))))
            kept.append((offset, piece[:part]))
        length = len(everything(data, writes)) if random.random() < 0.5 else 0
        found = everything(data, [(o, p) for o, p in kept if p])
        return found + bytes(max(length - len(found), 0))

    return left


def images(disk: Disk, random: Random, drawn: int) -> Iterator[Image]:
    """Those of one moment: all or nothing of names and bytes, then `drawn` at random."""
    for keep_names in (True, False):
        for left in (everything, nothing, zeros):
            yield disk.image(lambda change, keep=keep_names: keep, left)  # type: ignore[misc]
    for _ in range(drawn):
        yield disk.image(lambda change: random.random() < 0.5, some(random))
