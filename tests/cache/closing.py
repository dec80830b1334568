"""A process whose engines are each interrupted at another moment of their closing, for a test.

`python -m tests.cache.closing FOLDER`: engine N keeps its states in FOLDER/N, and nothing is
written before the process ends. Says how many engines there were.
"""

from __future__ import annotations

import atexit
import itertools
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

from engine import Engine, Request, service
from engine.cache.durability import FlushReport
from engine.tiers import Tiers, open_tiers
from tests.engine.pools import target_of

Flush = Callable[..., FlushReport | None]


class Trip:
    """Raises KeyboardInterrupt in this thread, at the Nth line that runs of `service.py`."""

    def __init__(self, moment: int) -> None:
        self._moment = moment
        self._lines: set[int] = set()
        self.raised = False

    def __call__(self, frame: FrameType, event: str, _: object) -> Any:
        if frame.f_code.co_filename != service.__file__:
            return None
        # A line that comes again is the end of a `with`: interrupted there, CPython keeps the lock.
        if event == "line" and frame.f_lineno not in self._lines:
            self._lines.add(frame.f_lineno)
            if len(self._lines) > self._moment:
                self.raised = True
                raise KeyboardInterrupt
        return self


def held_back(flush: Flush, ending: threading.Event) -> Flush:
    def late(timeout_s: float | None = None) -> FlushReport | None:
        ending.wait()
        return flush(timeout_s)

    return late


def interrupted(tiers: Tiers, moment: int) -> bool:
    """One engine's life; False if only the alarm has ended its wait for the model thread."""
    trip = Trip(moment)
    target = target_of("dense")
    try:
        with Engine(target, tiers=tiers) as engine:
            engine.submit(Request(tuple(target.encode("Name: ")), 4)).result()
            signal.setitimer(signal.ITIMER_REAL, 2)
            sys.settrace(trip)
    except KeyboardInterrupt:
        sys.settrace(None)
        signal.setitimer(signal.ITIMER_REAL, 0)
    return trip.raised


def main(folder: str) -> None:
    signal.signal(signal.SIGALRM, signal.default_int_handler)
    ending = threading.Event()
    for moment in itertools.count():
        tiers = open_tiers(target_of("dense"), ssd=Path(folder) / str(moment))
        tiers.flush = held_back(tiers.flush, ending)  # type: ignore[method-assign]
        if not interrupted(tiers, moment):
            break
    atexit.register(ending.set)
    sys.stdout.write(f"{moment + 1}\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
