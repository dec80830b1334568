"""What others may put in place of a folder or a file, and what killed writers leave behind."""

from __future__ import annotations

import fcntl
import os
import stat
import threading
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from random import Random

from .budget import Budget, scratch
from .contract import broken, every_file, ids, opened, perform, restored
from .crashes import ROOMY
from .failing import BASE, prepare
from .model import Model
from .plays import Use
from .sequences import file_of
from .small import read, small

NEW = small((2, 0), version=50)
LONGEST_S = 10.0
"""After which a call counts as hanging."""


@dataclass(frozen=True, slots=True)
class Replaced:
    """What stands in place of what, and whether the store is open already."""

    kind: str
    place: str
    while_open: bool


KINDS = ("link to a file", "link to a folder", "dangling link", "pipe", "device", "folder", "file")
PLACES = ("fingerprint", "namespace", "entry", "temporary")
REPLACED = tuple(Replaced(*case) for case in product(KINDS, PLACES, (False, True)))


def replaced(budget: Budget) -> None:
    """R15: what is no folder or file of ours is never followed, never waited for."""
    for seed, case in budget.each(REPLACED):
        with scratch() as base:
            if found := _in_time(lambda base=base, case=case: _replaced(case, base)):  # type: ignore[misc]
                budget.violated(seed, f"{case}: {found}")
        budget.done += 1


def _in_time(act: Callable[[], str | None]) -> str | None:
    said: list[str | None] = []
    worker = threading.Thread(target=lambda: said.append(act()), daemon=True)
    worker.start()
    worker.join(LONGEST_S)
    return said[0] if said else "hangs or raised"


def _replaced(case: Replaced, base: Path) -> str | None:
    folder, outside = base / "cache", base / "outside"
    model = Model(ROOMY)
    prepare(folder, model)
    store = opened(folder, ROOMY) if case.while_open else None
    kept = model.kept[0].entry
    entry = file_of(folder, kept)
    assert entry is not None
    path = {
        "fingerprint": entry.parent.parent,
        "namespace": entry.parent,
        "entry": entry,
        "temporary": entry.parent / f"{uuid.uuid4().hex}.mlxkv.safetensors.tmp",
    }[case.place]
    if path.exists():
        os.rename(path, outside)
    else:
        outside.write_bytes(b"theirs")
    _stand_in(case.kind, path, outside, base)
    there = _listed(outside)
    try:
        if store is None:
            store = opened(folder, ROOMY)
        else:
            perform(Use("plain", (1, 2, 3, 9)), store)
        stored = store.put(NEW, read(NEW))
        perform(Use("plain", (1, 2, 3, 9)), store)
        found = store.find(ids((2, 0, 9)), "plain")
        if stored and (found is None or restored(store, found.entry)):
            return "stored, and not found"
        opened(folder, ROOMY)
    except Exception as error:
        return f"raised {error!r}"
    if _listed(outside) != there:
        return f"{outside} was changed: {_listed(outside)}"
    if case.place in ("entry", "temporary") and not stored:
        return "nothing is stored any more"
    return None


def _stand_in(kind: str, path: Path, outside: Path, base: Path) -> None:
    if kind == "link to a file":
        target = base / "a file"
        target.write_bytes(b"theirs")
        path.symlink_to(outside if outside.is_file() else target)
    elif kind == "link to a folder":
        (base / "a folder").mkdir()
        path.symlink_to(outside if outside.is_dir() else base / "a folder")
    elif kind == "dangling link":
        path.symlink_to(base / "nowhere")
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        try:
            os.mknod(path, stat.S_IFCHR | 0o600, os.makedev(1, 5))  # zeros without end
        except PermissionError:
            path.symlink_to("/dev/zero")
    elif kind == "folder":
        path.mkdir()
    else:
        path.write_bytes(b"theirs")


def _listed(path: Path) -> list[tuple[str, bytes]]:
    paths = [path] if path.is_file() else sorted(path.rglob("*"))
    return [(str(p), p.read_bytes() if p.is_file() else b"") for p in paths]


def temporaries(budget: Budget) -> None:
    """R18: temporaries are removed at open unless a writer holds them; none is ever found."""
    for seed in budget.seeds():
        random = Random(f"{seed} temporaries")
        with scratch() as base:
            if found := _temporaries(random, base / "cache"):
                budget.violated(seed, found)
        budget.done += 1


def _temporaries(random: Random, folder: Path) -> str | None:
    model = Model(ROOMY)
    prepare(folder, model)
    whole = [path.read_bytes() for path in every_file(folder)]
    places = sorted({path.parent for path in every_file(folder)})
    held: list[tuple[Path, int]] = []
    for _ in range(random.randint(1, 6)):
        path = random.choice(places) / f"{uuid.uuid4().hex}.mlxkv.safetensors.tmp"
        data = random.choice(whole)
        path.write_bytes(data[: random.choice((0, random.randrange(len(data)), len(data)))])
        if random.random() < 0.5:
            opened_at = os.open(path, os.O_RDWR)
            fcntl.flock(opened_at, fcntl.LOCK_EX)
            held.append((path, opened_at))
    store = opened(folder, ROOMY)
    left = {path for path in every_file(folder) if path.suffix == ".tmp"}
    entries = store.counts.entries
    for _, descriptor in held:
        os.close(descriptor)
    if left != {path for path, _ in held}:
        return f"{len(left)} temporaries are left, {len(held)} are held"
    if entries != len(BASE):
        return f"{entries} entries of {len(BASE)}"
    return broken(folder, model, model)
