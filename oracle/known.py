"""The known deviations of mlx-lm: what is claimed, whether it still is so, and what follows."""

from __future__ import annotations

import os
import runpy
import signal
import subprocess
import sys
import tomllib
from collections import deque
from collections.abc import Generator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from enum import Enum
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from packaging.specifiers import InvalidSpecifier, SpecifierSet

from .server import last_error_line

CLAIMS = Path(__file__).with_name("deviations") / "deviations.toml"
RUN_TIMEOUT_S = 180.0
CLEAN_UP_S = 5.0
AT_ONCE = 2  # a server reproducer waits more than it works
_FIELDS = ("id", "title", "reason", "trigger", "affects", "file")


class ClaimsError(ValueError):
    """The claims, or the mlx-lm to try them on, cannot be used; one line says why."""


@dataclass(frozen=True, slots=True)
class Deviation:
    id: str
    title: str
    reason: str
    trigger: str
    affects: SpecifierSet
    """Releases of mlx-lm it was seen on."""
    links: tuple[str, ...]
    """Public reports."""
    file: Path
    """The reproducer: prints ``expected: …`` and ``actual: …`` and exits with 0."""


@dataclass(frozen=True, slots=True)
class Claims:
    pinned: str
    """The mlx-lm release on which every claim must hold."""
    deviations: tuple[Deviation, ...]


class State(Enum):
    LIVE = "live"
    NOT_LIVE = "not live"
    FAILED = "did not run"


@dataclass(frozen=True, slots=True)
class Finding:
    """What one reproducer said on one release of mlx-lm."""

    deviation: Deviation
    version: str
    state: State
    expected: str = ""
    actual: str = ""
    error: str = ""

    @property
    def claimed(self) -> bool:
        """Whether the claim covers this release."""
        return self.deviation.affects.contains(self.version, prereleases=True)

    @property
    def as_claimed(self) -> bool:
        return self.state is (State.LIVE if self.claimed else State.NOT_LIVE)


def read_claims(path: Path = CLAIMS) -> Claims:
    """Read and check the claims. ``ClaimsError`` names the entry and the field."""
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ClaimsError(f"{path} cannot be read: {error}") from None
    pinned = document.get("pinned")
    if not isinstance(pinned, str):
        raise ClaimsError(f"{path}: pinned must be a release of mlx-lm, got {pinned!r}")
    deviations = tuple(_deviation(entry, path) for entry in document.get("deviation", []))
    ids = [deviation.id for deviation in deviations]
    if len(set(ids)) < len(ids):
        raise ClaimsError(f"{path}: an id occurs twice in {', '.join(ids)}")
    return Claims(pinned, deviations)


def select(claims: Claims, name: str | None) -> tuple[Deviation, ...]:
    """Every deviation, or the one whose id is ``name``."""
    found = tuple(d for d in claims.deviations if name is None or d.id.lower() == name.lower())
    if not found:
        known = ", ".join(deviation.id for deviation in claims.deviations)
        raise ClaimsError(f"unknown deviation {name!r}: known are {known}")
    return found


def mlx_lm_version(site: Path | None = None) -> str:
    """The version of the mlx-lm that reproducers import, from ``site`` if it is given."""
    if site is not None:
        package = site / "mlx_lm"
    elif (spec := find_spec("mlx_lm")) is not None and spec.origin is not None:
        package = Path(spec.origin).parent
    else:
        raise ClaimsError("mlx-lm is not installed")
    try:  # read without importing mlx-lm, which takes a second and may need another mlx
        return str(runpy.run_path(str(package / "_version.py"))["__version__"])
    except (OSError, KeyError, SyntaxError):
        raise ClaimsError(f"{package.parent} holds no mlx_lm package with a version") from None


def check_all(
    deviations: Sequence[Deviation], version: str, site: Path | None = None
) -> Generator[Finding, None, None]:
    """Run reproducers against the mlx-lm in ``site`` (default: the installed one).

    ``AT_ONCE`` run at a time; findings come in the order of ``deviations``. Closing the iterator
    ends those that still run, and the servers that they started.
    """
    waiting = deque(deviations)
    running: deque[tuple[Deviation, subprocess.Popen[str]]] = deque()
    with ExitStack() as stack:
        while waiting or running:
            while waiting and len(running) < AT_ONCE:
                deviation = waiting.popleft()
                process = _start(deviation.file, site)
                stack.callback(_end, process)
                running.append((deviation, process))
            yield _finding(*running.popleft(), version)


def check(deviation: Deviation, version: str, site: Path | None = None) -> Finding:
    """Run one reproducer."""
    (finding,) = check_all((deviation,), version, site)
    return finding


def _finding(deviation: Deviation, process: subprocess.Popen[str], version: str) -> Finding:
    try:
        stdout, stderr = process.communicate(timeout=RUN_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        _end(process)
        error = f"not done within {RUN_TIMEOUT_S:g} s"
        return Finding(deviation, version, State.FAILED, error=error)
    if process.returncode != 0:
        error = last_error_line(stderr) or f"exit code {process.returncode}"
        return Finding(deviation, version, State.FAILED, error=error)
    lines = stdout.splitlines()
    if (
        len(lines) != 2
        or not lines[0].startswith("expected:")
        or not lines[1].startswith("actual:")
    ):
        error = f"printed {len(lines)} lines instead of 'expected: …' and 'actual: …'"
        return Finding(deviation, version, State.FAILED, error=error)
    expected, actual = (line.split(":", 1)[1].strip() for line in lines)
    state = State.NOT_LIVE if expected == actual else State.LIVE
    return Finding(deviation, version, state, expected, actual)


def _start(file: Path, site: Path | None) -> subprocess.Popen[str]:
    """Start Python without our packages in reach: a reproducer needs nothing of ours."""
    env = {**os.environ, "MLX_ENABLE_TF32": "0", "PYTHONSAFEPATH": "1"}
    if site is not None:
        env["PYTHONPATH"] = str(site.resolve())
    return subprocess.Popen(
        [sys.executable, str(file)],
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,  # so that what it starts can be ended with it
    )


def _end(process: subprocess.Popen[str]) -> None:
    """End a reproducer and what it started, if it runs: an interrupt lets it clean up first."""
    with process:
        if process.returncode is not None:
            return
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGINT)
            with suppress(subprocess.TimeoutExpired):
                process.wait(CLEAN_UP_S)
            os.killpg(process.pid, signal.SIGKILL)


def _deviation(entry: dict[str, Any], path: Path) -> Deviation:
    name = entry.get("id", "an entry without id")
    for field in _FIELDS:
        if not isinstance(entry.get(field), str) or not entry[field].strip():
            raise ClaimsError(f"{path}: {name}: {field} must be a text, got {entry.get(field)!r}")
    links = entry.get("links")
    if not isinstance(links, list) or not all(str(link).startswith("https://") for link in links):
        raise ClaimsError(f"{path}: {name}: links must be a list of https addresses, got {links!r}")
    if unknown := entry.keys() - {*_FIELDS, "links"}:
        raise ClaimsError(f"{path}: {name}: unknown fields {', '.join(sorted(unknown))}")
    try:
        affects = SpecifierSet(entry["affects"])
    except InvalidSpecifier:
        raise ClaimsError(
            f"{path}: {name}: affects must be a range like '==0.32.2', got {entry['affects']!r}"
        ) from None
    file = path.parent / entry["file"]
    if not file.is_file():
        raise ClaimsError(f"{path}: {name}: there is no {file.name} beside the claims")
    texts = {field: entry[field].strip() for field in ("id", "title", "reason", "trigger")}
    return Deviation(**texts, affects=affects, links=tuple(links), file=file)
