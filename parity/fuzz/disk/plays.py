"""Random operations on a store, from a seed alone: who knows it knows what was asked."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from random import Random
from typing import TypeAlias

from engine.cache.entry import Entry, Reuse

from .small import exact, small, unfinished

NAMESPACES = ("plain", "ngram:3:1")
LETTERS, LONGEST = 3, 6
KEYS = ("a", "b")
PROMPTS = {"a": (0, 1), "b": (0, 1, 2)}


@dataclass(frozen=True, slots=True, eq=False)
class Put:
    entry: Entry


@dataclass(frozen=True, slots=True)
class Use:
    """Find what serves a prompt and restore it."""

    namespace: str
    tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Finish:
    """A generation has ended: its checkpoints go."""

    key: str


Operation: TypeAlias = Put | Use | Finish


def operations(random: Random) -> Iterator[Operation]:
    """Without end. Versions count the puts, so that no two are alike."""
    version = 0
    while True:
        kind = random.random()
        if kind < 0.2:
            yield Use(random.choice(NAMESPACES), tokens(random))
        elif kind < 0.25:
            yield Finish(random.choice(KEYS))
        else:
            version += 1
            yield Put(an_entry(random, version))


def own(seed: int, number: int) -> Iterator[Operation]:
    """Puts of one process in a namespace that no other uses."""
    random = Random(f"{seed} {number} own")
    version = 0
    while True:
        version += 1
        yield Put(small(tokens(random), f"process {number}", version))


def tokens(random: Random) -> tuple[int, ...]:
    return tuple(random.choices(range(LETTERS), k=random.randint(1, LONGEST)))


def an_entry(random: Random, version: int) -> Entry:
    """Mostly trimmable, some of one boundary, some with a minimum, some unfinished generations."""
    ids, namespace, kind = tokens(random), random.choice(NAMESPACES), random.random()
    if kind < 0.15:
        return exact(ids, namespace, version)
    if kind < 0.25:
        return small(ids, namespace, version, reuse=Reuse(False))
    if kind < 0.4:
        return small(ids, namespace, version, reuse=Reuse(True, random.randint(2, LONGEST)))
    if kind < 0.55:
        key = random.choice(KEYS)
        more = tuple((n * n + 1) % LETTERS for n in range(version))  # each is longer than the last
        return unfinished((*PROMPTS[key], *more), key, len(PROMPTS[key]), version)
    return small(ids, namespace, version)
