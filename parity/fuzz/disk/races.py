"""Two at once on one key: the second acts at each step of the first.

Two stores on a folder are two processes: the second runs whole, between any two calls of the first.
In one store they are threads: the second starts when the first stands at a call, and if it has to
wait for the first there, the first goes on.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count, product
from pathlib import Path
from random import Random

from engine.cache.store import Store

from .budget import Budget, scratch
from .contract import advance, broken, opened, perform
from .crashes import ROOMY
from .failing import prepare
from .faults import Intercepted
from .model import Model, size_of
from .plays import Finish, Operation, Put, Use
from .small import small, unfinished

KEY = (1, 2, 3)
BASE: tuple[Operation, ...] = (
    Put(small((7, 7), version=1)),
    Put(small(KEY, version=2)),
    Put(unfinished((0, 1, 2), "a", 2, 3)),
)
BIG = sum(size_of(put.entry) for put in BASE if isinstance(put, Put))

ACTIONS: dict[str, Operation | None] = {
    "read": Use("plain", (*KEY, 0)),
    "put": Put(small(KEY, version=10)),
    "put longer": Put(small((*KEY, 4), version=12)),
    "put another": Put(small((5, 5), version=13)),
    "checkpoint": Put(unfinished((0, 1, 2, 0), "a", 2, 14)),
    "finish": Finish("a"),
    "open": None,
}
"""None: a new store is opened on the folder."""

LONGEST_S = 0.01
"""For the second to be done, or to be known as waiting for the first."""


@dataclass(frozen=True, slots=True)
class Pair:
    """Under a tight cap every put evicts: the key, if nothing has used it."""

    first: str
    second: str
    tight: bool

    @property
    def cap(self) -> int:
        return BIG if self.tight else ROOMY


ROOMY_ACTIONS = ("read", "put", "put longer", "checkpoint", "finish", "open")
TIGHT_ACTIONS = ("read", "put", "put another", "open")
PAIRS = tuple(
    Pair(*names, tight)
    for tight, actions in ((False, ROOMY_ACTIONS), (True, TIGHT_ACTIONS))
    for names in product(actions, actions)
)


def processes(budget: Budget) -> None:
    """R10, R18: all pairs of actions of two stores, the second at each step of the first."""
    _pairs(budget, _as_processes)


def threads(budget: Budget) -> None:
    """R10: all pairs of actions of one store, the second begun at each step of the first."""
    _pairs(budget, _as_threads)


def interleavings(budget: Budget) -> None:
    """R10, nightly: three threads of random actions, held up at random calls. Counts actions."""
    for seed in budget.seeds():
        random = Random(seed)
        pair = Pair("read", "put", random.random() < 0.5)
        with scratch() as base:
            folder = base / "cache"
            model = Model(ROOMY)
            prepare(folder, model, BASE)
            store = opened(folder, pair.cap, Intercepted(_slow(Random(seed + 1))))
            plans = [random.choices([a for a in ACTIONS if a != "open"], k=8) for _ in range(3)]
            wrong: list[str] = []
            workers = [threading.Thread(target=_work, args=(plan, store, wrong)) for plan in plans]
            for worker in workers:
                worker.start()
            for worker in workers:
                worker.join(30)
            found = wrong or _whole(pair, folder, [action for plan in plans for action in plan])
            if found or any(worker.is_alive() for worker in workers):
                budget.violated(seed, f"{plans}: {found or 'hangs'}")
                return
        budget.done += sum(map(len, plans))


def _whole(pair: Pair, folder: Path, actions: list[str]) -> str | None:
    """What is there whatever the order was, and that all is whole."""
    model = Model(pair.cap)
    for operation in [*BASE, *map(ACTIONS.__getitem__, sorted(set(actions)))]:
        if operation is not None:
            advance(model, operation)
    everything = model.copy()
    ended = "finish" in actions
    model.drop(lambda kept: pair.tight or (ended and kept.entry.generation is not None))
    return broken(folder, model, everything)


def _slow(random: Random) -> Callable[[str], None]:
    """Now and then, wait so long that others come first."""
    return lambda call: time.sleep(random.choice((0, 0, 0.0001, 0.0005)))


def _work(plan: list[str], store: Store, wrong: list[str]) -> None:
    for action in plan:
        if found := _act(action, store, None):
            wrong.append(f"{action}: {found}")


def _pairs(budget: Budget, run: Callable[[Pair, int, Path], tuple[bool, str | None]]) -> None:
    for seed, pair in budget.each(PAIRS):
        for step in count(1):
            with scratch() as base:
                met, found = run(pair, step, base / "cache")
            if found:
                budget.violated(seed, f"{pair}, at call {step}: {found}")
                return
            if not met:
                break
            budget.done += 1


def _as_processes(pair: Pair, step: int, folder: Path) -> tuple[bool, str | None]:
    """Whether there was such a step, and what went wrong."""
    prepare(folder, Model(ROOMY), BASE)
    other = opened(folder, pair.cap)
    said: list[str | None] = []
    calls = 0

    def meet(_: str) -> None:
        nonlocal calls
        calls += active
        if calls == step and not said:
            said.append(_act(pair.second, other, folder))

    active = False
    store = opened(folder, pair.cap, Intercepted(meet))
    active = True
    found = _act(pair.first, store, folder, Intercepted(meet))
    active = False
    if not said:
        return False, found
    found = found or said[0] or _damaged(store) or _damaged(other)
    return True, found or _after(pair, folder, None, [pair.first, pair.second])


def _as_threads(pair: Pair, step: int, folder: Path) -> tuple[bool, str | None]:
    prepare(folder, Model(ROOMY), BASE)
    here, first_on = threading.Event(), threading.Event()
    said: list[str | None] = []
    calls = 0
    main = threading.current_thread()

    def meet(_: str) -> None:
        nonlocal calls
        if not active or threading.current_thread() is main:
            return
        if threading.current_thread() is first:
            calls += 1
            if calls == step:
                here.set()
                first_on.wait(LONGEST_S)

    active = False
    store = opened(folder, pair.cap, Intercepted(meet))
    first = threading.Thread(target=lambda: said.append(_act(pair.first, store, folder)))
    active = True
    first.start()
    while first.is_alive() and not here.wait(0.001):
        pass
    found = None
    if here.is_set():
        found = _act(pair.second, store, folder)
        first_on.set()
    first.join(30)
    if first.is_alive():
        return True, "hangs"
    if not here.is_set():
        return False, said[0]
    found = found or said[0] or _damaged(store)
    return True, found or _after(pair, folder, store, [pair.first, pair.second])


def _act(
    action: str, store: Store, folder: Path | None, files: Intercepted | None = None
) -> str | None:
    """What is wrong with what it gave: it raised, gave wrong bytes or did not store."""
    operation = ACTIONS[action]
    try:
        if operation is None:
            assert folder is not None
            opened(folder, store.cap_bytes, files)
            return None
        outcome = perform(operation, store)
    except Exception as error:
        return f"{action} raised {error!r}"
    if outcome[0] == "used" and outcome[-1] not in (None, "miss"):
        return f"{outcome}"
    return f"{action} did not store" if outcome == ("put", False) else None


def _damaged(store: Store) -> str | None:
    return "took a file for damaged" if store.counts.damaged else None


def _after(pair: Pair, folder: Path, store: Store | None, actions: list[str]) -> str | None:
    """What every order of the actions leaves is there, whole."""
    one, other = Model(pair.cap), Model(pair.cap)
    for model, order in ((one, actions), (other, actions[::-1])):
        for operation in [*BASE, *map(ACTIONS.__getitem__, order)]:
            if operation is not None:
                advance(model, operation)
    versions = [{kept.version for kept in model.kept} for model in (one, other)]
    one.drop(lambda kept: pair.tight or kept.version not in versions[1])
    if store is not None and store.counts.nbytes > pair.cap:
        return f"{store.counts.nbytes} bytes, {pair.cap} allowed"
    return broken(folder, one, one)
