"""Rows on mlx-lm's own cache objects: one row, every family that mlx-lm runs.

Between `begin` and `resolve` a transaction is open: any number of forwards may append tokens, and
`resolve(keep)` leaves exactly the first `keep` of them. A failure inside poisons the state: it may
hold half of a window, so nothing can be done with it any more but to drop it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx

from ..errors import LawError
from .layouts import Cache, cannot_roll_back, layout_of

Forward = Callable[..., mx.array]
"""An mlx-lm model: ids [B, N] and `cache=` to logits [B, N, V]."""


class NativeRows:
    """The state of one row (B = 1) of one model. `processed` counts the tokens it holds."""

    def __init__(self, model: Forward, caches: list[Cache], processed: int = 0) -> None:
        self._model = model
        self.caches = caches
        self.processed = processed
        self._open_at: int | None = None
        self._poison: BaseException | None = None

    @property
    def row_count(self) -> int:
        return 1

    @property
    def cannot_roll_back(self) -> tuple[str, ...]:
        """Names of the layer kinds that rule out speculation; empty if none does."""
        return cannot_roll_back(self.caches)

    def begin(self) -> None:
        """Open a transaction at the current boundary."""
        self._require_whole()
        if self._open_at is not None:
            raise LawError(f"begin at {self.processed} tokens: the round before is unresolved")
        self._open_at = self.processed

    def forward(self, tokens: mx.array) -> mx.array:
        """Append ids [1, N] and return logits [1, N, V], not evaluated yet."""
        self._require_whole()
        try:
            logits = self._model(tokens, cache=self.caches)
        except BaseException as error:
            self._poison = error
            raise
        self.processed += tokens.shape[1]
        return logits

    def resolve(self, keep: Sequence[int]) -> None:
        """Close the transaction and keep, per row, the first `keep[r]` tokens appended in it.

        Raises:
            LawError: no transaction is open, or `keep` is not one count within the appended range.
        """
        self._require_whole()
        if self._open_at is None:
            raise LawError("resolve without begin")
        appended = self.processed - self._open_at
        if len(keep) != 1 or not 0 <= keep[0] <= appended:
            raise LawError(f"keep must be 1 count within 0..{appended}, got {list(keep)}")
        dropped = appended - keep[0]
        try:
            if dropped:
                self._drop(dropped)
        except BaseException as error:
            self._poison = error
            raise
        self.processed -= dropped
        self._open_at = None

    def poison(self, error: BaseException) -> None:
        """Declare the state lost: an evaluation that it takes part in has failed."""
        self._poison = error

    def arrays(self) -> list[Any]:
        """The caches' state trees, for evaluation."""
        return [cache.state for cache in self.caches]

    def _drop(self, n: int) -> None:
        if names := self.cannot_roll_back:
            raise LawError(f"cache kind {', '.join(names)} cannot forget {n} rejected tokens")
        for cache in self.caches:
            drop = layout_of(cache).drop
            assert drop is not None
            drop(cache, n)

    def _require_whole(self) -> None:
        if self._poison is not None:
            raise LawError("the state is lost: a forward or rollback failed") from self._poison
