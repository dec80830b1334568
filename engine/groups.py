"""Many requests on one model: who is admitted, who shares a forward, whose turn it is.

A request waits, is admitted, has its prompt processed in a cohort, and then decodes in a group
until it ends. Rows that can share a forward are kept in one cohort or one group; others form their
own. A row's stream depends on none of that.

`Groups.turn` is the pulse: cancelled rows leave, waiting requests are admitted, one chunk of
prompts is processed, and each group runs one round. It belongs to one thread (see `service.py`).
Membership changes between forwards, and by assignment of new batches (see `batches.py`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from .batches import Batch, Kind, Member, Stage, fail, join, part_of, without
from .errors import BadInput
from .generations import goes_on
from .prefill import CHUNK, Cohort
from .rounds import Rounds
from .tiers import Tiers


@dataclass(frozen=True, slots=True)
class Limits:
    """How much is in flight at once.

    `rows` may be admitted at a time, whose prompts and budgets come to at most `tokens` tokens and
    whose states to at most `state_bytes` bytes; None is no limit. `prefill_chunk` is the most
    tokens of a forward over prompts, all its rows together; running rows wait for at most
    `prefill_steps` such forwards between two of their rounds.
    """

    rows: int = 8
    tokens: int | None = None
    state_bytes: int | None = None
    prefill_chunk: int = CHUNK
    prefill_steps: int = 1

    def __post_init__(self) -> None:
        for name in ("rows", "tokens", "state_bytes", "prefill_chunk", "prefill_steps"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise BadInput(f"{name} must be at least 1, got {value}")


@dataclass(frozen=True, slots=True)
class GroupRound:
    """What one round of a group did: per row the request's number, drafted and accepted."""

    requests: tuple[int, ...]
    drafted: tuple[int, ...]
    accepted: tuple[int, ...]


class Groups:
    """All requests in flight. `on_round` is told of every round of every group."""

    def __init__(
        self,
        limits: Limits,
        on_round: Callable[[GroupRound], None] | None = None,
        tiers: Tiers | None = None,
    ) -> None:
        self._limits = limits
        self._tiers = tiers or Tiers()
        self._on_round = on_round
        self._waiting: deque[Member] = deque()
        self._cohorts: dict[Kind, Batch[Cohort]] = {}
        self._groups: dict[Kind, Batch[Rounds]] = {}

    @property
    def idle(self) -> bool:
        return not (self._waiting or self._cohorts or self._groups)

    def add(self, member: Member) -> None:
        """Take in a request; it waits for its turn behind those that came before."""
        self._waiting.append(member)

    def turn(self) -> None:
        """Advance everything by one step of prompts and one round of each group."""
        self._drop_cancelled()
        self._admit()
        for _ in range(self._limits.prefill_steps):
            if self._cohorts:
                self._work(self._step, self._cohorts.pop(next(iter(self._cohorts))))
        for kind in list(self._groups):
            self._work(self._round, self._groups.pop(kind))

    def _work(self, work: Callable[[Batch[Stage]], None], batch: Batch[Stage]) -> None:
        """Advance a batch, which is in no table meanwhile, where `close` would find its streams."""
        try:
            work(batch)
        except BaseException as error:
            for member in batch.members:
                member.stream.close(error)
            raise

    def suspend(self) -> int:
        """Keep what has been generated and not ended; how many requests can go on later."""
        self._drop_cancelled()
        return sum(
            self._suspend(group, r, at_once=True)
            for group in self._groups.values()
            for r in range(len(group.members))
        )

    def _suspend(self, group: Batch[Rounds], r: int, *, at_once: bool) -> bool:
        member = group.members[r]
        return self._tiers.generations.suspend(
            group.kind.target,
            member.text.request,
            member.text.seed,
            group.stage,
            r,
            member.prompt,
            member.text.logprobs,
            at_once=at_once,
        )

    def _checkpoint(self, group: Batch[Rounds]) -> None:
        """Keep the generations that have gone on for long since they were kept last."""
        if (every := self._tiers.checkpoint_tokens) is None:
            return
        for r, member in enumerate(group.members):
            if not goes_on(member.row):
                continue
            held = len(member.row.held)
            last = max(member.checkpointed, len(member.prompt.tokens))
            if held - last >= every:
                self._suspend(group, r, at_once=False)
                member.checkpointed = held  # what fails would fail in the next round as well

    def close(self, error: BaseException) -> None:
        """End every request with that error."""
        members = [*self._waiting, *self._flying()]
        self._waiting, self._cohorts, self._groups = deque(), {}, {}
        for member in members:
            member.stream.close(error)

    def _drop_cancelled(self) -> None:
        cancelled = [m for m in (*self._waiting, *self._flying()) if m.row.cancelled]
        if not cancelled:
            return
        self._waiting = deque(m for m in self._waiting if m not in cancelled)
        self._cohorts = without(self._cohorts, cancelled)
        self._groups = without(self._groups, cancelled)
        for member in cancelled:
            self._forget(member)
            member.stream.close()

    def _admit(self) -> None:
        while self._waiting and self._has_room(self._waiting[0]):
            member = self._waiting[0]
            try:
                self._waiting.popleft()
                self._enter(member)
            except BaseException as error:
                member.row.cancelled = True  # wherever it is by now
                member.stream.close(error)
                if not isinstance(error, Exception):
                    raise

    def _enter(self, member: Member) -> None:
        """Begin with a request, or go on with it where it was interrupted."""
        kind = member.kind
        # Where keys and values are converted depends on the chunks: each row has its own.
        alone = member.number if kind.target.quantizes else kind.alone
        kind = replace(kind, alone=alone)
        if (rounds := self._resume(kind, member)) is not None:
            self._regroup(Batch(kind, rounds, (member,)))
            return
        cohort = self._begin(kind, member)
        batch = Batch(kind, cohort, (member,))
        if any(cohort.lacking):
            join(self._cohorts, batch)
        else:
            self._start(batch)

    def _begin(self, kind: Kind, member: Member) -> Cohort:
        """A cohort of one, which starts from what is kept of its prompt."""
        samplers, prompt = member.sampling, member.prompt
        empty = kind.target.new_rows(() if kind.drafter is None else kind.drafter.taps)
        start = self._tiers.start(kind.target, kind.drafter, samplers, prompt, empty)
        return Cohort(start.rows, start.draft, samplers, [prompt])

    def _resume(self, kind: Kind, member: Member) -> Rounds | None:
        """The rounds of a generation that was interrupted, its reader told of what has been.

        None: there is no such generation, or another member is it.
        """
        if any(_same_generation(member, other) for other in self._flying()):
            return None
        found = self._tiers.generations.unfinished(
            kind.target, kind.drafter, kind.depth, member.text.request, member.prompt
        )
        if found is None:
            return None
        member.sampling, member.text.seed = found.samplers, found.sampling.seed
        found.journal.replay(member.prompt)
        member.checkpointed = len(member.row.held)
        start, rows = found.start, [member.row]
        return Rounds(
            start.rows,
            start.draft,
            found.samplers,
            rows,
            depth=kind.depth,
            vocab_size=kind.target.vocab_size,
        )

    def _has_room(self, member: Member) -> bool:
        flying, limits = self._flying(), self._limits
        return (
            len(flying) < limits.rows
            and _within(limits.tokens, sum(m.tokens for m in flying) + member.tokens)
            and _within(limits.state_bytes, sum(m.state_bytes for m in flying) + member.state_bytes)
        )

    def _flying(self) -> list[Member]:
        batches: list[Batch[Any]] = [*self._cohorts.values(), *self._groups.values()]
        return [member for batch in batches for member in batch.members]

    def _step(self, batch: Batch[Cohort]) -> None:
        """One chunk of a cohort; rows that are done go on."""
        try:
            batch.stage.step(self._limits.prefill_chunk)
            self._keep_prompts(batch)
            done = [r for r, lacking in enumerate(batch.stage.lacking) if lacking == 0]
            ready = part_of(batch, done)
            rest = part_of(batch, [r for r in range(len(batch.members)) if r not in done])
        except Exception as error:
            fail(batch, error)
            return
        if rest is not None:
            join(self._cohorts, rest)
        if ready is not None:
            self._start(ready)

    def _keep_prompts(self, batch: Batch[Cohort]) -> None:
        """Keep the states of rows that stand one token before their prompt's end."""
        cohort = batch.stage
        for r in cohort.at_boundary:
            held = cohort.prompts[r].tokens[:-1]
            self._tiers.keep(batch.kind.target, cohort.target, cohort.draft, r, held)

    def _keep_retired(self, group: Batch[Rounds]) -> None:
        """What a row leaves behind, exactly the tokens that it delivered and its state holds."""
        rounds = group.stage
        for r, (row, member) in enumerate(zip(rounds.rows, group.members, strict=True)):
            if row.end in ("stop", "length"):
                rounds.close()
                kind = group.kind
                self._tiers.keep(kind.target, rounds.target, rounds.draft, r, row.held)
            if row.end not in (None, "failed"):
                self._forget(member, group.members)

    def _forget(self, member: Member, beside: Sequence[Member] = ()) -> None:
        """A generation that has ended, or that nobody wants, is not to go on.

        `beside` are the members of its batch, if that is being worked on.
        """
        if not member.checkpointed:
            return
        for other in (*self._flying(), *beside):
            if goes_on(other.row) and _same_generation(member, other):
                other.checkpointed = other.checkpointed or 1  # it inherits what is stored
                return
        kind, request = member.kind, member.text.request
        self._tiers.generations.finished(kind.target, kind.drafter, kind.depth, request)

    def _start(self, ready: Batch[Cohort]) -> None:
        """Rows whose prompts are done go into a group."""
        kind = ready.kind
        rounds = ready.stage.rounds(kind.depth, kind.target.vocab_size)
        self._regroup(Batch(kind, rounds, ready.members))

    def _round(self, group: Batch[Rounds]) -> None:
        """One round of a group."""
        try:
            group.stage.step()
        except Exception as error:
            fail(group, error)
            return
        if self._on_round is not None:
            last = [member.row.trace[-1] for member in group.members]
            self._on_round(
                GroupRound(
                    tuple(member.number for member in group.members),
                    tuple(len(trace.draft) for trace in last),
                    tuple(trace.accepted for trace in last),
                )
            )
        self._regroup(group)

    def _regroup(self, group: Batch[Rounds]) -> None:
        """Deliver, let go of rows that have ended, and put the others where they belong now."""
        for member in group.members:
            _deliver(member)
        self._checkpoint(group)
        self._keep_retired(group)
        due = group.stage.target.due
        for wanted in (False, True):
            keep = [
                r
                for r, member in enumerate(group.members)
                if member.row.end is None and due[r] is wanted
            ]
            try:
                part = part_of(group, keep)
            except Exception as error:
                fail(group, error)
                return
            if part is not None:
                kind = replace(group.kind, due=wanted, alone=part.members[0].kind.alone)
                join(self._groups, replace(part, kind=kind))


def _deliver(member: Member) -> None:
    """Hand over what became certain; after the row's end, the rest and the end."""
    row, stream = member.row, member.stream
    try:
        if row.end is None:
            stream.put(*member.text.ready())
        elif row.end in ("stop", "length"):
            events, finish = member.text.finish(row, member.prompt)
            stream.put(*events, finish)
            stream.close()
        else:
            stream.close(row.error)
    except Exception as error:
        # Text is made by the tokenizer's own code; a row that it fails on ends alone.
        row.end, row.error = "failed", error
        stream.close(error)


def _same_generation(one: Member, other: Member) -> bool:
    """Whether their checkpoints could not be told apart."""
    return one.text.request == other.text.request and (
        (one.kind.target, one.kind.drafter, one.kind.depth)
        == (other.kind.target, other.kind.drafter, other.kind.depth)
    )


def _within(limit: int | None, wanted: int) -> bool:
    return limit is None or wanted <= limit
