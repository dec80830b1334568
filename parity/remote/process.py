"""A server that we start: ended whatever happens, its words kept in a log."""

from __future__ import annotations

import os
import shlex
import shutil
import time
from pathlib import Path
from types import TracebackType
from typing import IO

import httpx

from oracle.server import (
    POLL_S,
    ServerFailed,
    Watch,
    end,
    free_port,
    last_error_line,
    open_log,
    require_free,
    watched,
    written,
)
from parity.errors import BadInput, Unusable
from parity.remote.address import START_S
from parity.waiting import waiting_for


class SubjectProcess:
    """A command for the length of a `with` block, in a process group of its own.

    `url` says where it will listen; without, it is told a free port, by `{port}` in the command and
    by PORT in its environment. The process is a child of `oracle.watch`, which ends it when this
    process ends, however that happens.

    Raises:
        BadInput: a command that is none.

    """

    def __init__(self, command: str, url: str | None, log_path: Path) -> None:
        words = split(command)
        self.url = f"http://127.0.0.1:{free_port()}" if url is None else url
        self._port = httpx.URL(self.url).port
        self._words = [word.replace("{port}", str(self._port)) for word in words]
        self._log_path = log_path
        self._log: IO[bytes] | None = None
        self._watch: Watch | None = None
        self._last_status: int | None = None

    def __enter__(self) -> SubjectProcess:
        try:
            if self._port is not None and httpx.URL(self.url).host in ("127.0.0.1", "localhost"):
                # Whoever answers there afterwards is the one that was started.
                require_free(self._port)
            self._log = open_log(self._log_path)
        except ServerFailed as error:
            raise Unusable(f"--subject-command: {error}") from error
        env = {**os.environ, "PORT": str(self._port or ""), "PYTHONUNBUFFERED": "1"}
        self._watch = watched(self._words, env, self._log)
        assert self._watch.stdout is not None
        if not self._watch.stdout.readline().strip().isdigit():
            self._close()
            raise Unusable(f"--subject-command did not start; its log: {self._log_path}")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._close()

    def await_ready(self) -> None:
        """Return once something answers at the URL that is not an apology.

        Raises:
            Unusable: the command ended before, or nothing else answered in time.

        """
        deadline = time.monotonic() + START_S
        waiting = waiting_for(f"--subject-command to answer at {self.url}", f"{START_S:g} s")
        with waiting, httpx.Client(trust_env=False, timeout=5.0) as http:
            while not any(self._answers(http, path) for path in ("/health", "/v1/models")):
                if not self._runs():
                    raise Unusable(self.state())
                if time.monotonic() > deadline:
                    status = self._last_status
                    said = "nothing answers" if status is None else f"still status {status}"
                    raise Unusable(
                        f"--subject-command: {said} at {self.url} after {START_S:g} s; "
                        f"its log: {self._log_path}"
                    )
                time.sleep(POLL_S)

    def state(self) -> str:
        """What a complaint about the server should add: that its process ended, and its log."""
        if self._runs():
            return f"its log: {self._log_path}"
        log = b"" if self._log is None else written(self._log)
        cause = last_error_line(log.decode("utf-8", errors="replace"))
        said = f": {cause[:160]}" if cause else ""
        return f"--subject-command ended{said}; its log: {self._log_path}"

    def _runs(self) -> bool:
        return self._watch is not None and self._watch.poll() is None

    def _answers(self, http: httpx.Client, path: str) -> bool:
        try:
            # A server says 503 while it loads, and 404 of a path that it does not have.
            self._last_status = http.get(self.url + path).status_code
        except httpx.HTTPError:
            return False
        return self._last_status < 500

    def _close(self) -> None:
        if self._watch is not None:
            end(self._watch)
        if self._log is not None:
            self._log.close()
            self._log = None


def split(command: str) -> list[str]:
    """The words of a command line.

    Raises:
        BadInput: an open quote, no word, or no such program.

    """
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise BadInput(f"--subject-command {command!r}: {error}") from error
    if not words:
        raise BadInput("--subject-command is empty")
    if shutil.which(words[0]) is None:
        raise BadInput(f"--subject-command: there is no program {words[0]!r}")
    return words


def has_port(words: list[str]) -> bool:
    """Whether a command says where the port belongs."""
    return any("{port}" in word for word in words)
