"""Rows on mlx-lm's own cache objects: one row, every family that mlx-lm runs.

Between `begin` and `resolve` a transaction is open: any number of forwards may append tokens, and
`resolve(keep)` leaves exactly the first `keep` of them: the state is then what it would be had
only those been appended. A failure inside poisons the state: it may hold half of a window, so
nothing can be done with it any more but to drop it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

import mlx.core as mx

from ..errors import LawError
from .layouts import RECURRENT, Boundary, Cache, Mark, layout_of, leaves, unknown_kinds
from .quantize import KVQuantization
from .replay import Call, Recorder, replay

Forward = Callable[..., mx.array]
"""An mlx-lm model: ids [B, N] and `cache=` to logits [B, N, V]."""

Replayer = Callable[[], Recorder | str]
"""The model's recorder, or why its recurrent state cannot be replayed. Asked when needed."""


class Undo(Enum):
    """What a transaction may take back. Less is cheaper."""

    NOTHING = "every token will be kept"
    FORWARDS = "whole forwards"
    TOKENS = "any tokens"


@dataclass(slots=True)
class _Transaction:
    """`marks` were taken before each forward, `widths` are their tokens, `calls` the recorded."""

    start: int
    undo: Undo
    longest: int | None
    marks: list[list[Mark]] = field(default_factory=list)
    widths: list[int] = field(default_factory=list)
    calls: list[Sequence[Call]] = field(default_factory=list)

    def boundary(self, keep: int, dropped: int) -> Boundary:
        for forward, width in enumerate(self.widths):
            if keep < width:
                return Boundary(forward, keep, width, dropped)
            keep -= width
        raise AssertionError("something is dropped")


class NativeRows:
    """The state of one row (B = 1) of one model. `processed` counts the tokens it holds."""

    def __init__(
        self,
        model: Forward,
        caches: list[Cache],
        processed: int = 0,
        *,
        replayer: Replayer = lambda: "nothing to replay it with",
        quantization: KVQuantization | None = None,
    ) -> None:
        self._model = model
        self.caches = caches
        self.processed = processed
        self._replayer = replayer
        self._quantization = quantization
        self._open: _Transaction | None = None
        self._poison: BaseException | None = None

    @property
    def row_count(self) -> int:
        return 1

    @property
    def cannot_step_back(self) -> tuple[str, ...]:
        """Names of the layer kinds over which no forward can be taken back; empty if none."""
        return unknown_kinds(self.caches)

    @property
    def cannot_roll_back(self) -> tuple[str, ...]:
        """Names of the layer kinds that rule out speculation; empty if none does.

        The first question about a model with recurrent layers costs some small forwards.
        """
        recorder = self._replayer() if self._recurrent() else None
        refused = (f"recurrent ({recorder})",) if isinstance(recorder, str) else ()
        return tuple(sorted((*self.cannot_step_back, *refused)))

    @property
    def steps_back_freely(self) -> bool:
        """Whether taking back a forward is possible and costs no copies made in advance."""
        layouts = list(map(layout_of, leaves(self.caches)))
        return all(layout.free and layout.back is not None for layout in layouts)

    @property
    def longest_window(self) -> int | None:
        """How many tokens the next window may hold; None: any number."""
        if self._quantization is None:
            return None
        return self._quantization.longest_window(self.caches)

    def begin(self, undo: Undo = Undo.TOKENS) -> None:
        """Open a transaction at the current boundary."""
        self._require_whole()
        if self._open is not None:
            raise LawError(f"begin at {self.processed} tokens: the round before is unresolved")
        self._open = _Transaction(self.processed, undo, self.longest_window)

    def forward(self, tokens: mx.array) -> mx.array:
        """Append ids [1, N] and return logits [1, N, V], not evaluated yet.

        Raises:
            LawError: the state is lost, or the window is longer than `longest_window`.
        """
        self._require_whole()
        appended = self.processed + tokens.shape[1] - (self._open.start if self._open else 0)
        if self._open and self._open.longest is not None and appended > self._open.longest:
            raise LawError(f"a window may hold {self._open.longest} tokens here, got {appended}")
        try:
            logits = self._run(tokens)
            if self._open is None:
                self._settle()
        except BaseException as error:
            self.poison(error)
            raise
        self.processed += tokens.shape[1]
        return logits

    def resolve(self, keep: Sequence[int]) -> None:
        """Close the transaction and keep, per row, the first `keep[r]` tokens appended in it.

        Raises:
            LawError: no transaction is open, or `keep` is not one count within the appended range.
        """
        self._require_whole()
        if self._open is None:
            raise LawError("resolve without begin")
        appended = self.processed - self._open.start
        if len(keep) != 1 or not 0 <= keep[0] <= appended:
            raise LawError(f"keep must be 1 count within 0..{appended}, got {list(keep)}")
        dropped = appended - keep[0]
        try:
            if dropped:
                self._take_back(self._open, keep[0], dropped)
            self._settle()
        except BaseException as error:
            self.poison(error)
            raise
        self.processed -= dropped
        self._open = None

    def poison(self, error: BaseException) -> None:
        """Declare the state lost: an evaluation that it takes part in has failed."""
        self._poison, self._open = error, None

    def arrays(self) -> list[Any]:
        """The caches' state trees, for evaluation."""
        return [cache.state for cache in self.caches]

    def _run(self, tokens: mx.array) -> mx.array:
        now, width = self._open, tokens.shape[1]
        if now is None or now.undo is Undo.NOTHING:
            return self._model(tokens, cache=self.caches)
        now.marks.append([layout_of(leaf).mark(leaf) for leaf in leaves(self.caches)])
        now.widths.append(width)
        # One token is kept or not: its marks are enough.
        records = now.undo is Undo.TOKENS and width > 1 and self._recurrent()
        recorder = self._replayer() if records else None
        if isinstance(recorder, Recorder):
            logits, calls = recorder.forward(tokens, self.caches)
        else:
            logits, calls = self._model(tokens, cache=self.caches), []
        now.calls.append(calls)
        return logits

    def _take_back(self, now: _Transaction, keep: int, dropped: int) -> None:
        if names := self.cannot_step_back:
            raise LawError(f"cache kind {', '.join(names)} cannot forget {dropped} rejected tokens")
        if now.undo is Undo.NOTHING:
            raise LawError(f"{dropped} tokens are rejected of which every one was to be kept")
        at = now.boundary(keep, dropped)
        calls = now.calls[at.forward]
        rewritten: frozenset[int] = frozenset()
        if at.kept and self._recurrent():
            recorder = self._replayer()
            if isinstance(recorder, str) or not calls:
                raise LawError(f"recurrent layers cannot keep {at.kept} of {at.width} tokens")
            rewritten = recorder.rewritten
        whole = replace(at, kept=0, dropped=dropped + at.kept)
        for number, leaf in enumerate(leaves(self.caches)):
            back = layout_of(leaf).back
            assert back is not None
            back(leaf, [m[number] for m in now.marks], whole if number in rewritten else at)
        if at.kept and calls:
            replay(calls, at.width, at.kept)
            # At once, so that the recorded inputs are not kept alive by a pending graph.
            mx.async_eval([leaf.state for leaf in self._recurrent()])

    def _settle(self) -> None:
        """What is due after tokens have been appended for good."""
        if self._quantization is not None:
            self._quantization.convert(self.caches)
        # Nothing reads these counters in a row of its own, so their graph would grow for ever.
        counters = [c for leaf in self._recurrent() for c in (leaf.left_padding, leaf.lengths)]
        mx.async_eval([c for c in counters if c is not None])

    def _recurrent(self) -> list[Cache]:
        return [leaf for leaf in leaves(self.caches) if layout_of(leaf) is RECURRENT]

    def _require_whole(self) -> None:
        if self._poison is not None:
            raise LawError("the state is lost: a forward or rollback failed") from self._poison
