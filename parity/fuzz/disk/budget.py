"""How much of a row is done, and how that is told."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TypeVar

T = TypeVar("T")


@dataclass(slots=True)
class Budget:
    """Work is numbered by seeds from `first`; it goes on until `count` or the end of the time.

    `done` counts what the row counts; `next` is the first seed that was not begun; `cases` is how
    many there are where there is an end to them. `violations` are what broke the contract, in words
    that begin with the seed; `failed` is the last of these seeds. `notes` are for the table.
    """

    count: int
    seconds: float
    first: int = 0
    done: int = 0
    next: int = 0
    violations: list[str] = field(default_factory=list)
    failed: int | None = None
    cases: int = 0
    notes: list[str] = field(default_factory=list)
    started: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        self.next = self.first

    def seeds(self) -> Iterator[int]:
        """Seeds while there is something left to do, one at least. One violation is enough."""
        while self.next == self.first or not (
            self.done >= self.count or self.over or self.violations
        ):
            self.next += 1
            yield self.next - 1

    def each(self, cases: Iterable[T]) -> Iterator[tuple[int, T]]:
        """All cases once with their seeds, from the one whose turn it is, round and round."""
        listed = list(cases)
        self.cases = len(listed)
        for _, seed in zip(listed, self.seeds(), strict=False):
            yield seed, listed[seed % len(listed)]

    @property
    def whole(self) -> bool:
        """Whether all cases had their turn, where there is an end to them."""
        return self.next - self.first >= self.cases

    @property
    def over(self) -> bool:
        return self.took_s > self.seconds

    @property
    def took_s(self) -> float:
        return time.monotonic() - self.started

    def violated(self, seed: int, text: str) -> None:
        self.failed = seed
        self.violations.append(f"seed {seed}: {text}")


SHARED_MEMORY = Path("/dev/shm")


def quiet() -> None:
    """Keep the tier's warnings from standard error: here most of what it does goes wrong."""
    logger = logging.getLogger("engine.cache")
    logger.addHandler(logging.NullHandler())
    logger.propagate = False


@contextmanager
def scratch() -> Iterator[Path]:
    """A folder, in memory where the system has such a place: nothing here must outlive it."""
    place = SHARED_MEMORY if SHARED_MEMORY.is_dir() else None
    with TemporaryDirectory(prefix="mlx-parity-", dir=place) as folder:
        yield Path(folder)
