"""mlx-lm's prompt cache as its server uses it, beside what it promises: see `contracts.py`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.models.cache import (
    LRUPromptCache,
    can_trim_prompt_cache,
    load_prompt_cache,
    save_prompt_cache,
)

from engine.state.layouts import Cache

from .contracts import Key, Promise, Violation, fetch_cause
from .entries import same, says_otherwise
from .history import Chunk, History, Reference, forward
from .namespaces import Namespace
from .worlds import kinds

Violated = Callable[[Violation], None]

SIZE = 3
"""Entries: few, so that some are evicted."""


@dataclass(slots=True, eq=False)
class _Kept:
    """An entry; `arrays` are copies of what its caches hold."""

    namespace: Namespace
    history: History
    trimmable: bool
    arrays: list[mx.array]
    inserted: int
    used: int

    def common(self, namespace: Namespace, tokens: Chunk) -> int:
        """How many tokens it has in common with these, at the front."""
        own, common = self.history.tokens, 0
        if self.namespace != namespace:
            return 0
        while common < min(len(own), len(tokens)) and own[common] == tokens[common]:
            common += 1
        return common

    def serves(self, namespace: Namespace, tokens: Chunk) -> int:
        """As `fetch_nearest_cache` means it: all tokens, or all but one at most."""
        common = self.common(namespace, tokens)
        if common == len(self.history.tokens):
            return common
        return min(common, len(tokens) - 1) if self.trimmable else 0


@dataclass(frozen=True, slots=True)
class Fetched:
    """Caches that hold the first tokens of what was asked for, which are `history`."""

    caches: list[Cache]
    history: History


class TheirTier:
    """`LRUPromptCache` of `SIZE` entries. Broken promises go to `violated`."""

    def __init__(
        self, reference: Reference, violated: Violated, new_file: Callable[[], Path]
    ) -> None:
        self._reference, self._violated, self._new_file = reference, violated, new_file
        self._world = reference.world
        self._lru = LRUPromptCache(SIZE)
        self._kept: list[_Kept] = []
        self._uses = 0

    def feed(self, namespace: Namespace, start: Fetched | None, chunks: Sequence[Chunk]) -> Fetched:
        """Go on from what was fetched, or from nothing, one forward for each chunk."""
        caches = self._world.fresh() if start is None else start.caches
        history = History() if start is None else start.history
        for chunk in chunks:
            forward(self._world, caches, [namespace.ids(chunk)])
            history = namespace.append(history, chunk)
            namespace.convert(caches, len(history))
        return Fetched(caches, history)

    def put(self, namespace: Namespace, state: Fetched) -> None:
        tokens = list(state.history.tokens)
        self._lru.insert_cache(namespace.name, tokens, state.caches)
        self._uses += 1
        trimmable = can_trim_prompt_cache(state.caches)
        arrays, now = _copies(state.caches), self._uses
        new = _Kept(namespace, state.history, trimmable, arrays, now, now)
        self._kept = [old for old in self._kept if not _makes_needless(new, old)] + [new]
        if len(self._kept) > SIZE:
            self._evicted(1)

    def shrink(self, entries: int) -> None:
        """Evict all but so many."""
        self._lru.trim_to(n_sequences=entries)
        self._evicted(len(self._kept) - entries)

    def fetch(self, namespace: Namespace, tokens: Chunk) -> Fetched | None:
        served = [(kept.serves(namespace, tokens), kept) for kept in self._kept]
        caches, rest = self._lru.fetch_nearest_cache(namespace.name, list(tokens))
        count = len(tokens) - len(rest)
        best = max((n for n, _ in served), default=0)
        if count != best:
            key = Key(Promise.NEAREST, "LRUPromptCache", self._why_not(namespace, tokens, best))
            self._violated(Violation(key, f"{count} tokens of {list(tokens)}, not {best}"))
        if not count:
            return None
        sources = [kept for n, kept in served if n >= count]
        source = min(sources, key=lambda kept: len(kept.history))
        self._uses += 1
        source.used = self._uses
        history = namespace.first(source.history, count)
        if found := says_otherwise(self._reference, namespace, caches, history):
            packed = namespace.start is not None and source.history.exact is not None
            cut_below = packed and history.exact is None
            cause = fetch_cause(caches, cut_below)
            self._violated(Violation(Key(Promise.FETCH, *cause), found))
            caches = self._reference.fill(namespace.seen(history))
        return Fetched(caches, history)

    def _why_not(self, namespace: Namespace, tokens: Chunk, best: int) -> str:
        """What is known of searches that find less than `best` tokens."""
        common = [(one.common(namespace, tokens), one) for one in self._kept]
        deepest = max(count for count, _ in common)
        for count, one in common:
            if count == deepest < len(one.history) and not one.trimmable:
                return "hidden by a longer one"
        return "prefix of one token" if best == 1 else ""

    def restart(self) -> None:
        """Every entry is saved, and loaded into another prompt cache."""
        stored = [(kept, self._new_file()) for kept in self._kept]
        for kept, file in stored:
            tokens = list(kept.history.tokens)
            caches, _ = self._lru.fetch_nearest_cache(kept.namespace.name, tokens)
            save_prompt_cache(str(file), caches)
        self._lru = LRUPromptCache(SIZE)
        for kept, file in stored:
            caches = load_prompt_cache(str(file))
            if found := says_otherwise(self._reference, kept.namespace, caches, kept.history):
                key = Key(Promise.LOAD, " and ".join(kinds(caches)), "")
                self._violated(Violation(key, found))
            self._lru.insert_cache(kept.namespace.name, list(kept.history.tokens), caches)
            kept.arrays = _copies(caches)
            self._uses += 1
            kept.inserted = kept.used = self._uses

    def check(self) -> None:
        """The entries are as they were put, whatever became of what was handed out."""
        for kept in self._kept:
            tokens = list(kept.history.tokens)
            caches, rest = self._lru.fetch_nearest_cache(kept.namespace.name, tokens)
            now = [] if rest else _copies(caches)
            if len(now) != len(kept.arrays) or not all(map(same, now, kept.arrays)):
                key = Key(Promise.COPY, "LRUPromptCache", "")
                self._violated(Violation(key, f"the entry of {tokens} has changed"))

    def _evicted(self, count: int) -> None:
        """That many are gone: those that nobody used for longest?"""
        here = [kept for kept in self._kept if self._has(kept)]
        by_use = sorted(self._kept, key=lambda kept: kept.used)
        if set(here) != set(by_use[count:]):
            by_age = sorted(self._kept, key=lambda kept: kept.inserted)
            as_put = set(here) == set(by_age[count:])
            key = Key(Promise.RECENT, "LRUPromptCache", "fetched meanwhile" if as_put else "")
            gone = [list(kept.history.tokens) for kept in self._kept if kept not in here]
            self._violated(Violation(key, f"{gone} were evicted"))
        self._kept = here

    def _has(self, kept: _Kept) -> bool:
        tokens = list(kept.history.tokens)
        caches, rest = self._lru.fetch_nearest_cache(kept.namespace.name, tokens)
        return caches is not None and not rest


def _copies(caches: Sequence[Cache]) -> list[mx.array]:
    """Of all arrays in the caches."""
    named: Any = tree_flatten([cache.state for cache in caches])
    copies = [mx.array(array) for _, array in named if isinstance(array, mx.array)]
    mx.eval(copies)
    return copies


def _makes_needless(new: _Kept, old: _Kept) -> bool:
    own, theirs = new.history.tokens, old.history.tokens
    if new.namespace != old.namespace or own[: len(theirs)] != theirs:
        return False
    return new.trimmable or len(own) == len(theirs)
