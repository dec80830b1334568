"""File systems that fail, or that let something else happen, at a chosen call."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

from engine.cache.files import Descriptor, Files

ERRORS = (errno.ENOSPC, errno.EIO, errno.EINTR, errno.EMFILE, errno.EROFS)

CALLS = tuple(
    name for name, value in vars(Files).items() if callable(value) and not name.startswith("_")
)
"""Every call of the seam."""

Meet: TypeAlias = Callable[[str], None]
"""Told of each call by name before it is made; what it raises is what the call raises."""


def _intercepted(name: str) -> Callable[..., Any]:
    real = getattr(Files, name)

    def call(self: Intercepted, *arguments: Any) -> Any:
        if name == "close":  # a close that fails has closed
            real(self, *arguments)
            return self.meet(name)
        self.meet(name)
        return real(self, *arguments)

    return call


class Intercepted(Files):
    """The real calls, each announced to `meet` first."""

    __slots__ = ("meet",)

    def __init__(self, meet: Meet) -> None:
        super().__init__()
        object.__setattr__(self, "meet", meet)

    meet: Meet


for _name in CALLS:
    setattr(Intercepted, _name, _intercepted(_name))


@dataclass(slots=True)
class Fault:
    """A `Meet` that fails with error `number` at call `at` of those in `calls`, counted from 1.

    With `on` all that follow fail as well; with `at` None, none does. `met` counts the calls so
    far, `failed` those that did fail.
    """

    number: int
    at: int | None = None
    on: bool = False
    calls: frozenset[str] = frozenset(CALLS)
    met: int = 0
    failed: int = 0

    def __call__(self, name: str) -> None:
        if name not in self.calls:
            return
        self.met += 1
        if self.at is None or not (self.met == self.at or (self.on and self.met > self.at)):
            return
        self.failed += 1
        raise OSError(self.number, os.strerror(self.number))


class Short(Files):
    """Writes and reads of at most `most` bytes; write number `at` writes nothing and fails."""

    __slots__ = ("fault", "most")

    def __init__(self, most: int, fault: Fault) -> None:
        super().__init__()
        object.__setattr__(self, "most", most)
        object.__setattr__(self, "fault", fault)

    most: int
    fault: Fault

    def write(self, file: Descriptor, data: memoryview, offset: int) -> int:
        self.fault("write")
        return Files.write(self, file, data[: self.most], offset)

    def read(self, file: Descriptor, into: memoryview, offset: int) -> int:
        return Files.read(self, file, into[: self.most], offset)


class Unsynced(Files):
    """The real calls without the waits for a drive, for files that no loss of power will meet."""

    __slots__ = ()

    def sync(self, file: Descriptor) -> None:
        pass

    def sync_folder(self, at: Descriptor) -> None:
        pass
