"""Rows that join, leave, change places, are captured and come back: each goes on as if alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine import Finish
from engine.collector import Collector
from engine.prefill import Cohort, Prompt
from engine.requests import make_row, make_row_sampling
from engine.rounds import Rounds, Row
from engine.sampling import resolve_seed
from engine.state.checkpoint import Checkpoint, capture_caches
from engine.state.rows import Rows

from .pools import PAIRS, Pool, pool, same

SCHEDULES = 42
"""Per family and drafter: more than 500 in all."""

STEPS = ("new", "round", "round", "round", "reorder", "leave", "capture")


class Company:
    """Rounds over rows of a pool; `numbers[r]` is the request that row r serves."""

    def __init__(self, own: Pool) -> None:
        self.own = own
        self.rounds: Rounds | None = None
        self.numbers: list[int] = []
        self.prompts: dict[int, Prompt] = {}

    @property
    def taps(self) -> tuple[str, ...]:
        return () if self.own.drafter is None else self.own.drafter.taps

    def new(self, number: int, chunk: int) -> None:
        """A request with its prompt processed joins."""
        request, target = self.own.requests[number], self.own.target
        sampling = resolve_seed(request.sampling)
        row = make_row(target, request, Collector(target, request, sampling.seed))
        samplers = make_row_sampling(target, sampling)
        draft = None if self.own.drafter is None else self.own.drafter.open(samplers)
        prompt = Prompt(request.prompt, row)
        cohort = Cohort(target.new_rows(self.taps), draft, samplers, [prompt])
        while any(cohort.lacking):
            cohort.step(chunk)
        self.prompts[number] = prompt
        if row.end is None:
            self.join(cohort.rounds(self.depth, target.vocab_size), number)
        else:
            # A drafter that reads the whole prompt has the first token sampled with it.
            assert same(self.finish(row, number), self.own.alone[number]), number

    @property
    def depth(self) -> int:
        return 0 if self.own.drafter is None else self.own.drafter.default_depth

    def join(self, rounds: Rounds, number: int) -> None:
        self.rounds = rounds if self.rounds is None else self.rounds.joined(rounds)
        self.numbers.append(number)

    def step(self) -> None:
        """One round; rows that end are held to what they are alone, and leave."""
        if self.rounds is None:
            return
        self.rounds.step()
        for number, row in zip(self.numbers, self.rounds.rows, strict=True):
            if row.end is not None:
                assert same(self.finish(row, number), self.own.alone[number]), number
        self.keep([r for r, row in enumerate(self.rounds.rows) if row.end is None])

    def finish(self, row: Row, number: int) -> Finish:
        assert isinstance(row.consumer, Collector)
        return row.consumer.finish(row, self.prompts[number])[1]

    def keep(self, rows: Sequence[int]) -> None:
        """The rows in that order; the state of each holds what its record says."""
        if self.rounds is None:
            return
        self.rounds = self.rounds.selected(rows) if rows else None
        self.numbers = [self.numbers[r] for r in rows]
        if self.rounds is not None:
            assert isinstance(self.rounds.target, Rows)
            assert self.rounds.target.processed == [len(row.held) for row in self.rounds.rows]

    def capture_and_join(self, r: int) -> None:
        """`capture`: a copy of row r, from owned tensors, joins as a row of its own."""
        self.join(self.restored(r), self.numbers[r])

    def restored(self, r: int, into: Pool | None = None) -> Rounds:
        """A copy of row r, from owned tensors; in another pool's target and drafter if given."""
        own = into or self.own
        assert self.rounds is not None
        self.rounds.close()
        target, row, number = self.rounds.target, self.rounds.rows[r], self.numbers[r]
        assert isinstance(target, Rows)
        layout, tensors = capture_caches(target.lowered(r))
        restored = own.target.restored_rows(layout, tensors, target.processed[r], self.taps)
        samplers = make_row_sampling(own.target, resolve_seed(self.own.requests[number].sampling))
        draft = None
        if self.rounds.draft is not None:
            stored: Checkpoint = self.rounds.draft.capture(r)
            assert stored.processed_tokens == len(row.held)
            assert own.drafter is not None
            draft = own.drafter.open(samplers, stored)
        copy = replace(
            row, consumer=self.again(row, number), held=list(row.held), trace=list(row.trace)
        )
        vocab_size = own.target.vocab_size
        return Rounds(restored, draft, samplers, [copy], depth=self.depth, vocab_size=vocab_size)

    def again(self, row: Row, number: int) -> Collector:
        """A second reader that has taken what the first has."""
        assert isinstance(row.consumer, Collector)
        request = self.own.requests[number]
        seed = self.own.alone[number].seed
        second = Collector(self.own.target, request, seed)
        for token, logprob, from_draft, round_number in row.consumer._taken:
            second.take(token, logprob, from_draft=from_draft, round=round_number)
        return second


@pytest.mark.parametrize(("family", "kind"), PAIRS)
def test_members_come_and_go_as_if_alone(family: str, kind: str) -> None:
    """`membership`, `capture`, `solitude`, `position`."""
    own = pool(family, kind)

    @settings(max_examples=SCHEDULES)
    @given(st.data())
    def run(data: st.DataObject) -> None:
        company = Company(own)
        for step in data.draw(st.lists(st.sampled_from(STEPS), min_size=3, max_size=14)):
            rows = len(company.numbers)
            if step == "new" and rows < 5:
                company.new(data.draw(st.integers(0, 19)), data.draw(st.sampled_from([5, 2048])))
            elif step == "round":
                company.step()
            elif step == "reorder" and rows > 1:
                company.keep(data.draw(st.permutations(range(rows))))
            elif step == "leave" and rows > 1:
                company.keep(data.draw(st.permutations(range(rows)))[1:])
            elif step == "capture" and 0 < rows < 5:
                company.capture_and_join(data.draw(st.integers(0, rows - 1)))
        while company.rounds is not None:
            company.step()

    run()
