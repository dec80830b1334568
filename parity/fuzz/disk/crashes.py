"""Loss of power at any moment of a recorded run, and of the recovery from it."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from random import Random

from .budget import Budget, scratch
from .contract import advance, broken, bytes_in, opened, perform
from .images import Disk, Image, images
from .model import Model, size_of
from .plays import operations
from .recording import Acknowledged, Log, Recorded
from .small import small

OPERATIONS = 10
DRAWN = 4
"""Images at random beside the six of all or nothing, for each change in the log."""

CUTS = 12
"""Moments of a run after which a recovery is recorded."""

ROOMY, TIGHT = 1 << 20, 5 * size_of(small((1, 2, 3)))
"""Bytes under which nothing is evicted, and under which much is."""


@dataclass(frozen=True, slots=True)
class Recording:
    """A log of operations on a store, and what must be there before and after each."""

    log: Log
    states: tuple[Model, ...]


def record(seed: int, base: Path) -> Recording:
    random = Random(seed)
    cap = random.choice((ROOMY, TIGHT))
    files = Recorded()
    store = opened(base / "cache", cap, files)
    states = [Model(cap)]
    for number, operation in enumerate(islice(operations(random), OPERATIONS), 1):
        states.append(states[-1].copy())
        advance(states[-1], operation)
        perform(operation, store)
        files.acknowledge(number)
    return Recording(files.log, tuple(states))


def crash_images(budget: Budget) -> None:
    """R2: what every image leaves is what was promised; an image that was there is not counted."""
    for seed in budget.seeds():
        random = Random(seed)
        with scratch() as base:
            recording = record(seed, base)
            _each_image(budget, seed, recording, Disk(str(base)), random)


def _each_image(
    budget: Budget, seed: int, recording: Recording, disk: Disk, random: Random, excess: int = 0
) -> None:
    seen: set[tuple[Image, int]] = set()
    done = 0
    for place, change in enumerate(recording.log.changes):
        if isinstance(change, Acknowledged):
            done = change.operations
        disk.apply(change)
        before = recording.states[done]
        after = recording.states[min(done + 1, len(recording.states) - 1)]
        for image in images(disk, random, DRAWN):
            if budget.over or budget.done >= budget.count:
                return
            if (image, done) in seen:
                continue
            seen.add((image, done))
            budget.done += 1
            with scratch() as folder:
                image.materialise(disk.origin, folder)
                found = broken(folder / "cache", before, after, excess)
            if found:
                budget.violated(seed, f"after change {place}, {change}: {found}")
                return


def crashes_of_recovery(budget: Budget) -> None:
    """R2 once more: the power is lost again while a store is being opened on an image."""
    for seed in budget.seeds():
        random = Random(seed)
        with scratch() as base:
            recording = record(seed, base)
            for _ in range(CUTS):
                _crash_twice(budget, seed, recording, str(base), random)


def _crash_twice(
    budget: Budget, seed: int, recording: Recording, origin: str, random: Random
) -> None:
    changes = recording.log.changes
    disk, done = Disk(origin), 0
    for change in changes[: random.randrange(len(changes))]:
        disk.apply(change)
        if isinstance(change, Acknowledged):
            done = change.operations
    states = recording.states[done : done + 2]
    image = random.choice(list(images(disk, random, DRAWN)))
    with scratch() as folder:
        image.materialise(origin, folder)
        names, again = Disk.of(image, origin, str(folder))
        files = Recorded(log=Log(names=names, numbered=len(names)))
        excess = bytes_in(folder) - states[0].cap_bytes
        opened(folder / "cache", states[0].cap_bytes, files)
        _each_image(budget, seed, Recording(files.log, states), again, random, excess)
