"""The real calls, and a log of all that change something: what a crash may undo."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import TypeAlias

from engine.cache.files import Descriptor, Files


@dataclass(frozen=True, slots=True)
class MadeFolder:
    """`folder` is the one it stands in; a path."""

    folder: str
    name: str


@dataclass(frozen=True, slots=True)
class Created:
    """A new name for a new file; files have numbers, as names change."""

    folder: str
    name: str
    file: int


@dataclass(frozen=True, slots=True)
class Wrote:
    file: int
    offset: int
    data: bytes


@dataclass(frozen=True, slots=True)
class Touched:
    file: int
    mtime_ns: int


@dataclass(frozen=True, slots=True)
class Synced:
    file: int


@dataclass(frozen=True, slots=True)
class SyncedFolder:
    folder: str


@dataclass(frozen=True, slots=True)
class Renamed:
    folder: str
    old: str
    new: str
    file: int


@dataclass(frozen=True, slots=True)
class Removed:
    folder: str
    name: str
    file: int


@dataclass(frozen=True, slots=True)
class RemovedFolder:
    folder: str
    name: str


@dataclass(frozen=True, slots=True)
class Acknowledged:
    """Not a call: the caller was told that so many operations are done."""

    operations: int


Change: TypeAlias = (
    MadeFolder
    | Created
    | Wrote
    | Touched
    | Synced
    | SyncedFolder
    | Renamed
    | Removed
    | RemovedFolder
    | Acknowledged
)


@dataclass(slots=True)
class Log:
    """Changes in order; what is open; and which file has which name."""

    changes: list[Change] = field(default_factory=list)
    folders: dict[Descriptor, str] = field(default_factory=dict)
    files: dict[Descriptor, int] = field(default_factory=dict)
    names: dict[tuple[str, str], int] = field(default_factory=dict)
    numbered: int = 0

    def place(self, name: str, at: Descriptor | None) -> tuple[str, str]:
        """The path of the folder that holds the name, and the name in it."""
        if at is not None:
            return self.folders[at], name
        folder, last = os.path.split(os.path.abspath(name))
        return folder, last


@dataclass(frozen=True, slots=True)
class Recorded(Files):
    """Records what is done to files that it has created itself, and to the folders around them.

    Nothing is synced: the log says what would have been.
    """

    log: Log = field(default_factory=Log)

    def make_folder(self, name: str, at: Descriptor | None = None) -> None:
        Files.make_folder(self, name, at)
        self.log.changes.append(MadeFolder(*self.log.place(name, at)))

    def open_folder(self, name: str, at: Descriptor | None = None) -> Descriptor:
        opened = Files.open_folder(self, name, at)
        self.log.folders[opened] = os.path.join(*self.log.place(name, at)).rstrip("/.")
        return opened

    def create(self, name: str, at: Descriptor) -> Descriptor:
        opened = Files.create(self, name, at)
        log = self.log
        log.numbered += 1
        log.files[opened] = log.names[log.folders[at], name] = log.numbered
        log.changes.append(Created(log.folders[at], name, log.numbered))
        return opened

    def open(self, name: str, at: Descriptor) -> Descriptor:
        opened = Files.open(self, name, at)
        if (number := self.log.names.get((self.log.folders[at], name))) is not None:
            self.log.files[opened] = number
        return opened

    def write(self, file: Descriptor, data: memoryview, offset: int) -> int:
        written = Files.write(self, file, data, offset)
        self.log.changes.append(Wrote(self.log.files[file], offset, bytes(data[:written])))
        return written

    def set_mtime(self, file: Descriptor, mtime_ns: int) -> None:
        Files.set_mtime(self, file, mtime_ns)
        self.log.changes.append(Touched(self.log.files[file], mtime_ns))

    def sync(self, file: Descriptor) -> None:
        self.log.changes.append(Synced(self.log.files[file]))

    def sync_folder(self, at: Descriptor) -> None:
        self.log.changes.append(SyncedFolder(self.log.folders[at]))

    def rename(self, old: str, new: str, at: Descriptor) -> None:
        Files.rename(self, old, new, at)
        log, folder = self.log, self.log.folders[at]
        number = log.names[folder, new] = log.names.pop((folder, old))
        log.changes.append(Renamed(folder, old, new, number))

    def remove(self, name: str, at: Descriptor) -> None:
        Files.remove(self, name, at)
        folder = self.log.folders[at]
        number = self.log.names.pop((folder, name))
        self.log.changes.append(Removed(folder, name, number))

    def remove_folder(self, name: str, at: Descriptor) -> None:
        Files.remove_folder(self, name, at)
        self.log.changes.append(RemovedFolder(self.log.folders[at], name))

    def close(self, descriptor: Descriptor) -> None:
        self.log.folders.pop(descriptor, None)
        self.log.files.pop(descriptor, None)
        Files.close(self, descriptor)

    def acknowledge(self, operations: int) -> None:
        """Note that the caller was told."""
        self.log.changes.append(Acknowledged(operations))
