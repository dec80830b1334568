"""Calls that fail: each in turn once, and each with all that follow it."""

from __future__ import annotations

import errno
from dataclasses import dataclass
from functools import cache
from itertools import count, product
from pathlib import Path

from engine.cache.entry import Reuse
from engine.cache.files import Files
from engine.cache.store import Store

from .budget import Budget, scratch
from .contract import Outcome, advance, broken, every_file, ids, opened, perform
from .crashes import ROOMY
from .faults import ERRORS, Fault, Intercepted, Short
from .images import Image
from .model import Model, size_of
from .plays import Finish, Operation, Put, Use
from .small import content, exact, read, small, unfinished

BASE: tuple[Operation, ...] = (
    Put(small((1, 2, 3), version=1)),
    Put(small((1, 2, 4, 4), version=2)),
    Put(exact((2, 2), "ngram:3:1", 3)),
    Put(unfinished((0, 1, 2), "a", 2, 4)),
)
TIGHT = sum(size_of(put.entry) for put in BASE if isinstance(put, Put)) + 100


@dataclass(frozen=True, slots=True)
class Scene:
    """An operation on a folder that holds BASE. `cap` is that of the store."""

    name: str
    operation: Operation
    cap: int = ROOMY


SCENES = (
    Scene("a new entry", Put(small((2, 1), version=10))),
    Scene("an entry of a new namespace", Put(small((2, 1), "new", 10))),
    Scene("the same tokens again", Put(small((1, 2, 3), version=10))),
    Scene("a longer one", Put(small((1, 2, 3, 4), version=10))),
    Scene("a longer one that serves no shorter", Put(small((1, 2, 3, 4), reuse=Reuse(False)))),
    Scene("one that needs room", Put(small((2, 1, 1), version=10)), TIGHT),
    Scene("a checkpoint", Put(unfinished((0, 1, 2, 0), "a", 2, 10))),
    Scene("a restore", Use("plain", (1, 2, 3, 0))),
    Scene("the end of a generation", Finish("a")),
)


def every_error(budget: Budget) -> None:
    """R7: every call of every scene, with every error, once and from then on. Counts faults."""
    failing_calls(budget, ERRORS)


def failing_calls(budget: Budget, errors: tuple[int | None, ...] = (None,)) -> None:
    """R7: every call of every scene, once and from then on. None: call by call another error."""
    faults = product((*SCENES, None), errors, (False, True))
    for seed, (scene, number, on) in budget.each(faults):
        for at in count(1):
            fault = Fault(ERRORS[at % len(ERRORS)] if number is None else number, at, on)
            if found := _open(fault) if scene is None else _meet(scene, fault):
                budget.violated(seed, f"{scene.name if scene else 'opening'}, {fault}: {found}")
                return
            if not fault.failed:
                break
            budget.done += 1


def failing_syncs(budget: Budget) -> None:
    """R8: a sync that fails publishes nothing, and what was there before stays."""
    puts = [scene for scene in SCENES if isinstance(scene.operation, Put)]
    for seed, (scene, on) in budget.each(product(puts, (False, True))):
        for at in count(1):
            fault = Fault(errno.EIO, at, on, frozenset({"sync"}))
            if found := _meet(scene, fault, publishes=False):
                budget.violated(seed, f"{scene.name}, {fault}: {found}")
                return
            if not fault.failed:
                break
            budget.done += 1


def shorter_writes(budget: Budget) -> None:
    """R7: the same in even smaller pieces."""
    short_writes(budget, (7, 64, 500))


def short_writes(budget: Budget, sizes: tuple[int, ...] = (64,)) -> None:
    """R7: writes and reads that do less than was asked, and the disk full after any of them."""
    for seed, (scene, most) in budget.each(product(SCENES, sizes)):
        for at in count(0):
            fault = Fault(errno.ENOSPC, at, on=True, calls=frozenset({"write"}))
            if found := _meet(scene, fault, Short(most, fault)):
                budget.violated(seed, f"{scene.name}, {most} bytes a write, {fault}: {found}")
                return
            if at and not fault.failed:
                break
            budget.done += 1


def _meet(
    scene: Scene, fault: Fault, files: Files | None = None, *, publishes: bool = True
) -> str | None:
    """What is wrong after the operation met the fault: at once, in that store, and in a new one."""
    at, fault.at = fault.at, None
    with scratch() as base:
        folder = base / "cache"
        before = Model(ROOMY)
        prepare(folder, before)
        store = opened(folder, scene.cap, files or Intercepted(fault))
        fault.at, fault.met = at, 0
        try:
            outcome = perform(scene.operation, store)
        except Exception as error:
            return f"raised {error!r}"
        fault.at = None
        before.cap_bytes = scene.cap
        after = before.copy()
        expected = advance(after, scene.operation)
        if outcome == ("put", True) and fault.failed and not publishes:
            return "published although it was not synced"
        if found := _answers(outcome, expected, fault):
            return found
        if fault.failed and not publishes:
            return broken(folder, before, before) or _published(folder, scene)
        if outcome == expected and isinstance(scene.operation, Put):
            before = after
        if found := _goes_on(store):
            return found
        for state in (before, after):
            state.put(AFTERWARDS)
        return broken(folder, before, after)


def _published(folder: Path, scene: Scene) -> str | None:
    """Whether a put that failed has left its entry all the same."""
    assert isinstance(scene.operation, Put)
    needle = content(scene.operation.entry, scene.operation.entry.tensors[0])
    left = any(needle in path.read_bytes() for path in every_file(folder))
    return "left what was not synced" if left else None


def _answers(outcome: Outcome, expected: Outcome, fault: Fault) -> str | None:
    """Whether an operation's outcome is right, or a miss that a fault excuses."""
    if outcome == expected:
        return None
    missed = outcome == ("put", False) or outcome[-1] == "miss"
    return None if missed and fault.failed else f"{outcome}, not {expected}"


AFTERWARDS = small((2, 0, 2), version=99)


def _goes_on(store: Store) -> str | None:
    """The fault is over: the store stores, and what it says it holds it restores."""
    if not store.put(AFTERWARDS, read(AFTERWARDS)):
        return "stores nothing after the fault"
    found = store.find(ids((2, 0, 2, 5)), "plain")
    if found is None or found.count != 3:
        return "does not find what was stored after the fault"
    outcome = perform(Use("plain", (2, 0, 2, 5)), store)
    return None if outcome[-1] is None else f"{outcome} of what was stored after the fault"


def _open(fault: Fault) -> str | None:
    """A store is opened on a folder with all kinds of rubbish while a call fails."""
    with scratch() as base:
        folder = base / "cache"
        before = Model(ROOMY)
        prepare(folder, before)
        litter(folder)
        try:
            store = opened(folder, ROOMY, Intercepted(fault))
        except OSError:
            store = None  # no tier: the host goes on without
        except Exception as error:
            return f"raised {error!r}"
        fault.at = None
        if store is not None and (found := _asked(store, before)):
            return found
        return broken(folder, before, before)


def _asked(store: Store, model: Model) -> str | None:
    """Misses are excused, wrong answers are not."""
    for kept in list(model.kept):
        outcome = perform(Use(kept.key[0], (*kept.key[1], 9)), store)
        if outcome[0] == "used" and outcome[-1] not in (None, "miss"):
            return f"{outcome}"
    return None


@cache
def _prepared(operations: tuple[Operation, ...]) -> tuple[str, Image]:
    """A folder after these operations, as it was then."""
    with scratch() as base:
        store = opened(base / "cache", ROOMY)
        for operation in operations:
            assert perform(operation, store) == ("put", True)
        return str(base), Image.of(base)


def prepare(folder: Path, model: Model, operations: tuple[Operation, ...] = BASE) -> None:
    """What every scene begins with, in a folder whose parent is there."""
    for operation in operations:
        advance(model, operation)
    origin, image = _prepared(operations)
    image.materialise(origin, folder.parent)


def litter(folder: Path) -> None:
    """Damaged files and stale temporaries beside the entries."""
    for place in sorted({path.parent for path in folder.rglob("*.safetensors")}):
        whole = next(place.glob("*.safetensors"))
        (place / f"{'0' * 32}.mlxkv.safetensors").write_bytes(whole.read_bytes()[:-1])
        (place / (whole.name + ".tmp")).write_bytes(b"half")
