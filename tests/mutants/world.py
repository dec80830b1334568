"""The engine and the suite imported a second time, from a copy with one text replaced."""

from __future__ import annotations

import importlib
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PACKAGES = ("engine", "parity")
HELPERS = (
    "tests.parity.fakes",
    "tests.engine.puppet",
    "tests.engine.families",
    "tests.engine.company",
    "tests.engine.mtp_model",
)


def _is_bound(name: str) -> bool:
    """Whether a module belongs to the copy, or holds names imported from it."""
    return name.split(".")[0] in PACKAGES or name in HELPERS


class World:
    """Modules of the changed copy, by name."""

    def __getitem__(self, name: str) -> Any:
        return importlib.import_module(name)


@contextmanager
def changed(folder: Path, file: str, old: str, new: str) -> Iterator[World]:
    """Import `engine` and `parity` from a copy in which `old` reads `new`; then go back.

    Raises:
        ValueError: `old` is not in the file exactly once.
    """
    ignored = shutil.ignore_patterns("__pycache__", "__snapshots__")
    for package in PACKAGES:
        shutil.copytree(ROOT / package, folder / package, ignore=ignored)
    text = (folder / file).read_text(encoding="utf-8")
    if text.count(old) != 1:
        raise ValueError(f"{file} holds the replaced text {text.count(old)} times, expected 1")
    (folder / file).write_text(text.replace(old, new), encoding="utf-8")
    kept = {name: module for name, module in sys.modules.items() if _is_bound(name)}
    for name in kept:
        del sys.modules[name]
    sys.path.insert(0, str(folder))
    importlib.invalidate_caches()
    try:
        yield World()
    finally:
        sys.path.remove(str(folder))
        for name in filter(_is_bound, list(sys.modules)):
            del sys.modules[name]
        sys.modules.update(kept)
