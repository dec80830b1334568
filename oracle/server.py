"""mlx_lm.server as a subprocess on the loopback: started, proven ours and ready, always stopped."""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import IO

import httpx

from oracle import device

HOST = "127.0.0.1"
POLL_S = 0.05
Watch = subprocess.Popen[str]
STOP_S = 5.0


class ServerFailed(RuntimeError):
    """The server did not come up; one line says why, ``log`` holds the last lines it wrote."""

    def __init__(self, message: str, log: str = "") -> None:
        super().__init__(message)
        self.log = log


class Server:
    """``python -m mlx_lm server`` for the length of a ``with`` block.

    ``model`` is a model folder, or a Hub id that mlx-lm resolves; ``draft`` mounts a draft model,
    and with it the serial lane. ``prompt_cache_size`` 0 switches prefix reuse off. ``env`` is added
    to this process's environment and to ``MLX_ENABLE_TF32=0``. The log goes to ``log_path``, or to
    a nameless temporary file.

    The server is a child of ``watch``, which ends it when this process ends, however that happens.
    A process forked from this one without exec holds the server up until it ends, too.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        draft: str | Path | None = None,
        prompt_cache_size: int = 0,
        extra_args: Sequence[str] = (),
        log_path: str | Path | None = None,
        port: int | None = None,
        start_timeout_s: float = 120.0,
        env: Mapping[str, str] | None = None,
    ) -> None:
        self.model = str(model)
        self.draft = None if draft is None else str(draft)
        self._prompt_cache_size = prompt_cache_size
        self._extra_args = tuple(extra_args)
        self._log_path = None if log_path is None else Path(log_path)
        self._log: IO[bytes] | None = None
        self._asked_port = port
        self._start_timeout_s = start_timeout_s
        self._env = {**os.environ, "MLX_ENABLE_TF32": "0", "PYTHONUNBUFFERED": "1", **(env or {})}
        # The server names an allowed origin only to those who ask with it: the proof that whoever
        # answers on our port is our process and not one that took the port in between.
        self._origin = f"http://{secrets.token_hex(16)}.invalid"
        self._watch: subprocess.Popen[str] | None = None
        self._pid: int | None = None
        self._port = 0
        self._kept_log = b""

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self._port}"

    @property
    def port(self) -> int:
        return self._port

    @property
    def pid(self) -> int:
        """Process id of mlx_lm.server itself, not of its watcher."""
        if self._pid is None:
            raise RuntimeError("the server was not started")
        return self._pid

    def __enter__(self) -> Server:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def start(self) -> None:
        """Return once the model is loaded and served; after ``ServerFailed`` nothing is left."""
        if self._watch is not None:
            raise RuntimeError("the server was already started")
        for folder in (self.model, self.draft):
            require_model(folder)
        require_compiler(self._env)
        self._port = free_port() if self._asked_port is None else self._asked_port
        require_free(self._port)
        self._log = open_log(self._log_path)
        try:
            self._spawn(self._log)
            self._await_ready()
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """End the server and all it started. May be called at any time and again."""
        if self._watch is not None:
            end(self._watch)
        if self._log is not None:
            self._kept_log = written(self._log)
            self._log.close()
            self._log = None

    def alive(self) -> bool:
        """Whether the process runs. One whose worker died is alive; its requests are refused."""
        return self._watch is not None and self._watch.poll() is None

    def log_tail(self, n: int) -> str:
        """The last ``n`` lines the server wrote."""
        log = self._kept_log if self._log is None else written(self._log)
        lines = log.decode("utf-8", errors="replace").splitlines()
        return "\n".join(lines[-n:]) if n > 0 else ""

    def _command(self) -> list[str]:
        draft = [] if self.draft is None else ["--draft-model", self.draft]
        return [
            *(sys.executable, "-P", *self._module(), "server"),
            *("--model", self.model, *draft),
            *("--host", HOST, "--port", str(self._port)),
            *("--allowed-origins", self._origin),
            *("--prompt-cache-size", str(self._prompt_cache_size)),
            *self._extra_args,
        ]

    def _module(self) -> list[str]:
        if self._env.get(device.VARIABLE):
            return [str(Path(device.__file__))]
        return ["-m", "mlx_lm"]

    def _spawn(self, log: IO[bytes]) -> None:
        self._watch = watched(self._command(), self._env, log)
        assert self._watch.stdout is not None
        line = self._watch.stdout.readline()
        if not line.strip().isdigit():
            raise self._failed("its watcher did not start")
        self._pid = int(line)

    def _await_ready(self) -> None:
        deadline = time.monotonic() + self._start_timeout_s
        with httpx.Client(base_url=self.url, trust_env=False, timeout=5.0) as http:
            while not self._answers(http, deadline):
                if not self.alive():
                    raise self._failed("it exited")
                # A failed bind ends the server's main thread, while its worker keeps it alive.
                if "Address already in use" in self.log_tail(20):
                    raise self._failed(f"port {self._port} was taken by another process")
                if time.monotonic() > deadline:
                    raise self._failed(f"no answer within {self._start_timeout_s:g} s")
                time.sleep(POLL_S)

    def _answers(self, http: httpx.Client, deadline: float) -> bool:
        """Whether the worker has loaded the model; /health alone says yes while it still loads.

        The probe is a request that its tokenizer refuses: it waits its turn in the worker's queue
        and leaves no trace, no token, no random key drawn, nothing in the prompt cache.
        """
        if not self._healthy(http):
            return False
        probe = {"prompt": {}, "max_tokens": 1, "seed": 0}
        left_s = max(deadline - time.monotonic(), 1.0)
        try:
            http.post("/v1/completions", json=probe, timeout=left_s)
        except httpx.HTTPError:
            return False
        return self._healthy(http)

    def _healthy(self, http: httpx.Client) -> bool:
        try:
            answer = http.get("/health", headers={"Origin": self._origin})
        except httpx.HTTPError:
            return False
        if answer.headers.get("Access-Control-Allow-Origin") != self._origin:
            raise self._failed(f"port {self._port} is answered by another process")
        if answer.status_code == 503:
            raise self._failed("its worker died")
        return answer.status_code == 200

    def _failed(self, what: str) -> ServerFailed:
        log = self.log_tail(20)
        cause = last_error_line(log)
        return ServerFailed(
            f"mlx_lm.server for {self.model} failed to start: {what}"
            + (f": {cause}" if cause else ""),
            log,
        )


def watched(command: Sequence[str], env: Mapping[str, str], log: IO[bytes]) -> Watch:
    """Start ``command`` under ``watch``, which ends it when this process ends; ``end`` it.

    The watcher's first line of output is the command's process id; none if it could not start it.
    """
    return subprocess.Popen(
        [sys.executable, "-I", "-S", str(Path(__file__).with_name("watch.py")), *command],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=log,
        env=env,
        start_new_session=True,
        text=True,
    )


def open_log(path: Path | None) -> IO[bytes]:
    if path is None:
        return tempfile.TemporaryFile()
    try:
        return path.open("w+b")
    except OSError as error:
        raise ServerFailed(f"log file {path} cannot be written: {error.strerror}") from None


def written(log: IO[bytes]) -> bytes:
    """All of a log, without moving the position that its writers share."""
    return os.pread(log.fileno(), os.fstat(log.fileno()).st_size, 0)


def end(watch: subprocess.Popen[str]) -> None:
    """End ``watch`` and its whole process group; whatever happened to either, nothing is left."""
    assert watch.stdin is not None
    assert watch.stdout is not None
    watch.stdin.close()
    with suppress(subprocess.TimeoutExpired):
        watch.wait(STOP_S)
    if watch.returncode != 0:  # stuck, or killed before it could end the server
        with suppress(ProcessLookupError):
            os.killpg(watch.pid, signal.SIGKILL)
        watch.wait()
    watch.stdout.close()


def require_model(model: str | None) -> None:
    """Refuse what is meant as a folder and is none; a Hub id, ``owner/name``, passes."""
    if model is None or Path(model).is_dir():
        return
    if Path(model).is_absolute() or model.startswith((".", "~")) or model.count("/") > 1:
        raise ServerFailed(f"model folder {model} does not exist")


def require_compiler(env: Mapping[str, str] = os.environ) -> None:
    """Refuse a Linux without ``g++``, with which mlx's CPU backend compiles kernels at run time."""
    if sys.platform == "linux" and shutil.which("g++", path=env.get("PATH", "")) is None:
        raise ServerFailed("no C++ compiler: mlx on Linux needs g++ on the PATH")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


def require_free(port: int) -> None:
    """Refuse a port that somebody listens on or that cannot be bound."""
    if not 1 <= port <= 65535:
        raise ServerFailed(f"port must be within 1..65535, got {port}")
    with socket.socket() as probe:
        probe.settimeout(1.0)
        if probe.connect_ex((HOST, port)) == 0:
            raise ServerFailed(f"port {port} is in use")
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the server does
        try:
            probe.bind((HOST, port))
        except OSError as error:
            raise ServerFailed(f"port {port} cannot be used: {error.strerror}") from None


def last_error_line(log: str) -> str:
    """The last line of a log that names an error, without the requests logged after it."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    errors = [line for line in lines if "Error" in line.split(":")[0] or "error:" in line]
    return (errors or lines or [""])[-1]
