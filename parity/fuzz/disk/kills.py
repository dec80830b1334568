"""Processes killed while they write, while they recover, and while others use the same folder."""

from __future__ import annotations

import time
from itertools import islice
from pathlib import Path
from random import Random

from .budget import Budget, scratch
from .children import Child, Nursery
from .contract import advance, broken
from .crashes import ROOMY, TIGHT
from .model import Model
from .plays import operations, own

LONGEST_S = 0.02
CALLS = 600
"""Of a run of that long, roughly."""

RECOVERY_CALLS = 60


def writers(budget: Budget) -> None:
    """R3: `kill -9` at a random time or at a random call; then all that was promised is there."""
    with Nursery() as nursery:
        for seed in budget.seeds():
            with scratch() as folder:
                _one(budget, seed, nursery, folder / "cache", recoveries=0)
            budget.done += 1


def recoveries(budget: Budget) -> None:
    """R4: the same, killed once or twice more while the folder is being scanned."""
    with Nursery() as nursery:
        for seed in budget.seeds():
            with scratch() as folder:
                budget.done += _one(budget, seed, nursery, folder / "cache", recoveries=2)


def _one(budget: Budget, seed: int, nursery: Nursery, folder: Path, recoveries: int) -> int:
    """Kill a writer and then so many recoveries; how many of these were."""
    random = Random(seed)
    cap = random.choice((ROOMY, TIGHT))
    by_call = random.random() < 0.5
    call = random.randint(1, CALLS) if by_call else None
    child = nursery.start("play", folder=str(folder), seed=seed, cap=cap, call=call)
    if not by_call:
        time.sleep(random.uniform(0, LONGEST_S))
        child.kill()
    status = child.wait()
    told = [value for word, value in child.said if word == "done"]
    if status != -9:
        budget.violated(seed, f"a writer ended with {status}: {child.said[-1:]}")
        return 0
    killed = 0
    for _ in range(recoveries):
        call = random.randint(1, RECOVERY_CALLS)
        again = nursery.start("recover", folder=str(folder), cap=cap, call=call)
        status = again.wait()
        killed += status == -9
        if status not in (0, -9):
            budget.violated(seed, f"a recovery ended with {status}: {again.said[-1:]}")
            return killed
    before = Model(cap)
    play = operations(Random(seed))
    for operation in islice(play, len(told)):
        advance(before, operation)
    after = before.copy()
    advance(after, next(play))
    if found := broken(folder, before, after):
        budget.violated(seed, f"after {len(told)} operations and {killed} recoveries: {found}")
    return killed


def sharers(budget: Budget, processes: int, seconds: float) -> None:
    """R9: processes on one folder, killed and replaced at random; counts seconds."""
    with Nursery() as nursery:
        for seed in budget.seeds():
            with scratch() as folder:
                left = min(seconds, budget.seconds - budget.took_s)
                _share(budget, seed, nursery, folder / "cache", processes, left)
            budget.done += round(left)


def two(budget: Budget) -> None:
    """R9 in CI."""
    sharers(budget, processes=2, seconds=15)


def eight(budget: Budget) -> None:
    """R9 at night."""
    sharers(budget, processes=8, seconds=60)


def _share(
    budget: Budget, seed: int, nursery: Nursery, folder: Path, processes: int, seconds: float
) -> None:
    random = Random(seed)
    cap = (1 << 28, 40_000)[seed % 2]
    until = time.monotonic() + seconds
    running: list[tuple[int, Child]] = []
    ended: list[tuple[int, Child]] = []
    number = 0
    while time.monotonic() < until:
        while len(running) < processes:
            child = nursery.start("share", folder=str(folder), seed=seed, number=number, cap=cap)
            running.append((number, child))
            number += 1
        time.sleep(random.uniform(0, min(1.0, seconds / 5)))
        ended.append(running.pop(random.randrange(len(running))))
        ended[-1][1].kill()
        ended[-1][1].wait()
    for _, child in running:
        child.kill()
        child.wait()
    before, after = Model(cap), Model(cap)
    for number, child in [*ended, *running]:
        for word, value in child.said:
            if word not in ("done", "pid"):
                budget.violated(seed, f"process {number} {word}: {value}")
        if cap < 1 << 28:
            continue
        play = own(seed, number)
        for operation in islice(play, sum(word == "done" for word, _ in child.said)):
            advance(before, operation)
            advance(after, operation)
        advance(after, next(play))
    if found := broken(folder, before, after):
        budget.violated(seed, f"{number + 1} processes: {found}")
    budget.notes.append(f"{number + 1} processes, {len(ended)} killed at work")
