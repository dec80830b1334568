"""The store that is obviously right: a list of entries, searched from end to end.

It has no files and no faults. What a real one holds after the same operations is this; after a
crash inside an operation, this before or after it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeAlias

from engine.cache.entry import Entry
from engine.cache.format import plan
from engine.cache.header import Origin

from .small import IDENTITY, version_of

Key: TypeAlias = "tuple[str, tuple[int, ...]]"
"""Namespace and tokens."""

ORIGIN = Origin(IDENTITY, 1_800_000_000)


def key_of(entry: Entry) -> Key:
    return entry.namespace, tuple(entry.tokens.tolist())


def size_of(entry: Entry) -> int:
    """Bytes of the file."""
    return plan(entry, ORIGIN).size


@dataclass(slots=True, eq=False)
class Kept:
    """`used` grows with each use: the least is the next victim."""

    entry: Entry
    size: int
    used: int

    @property
    def key(self) -> Key:
        return key_of(self.entry)

    @property
    def version(self) -> int:
        return version_of(self.entry)


@dataclass(slots=True)
class Model:
    """`kept` in the order of addition; `evicted` and `superseded` since the beginning."""

    cap_bytes: int
    kept: list[Kept] = field(default_factory=list)
    evicted: int = 0
    superseded: int = 0
    _clock: int = 0

    def copy(self) -> Model:
        kept = [Kept(k.entry, k.size, k.used) for k in self.kept]
        return Model(self.cap_bytes, kept, self.evicted, self.superseded, self._clock)

    @property
    def used_bytes(self) -> int:
        return sum(kept.size for kept in self.kept)

    def put(self, entry: Entry) -> bool:
        size = size_of(entry)
        if size > self.cap_bytes:
            return False
        before = len(self.kept)
        self.kept = [old for old in self.kept if not replaces(entry, old.entry)]
        self.superseded += before - len(self.kept)
        while self.used_bytes + size > self.cap_bytes:
            self.kept.remove(min(self.kept, key=lambda kept: kept.used))
            self.evicted += 1
        self.kept.append(Kept(entry, size, self._tick()))
        return True

    def find(self, namespace: str, tokens: tuple[int, ...]) -> tuple[list[Kept], int]:
        """Those that serve most of all tokens but the last, in order, and how many; or ([], 0)."""
        best: list[Kept] = []
        longest = 0
        for kept in self.kept:
            if kept.entry.namespace != namespace:
                continue
            count = served(kept.entry, tokens)
            if count > longest:
                best, longest = [], count
            if count and count == longest:
                best.append(kept)
        return best, longest

    def covered(self, namespace: str, tokens: tuple[int, ...]) -> bool:
        """Whether some entry serves all of the tokens."""
        return self.find(namespace, (*tokens, -1))[1] == len(tokens)

    def generation(self, key: str, namespace: str, prompt: tuple[int, ...]) -> list[Kept]:
        """The longest unfinished generations of this key behind this whole prompt."""
        found: list[Kept] = []
        for kept in self.kept:
            generation, tokens = kept.entry.generation, kept.key[1]
            if (
                generation is not None
                and (generation.key, generation.namespace) == (key, namespace)
                and generation.prompt_tokens == len(prompt) < len(tokens)
                and tokens[: len(prompt)] == prompt
            ):
                found.append(kept)
        longest = max((len(kept.key[1]) for kept in found), default=0)
        return [kept for kept in found if len(kept.key[1]) == longest]

    def finish(self, key: str) -> None:
        """The generation has ended."""
        self.drop(lambda kept: (g := kept.entry.generation) is not None and g.key == key)

    def use(self, kept: Kept) -> None:
        """It was restored."""
        kept.used = self._tick()

    def drop(self, gone: Callable[[Kept], bool]) -> None:
        self.kept = [kept for kept in self.kept if not gone(kept)]

    def _tick(self) -> int:
        self._clock += 1
        return self._clock


def served(entry: Entry, tokens: tuple[int, ...]) -> int:
    """How many of all tokens but the last the entry can serve: 0 if none."""
    held = tuple(entry.tokens.tolist())
    common = 0
    while common < min(len(held), len(tokens) - 1) and held[common] == tokens[common]:
        common += 1
    return common if serves(entry, common) else 0


def serves(entry: Entry, count: int) -> bool:
    """Whether the entry may be handed out for its first `count` tokens."""
    reuse = entry.reuse
    return count >= max(1, reuse.minimum) and (reuse.trimmable or count == len(entry.tokens))


def replaces(new: Entry, old: Entry) -> bool:
    """Whether a newcomer makes an entry needless."""
    if new.namespace != old.namespace:
        return False
    if new.generation is not None:
        return True  # of the same key, as the namespace says
    count = len(old.tokens)
    same = bool(new.tokens[:count].tolist() == old.tokens.tolist())
    if count == len(new.tokens):
        return same
    return same and serves(new, count)
