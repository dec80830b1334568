"""The system calls of the SSD tier, as an object that is passed in. No mlx here.

Each method is about one call, so that a test can record the calls, or let any of them fail. Names
are looked up in an open folder and never lead through a symbolic link: whoever replaces a folder
or a file under us gets an error and not our data.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeAlias

FOLDER_MODE = 0o700
FILE_MODE = 0o600

UNSUPPORTED = frozenset({errno.EINVAL, errno.ENOTSUP, errno.ENOTTY, errno.ENOSYS})
"""How file systems say that they do not know a kind of fsync."""

FULL_SYNC: int | None = getattr(fcntl, "F_FULLFSYNC", None)
"""macOS: `fsync` leaves the data in the drive's cache, this does not."""

Descriptor: TypeAlias = int


@dataclass(frozen=True, slots=True)
class Status:
    """What is known of an open file. `links` is 0 once it was removed."""

    regular: bool
    size: int
    mtime_ns: int
    links: int


@dataclass(frozen=True, slots=True)
class Files:
    """The real calls. All raise OSError, and only that.

    `full_sync`: where the system has F_FULLFSYNC, use it, and fsync where a file system refuses it.
    """

    full_sync: bool = True

    def make_folder(self, name: str, at: Descriptor | None = None) -> None:
        """A new folder, ours alone; FileExistsError if there is anything of that name."""
        os.mkdir(name, FOLDER_MODE, dir_fd=at)

    def open_folder(self, name: str, at: Descriptor | None = None) -> Descriptor:
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
        # Without a folder to start from it is the user's path, links and all.
        return os.open(name, flags if at is None else flags | os.O_NOFOLLOW, dir_fd=at)

    def names(self, at: Descriptor) -> list[tuple[str, bool]]:
        """Every name in a folder, and whether it stands for a regular file."""
        with os.scandir(at) as entries:
            return [(entry.name, entry.is_file(follow_symlinks=False)) for entry in entries]

    def create(self, name: str, at: Descriptor) -> Descriptor:
        """A new empty file to write to; FileExistsError if there is anything of that name."""
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        return os.open(name, flags, FILE_MODE, dir_fd=at)

    def open(self, name: str, at: Descriptor) -> Descriptor:
        """A file to read from the start. What is no regular file neither blocks nor is followed."""
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        return os.open(name, flags, dir_fd=at)

    def lock(self, file: Descriptor) -> None:
        """Hold the file until it is closed; BlockingIOError if another descriptor does."""
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def duplicate(self, file: Descriptor) -> Descriptor:
        """The same open file, to be closed by itself."""
        return os.dup(file)

    def status(self, file: Descriptor) -> Status:
        return _status(os.fstat(file))

    def status_of(self, name: str, at: Descriptor) -> Status:
        return _status(os.stat(name, dir_fd=at, follow_symlinks=False))

    def read(self, file: Descriptor, into: memoryview, offset: int) -> int:
        """Read from there, in any thread: how many bytes were read; 0 at the end."""
        return os.preadv(file, [into], offset)

    def write(self, file: Descriptor, data: memoryview, offset: int) -> int:
        """Write there: how many bytes were written."""
        return os.pwrite(file, data, offset)

    def write_back(self, file: Descriptor, offset: int, count: int) -> None:
        """Begin to bring what was just written to the disk, where the system can.

        Linux does that when it is told that the pages are not needed; it keeps them until then.
        """
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file, offset, count, os.POSIX_FADV_DONTNEED)

    def set_mtime(self, file: Descriptor, mtime_ns: int) -> None:
        os.utime(file, ns=(mtime_ns, mtime_ns))

    def sync(self, file: Descriptor) -> None:
        """Return when the file's bytes outlive a loss of power."""
        _sync(file, self.full_sync)

    def sync_folder(self, at: Descriptor) -> None:
        """Return when the folder's names outlive a loss of power, where the system can tell."""
        try:
            _sync(at, self.full_sync)
        except OSError as error:
            if error.errno not in UNSUPPORTED:
                raise

    def rename(self, old: str, new: str, at: Descriptor) -> None:
        os.rename(old, new, src_dir_fd=at, dst_dir_fd=at)

    def remove(self, name: str, at: Descriptor) -> None:
        os.unlink(name, dir_fd=at)

    def remove_folder(self, name: str, at: Descriptor) -> None:
        """Remove an empty folder."""
        os.rmdir(name, dir_fd=at)

    def close(self, descriptor: Descriptor) -> None:
        os.close(descriptor)


def _sync(descriptor: Descriptor, full: bool) -> None:
    if full and FULL_SYNC is not None:
        try:
            fcntl.fcntl(descriptor, FULL_SYNC)
            return
        except OSError as error:
            if error.errno not in UNSUPPORTED:
                raise
    os.fsync(descriptor)


def _status(found: os.stat_result) -> Status:
    return Status(stat.S_ISREG(found.st_mode), found.st_size, found.st_mtime_ns, found.st_nlink)


@contextlib.contextmanager
def closing(files: Files, descriptor: Descriptor) -> Iterator[Descriptor]:
    """Close it at the end. That this fails is of no consequence: what had to last was synced."""
    try:
        yield descriptor
    finally:
        with contextlib.suppress(OSError):
            files.close(descriptor)


def write_all(files: Files, file: Descriptor, data: memoryview, offset: int) -> None:
    """Write all the bytes, in as many calls as it takes."""
    while data:
        written = files.write(file, data, offset)
        if written <= 0:
            raise OSError(errno.EIO, "a write of no bytes")
        data, offset = data[written:], offset + written


def read_all(files: Files, file: Descriptor, into: memoryview, offset: int) -> bool:
    """Fill the buffer of bytes; False if the file ends before."""
    while into:
        count = files.read(file, into, offset)
        if count <= 0:
            return False
        into, offset = into[count:], offset + count
    return True
