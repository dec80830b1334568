"""The process behind ``drafters``: ``vlm`` under the Python of mlx-vlm's environment."""

from __future__ import annotations

import base64
import json
import os
import queue
import subprocess
import tempfile
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

import numpy as np

VERSION = "0.7.10"  # of mlx-vlm: its drafters are driven through names that it may change
STOP_S = 5.0
_SCRIPT = Path(__file__).parent / "vlm" / "__main__.py"


class WorkerFailed(RuntimeError):
    """No answer will come; one line says why, ``log`` holds the last lines the worker wrote."""

    def __init__(self, message: str, log: str = "") -> None:
        super().__init__(message)
        self.log = log


class Process:
    """A worker that answers one line of JSON with another (see ``vlm.serve``).

    ``WorkerFailed`` if it does not start, holds another mlx-vlm than ``VERSION``, dies, or keeps a
    request waiting for longer than ``timeout_s``; it is ended then. It also ends when this process
    does, at the latest behind the request it is at.
    """

    def __init__(self, python: str | Path, *, timeout_s: float) -> None:
        if timeout_s <= 0:
            raise ValueError(f"timeout_s must be above 0, got {timeout_s}")
        self._python = str(python)
        self._timeout_s = timeout_s
        self._log: IO[bytes] | None = None
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._child: subprocess.Popen[str] | None = None

    @property
    def pid(self) -> int:
        if self._child is None:
            raise RuntimeError("the worker was not started")
        return self._child.pid

    def start(self) -> None:
        """Return once the worker has told its versions."""
        if self._child is not None:
            raise RuntimeError("the worker was already started")
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 -- `stop` closes it
        try:
            self._child = subprocess.Popen(
                [self._python, "-I", str(_SCRIPT)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._log,
                env={**os.environ, "MLX_ENABLE_TF32": "0"},
                start_new_session=True,  # a Ctrl-C is for us, who then close its input
                text=True,
            )
        except OSError as error:
            self.stop()
            raise WorkerFailed(
                f"no Python of an mlx-vlm environment at {self._python}: {error.strerror}"
            ) from None
        threading.Thread(target=self._read, args=(self._child,), daemon=True).start()
        try:
            self._greet()
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """End the worker. May be called at any time and again."""
        if self._child is not None:
            self._end(STOP_S)
        if self._log is not None:
            self._log.close()
            self._log = None

    def ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """The answer to a request, arrays in both; ``ValueError`` if the worker refuses it."""
        if self._child is None or self._child.stdin is None or self._child.stdin.closed:
            raise WorkerFailed("the mlx-vlm worker is not running")
        with suppress(BrokenPipeError):  # that there is no answer says more
            self._child.stdin.write(json.dumps(written(request)) + "\n")
            self._child.stdin.flush()
        asked = str(request["operation"])
        answer = self._next(asked)
        if "refused" in answer:
            raise ValueError(answer["refused"])
        if "failed" in answer:
            raise WorkerFailed(f"mlx-vlm failed at {asked}: {answer['failed']}", self._tail())
        return dict(read(answer["answer"]))

    def _greet(self) -> None:
        greeting = self._next("the start")
        if "failed" in greeting:
            raise WorkerFailed(f"{self._python}: {greeting['failed']}")
        if greeting["mlx-vlm"] != VERSION:
            raise WorkerFailed(
                f"{self._python} has mlx-vlm {greeting['mlx-vlm']}, the oracle is {VERSION}"
            )

    def _read(self, child: subprocess.Popen[str]) -> None:
        assert child.stdout is not None
        with child.stdout as lines:
            for line in lines:
                self._lines.put(line)
        self._lines.put("")

    def _next(self, asked: str) -> dict[str, Any]:
        try:
            line = self._lines.get(timeout=self._timeout_s)
        except queue.Empty:
            self._end(0.0)
            raise WorkerFailed(
                f"the mlx-vlm worker did not answer {asked} within {self._timeout_s:g} s",
                self._tail(),
            ) from None
        if line:
            return dict(json.loads(line))
        code = self._end(STOP_S)
        log = self._tail()
        last = (log.splitlines() or ["it wrote nothing"])[-1]
        raise WorkerFailed(f"the mlx-vlm worker died at {asked} (exit {code}): {last}", log)

    def _end(self, patience_s: float) -> int:
        assert self._child is not None
        assert self._child.stdin is not None
        with suppress(BrokenPipeError):
            self._child.stdin.close()
        try:
            return self._child.wait(patience_s)
        except subprocess.TimeoutExpired:
            self._child.kill()
            return self._child.wait()

    def _tail(self) -> str:
        assert self._log is not None
        text = os.pread(self._log.fileno(), os.fstat(self._log.fileno()).st_size, 0)
        lines = text.decode("utf-8", errors="replace").splitlines()
        return "\n".join([line for line in lines if line.strip()][-20:])


def written(value: Any) -> Any:
    """Arrays and sequences, at any depth, as JSON holds them."""
    if isinstance(value, np.ndarray):
        array = np.ascontiguousarray(value, dtype=np.float32)
        data = base64.b64encode(array.tobytes()).decode()
        return {"shape": list(array.shape), "float32": data}
    if isinstance(value, Mapping):
        return {name: written(item) for name, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [written(item) for item in value]
    return int(value) if isinstance(value, np.integer) else value


def read(value: Any) -> Any:
    """What ``written`` wrote."""
    if isinstance(value, dict):
        if value.keys() == {"shape", "float32"}:
            data = np.frombuffer(base64.b64decode(value["float32"]), dtype=np.float32)
            return data.reshape(value["shape"])
        return {name: read(item) for name, item in value.items()}
    return [read(item) for item in value] if isinstance(value, list) else value
