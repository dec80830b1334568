"""The thread that writes, beside the thread that runs forwards. No mlx here."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from .durability import Durability, FlushReport
from .gate import Gate
from .spill import SpillQueue


class Writer:
    """Writes what was spilled as it comes, and what is dirty while the model thread is idle.

    Its steps run on the model thread, which calls `serve` between forwards, says by `set_idle` when
    it has nothing else to do, and calls `close`. `tell` may be called by any thread.

    Args:
        wake: called when a step waits for the model thread.
    """

    def __init__(
        self, spill: SpillQueue[Any], durability: Durability, wake: Callable[[], None]
    ) -> None:
        self._spill = spill
        self._durability = durability
        self._gate = Gate(wake)
        self._changed = threading.Condition()
        self._idle = self._told = False
        self._timeout_s: float | None = None
        self._closing = False
        self.report: FlushReport | None = None
        self._thread = threading.Thread(target=self._write, name="writer", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def run_step(self, step: Callable[[], None]) -> None:
        """What the writer's steps go through; see `RunStep`."""
        if threading.current_thread() is self._thread:
            self._gate.run(step)
        else:
            step()

    @property
    def asks(self) -> bool:
        """Whether a step waits for `serve`."""
        return self._gate.asks

    def serve(self) -> bool:
        """Run one step; False if none waits."""
        return self._gate.serve()

    def set_idle(self, idle: bool) -> None:
        with self._changed:
            self._idle = idle
            self._changed.notify()

    def tell(self) -> None:
        """There is something to write."""
        with self._changed:
            self._told = True
            self._changed.notify()

    def close(self, timeout_s: float | None = None) -> FlushReport | None:
        """Write everything within that time, serving the steps meanwhile; then the thread is gone.

        No step begins later, but the disk may take longer for the last one. None: the thread was
        gone before, or ended by an error.
        """
        with self._changed:
            self._closing, self._timeout_s = True, timeout_s
            self._changed.notify()
        while self._thread.is_alive():
            if not self._gate.serve():
                self._thread.join(0.005)  # short, since a step may be asked for meanwhile
        self._gate.close()
        return self.report

    def _write(self) -> None:
        while True:
            with self._changed:
                self._told = False
                if self._closing:
                    break
                idle = self._idle
            if self._spill.run_one(self._gate.run) or (idle and self._durability.step()):
                continue
            with self._changed:
                due_s = self._durability.due_in_s if self._idle else None
                if not self._told and not self._closing and self._idle == idle:
                    self._changed.wait(due_s)
        self.report = self._durability.flush(self._timeout_s)
