"""A file system that is watched, and fails when it is told to."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from engine.cache.files import Files

CALLS = tuple(
    name for name, value in vars(Files).items() if callable(value) and not name.startswith("_")
)
"""Every call of the seam."""


@dataclass
class Watch:
    """What was called, and what happens at a call: `fault` may raise."""

    fault: Callable[[int, str], None] = lambda number, name: None
    log: list[tuple[str, tuple[Any, ...], Any]] = field(default_factory=list)
    called: int = 0

    def files(self) -> Files:
        """The real calls, watched."""

        def watched(name: str) -> Callable[..., Any]:
            real = getattr(Files, name)

            def call(files: Files, *arguments: Any) -> Any:
                number, self.called = self.called, self.called + 1
                try:
                    self.fault(number, name)
                except OSError:
                    if name == "close":  # a descriptor is closed even if that fails
                        real(files, *arguments)
                    raise
                result = real(files, *arguments)
                self.log.append((name, arguments, result))
                return result

            return call

        return type("Watched", (Files,), {name: watched(name) for name in CALLS})()  # type: ignore[no-any-return]

    @contextmanager
    def failing(self, fault: Callable[[int, str], None]) -> Iterator[None]:
        """Count calls from here on, and let the fault happen."""
        self.called, self.fault = 0, fault
        try:
            yield
        finally:
            self.fault = lambda number, name: None


def at(number: int, error: int, *, on: bool) -> Callable[[int, str], None]:
    """The call of that number fails, and if `on` every later one as well."""

    def fault(called: int, name: str) -> None:
        if called == number or (on and called > number):
            raise OSError(error, f"{os.strerror(error)} at {name}, call {called}")

    return fault


ERRORS = (errno.EIO, errno.ENOSPC, errno.EINTR, errno.EMFILE, errno.EROFS)
