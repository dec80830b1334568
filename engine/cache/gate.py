"""Write steps on the model thread: a writer asks, the thread that runs forwards lets it in.

So no step runs beside a forward, and none between a check that all is idle and the forward that
follows: both are things that one thread does in turn. No mlx here.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from .entry import Step


class Rejected(RuntimeError):
    """The model thread takes no more steps."""


@dataclass(slots=True)
class _Waiting:
    step: Step
    done: threading.Event = field(default_factory=threading.Event)
    error: BaseException | None = None


class Gate:
    """`run` is for the writer, the rest for the model thread. `wake` tells the latter of a step."""

    def __init__(self, wake: Callable[[], None] = lambda: None) -> None:
        self._wake = wake
        self._waiting: deque[_Waiting] = deque()
        self._lock = threading.Lock()
        self._closed = False

    def run(self, step: Step) -> None:
        """Have the model thread run a step, and wait until it has.

        Raises:
            Rejected: the gate is closed; the step did not run.
            BaseException: what the step raised.
        """
        waiting = _Waiting(step)
        with self._lock:
            if self._closed:
                raise Rejected("the model thread takes no more write steps")
            self._waiting.append(waiting)
        self._wake()
        waiting.done.wait()
        if waiting.error is not None:
            raise waiting.error

    @property
    def asks(self) -> bool:
        """Whether a step waits for `serve`."""
        return bool(self._waiting)

    def serve(self) -> bool:
        """Run the step that waits longest; False if none does."""
        with self._lock:
            if not self._waiting:
                return False
            waiting = self._waiting.popleft()
        try:
            waiting.step()
        except BaseException as error:
            waiting.error = error
        waiting.done.set()
        return True

    def close(self) -> None:
        """Reject the steps that wait and all that come."""
        with self._lock:
            self._closed = True
            rejected, self._waiting = self._waiting, deque()
        for waiting in rejected:
            waiting.error = Rejected("the model thread takes no more write steps")
            waiting.done.set()
