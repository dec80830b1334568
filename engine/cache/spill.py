"""What memory has no room for any more, on its way to the disk: a bounded queue, written serially.

Eviction must not wait for a disk, and must not keep what it frees either. So the queue holds a
number of bytes at most and forgets its oldest first: a lost spill is a miss later, no more. What
waits can still be looked at.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from ..errors import BadInput
from .entry import RunStep, at_once

log = logging.getLogger(__name__)

T = TypeVar("T")
T_contra = TypeVar("T_contra", contravariant=True)


class Write(Protocol[T_contra]):
    """Writes an item, as `Store.put` does: reads in steps.

    True: it is written. False: that failed. None: it was called off meanwhile.
    """

    def __call__(self, item: T_contra, run_step: RunStep, /) -> bool | None: ...


@dataclass(frozen=True, slots=True)
class SpillCounts:
    """What waits or is being written now, and what became of the rest; `dropped` are lost."""

    pending: int
    nbytes: int
    written: int
    failed: int
    dropped: int


class SpillQueue(Generic[T]):
    """At most `cap_bytes` of items to be written, the one in flight included.

    The newcomer is never dropped, however large, and neither is what is in flight. What is dropped
    although it `is_stored` already is not lost, and not counted.

    `offer`, `withdraw`, `items` and `counts` are for any thread and never wait. `run_one`
    is for the thread that writes; if another calls it as well they take turns.

    Raises:
        BadInput: a negative cap.
    """

    def __init__(
        self, cap_bytes: int, write: Write[T], is_stored: Callable[[T], bool] = lambda item: False
    ) -> None:
        if cap_bytes < 0:
            raise BadInput(f"cap_bytes must be at least 0, got {cap_bytes}")
        self._cap_bytes, self._write, self._is_stored = cap_bytes, write, is_stored
        self._waiting: deque[tuple[T, int]] = deque()
        self._in_flight: tuple[T, int] | None = None
        self._nbytes = self._written = self._failed = self._dropped = 0
        self._lock, self._serial = threading.Lock(), threading.Lock()

    @property
    def counts(self) -> SpillCounts:
        with self._lock:
            pending = len(self._waiting) + (self._in_flight is not None)
            return SpillCounts(pending, self._nbytes, self._written, self._failed, self._dropped)

    @property
    def items(self) -> list[T]:
        """What is not written yet, the oldest first; it stays where it is."""
        with self._lock:
            flying = [] if self._in_flight is None else [self._in_flight]
            return [item for item, _ in (*flying, *self._waiting)]

    def offer(self, item: T, nbytes: int) -> None:
        """Queue an item of so many bytes, and forget the oldest ones that are then too much."""
        dropped: list[T] = []  # freed after the lock is: that may take its time
        with self._lock:
            self._waiting.append((item, nbytes))
            self._nbytes += nbytes
            while self._nbytes > self._cap_bytes and len(self._waiting) > 1:
                oldest, size = self._waiting.popleft()
                dropped.append(oldest)
                self._nbytes -= size
        lost = sum(not self._is_stored(item) for item in dropped)
        with self._lock:
            self._dropped += lost

    def withdraw(self, unwanted: Callable[[T], bool]) -> list[T]:
        """Forget the items that wait and are not wanted any more; these, and such a one in flight.

        To call off the latter is up to whoever writes it.
        """
        with self._lock:
            found = [one for one in self._waiting if unwanted(one[0])]
            self._waiting = deque(one for one in self._waiting if not unwanted(one[0]))
            self._nbytes -= sum(nbytes for _, nbytes in found)
            if self._in_flight is not None and unwanted(self._in_flight[0]):
                found.append(self._in_flight)
        return [item for item, _ in found]

    def run_one(self, run_step: RunStep = at_once, timeout_s: float | None = None) -> bool:
        """Write the oldest item; False if none waits, or another thread writes for too long.

        Whatever happens to it, the queue holds it no longer.
        """
        if not self._serial.acquire(timeout=-1 if timeout_s is None else max(0.0, timeout_s)):
            return False
        try:
            with self._lock:
                if not self._waiting:
                    return False
                self._in_flight = self._waiting.popleft()
                item, nbytes = self._in_flight
            written: bool | None = False
            try:
                written = self._write(item, run_step)
            except Exception as error:
                log.warning("a state could not be written: %s", error)
            finally:
                with self._lock:
                    self._nbytes -= nbytes
                    self._in_flight = None
                    self._written += written is True
                    self._failed += written is False
            return True
        finally:
            self._serial.release()
