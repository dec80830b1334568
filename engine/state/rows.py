"""The state of B rows of one model: appended to by forwards, rolled back exactly, row by row.

Its caches are mlx-lm's own objects for one row, every family; or, for many rows, the layers of
`columns.py`. Both go through the same transaction: between `begin` and `resolve` any number of
forwards may append tokens, and `resolve(keep)` leaves of row r exactly the first `keep[r]` of them:
the state is then what it would be had only those been appended. A failure inside poisons the state:
it may hold half of a window, so nothing can be done with it any more but to drop it.

Membership (`selected`, `joined`) builds new rows and leaves the old ones as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

import mlx.core as mx

from ..errors import LawError
from .columns import Columns
from .layouts import RECURRENT, Boundary, Cache, Mark, layout_of, leaves, unknown_kinds
from .membership import joined, lifted, lowered, places_of, selected
from .quantize import KVQuantization
from .replay import Call, Recorder, replay, replay_rows

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

    undo: Undo
    longest: tuple[int | None, ...]
    marks: list[list[Mark]] = field(default_factory=list)
    widths: list[int] = field(default_factory=list)
    calls: list[Sequence[Call]] = field(default_factory=list)

    @property
    def appended(self) -> int:
        return sum(self.widths)

    def boundary(self, keep: int) -> Boundary:
        dropped = self.appended - keep
        for forward, width in enumerate(self.widths):
            if keep < width:
                return Boundary(forward, keep, width, dropped)
            keep -= width
        return Boundary(len(self.widths), 0, 0, 0)


class Rows:
    """The state of B rows of one model. `processed[r]` counts the tokens that row r holds."""

    def __init__(
        self,
        model: Forward,
        caches: list[Cache],
        processed: Sequence[int] = (0,),
        *,
        replayer: Replayer = lambda: "nothing to replay it with",
        quantization: KVQuantization | None = None,
    ) -> None:
        self._model = model
        self.caches = caches
        self.processed = list(processed)
        self._replayer = replayer
        self._quantization = quantization
        self._places = places_of(caches)
        self._open: _Transaction | None = None
        self._poison: BaseException | None = None

    @property
    def row_count(self) -> int:
        return len(self.processed)

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
        if self.row_count > 1 and not all(n is None for n in self.longest_windows):
            return False  # some row's keys and values may be due to be converted before the next
        layouts = list(map(layout_of, leaves(self.caches)))
        return all(layout.free and layout.back is not None for layout in layouts)

    @property
    def longest_windows(self) -> tuple[int | None, ...]:
        """Per row, how many tokens of the next window may be kept; None: any number."""
        if self._quantization is None:
            return (None,) * self.row_count
        return self._quantization.longest_windows(self.caches, self.processed)

    @property
    def due(self) -> tuple[bool, ...]:
        """Per row, whether its keys and values are to be stored in few bits by now.

        Rows that are and rows that are not cannot go on together. A round under way does not count.
        """
        how, open_tokens = self._quantization, self._open.appended if self._open else 0
        return tuple(how is not None and how.due(n - open_tokens) for n in self.processed)

    def begin(self, undo: Undo = Undo.TOKENS) -> None:
        """Open a transaction at the current boundary."""
        self._require_whole()
        if len(set(self.due)) > 1:
            raise LawError("rows whose keys and values are converted beside rows where not")
        if self._open is not None:
            raise LawError(f"begin at {self.processed} tokens: the round before is unresolved")
        self._open = _Transaction(undo, self.longest_windows)

    def forward(self, tokens: mx.array) -> mx.array:
        """Append ids [B, N] and return logits [B, N, V], not evaluated yet.

        Raises:
            LawError: the state is lost.
        """
        self._require_whole()
        try:
            logits = self._run(tokens)
            self.processed = [count + tokens.shape[1] for count in self.processed]
            if self._open is None:
                self._settle()
        except BaseException as error:
            self.poison(error)
            raise
        return logits

    def resolve(self, keep: Sequence[int]) -> None:
        """Close the transaction and keep, per row, the first `keep[r]` tokens appended in it.

        Raises:
            LawError: no transaction is open, or `keep` is not one count per row within the
                appended range.
        """
        self._require_whole()
        if self._open is None:
            raise LawError("resolve without begin")
        appended = self._open.appended
        if len(keep) != self.row_count or not all(0 <= kept <= appended for kept in keep):
            counts = f"{self.row_count} count{'s' * (self.row_count > 1)}"
            raise LawError(f"keep must be {counts} within 0..{appended}, got {list(keep)}")
        for kept, longest in zip(keep, self._open.longest, strict=True):
            if longest is not None and kept > longest:
                raise LawError(f"a window may hold {longest} tokens here, got {kept}")
        try:
            if any(kept < appended for kept in keep):
                self._take_back(self._open, keep)
            self.processed = [
                count - appended + kept for count, kept in zip(self.processed, keep, strict=True)
            ]
            self._settle()
        except BaseException as error:
            self.poison(error)
            raise
        self._open = None

    def poison(self, error: BaseException) -> None:
        """Declare the state lost: an evaluation that it takes part in has failed."""
        self._poison, self._open = error, None

    def arrays(self) -> list[Any]:
        """The caches' state trees, for evaluation."""
        return [cache.state for cache in self.caches]

    def lifted(self) -> Rows:
        """These rows on caches of many rows, whatever they stand on now."""
        self._require_settled("lift rows")
        if self.row_count > 1 or self._places:
            return self
        return self._with(lifted(self.caches), self.processed)

    def lowered(self, row: int) -> list[Cache]:
        """One row as native caches, not to be written to."""
        self._require_settled("lower a row")
        if self.row_count > 1 or self._places:
            return lowered(self.caches, row)
        return self.caches

    def selected(self, keep: Sequence[int]) -> Rows:
        """The rows `keep`, in that order, as rows of their own; at least one."""
        self._require_settled("select rows")
        if list(keep) == list(range(self.row_count)):
            return self
        return self._with(selected(self.caches, keep), [self.processed[r] for r in keep])

    def joined(self, other: Rows) -> Rows:
        """These rows and the other's behind them."""
        ours, theirs = self.lifted(), other.lifted()
        counts = (self.row_count, other.row_count)
        caches = joined(ours.caches, theirs.caches, counts)
        return self._with(caches, self.processed + other.processed)

    def _with(self, caches: list[Cache], processed: Sequence[int]) -> Rows:
        rows = Rows(
            self._model,
            caches,
            processed,
            replayer=self._replayer,
            quantization=self._quantization,
        )
        rows._settle()
        return rows

    def _run(self, tokens: mx.array) -> mx.array:
        now, width = self._open, tokens.shape[1]
        if now is None or not now.widths:
            self._compact()
        calls: Sequence[Call] = ()
        if now is not None:
            undoes = now.undo is not Undo.NOTHING
            now.marks.append([layout_of(u).mark(u) for u in self._units()] if undoes else [])
            now.widths.append(width)
        for place in self._places:
            place.prepare(width)
        # One token is kept or not: its marks are enough.
        records = now is not None and now.undo is Undo.TOKENS and width > 1 and self._recurrent()
        recorder = self._replayer() if records else None
        if isinstance(recorder, Recorder):
            logits, calls = recorder.forward(tokens, self.caches)
        else:
            logits = self._model(tokens, cache=self.caches)
        for place in self._places:
            place.advance()
        if now is not None:
            now.calls.append(calls)
        return logits

    def _take_back(self, now: _Transaction, keep: Sequence[int]) -> None:
        if names := self.cannot_step_back:
            dropped = now.appended - min(keep)
            raise LawError(f"cache kind {', '.join(names)} cannot forget {dropped} rejected tokens")
        if now.undo is Undo.NOTHING:
            raise LawError("tokens are rejected of which every one was to be kept")
        bounds = [now.boundary(kept) for kept in keep]
        inside: dict[tuple[int, int], list[int]] = {}
        for r, at in enumerate(bounds):
            if at.kept:
                inside.setdefault((at.forward, at.kept), []).append(r)
        rewritten: frozenset[int] = frozenset()
        if inside and self._recurrent():
            recorder = self._replayer()
            if isinstance(recorder, str) or not all(now.calls[forward] for forward, _ in inside):
                raise LawError(f"recurrent layers cannot keep {list(keep)} of {now.widths} tokens")
            rewritten = recorder.rewritten
        whole = [replace(at, kept=0, dropped=at.dropped + at.kept) for at in bounds]
        for number, unit in enumerate(self._units()):
            back = layout_of(unit).back
            assert back is not None
            marks = [mark[number] for mark in now.marks]
            back(unit, marks, whole if number in rewritten else bounds)
        if not self._recurrent():
            return
        for (forward, kept), rows in inside.items():
            calls, width, batch = now.calls[forward], now.widths[forward], self.row_count
            if len(rows) == batch:
                replay(calls, width, kept, batch)
            else:
                replay_rows(calls, self._recurrent(), width, kept, batch, rows)
        # At once, so that the recorded inputs are not kept alive by a pending graph.
        if inside:
            mx.async_eval(self.arrays())

    def _compact(self) -> None:
        """Drop columns that no window reaches any more, where they have become many."""
        for place in self._places:
            if (shift := place.outgrown()) is None:
                continue
            columns = max(n - s for n, s in zip(place.starts, shift, strict=True))
            for leaf in leaves(self.caches):
                if isinstance(leaf, Columns) and leaf.place is place:
                    leaf.drop_front(shift, columns)
            place.shifted(shift)

    def _settle(self) -> None:
        """What is due after tokens have been appended for good."""
        if self._quantization is not None:
            self._quantization.convert(self.caches, self.processed)
        # Nothing reads these counters in a row of its own, so their graph would grow for ever.
        counters = [c for leaf in self._recurrent() for c in (leaf.left_padding, leaf.lengths)]
        if any(counter is not None for counter in counters):
            mx.async_eval(counters)

    def _units(self) -> list[Any]:
        """What is marked and goes back: the caches in layer order, then the places."""
        return [*leaves(self.caches), *self._places]

    def _recurrent(self) -> list[Cache]:
        return [leaf for leaf in leaves(self.caches) if layout_of(leaf) is RECURRENT]

    def _require_whole(self) -> None:
        if self._poison is not None:
            raise LawError("the state is lost: a forward or rollback failed") from self._poison

    def _require_settled(self, what: str) -> None:
        self._require_whole()
        if self._open is not None:
            raise LawError(f"cannot {what} inside a round")
