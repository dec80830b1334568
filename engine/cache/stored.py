"""What one row's caches hold at one boundary, as a value that can be cut back and handed out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import mlx.core as mx
from mlx_lm.models.cache import CacheList

from ..errors import BadInput
from ..state.checkpoint import capture
from ..state.forms import Held, cut, cut_from, require_position
from ..state.layouts import QUANTIZED, Cache
from ..state.quantize import KVQuantization
from .entry import Reuse

Part: TypeAlias = "Held | tuple[Part, ...]"
"""What a cache holds; a tuple, of any depth, for a list of caches."""


@dataclass(frozen=True, slots=True, eq=False)
class Stored:
    """A row's caches, in layer order, after `num_tokens` tokens.

    Nobody changes its arrays, and what was filled with them never writes to them. It is cut back to
    no less than `minimum` tokens: where packing is delayed, a shorter state is not packed yet.
    """

    num_tokens: int
    caches: tuple[Part, ...]
    minimum: int = 1

    def __post_init__(self) -> None:
        if not 1 <= self.minimum <= max(1, self.num_tokens):
            raise BadInput(f"a minimum of {self.minimum} tokens is not within 1..{self.num_tokens}")
        for held in self.leaves:
            require_position(held, self.num_tokens)

    @classmethod
    def of(
        cls, caches: Sequence[Cache], num_tokens: int, quantization: KVQuantization | None = None
    ) -> Stored:
        """A copy of what a row's native caches hold after `num_tokens` tokens.

        Raises:
            BadInput: a cache is of an unknown kind, or stands elsewhere.
        """
        captured = capture(caches)
        packed = any(held.kind == QUANTIZED.name for held in captured)
        minimum = max(1, quantization.start) if quantization is not None and packed else 1
        return cls(num_tokens, _arranged(caches, iter(captured)), minimum)

    @property
    def leaves(self) -> list[Held]:
        """What each cache holds, lists of caches replaced by what is in them."""
        return _flat(self.caches)

    @property
    def arrays(self) -> list[mx.array]:
        """All of them, in order."""
        return [array for held in self.leaves for array in held.arrays]

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return sum(array.nbytes for array in self.arrays)

    @property
    def reuse(self) -> Reuse:
        """Which shorter boundaries all caches can be cut back to."""
        least = [self.minimum, *map(cut_from, self.leaves)]
        known = [n for n in least if n is not None]
        trimmable = len(known) == len(least) and max(known) < self.num_tokens
        return Reuse(trimmable, max(known) if trimmable else self.minimum)

    def trimmed(self, count: int) -> Stored:
        """What the caches would hold had they seen the first `count` tokens only.

        The arrays are parts of the longer ones and keep these alive.

        Raises:
            BadInput: not every cache can be cut back to there.
        """
        if not self.reuse.serves(count, self.num_tokens):
            raise BadInput(f"{self.num_tokens} stored tokens cannot be cut back to {count}")
        if count == self.num_tokens:
            return self
        return replace(self, num_tokens=count, caches=_cut(self.caches, count))


def _arranged(caches: Sequence[Cache], captured: Iterator[Held]) -> tuple[Part, ...]:
    return tuple(
        _arranged(cache.caches, captured) if type(cache) is CacheList else next(captured)
        for cache in caches
    )


def _flat(parts: Sequence[Part]) -> list[Held]:
    found: list[Held] = []
    for part in parts:
        found += [part] if isinstance(part, Held) else _flat(part)
    return found


def _cut(parts: Sequence[Part], count: int) -> tuple[Part, ...]:
    return tuple(
        cut(part, count) if isinstance(part, Held) else _cut(part, count) for part in parts
    )
