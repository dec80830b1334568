"""What stands beside the snapshots and is never compared: margins, versions, backend, machine.

Read only to know which backends have been recorded. Written only when recording, so that a new
release of MLX that moves no token changes no file.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import math
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from parity.cases import Case
from parity.snapshots import parts_of, storage_of

FILE = "provenance.json"


@dataclass(frozen=True, slots=True)
class Margins:
    """The smallest margin behind a text and, None without a draft model, behind its trace."""

    text: float
    trace: float | None


def is_portable(margin: float | None, floor: float) -> bool:
    """Whether the smallest margin behind a part allows it to be compared on every backend."""
    return margin is None or margin > floor


def storages(margins: Margins, floor: float, backend: str, portable: str) -> dict[str, str]:
    """Where each part is kept. A trace is never portable where its text is not."""
    text = is_portable(margins.text, floor)
    trace = text and is_portable(margins.trace, floor)
    return {"text": portable if text else backend, "trace": portable if trace else backend}


def rounded(margin: float | None) -> float | str | None:
    """A margin rounded down to a power of two, so that noise does not show in a diff."""
    # Loading MLX takes a second, which comparing need not wait for.
    from oracle.margins import floor_pow2

    if margin is None:
        return None
    return "infinite" if math.isinf(margin) else floor_pow2(margin)


@dataclass(slots=True)
class Recorder:
    """Collects what one recording run measured, and writes it at its end."""

    folder: Path
    environment: Mapping[str, str | int]
    backend: str
    margins: dict[str, Margins] = field(default_factory=dict)

    def write(self, case_ids: Collection[str]) -> None:
        """Merge into the file: the cases of this run, and of others those still in the matrix."""
        if not self.margins:
            return
        self.folder.mkdir(exist_ok=True)
        with _locked(self.folder):
            stored = read(self.folder)
            key = self._key()
            stored["environments"][key] = dict(self.environment)
            cases = stored["backends"].setdefault(self.backend, {})
            for case_id, margins in self.margins.items():
                cases[case_id] = {
                    "text": rounded(margins.text),
                    "trace": rounded(margins.trace),
                    "environment": key,
                }
            _prune(stored, case_ids)
            text = json.dumps(stored, indent=1, sort_keys=True) + "\n"
            temporary = self.folder / f".{FILE}"
            temporary.write_text(text, encoding="utf-8")
            temporary.replace(self.folder / FILE)

    def _key(self) -> str:
        text = json.dumps(dict(self.environment), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:8]


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Keep other recording processes (pytest-xdist's workers) out of the folder's provenance."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def read(folder: Path) -> dict[str, Any]:
    """The stored provenance, empty if there is none."""
    file = folder / FILE
    if not file.is_file():
        return {"environments": {}, "backends": {}}
    stored: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return stored


def recorded_backends(folder: Path) -> frozenset[str]:
    """Backends on which snapshots have been recorded."""
    return frozenset(read(folder)["backends"])


def _prune(stored: dict[str, Any], case_ids: Collection[str]) -> None:
    for cases in stored["backends"].values():
        for case_id in set(cases) - set(case_ids):
            del cases[case_id]
    used = {c["environment"] for cases in stored["backends"].values() for c in cases.values()}
    for key in set(stored["environments"]) - used:
        del stored["environments"][key]


def unportable(folder: Path, backend: str, cases: Sequence[Case]) -> list[str]:
    """One line for each part of a case that is kept for `backend` alone, with its margin."""
    margins = read(folder)["backends"].get(backend, {})
    return [
        f"{case.id}  {part}  margin {margins.get(case.id, {}).get(part)}"
        for case in cases
        for part in parts_of(case)
        if storage_of(folder, part, case.id, backend) == backend
    ]
