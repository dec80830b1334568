"""Which prefixes are to outlive the process, and whether they would now.

A prefix is scheduled when it is worth keeping, written when it has been left alone for a while and
the engine is idle, and written at once by `flush`, which says what a restart would find.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from .entry import RunStep, Step, Tokens, at_once
from .spill import SpillCounts, SpillQueue

log = logging.getLogger(__name__)

DEBOUNCE_S = 2.0
"""How long a scheduled prefix is left alone: a longer one that follows soon is written for both."""

MAX_RECORDS = 1024
"""So that an engine that is never idle does not remember every prompt it has seen."""


class WriteDurably(Protocol):
    """Stores an entry that serves all of these tokens.

    True: they are durable. False: that failed. None: nobody has such a state any more.
    """

    def __call__(self, tokens: Tokens, namespace: str, run_step: RunStep, /) -> bool | None: ...


@dataclass(frozen=True, slots=True)
class FlushReport:
    """What became of the records that were dirty.

    `durable`: `missing`, `pending`, `dropped` and `failed` are all 0. `flushed` are durable now.
    `missing` are nowhere any more, or gave way to others under the cap; they stay dirty. `pending`
    were not reached in time, or came meanwhile. `dropped` were given up since the last report,
    among them evicted entries. `failed` could not be written.
    """

    durable: bool
    flushed: int
    missing: int
    pending: int
    dropped: int
    failed: int
    elapsed_s: float


@dataclass(slots=True)
class _Dirty:
    tokens: Tokens
    namespace: str
    due_s: float | None
    """None: it was tried, and waits for a flush or for being scheduled again."""

    @property
    def key(self) -> tuple[str, bytes]:
        return self.namespace, self.tokens.tobytes()


class Durability:
    """The dirty records: prefixes, each with its namespace, that are to be made durable.

    `schedule`, `dirty` and `due_in_s` are for any thread and never wait. `step` and `flush` write,
    one at a time: `step` belongs to the thread that writes, and only while the engine is idle;
    `flush` may be called by any thread that `run_step` does not need.

    Args:
        is_durable: whether a restart would find these tokens: `Store.would_find`.
        write: see `WriteDurably`; it reads tensors inside `run_step`.
        spill: what is to be written before it can be said what is missing.
        debounce_s: how long a record is left alone after it was scheduled.
        clock: seconds that never go back.
    """

    def __init__(
        self,
        is_durable: Callable[[Tokens, str], bool],
        write: WriteDurably,
        *,
        run_step: RunStep = at_once,
        spill: SpillQueue[Any] | None = None,
        debounce_s: float = DEBOUNCE_S,
        max_records: int = MAX_RECORDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._is_durable, self._write, self._run_step = is_durable, write, run_step
        self._spill, self._debounce_s, self._clock = spill, debounce_s, clock
        self._max_records = max_records
        self._records: dict[tuple[str, bytes], _Dirty] = {}
        self._dropped = 0
        self._reported_spill: SpillCounts | None = None
        self._lock, self._serial = threading.Lock(), threading.Lock()

    @property
    def dirty(self) -> int:
        with self._lock:
            return len(self._records)

    @property
    def due_in_s(self) -> float | None:
        """Seconds until `step` has something to do; None: never, as things are."""
        with self._lock:
            due = [record.due_s for record in self._records.values() if record.due_s is not None]
        return max(0.0, min(due) - self._clock()) if due else None

    def schedule(self, tokens: Tokens, namespace: str) -> None:
        """Mark a prefix as to be kept; if it is already, it is left alone for longer."""
        record = _Dirty(tokens, namespace, self._clock() + self._debounce_s)
        with self._lock:
            self._records.pop(record.key, None)
            self._records[record.key] = record
            while len(self._records) > self._max_records:
                del self._records[next(iter(self._records))]
                self._dropped += 1

    def step(self) -> bool:
        """Write the record that is due for longest; False if none is, or a flush is under way."""
        if not self._serial.acquire(blocking=False):
            return False
        try:
            now = self._clock()
            with self._lock:
                due = [
                    record
                    for record in self._records.values()
                    if record.due_s is not None and record.due_s <= now
                ]
            if not due:
                return False
            self._conclude(due[0], self._make_durable(due[0], self._run_step))
            return True
        finally:
            self._serial.release()

    def flush(self, timeout_s: float | None = None) -> FlushReport:
        """Write every dirty record now, after what was evicted, and report.

        No step begins after `timeout_s`: it takes at most that, one tensor's write and one sync.
        """
        limit = _Limit(self._clock, timeout_s, self._run_step)
        found: list[bool | None] = []
        if self._serial.acquire(timeout=-1 if timeout_s is None else max(0.0, timeout_s)):
            try:
                self._drain_spill(limit)
                found = self._settle_all(limit)
            finally:
                self._serial.release()
        missing, failed = found.count(None), found.count(False)
        with self._lock:
            pending = max(0, len(self._records) - missing - failed)
            dropped, self._dropped = self._dropped, 0
        if self._spill is not None:
            now, before = self._spill.counts, self._reported_spill
            self._reported_spill = now
            pending += now.pending
            dropped += now.dropped - (before.dropped if before else 0)
            failed += now.failed - (before.failed if before else 0)
        return FlushReport(
            durable=not (missing or pending or dropped or failed),
            flushed=found.count(True),
            missing=missing,
            pending=pending,
            dropped=dropped,
            failed=failed,
            elapsed_s=limit.elapsed_s,
        )

    def _drain_spill(self, limit: _Limit) -> None:
        if self._spill is not None:
            for _ in range(self._spill.counts.pending):
                if limit.over or not self._spill.run_one(limit, limit.left_s):
                    return

    def _settle_all(self, limit: _Limit) -> list[bool | None]:
        """What became of every record that was dirty, but for those there was no time for."""
        with self._lock:
            records = list(self._records.values())
        written: list[bool | None] = []
        for record in records:
            if limit.over:
                break
            done = self._make_durable(record, limit)
            if done or not limit.over:
                written.append(done)
        # Last, because a later one may serve an earlier one that was missing, or push it out.
        return [
            self._conclude(record, done) for record, done in zip(records, written, strict=False)
        ]

    def _make_durable(self, record: _Dirty, run_step: RunStep) -> bool | None:
        """Write a record if it is not durable, as `WriteDurably` does."""
        record.due_s = None
        try:
            if self._is_durable(record.tokens, record.namespace):
                return True
            return self._write(record.tokens, record.namespace, run_step)
        except Exception as error:
            log.warning("a prefix could not be made durable: %s", error)
            return False

    def _conclude(self, record: _Dirty, done: bool | None) -> bool | None:
        """What `_make_durable` said, seen again after all writes: one may have undone another.

        A record that is durable is forgotten, unless it was scheduled anew; any other stays dirty.
        """
        try:
            durable = self._is_durable(record.tokens, record.namespace)
        except Exception as error:
            log.warning("it is not known whether a prefix is durable: %s", error)
            return False
        if durable:
            with self._lock:
                if self._records.get(record.key) is record:
                    del self._records[record.key]
            return True
        return None if done else done


class _Limit:
    """A `RunStep` that rejects every step once the time is over."""

    def __init__(
        self, clock: Callable[[], float], timeout_s: float | None, run_step: RunStep
    ) -> None:
        self._clock, self._timeout_s, self._run_step = clock, timeout_s, run_step
        self._started = clock()

    def __call__(self, step: Step) -> None:
        if self.over:
            raise TimeoutError(f"no time left of {self._timeout_s} s")
        self._run_step(step)

    @property
    def elapsed_s(self) -> float:
        return self._clock() - self._started

    @property
    def left_s(self) -> float | None:
        return None if self._timeout_s is None else self._timeout_s - self.elapsed_s

    @property
    def over(self) -> bool:
        return self._timeout_s is not None and self.elapsed_s >= self._timeout_s
