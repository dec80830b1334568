"""The RAM tier: prefixes of tokens and the states behind them, the least recently used go first.

A colder tier may stand behind it. What is evicted here is spilled there first, and what it has more
of is brought back by `take`. It belongs to the thread that runs the forwards. Arrays are shared
with whoever takes them and never copied: nobody changes one in place, see `forms.load`.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Protocol

import mlx.core as mx
import numpy as np

from ..errors import BadInput
from ..state.checkpoint import Checkpoint
from .entry import Reuse, Tokens
from .prefixes import Indexed, PrefixIndex
from .stored import Stored

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class Kept:
    """A prefix of tokens, a target's state behind it and, as `checkpoints`, its drafter's.

    Raises:
        BadInput: a state stands behind another number of tokens, or there are none.
    """

    namespace: str
    tokens: Tokens
    stored: Stored
    checkpoints: tuple[Checkpoint, ...] = ()

    def __post_init__(self) -> None:
        if not len(self.tokens):
            raise BadInput("a state of 0 tokens is not kept; at least 1 is needed")
        for stands in (self.stored.num_tokens, *(c.processed_tokens for c in self.checkpoints)):
            if stands != len(self.tokens):
                raise BadInput(f"a state of {stands} tokens cannot stand for {len(self.tokens)}")

    @property
    def reuse(self) -> Reuse:
        """A drafter's state stands for one boundary, and its target's with it."""
        reuse = self.stored.reuse
        return replace(reuse, trimmable=False) if self.checkpoints else reuse

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays and, here and in the index, of the tokens."""
        drafts = sum(array.nbytes for c in self.checkpoints for array in c.attachment.tensors)
        return self.stored.nbytes + drafts + 2 * self.tokens.nbytes


class ColderTier(Protocol):
    """A slower tier. What it raises is as good as having nothing, and is logged."""

    def promises(self, tokens: Tokens, namespace: str) -> int:
        """How many of the tokens, but for the last, it could serve, without I/O; 0 if none."""
        ...

    def fetch(self, tokens: Tokens, namespace: str) -> Kept | None:
        """The entry that then serves them, whole; None if it turns out to be unusable."""
        ...

    def spill(self, kept: Kept) -> bool:
        """Take what is about to be forgotten here; False if it could not."""
        ...


class NoColderTier:
    """A `ColderTier` that has nothing and takes nothing: the RAM tier stands alone."""

    def promises(self, tokens: Tokens, namespace: str) -> int:
        return 0

    def fetch(self, tokens: Tokens, namespace: str) -> Kept | None:
        return None

    def spill(self, kept: Kept) -> bool:
        return False


@dataclass(frozen=True, slots=True, eq=False)
class Hit:
    """The state of the first `count` tokens of what was asked for.

    `checkpoints` are the drafter's of the same boundary.
    """

    count: int
    stored: Stored
    checkpoints: tuple[Checkpoint, ...]


@dataclass(frozen=True, slots=True)
class Counts:
    """What has happened so far. `cold_hits` are those of the hits that the colder tier served."""

    hits: int = 0
    cold_hits: int = 0
    misses: int = 0
    evicted: int = 0
    cold_failures: int = 0


@dataclass(slots=True)
class _Use:
    """An entry's bytes, and when it was used last, in seconds of the cache's clock."""

    nbytes: int
    at_s: float


class PromptCache:
    """At most `cap_bytes` of states after every call.

    Args:
        cold: the tier behind this one.
        clock: seconds, growing.
    """

    def __init__(
        self,
        cap_bytes: int,
        cold: ColderTier | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if cap_bytes < 0:
            raise BadInput(f"the prompt cache's bytes must be at least 0, got {cap_bytes}")
        self.cap_bytes = cap_bytes
        self.nbytes = 0
        self.counts = Counts()
        self._cold: ColderTier = cold or NoColderTier()
        self._clock = clock
        self._index: PrefixIndex[Kept] = PrefixIndex()
        self._uses: OrderedDict[Indexed[Kept], _Use] = OrderedDict()  # the latest comes last

    def __len__(self) -> int:
        return len(self._index)

    def take(self, tokens: Tokens, namespace: str) -> Hit | None:
        """The longest prefix that can be handed out; at least one token is left to process.

        The entry stays as it is, and is now the one used last. The colder tier is asked if it
        promises more than is here.
        """
        found = self._index.longest(namespace, tokens)
        own, count = (None, 0) if found is None else found
        fetched = self._fetch(tokens, namespace, count)
        if fetched is not None:
            self._count(hits=1, cold_hits=1)
            return fetched
        if own is None:
            self._count(misses=1)
            return None
        self._uses.move_to_end(own)
        self._uses[own].at_s = self._clock()
        self._count(hits=1)
        return _hit(own.entry, count)

    def put(
        self,
        tokens: Tokens,
        namespace: str,
        stored: Stored,
        checkpoints: Sequence[Checkpoint] = (),
    ) -> None:
        """Keep a state. It replaces one of the same tokens, and shorter ones that it can serve.

        What does not fit at all goes to the colder tier at once.

        Raises:
            BadInput: the state does not stand behind those tokens.
        """
        own = np.array(tokens, np.int32)  # the caller may go on with theirs
        own.flags.writeable = False
        kept = Kept(namespace, own, stored, tuple(checkpoints))
        if kept.nbytes > self.cap_bytes:
            self._spill(kept)
        else:
            self._adopt(kept)

    def holding(self, tokens: Tokens, namespace: str) -> Kept | None:
        """An entry that serves all of these tokens, None if there is none; no use is counted."""
        found = self._index.longest(namespace, tokens, len(tokens))
        return found[0].entry if found is not None and found[1] == len(tokens) else None

    def exactly(self, tokens: Tokens, namespace: str) -> Kept | None:
        """The entry of exactly these tokens, None if there is none; no use is counted."""
        same = self._index.same(namespace, tokens)
        return same[0].entry if same else None

    def demote(self, idle_s: float) -> int:
        """Spill and forget what was not used for that many seconds; how many entries that were.

        What the colder tier does not take stays.
        """
        latest = self._clock() - idle_s
        idle = [one for one, _ in takewhile(lambda use: use[1].at_s <= latest, self._uses.items())]
        demoted = [indexed for indexed in idle if self._spill(indexed.entry)]
        for indexed in demoted:
            self._forget(indexed)
        return len(demoted)

    def _adopt(self, kept: Kept) -> None:
        """Take in what fits."""
        for indexed in (
            *self._index.same(kept.namespace, kept.tokens),
            *self._index.superseded(kept.namespace, kept.tokens, kept.reuse),
        ):
            self._forget(indexed)
        nbytes = kept.nbytes
        while self.nbytes + nbytes > self.cap_bytes:
            oldest = next(iter(self._uses))
            self._spill(oldest.entry)
            self._forget(oldest)
            self._count(evicted=1)
        indexed = self._index.add(kept.namespace, kept.tokens, kept.reuse, kept)
        self._uses[indexed] = _Use(nbytes, self._clock())
        self.nbytes += nbytes

    def _forget(self, indexed: Indexed[Kept]) -> None:
        self._index.remove(indexed)
        self.nbytes -= self._uses.pop(indexed).nbytes

    def _fetch(self, tokens: Tokens, namespace: str, more_than: int) -> Hit | None:
        """What the colder tier has if that is more; it is then here as well, where it fits."""
        try:
            if self._cold.promises(tokens, namespace) <= more_than:
                return None
            kept = self._cold.fetch(tokens, namespace)
            count = 0 if kept is None else served_by(kept, tokens, namespace)
            if kept is None or count <= more_than:
                return None
            hit = _hit(kept, count)
        except Exception as error:
            self._failed("fetched", error)
            return None
        if kept.nbytes <= self.cap_bytes:
            self._adopt(kept)
        return hit

    def _spill(self, kept: Kept) -> bool:
        try:
            return self._cold.spill(kept)
        except Exception as error:
            self._failed("spilled", error)
            return False

    def _failed(self, what: str, error: Exception) -> None:
        self._count(cold_failures=1)
        log.warning("a state could not be %s: %s", what, error)

    def _count(self, **more: int) -> None:
        now = self.counts
        self.counts = replace(now, **{name: getattr(now, name) + n for name, n in more.items()})


def served_by(kept: Kept, tokens: Tokens, namespace: str) -> int:
    """How many of the tokens, but for the last, the entry can serve; 0 if none."""
    most = max(0, min(len(kept.tokens), len(tokens) - 1))
    differing = np.flatnonzero(kept.tokens[:most] != tokens[:most])
    count = int(differing[0]) if len(differing) else most
    usable = kept.namespace == namespace and kept.reuse.serves(count, len(kept.tokens))
    return count if usable else 0


def _hit(kept: Kept, count: int) -> Hit:
    stored = kept.stored.trimmed(count)
    # At once: what is not evaluated belongs to the thread that made it.
    mx.eval(stored.arrays)
    return Hit(count, stored, kept.checkpoints)
