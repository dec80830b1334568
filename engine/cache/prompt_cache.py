"""The RAM tier: prefixes of tokens and the states behind them, the least recently used go first.

A colder tier may stand behind it. What is evicted here is spilled there first, and what it alone
has, or has more of, is brought back by `take`. It belongs to the thread that runs the forwards.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import mlx.core as mx

from ..errors import BadInput
from ..state.checkpoint import Checkpoint
from .entry import Reuse, Tokens
from .prefixes import Indexed, PrefixIndex
from .stored import Stored


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
        states = (self.stored.tokens, *(c.processed_tokens for c in self.checkpoints))
        for stands in states:
            if stands != len(self.tokens):
                raise BadInput(f"a state of {stands} tokens cannot stand for {len(self.tokens)}")

    @property
    def reuse(self) -> Reuse:
        """A drafter's state stands for one boundary, and its target's with it."""
        return Reuse(trimmable=False) if self.checkpoints else self.stored.reuse

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays and of the tokens."""
        drafts = sum(t.nbytes for c in self.checkpoints for t in c.attachment.tensors)
        return self.stored.nbytes + drafts + self.tokens.nbytes


class Cold(Protocol):
    """A slower tier. It never raises."""

    def promises(self, tokens: Tokens, namespace: str) -> int:
        """How many of the tokens, but for the last, it could serve, without I/O; 0 if none."""
        ...

    def fetch(self, tokens: Tokens, namespace: str) -> Kept | None:
        """What it then serves: an entry of its own, whole; None if it turns out to be unusable."""
        ...

    def spill(self, kept: Kept) -> None:
        """Take what is about to be forgotten here."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class Hit:
    """The state of the first `count` tokens of what was asked for, owned by whoever asked."""

    count: int
    stored: Stored
    checkpoints: tuple[Checkpoint, ...]


@dataclass(slots=True)
class _Use:
    """An entry's last use, in seconds of the cache's clock."""

    indexed: Indexed[Kept]
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
        cold: Cold | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if cap_bytes < 0:
            raise BadInput(f"the prompt cache's bytes must be at least 0, got {cap_bytes}")
        self._cap_bytes = cap_bytes
        self._cold = cold
        self._clock = clock
        self._index: PrefixIndex[Kept] = PrefixIndex()
        self._uses: OrderedDict[Indexed[Kept], _Use] = OrderedDict()
        self.nbytes = 0

    def __len__(self) -> int:
        return len(self._index)

    def take(self, tokens: Tokens, namespace: str) -> Hit | None:
        """The longest prefix that can be handed out; at least one token is left to process.

        The entry stays, and is now the one used last. The colder tier is asked if it has more.
        """
        found = self._index.longest(namespace, tokens)
        count = 0 if found is None else found[1]
        if self._cold is not None and self._cold.promises(tokens, namespace) > count:
            kept = self._cold.fetch(tokens, namespace)
            if kept is not None:
                served = served_by(kept, tokens)
                if served > count:
                    self._adopt(kept)
                    return _hit(kept, served)
        if found is None:
            return None
        self._touch(found[0])
        return _hit(found[0].entry, count)

    def put(
        self,
        tokens: Tokens,
        namespace: str,
        stored: Stored,
        checkpoints: Sequence[Checkpoint] = (),
    ) -> None:
        """Keep a state; it is nobody's to change any more.

        It replaces one of the same tokens, and shorter ones that it can serve itself. What does not
        fit at all goes to the colder tier at once.

        Raises:
            BadInput: the state does not stand behind those tokens.
        """
        self._adopt(Kept(namespace, tokens, stored, tuple(checkpoints)))

    def holding(self, tokens: Tokens, namespace: str) -> Kept | None:
        """An entry that serves all these tokens; it does not count as used."""
        found = self._index.longest(namespace, tokens, len(tokens))
        return found[0].entry if found is not None and found[1] == len(tokens) else None

    def demote(self, idle_s: float) -> int:
        """Spill and forget what was not used for that many seconds; how many entries that were."""
        latest = self._clock() - idle_s
        idle = [use.indexed for use in self._uses.values() if use.at_s <= latest]
        for indexed in idle:
            self._spill(indexed)
        return len(idle)

    def _adopt(self, kept: Kept) -> None:
        needless = [
            *self._index.same(kept.namespace, kept.tokens),
            *self._index.superseded(kept.namespace, kept.tokens, kept.reuse),
        ]
        if kept.nbytes > self._cap_bytes:
            for indexed in self._index.same(kept.namespace, kept.tokens):
                self._forget(indexed)
            if self._cold is not None:
                self._cold.spill(kept)
            return
        for indexed in needless:
            self._forget(indexed)
        while self.nbytes + kept.nbytes > self._cap_bytes:
            self._spill(next(iter(self._uses)))
        indexed = self._index.add(kept.namespace, kept.tokens, kept.reuse, kept)
        self._uses[indexed] = _Use(indexed, self._clock())
        self.nbytes += kept.nbytes

    def _touch(self, indexed: Indexed[Kept]) -> None:
        self._uses.move_to_end(indexed)
        self._uses[indexed].at_s = self._clock()

    def _spill(self, indexed: Indexed[Kept]) -> None:
        if self._cold is not None:
            self._cold.spill(indexed.entry)
        self._forget(indexed)

    def _forget(self, indexed: Indexed[Kept]) -> None:
        self._index.remove(indexed)
        del self._uses[indexed]
        self.nbytes -= indexed.entry.nbytes


def served_by(kept: Kept, tokens: Tokens) -> int:
    """How many of the tokens, but for the last, the entry can serve; 0 if none."""
    most = min(len(kept.tokens), len(tokens) - 1)
    differing = (kept.tokens[:most] != tokens[:most]).nonzero()[0]
    count = int(differing[0]) if len(differing) else most
    return count if kept.reuse.serves(count, len(kept.tokens)) else 0


def _hit(kept: Kept, count: int) -> Hit:
    """Arrays are never changed in place by whoever restores them, so they need no copy."""
    stored = kept.stored.trimmed(count)
    if count < len(kept.tokens):
        mx.eval(stored.arrays)
    return Hit(count, stored, kept.checkpoints)
