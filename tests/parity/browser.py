"""Chromium over its debugging pipe: https://chromedevtools.github.io/devtools-protocol/"""

from __future__ import annotations

import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome")
TIMEOUT_S = 60.0


def find() -> str | None:
    """Where a Chromium is, if there is one."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


@dataclass
class Page:
    """One page of a browser. `events` are all that the browser told without being asked."""

    _to: int
    _from: int
    _session: str | None = None
    _rest: bytes = b""
    _number: int = 0
    events: list[dict[str, Any]] = field(default_factory=list)

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Ask and wait for the answer."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            said = self._read()
            if said.get("id") == self._number:
                assert "error" not in said, f"{method}: {said['error']}"
                return dict(said["result"])
            self.events.append(said)

    def wait_for(self, event: str) -> None:
        """Read until an event came."""
        while all(said["method"] != event for said in self.events):
            self.events.append(self._read())

    def attach(self) -> None:
        """Open an empty page and listen to what it does."""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Network", "Log", "Runtime"):
            self.call(f"{domain}.enable")
        self.events.clear()

    def look(self, expression: str) -> Any:
        """The value of a JavaScript expression in the page."""
        said = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in said, said["exceptionDetails"]
        return said["result"].get("value")

    def _read(self) -> dict[str, Any]:
        end = time.monotonic() + TIMEOUT_S
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._from], [], [], max(0.0, end - time.monotonic()))
            assert ready, f"Chromium was silent for {TIMEOUT_S:g} s"
            chunk = os.read(self._from, 1 << 16)
            assert chunk, "Chromium ended"
            self._rest += chunk
        line, _, self._rest = self._rest.partition(b"\0")
        return dict(json.loads(line))


@contextmanager
def opened(chromium: str, profile: Path) -> Iterator[Page]:
    """A headless browser with an empty profile; it ends with the block."""
    their_in, our_out = os.pipe()
    our_in, their_out = os.pipe()
    arguments = [
        *(chromium, "--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run"),
        *("--disable-background-networking", "--remote-debugging-pipe"),
        *(f"--user-data-dir={profile}", "about:blank"),
    ]
    # It reads from descriptor 3 and writes to 4; a detour keeps ours from being overwritten first.
    shell = f'exec 18<&{their_in} 19>&{their_out}; exec 3<&18 4>&19 18<&- 19>&-; exec "$@"'
    with subprocess.Popen(
        ["bash", "-c", shell, "bash", *arguments],
        pass_fds=(their_in, their_out),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    ) as process:
        os.close(their_in)
        os.close(their_out)
        try:
            page = Page(our_out, our_in)
            page.attach()
            yield page
        finally:
            process.kill()
            os.close(our_out)
            os.close(our_in)
