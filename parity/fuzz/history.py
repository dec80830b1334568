"""The list model: which tokens a state holds, and what a fresh cache says after them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import chain

import mlx.core as mx
from mlx_lm.generate import maybe_quantize_kv_cache

from engine.state.layouts import Cache

from .worlds import BITS, GROUP_SIZE, World

Chunk = tuple[int, ...]

PROBE: tuple[Chunk, ...] = ((5,), (11, 2, 7))
"""What a state is asked with: one token alone and several at once, which caches store by different
code."""


@dataclass(frozen=True, slots=True)
class History:
    """The tokens, cut as they were appended. The first `exact` were there before quantization."""

    chunks: tuple[Chunk, ...] = ()
    exact: int | None = None

    def __len__(self) -> int:
        return sum(map(len, self.chunks))

    @property
    def tokens(self) -> Chunk:
        return tuple(chain.from_iterable(self.chunks))

    def append(self, tokens: Sequence[int]) -> History:
        return replace(self, chunks=(*self.chunks, tuple(tokens)))

    def first(self, n: int) -> History:
        """What is left when all but the first `n` tokens are taken back."""
        chunks, left = [], n
        for piece in self.chunks:
            if left > 0:
                chunks.append(piece[:left])
            left -= len(piece)
        return History(tuple(chunks), None if self.exact is None else min(self.exact, n))

    def quantize(self) -> History:
        return self if self.exact is not None else replace(self, exact=len(self))

    def before_quantization(self) -> tuple[tuple[Chunk, ...], tuple[Chunk, ...]]:
        """The chunks before and after it; it falls between two."""
        early: list[Chunk] = []
        late = list(self.chunks)
        while late and sum(map(len, early)) < (len(self) if self.exact is None else self.exact):
            early.append(late.pop(0))
        return tuple(early), tuple(late)


class Reference:
    """What fresh caches of one world say. Answers are kept: a shrinking run asks again."""

    def __init__(self, world: World, keep: int = 2048) -> None:
        self.world = world
        self.answer = lru_cache(keep)(self._answer)
        self.logits = lru_cache(keep)(self._logits)

    def fill(self, history: History) -> list[Cache]:
        """Caches that only ever saw the history, in as few forwards as its definition allows."""
        caches = self.world.fresh()
        early, late = history.before_quantization()
        self._feed(caches, early)
        if history.exact is not None:
            quantize(caches)
        self._feed(caches, late)
        return caches

    def _feed(self, caches: list[Cache], chunks: tuple[Chunk, ...]) -> None:
        whole = (tuple(chain.from_iterable(chunks)),) if chunks else ()
        for tokens in chunks if self.world.by_chunks else whole:
            self.world.model(mx.array([tokens]), cache=caches)

    def _answer(self, history: History) -> mx.array:
        return ask(self.world, self.fill(history))

    def _logits(self, history: History, windows: tuple[Chunk, ...]) -> mx.array:
        """Logits [N, V] of windows that follow the history."""
        return forward(self.world, self.fill(history), windows)


def ask(world: World, caches: list[Cache]) -> mx.array:
    """The logits [4, V] of the probe's tokens. The caches have seen them afterwards."""
    return forward(world, caches, PROBE)


def forward(world: World, caches: list[Cache], windows: Sequence[Sequence[int]]) -> mx.array:
    """Append windows and return their logits [N, V], evaluated."""
    logits = [world.model(mx.array([list(window)]), cache=caches)[0] for window in windows]
    joined = mx.concatenate(logits)
    mx.eval(joined, [cache.state for cache in caches])
    return joined


def quantize(caches: list[Cache]) -> None:
    """Convert every layer that can be."""
    maybe_quantize_kv_cache(caches, 0, GROUP_SIZE, BITS)


def difference(expected: mx.array, actual: mx.array, tolerance: float) -> str | None:
    """How two logit arrays differ by more than `tolerance` of the largest, in words."""
    if expected.shape != actual.shape:
        return f"logits {actual.shape} instead of {expected.shape}"
    gap = mx.abs(expected - actual).max(axis=-1)
    scale = mx.abs(expected).max()
    rows: list[float] = (gap / scale).tolist()  # type: ignore[assignment]  # of a vector
    for number, share in enumerate(rows):
        if not share <= tolerance:  # so that NaN differs
            return f"logits {number + 1} of {len(rows)} differ by {share:.1e} of the largest"
    return None
