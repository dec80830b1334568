"""Processes that are told to end: what they say is durable is found by the next."""

from __future__ import annotations

import os
import signal
import time
from itertools import islice
from pathlib import Path
from random import Random

from .budget import Budget, scratch
from .children import Nursery
from .contract import SENTINEL, ids, opened, restored
from .crashes import ROOMY
from .plays import Put, own

BOUNDS_S = (0.0, 0.001, 1.0)
"""That a flush may take: too little, hardly enough, enough."""

SPARE_S = 2.0
"""For the step under way, and for a machine with other work."""


def flushes(budget: Budget) -> None:
    """R20: SIGTERM at a random time; some are killed before they have flushed."""
    with Nursery() as nursery:
        for seed in budget.seeds():
            random = Random(f"{seed} flushes")
            with scratch() as base:
                if found := _ended(nursery, seed, random, base / "cache"):
                    budget.violated(seed, found)
            budget.done += 1


def _ended(nursery: Nursery, seed: int, random: Random, folder: Path) -> str | None:
    bound = random.choice(BOUNDS_S)
    child = nursery.start("flush", folder=str(folder), seed=seed, bound=bound)
    child.next()  # its handler is there
    time.sleep(random.uniform(0, 0.01))
    os.kill(child.pid, signal.SIGTERM)
    if killed := random.random() < 0.3:
        time.sleep(random.uniform(0, 0.003))
        child.kill()
    status = child.wait()
    said = dict(child.said)  # the last of each word
    if status not in ((0, -9) if killed else (0,)):
        return f"ended with {status}: {child.said[-1]}"
    report = said.get("flushed")
    if report is not None and report["elapsed_s"] > bound + SPARE_S:
        return f"a flush within {bound} s took {report['elapsed_s']:.1f} s"
    promised = [value for word, value in child.said if word == "written"]
    if report is not None and report["durable"]:
        promised = list(range(said.get("scheduled", 0)))
    if report is None and not killed:
        return "did not flush"
    return _lost(folder, seed, promised)


def _lost(folder: Path, seed: int, promised: list[int]) -> str | None:
    """Of the operations with these numbers, one whose entry is not served."""
    store = opened(folder, ROOMY)
    puts = list(islice(own(seed, 0), max(promised, default=-1) + 1))
    for number in promised:
        put = puts[number]
        assert isinstance(put, Put)
        tokens = tuple(put.entry.tokens.tolist())
        found = store.find(ids((*tokens, SENTINEL)), put.entry.namespace)
        if found is None or found.count < len(tokens) or restored(store, found.entry):
            return f"{tokens} was promised and is not there"
    return None
