"""One round for B >= 1 rows: draft, verify, accept, deliver, resolve, commit.

`Rounds.step()` is one round. It is cut in two, so that the device works while the host reads:
`_launch` builds draft and verify without waiting for either; `_land` reads both at once, walks
each row, and settles target and drafter before any token leaves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import mlx.core as mx

from .acceptance import End, Outcome, settle, walk
from .drafters.source import Draft, DraftRows
from .errors import LawError
from .host import read
from .sampling import RowSampling
from .state.native import Undo
from .values import RoundTrace


class TargetRows(Protocol):
    """The target's memory of a group's rows; see `state.native.NativeRows`."""

    @property
    def steps_back_freely(self) -> bool: ...

    @property
    def longest_window(self) -> int | None: ...

    def begin(self, undo: Undo) -> None: ...

    def forward(self, tokens: mx.array) -> mx.array: ...

    def resolve(self, keep: Sequence[int]) -> None: ...

    def poison(self, error: BaseException) -> None: ...


class Consumer(Protocol):
    """Takes a row's tokens one at a time."""

    def take(self, token: int, logprob: float, *, from_draft: bool, round: int) -> bool:
        """False ends the row at this token."""
        ...


@dataclass(slots=True)
class Row:
    """One request in flight.

    `held` are the tokens in the target's state; `pending` is the last known one, which is not.
    `step` numbers the next token to draw; `remaining` is the budget.
    """

    consumer: Consumer
    eos: frozenset[int]
    held: list[int]
    pending: int
    step: int
    remaining: int
    trace: list[RoundTrace] = field(default_factory=list)
    end: End | None = None


@dataclass(frozen=True, slots=True)
class Flight:
    """A launched round. Rows B, longest draft K; arrays are on the device, not waited for."""

    draft: Draft
    samples: mx.array  # [B, K+1] the target's own ids
    logprobs: mx.array  # [B, K+1] of those ids


class Rounds:
    """Rounds over a group until every row has ended.

    Without a drafter the next window's only token is already on the device when a round is
    launched, so the next round is launched before this one is read. `close` takes it back. Where
    the state would have to be copied for that, rounds wait for each other.
    """

    def __init__(
        self,
        target: TargetRows,
        draft: DraftRows | None,
        sampling: RowSampling,
        rows: Sequence[Row],
        *,
        depth: int,
        vocab_size: int,
    ) -> None:
        self._target = target
        self._draft = draft
        self._sampling = sampling
        self._rows = rows
        self._depth = depth
        self._vocab_size = vocab_size
        self._no_draft = Draft.of([[] for _ in rows])
        self._ahead: Flight | None = None
        self._looks_ahead = draft is None and target.steps_back_freely

    @property
    def done(self) -> bool:
        return all(row.end is not None for row in self._rows)

    def step(self) -> None:
        """Run one round: tokens go to each row's consumer, then both states are settled."""
        try:
            flight, self._ahead = self._ahead or self._launch(self._pending()), None
            if self._looks_ahead and all(row.remaining > 1 for row in self._rows):
                # Nothing of a window without drafts is ever rejected.
                self._target.resolve([1] * len(self._rows))
                self._ahead = self._launch(flight.samples, steps_ahead=1)
            self._land(flight)
        except BaseException as error:
            self._ahead = None
            self._target.poison(error)
            raise
        if self.done:
            self.close()

    def close(self) -> None:
        """Take back a round that was launched ahead. The state is then settled."""
        if self._ahead is not None:
            self._ahead = None
            self._target.resolve([0] * len(self._rows))

    def _launch(self, pending: mx.array, *, steps_ahead: int = 0) -> Flight:
        """Draft and verify for pending ids [B, 1]."""
        steps = [row.step + steps_ahead for row in self._rows]
        draft = self._propose(steps)
        window = self._window(pending, draft)
        # The pending token itself is never rejected.
        certain = Undo.FORWARDS if steps_ahead else Undo.NOTHING
        self._target.begin(certain if window.shape[1] == 1 else Undo.TOKENS)
        logits = self._target.forward(window)
        samples, logprobs = self._sampling.choose(logits, self._known(steps_ahead), window, steps)
        chosen = mx.take_along_axis(logprobs, samples[..., None], axis=-1)[..., 0]
        mx.async_eval(samples, chosen)
        return Flight(draft, samples, chosen)

    def _known(self, steps_ahead: int) -> list[list[int]]:
        """Per row, the ids in front of the window that its logits processors may look at.

        A round in flight has a window of one: the pending id, which is known but not held yet.
        """
        known: list[list[int]] = []
        for row, reach in zip(self._rows, self._sampling.reaches, strict=True):
            start = 0 if reach is None else max(0, len(row.held) - reach)
            known.append(row.held[start:] + [row.pending] * steps_ahead)
        return known

    def _propose(self, steps: Sequence[int]) -> Draft:
        if self._draft is None:
            return self._no_draft
        depth = min(self._depth, max(row.remaining for row in self._rows))
        if (longest := self._target.longest_window) is not None:
            depth = min(depth, longest - 1)
        draft = self._draft.draft([row.pending for row in self._rows], depth, steps)
        if len(draft.lengths) != len(self._rows) or max(draft.lengths) > depth:
            raise LawError(
                f"round {len(self._rows[0].trace)}: the drafter returned lengths {draft.lengths} "
                f"for {len(self._rows)} rows at depth {depth}"
            )
        return draft

    def _window(self, pending: mx.array, draft: Draft) -> mx.array:
        """Ids [B, K+1]: pending, the draft, then the row's own pending again as padding."""
        width = max(draft.lengths)
        if width == 0:
            return pending
        # A draft model may know ids that the target has no embedding for; they never match.
        usable = draft.tokens < self._vocab_size
        if min(draft.lengths) < width:
            usable &= mx.arange(width) < mx.array(draft.lengths)[:, None]
        return mx.concatenate([pending, mx.where(usable, draft.tokens, pending)], axis=1)

    def _land(self, flight: Flight) -> None:
        mx.eval(flight.samples, flight.logprobs, flight.draft.tokens)
        samples, logprobs = read(flight.samples), read(flight.logprobs)
        drafts = read(flight.draft.tokens)
        outcomes: list[Outcome] = []
        for r, row in enumerate(self._rows):
            draft = drafts[r][: flight.draft.lengths[r]]
            outcomes.append(accept(row, draft, samples[r], logprobs[r]))
        retained = [outcome.retained for outcome in outcomes]
        if self._ahead is None:
            self._target.resolve([1 + kept for kept in retained])
        if self._draft is not None:
            self._draft.commit(retained)

    def _pending(self) -> mx.array:
        return mx.array([[row.pending] for row in self._rows], dtype=mx.uint32)


def accept(
    row: Row, draft: Sequence[int], samples: Sequence[int], logprobs: Sequence[float]
) -> Outcome:
    """Walk one row, hand its tokens to its consumer one at a time, and write down the round."""
    verdict = walk(draft, samples, row.remaining, row.eos)
    delivered = 0
    stopped = False
    for position, token in enumerate(verdict.emitted):
        from_draft = position < verdict.accepted
        number = len(row.trace)
        delivered += 1
        if not row.consumer.take(token, logprobs[position], from_draft=from_draft, round=number):
            stopped = True
            break
    outcome = settle(verdict, delivered, stopped=stopped)
    emitted = verdict.emitted[:delivered]
    row.trace.append(RoundTrace(tuple(draft), verdict.accepted, emitted, outcome.retained))
    row.held += [row.pending, *draft[: outcome.retained]]
    row.step += delivered
    row.remaining -= delivered
    row.end = outcome.end
    if outcome.pending is not None:
        row.pending = outcome.pending
    return outcome
