"""Random operations on a store and the model beside it, with restarts, damage, strange clocks."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from random import Random

from engine.cache.entry import Entry
from engine.cache.store import Store

from .budget import Budget, scratch
from .contract import Outcome, bytes_in, every_file, ids, opened, perform, restored
from .model import Kept, Model, key_of, size_of
from .plays import KEYS, NAMESPACES, PROMPTS, Finish, Operation, Put, operations, tokens
from .small import content, small, version_of

STEPS = 50
SIZE = size_of(small((1, 2, 3)))
CAPS = (1 << 20, 8 * SIZE, 5 * SIZE, 2 * SIZE, SIZE + 20)
"""Bytes: all fits, and less and less; in the last, one entry with nothing attached."""

EVERY = 5
"""Steps after which bytes and entries are counted."""

DAY_NS = 86_400 * 10**9


def sequences(budget: Budget, steps: int = STEPS) -> None:
    """R1: a store answers each operation as the model does."""
    for seed in budget.seeds():
        random = Random(seed)
        with scratch() as base:
            play = Play(base / "cache", random, random.choice(CAPS))
            _run(budget, seed, play, steps, restarts=0.04, damage=0.1)
        budget.done += 1


def accounts(budget: Budget) -> None:
    """R19: the same where entries are evicted all the time, and clocks are set forth and back."""
    for seed in budget.seeds():
        random = Random(f"{seed} accounts")
        with scratch() as base:
            play = Play(base / "cache", random, random.choice(CAPS[2:4]), _clock(random))
            _run(budget, seed, play, STEPS, restarts=0.2, damage=0.1)
        budget.done += 1


def _clock(random: Random) -> Iterator[int]:
    """Nanoseconds since 1970, set by up to a day now and then, or standing still."""
    now = time.time_ns()
    while True:
        yield now
        if random.random() < 0.2:
            now += random.randint(-DAY_NS, DAY_NS)
        elif random.random() < 0.5:
            now += random.randint(1, 10**9)


def _run(budget: Budget, seed: int, play: Play, steps: int, restarts: float, damage: float) -> None:
    random = play.random
    for number, operation in enumerate(islice(operations(random), steps)):
        kind = random.random()
        if kind < restarts:
            found = play.reopen()
        elif kind < restarts + damage:
            found = play.harm()
        else:
            found = play.step(operation)
        due = number % EVERY == 0 or number == steps - 1
        if found := found or (play.accounts() if due else None) or play.asked():
            budget.violated(seed, f"step {number}, {operation}: {found}")
            return


class Play:
    """A store and its model."""

    def __init__(
        self, folder: Path, random: Random, cap: int, clock: Iterator[int] | None = None
    ) -> None:
        self.folder, self.random, self.clock = folder, random, clock
        self.model = Model(cap)
        self.store = self._opened()

    def _opened(self) -> Store:
        return opened(self.folder, self.model.cap_bytes, clock=self.clock)

    def reopen(self) -> str | None:
        self.store = self._opened()
        return None

    def step(self, operation: Operation) -> str | None:
        """Do it on both; of several entries that serve as much, the store may choose."""
        actual = perform(operation, self.store)
        expected: Outcome
        if isinstance(operation, Put):
            expected = "put", self.model.put(operation.entry)
        elif isinstance(operation, Finish):
            self.model.finish(operation.key)
            expected = ("finished",)
        else:
            best, count = self.model.find(operation.namespace, operation.tokens)
            expected = ("nothing", 0)
            for kept in best:
                if (kept.key, kept.version) == actual[1:3] or expected[0] == "nothing":
                    expected = "used", kept.key, kept.version, count, None
                    chosen = kept
            if best:
                self.model.use(chosen)
        return None if actual == expected else f"{actual}, not {expected}"

    def harm(self) -> str | None:
        """Someone removes or damages the file that serves a prompt: a miss, and never again."""
        namespace, prompt = self.random.choice(NAMESPACES), tokens(self.random)
        found = self.store.find(ids(prompt), namespace)
        if found is None:
            return None
        path = file_of(self.folder, found.entry)
        if path is None:
            return f"the file of {key_of(found.entry)} is not there"
        damaged = self.store.counts.damaged
        kind = spoil(path, self.random)
        if (outcome := restored(self.store, found.entry)) != "miss":
            return f"{kind}, and then {outcome or 'restored'}"
        if self.store.counts.damaged != damaged + (kind != "removed"):
            return f"{kind}, and {self.store.counts.damaged - damaged} counted as damaged"
        key, version = key_of(found.entry), version_of(found.entry)
        self.model.drop(lambda kept: (kept.key, kept.version) == (key, version))
        return None

    def accounts(self) -> str | None:
        """Bytes and numbers, on disk, as counted, and as the model has them."""
        counts, model = self.store.counts, self.model
        size = bytes_in(self.folder)
        if not size == counts.nbytes == model.used_bytes <= model.cap_bytes:
            return f"{size} bytes on disk, {counts.nbytes} counted, {model.used_bytes} in the model"
        if counts.entries != len(model.kept):
            return f"{counts.entries} entries counted, {len(model.kept)} in the model"
        return None

    def asked(self) -> str | None:
        """A question without consequences."""
        namespace, prompt = self.random.choice(NAMESPACES), tokens(self.random)
        if self.store.has_durable_prefix(ids(prompt), namespace) != self.model.covered(
            namespace, prompt
        ):
            return f"has_durable_prefix({namespace}, {prompt}) is wrong"
        key = self.random.choice(KEYS)
        asked = self.random.choice((PROMPTS[key], prompt))
        entry = self.store.find_generation_checkpoint(ids(asked), key, "plain")
        version = None if entry is None else version_of(entry)
        return _compared(version, self.model.generation(key, "plain", asked))


def _compared(version: int | None, expected: list[Kept]) -> str | None:
    versions = [kept.version for kept in expected]
    if version in versions or (version is None and not versions):
        return None
    return f"checkpoint version {version}, not one of {versions}"


def file_of(folder: Path, entry: Entry) -> Path | None:
    """The file that holds an entry's bytes."""
    needle = content(entry, entry.tensors[0])
    return next((path for path in every_file(folder) if needle in path.read_bytes()), None)


def spoil(path: Path, random: Random) -> str:
    """Remove a file, or change, cut or lengthen it, in place; says which."""
    data = bytearray(path.read_bytes())
    kind = random.choice(("removed", "flipped", "cut", "zeroed", "longer"))
    if kind == "removed":
        path.unlink()
        return kind
    if kind == "flipped":
        data[random.randrange(len(data))] ^= 1 << random.randrange(8)
    elif kind == "cut":
        del data[random.randrange(len(data)) :]
    elif kind == "zeroed":
        start = random.randrange(len(data))
        if not any(data[start:]):
            data[start - 1] ^= 1
        data[start:] = bytes(len(data) - start)
    else:
        data += random.randbytes(random.randint(1, 9))
    status = path.stat()
    path.write_bytes(data)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    return kind
