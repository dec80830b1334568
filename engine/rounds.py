"""One round for B >= 1 rows: draft, verify, accept, deliver, resolve, commit.

`Rounds.step()` is one round. It is cut in two, so that the device works while the host reads:
`_launch` builds draft and verify without waiting for either; `_land` reads both at once, walks
each row, and settles target and drafter before any token leaves.

Between rounds, `selected` and `joined` make new `Rounds` of fewer and of more rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, Self

import mlx.core as mx

from .acceptance import Broken, End, Outcome, Walk, settle, walk
from .drafters.source import Draft, DraftRows, Taps
from .errors import LawError
from .host import read
from .sampling import RowSampling
from .state.donors import Donor
from .state.layouts import Cache
from .state.rows import Undo
from .values import RoundTrace


class TargetRows(Protocol):
    """The target's memory of a group's rows; see `state.rows.Rows`."""

    @property
    def steps_back_freely(self) -> bool: ...

    @property
    def longest_windows(self) -> tuple[int | None, ...]: ...

    @property
    def tapped(self) -> Taps: ...

    def donor(self, windowed: bool) -> Donor: ...

    @property
    def due(self) -> tuple[bool, ...]: ...

    def begin(self, undo: Undo) -> None: ...

    def forward(self, tokens: mx.array) -> mx.array: ...

    def resolve(self, keep: Sequence[int]) -> None: ...

    def poison(self, error: BaseException) -> None: ...

    def arrays(self) -> list[Any]: ...

    def lowered(self, row: int) -> list[Cache]: ...

    def selected(self, keep: Sequence[int]) -> Self: ...

    def joined(self, other: Self) -> Self: ...


class Consumer(Protocol):
    """Takes a row's tokens one at a time."""

    def take(self, token: int, logprob: float, *, from_draft: bool, round: int) -> bool:
        """False ends the row at this token; an exception ends it as failed."""
        ...


@dataclass(slots=True)
class Row:
    """One request in flight.

    `held` are the tokens in the target's state; `pending` is the last known one, which is not.
    `step` numbers the next token to draw; `remaining` is the budget. Any thread may set
    `cancelled`: the row then takes no more tokens and ends with the round.
    """

    consumer: Consumer
    eos: frozenset[int]
    held: list[int]
    pending: int
    step: int
    remaining: int
    trace: list[RoundTrace] = field(default_factory=list)
    cancelled: bool = False
    end: End | None = None
    error: Exception | None = None


@dataclass(frozen=True, slots=True)
class Flight:
    """A launched round. Rows B, longest draft K; arrays are on the device, not waited for.

    `chains` are the samplers' before its draws.
    """

    draft: Draft
    samples: mx.array  # [B, K+1] the target's own ids
    logprobs: mx.array  # [B, K+1] of those ids
    chains: tuple[mx.array | None, ...]


class Rounds:
    """Rounds over a group of rows. Rows that have ended are to be left out before the next.

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
        self.target = target
        self.draft = draft
        self.sampling = sampling
        self.rows = rows
        self.depth = depth
        self._vocab_size = vocab_size
        self._no_draft = Draft.of([[] for _ in rows])
        self._ahead: Flight | None = None

    @property
    def done(self) -> bool:
        return all(row.end is not None for row in self.rows)

    def step(self) -> None:
        """Run one round: tokens go to each row's consumer, then both states are settled.

        Raises:
            LawError: a row has ended, or the drafter broke its contract.
            Exception: whatever the model or the drafter raised. The state of all rows is lost.
        """
        if any(row.end is not None for row in self.rows):
            raise LawError("a round over rows of which some have ended")
        try:
            flight, self._ahead = self._ahead or self._launch(self._pending()), None
            looks_ahead = self.draft is None and self.target.steps_back_freely
            if looks_ahead and all(row.remaining > 1 for row in self.rows):
                # Nothing of a window without drafts is ever rejected.
                self.target.resolve([1] * len(self.rows))
                self._ahead = self._launch(flight.samples, steps_ahead=1)
            self._land(flight)
        except BaseException as error:
            self._ahead = None
            self.target.poison(error)
            raise
        if self.done:
            self.close()

    def selected(self, keep: Sequence[int]) -> Rounds:
        """The rows `keep`, at least one, in that order."""
        self.close()
        return Rounds(
            self.target.selected(keep),
            None if self.draft is None else self.draft.selected(keep),
            self.sampling.selected(keep),
            [self.rows[r] for r in keep],
            depth=self.depth,
            vocab_size=self._vocab_size,
        )

    def joined(self, other: Rounds) -> Rounds:
        """These rows and the other's behind them, at the depth of these."""
        self.close()
        other.close()
        draft = self.draft
        if draft is not None:
            assert other.draft is not None
            draft = draft.joined(other.draft)
        return Rounds(
            self.target.joined(other.target),
            draft,
            self.sampling.joined(other.sampling),
            [*self.rows, *other.rows],
            depth=self.depth,
            vocab_size=self._vocab_size,
        )

    def close(self) -> None:
        """Take back a round that was launched ahead. The state is then settled."""
        if self._ahead is not None:
            self.sampling.chains, self._ahead = self._ahead.chains, None
            self.target.resolve([0] * len(self.rows))

    def _launch(self, pending: mx.array, *, steps_ahead: int = 0) -> Flight:
        """Draft and verify for pending ids [B, 1]."""
        steps = [row.step + steps_ahead for row in self.rows]
        chains = self.sampling.chains
        draft = self._propose(steps)
        window = self._window(pending, draft)
        # The pending token itself is never rejected.
        certain = Undo.FORWARDS if steps_ahead else Undo.NOTHING
        self.target.begin(certain if window.shape[1] == 1 else Undo.TOKENS)
        logits = self.target.forward(window)
        samples, logprobs = self.sampling.choose(logits, self._known(steps_ahead), window, steps)
        chosen = mx.take_along_axis(logprobs, samples[..., None], axis=-1)[..., 0]
        mx.async_eval(samples, chosen)
        return Flight(draft, samples, chosen, chains)

    def _known(self, steps_ahead: int) -> list[list[int]]:
        """Per row, the ids in front of the window that its logits processors may look at.

        A round in flight has a window of one: the pending id, which is known but not held yet.
        """
        known: list[list[int]] = []
        for row, reach in zip(self.rows, self.sampling.reaches, strict=True):
            start = 0 if reach is None else max(0, len(row.held) - reach)
            known.append(row.held[start:] + [row.pending] * steps_ahead)
        return known

    def _propose(self, steps: Sequence[int]) -> Draft:
        if self.draft is None:
            return self._no_draft
        # A row drafts no more in company than it would alone.
        caps = [
            min(self.depth, row.remaining, self.depth if longest is None else longest - 1)
            for row, longest in zip(self.rows, self.target.longest_windows, strict=True)
        ]
        depth = max(caps)
        draft = self.draft.draft([row.pending for row in self.rows], depth, steps, self.target)
        if len(draft.lengths) != len(self.rows) or max(draft.lengths) > depth:
            raise LawError(
                f"round {len(self.rows[0].trace)}: the drafter returned lengths {draft.lengths} "
                f"for {len(self.rows)} rows at depth {depth}"
            )
        return Draft(draft.tokens, tuple(map(min, draft.lengths, caps)))

    def _window(self, pending: mx.array, draft: Draft) -> mx.array:
        """Ids [B, K+1]: pending, the draft, then the row's own pending again as padding."""
        width = max(draft.lengths)
        if width == 0:
            return pending
        tokens = draft.tokens[:, :width]
        # A draft model may know ids that the target has no embedding for; they never match.
        usable = tokens < self._vocab_size
        if min(draft.lengths) < width:
            usable &= mx.arange(width) < mx.array(draft.lengths)[:, None]
        return mx.concatenate([pending, mx.where(usable, tokens, pending)], axis=1)

    def _land(self, flight: Flight) -> None:
        mx.eval(flight.samples, flight.logprobs, flight.draft.tokens)
        samples, logprobs = read(flight.samples), read(flight.logprobs)
        drafts = read(flight.draft.tokens)
        outcomes: list[Outcome] = []
        for r, row in enumerate(self.rows):
            draft = drafts[r][: flight.draft.lengths[r]]
            outcomes.append(accept(row, draft, samples[r], logprobs[r]))
        retained = [outcome.retained for outcome in outcomes]
        if self._ahead is None:
            self.target.resolve([1 + kept for kept in retained])
        if self.draft is not None:
            self.draft.commit(retained, self.target.tapped)

    def _pending(self) -> mx.array:
        return mx.array([[row.pending] for row in self.rows], dtype=mx.uint32)


def accept(
    row: Row, draft: Sequence[int], samples: Sequence[int], logprobs: Sequence[float]
) -> Outcome:
    """Walk one row, hand its tokens to its consumer one at a time, and write down the round."""
    verdict = walk(draft, samples, row.remaining, row.eos)
    delivered, stopped = _deliver(row, verdict, logprobs)
    broken: Broken | None = "cancelled" if row.cancelled else "failed" if row.error else None
    outcome = settle(verdict, delivered, stopped=stopped, broken=broken)
    emitted = verdict.emitted[:delivered]
    row.trace.append(RoundTrace(tuple(draft), verdict.accepted, emitted, outcome.retained))
    row.held += [row.pending, *draft[: outcome.retained]]
    row.step += delivered
    row.remaining -= delivered
    row.end = outcome.end
    if outcome.pending is not None:
        row.pending = outcome.pending
    return outcome


def _deliver(row: Row, verdict: Walk, logprobs: Sequence[float]) -> tuple[int, bool]:
    """Hand over what the walk emits: how many tokens were taken, and whether the row stops."""
    number = len(row.trace)
    for position, token in enumerate(verdict.emitted):
        if row.cancelled:
            return position, False
        from_draft = position < verdict.accepted
        try:
            goes_on = row.consumer.take(
                token, logprobs[position], from_draft=from_draft, round=number
            )
        except Exception as error:
            row.error = error
            return position, False
        if not goes_on:
            return position + 1, True
    return len(verdict.emitted), False
