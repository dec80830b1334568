"""Processes that may be killed at any moment: a parent without mlx forks as many as are wanted.

The parent, `python -m parity.fuzz.disk.jobs`, reads a JSON line for each job and passes on what its
children say, a line each: [number, word, value]. The first word of every child is `pid`, the last,
said for it, `dead` with its exit status. A fork takes a millisecond where a fresh process takes a
hundred.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping
from types import TracebackType
from typing import Any, TypeAlias

Say: TypeAlias = Callable[[str, Any], None]
Job: TypeAlias = Callable[..., None]

PIPE = 4096
"""Bytes that a pipe takes in one piece: PIPE_BUF of Linux."""


def serve(jobs: Mapping[str, Job]) -> None:
    """Start what standard input asks for, until it ends; then kill what still runs."""
    running: dict[int, int] = {}
    for line in sys.stdin:
        number, name, arguments = json.loads(line)
        if name == "wait":
            _, status = os.waitpid(running.pop(number), 0)
            _say(number, "dead", os.waitstatus_to_exitcode(status))
            continue
        pid = os.fork()
        if pid:
            running[number] = pid
            continue
        _child(number, jobs[name], arguments)
    for pid in running.values():
        os.kill(pid, signal.SIGKILL)


def _child(number: int, job: Job, arguments: Mapping[str, Any]) -> None:
    status = 1
    try:
        _say(number, "pid", os.getpid())
        job(lambda word, value: _say(number, word, value), **arguments)
        status = 0
    except BaseException:
        _say(number, "raised", traceback.format_exc()[-2000:])
    finally:
        os._exit(status)


def _say(number: int, word: str, value: Any) -> None:
    line = json.dumps([number, word, value]).encode() + b"\n"
    assert len(line) <= PIPE, "a longer line could be torn"
    os.write(1, line)


def killed_at(call: int | None) -> Callable[[str], None]:
    """A `Meet` that kills this process at a call, counted from 1; None: never."""
    met = 0

    def meet(_: str) -> None:
        nonlocal met
        met += 1
        if met == call:
            os.kill(os.getpid(), signal.SIGKILL)

    return meet


class Child:
    """A process at work. `said` is what came so far, without `pid` and `dead`."""

    def __init__(self, number: int, ask: Callable[[int, str, Any], None]) -> None:
        self._number, self._ask = number, ask
        self.lines: queue.SimpleQueue[tuple[str, Any]] = queue.SimpleQueue()
        self.said: list[tuple[str, Any]] = []
        self.pid = 0

    def begun(self) -> None:
        """Wait until the job begins."""
        word, self.pid = self.lines.get(timeout=60)
        assert word == "pid"

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)  # a child that ended is waited for by its parent only

    def next(self, timeout_s: float = 60) -> tuple[str, Any]:
        """The next word, also kept in `said`."""
        self.said.append(line := self.lines.get(timeout=timeout_s))
        return line

    def wait(self, timeout_s: float = 60) -> int:
        """Wait for its end: the exit status, negative if a signal ended it.

        Raises:
            queue.Empty: it hangs.
        """
        self._ask(self._number, "wait", {})
        while (line := self.lines.get(timeout=timeout_s))[0] != "dead":
            self.said.append(line)
        return int(line[1])


class Nursery:
    """The parent of the children, itself a process; `with` ends it and them."""

    def __init__(self) -> None:
        command = [sys.executable, "-m", "parity.fuzz.disk.jobs"]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True)
        self._children: list[Child] = []
        self._reader = threading.Thread(target=self._listen, daemon=True)

    def __enter__(self) -> Nursery:
        self._reader.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(60)
        self._reader.join(60)
        self._process.stdout.close()

    def start(self, job: str, **arguments: Any) -> Child:
        """A child that has begun."""
        child = Child(len(self._children), self._request)
        self._children.append(child)
        self._request(len(self._children) - 1, job, arguments)
        child.begun()
        return child

    def _request(self, number: int, job: str, arguments: Any) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([number, job, arguments]) + "\n")
        self._process.stdin.flush()

    def _listen(self) -> None:
        for number, word, value in self._lines():
            self._children[number].lines.put((word, value))

    def _lines(self) -> Iterator[tuple[int, str, Any]]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            yield json.loads(line)
