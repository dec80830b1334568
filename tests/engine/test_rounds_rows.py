"""Rounds of many rows on real models: whoever joins, leaves or breaks, the others do not notice."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import mlx.core as mx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine import DraftProvider, LawError, Request, Sampling, Target, generate, open_live
from engine.drafters.ngram import NgramProvider
from engine.prefill import Cohort, Prompt
from engine.rounds import Rounds, Row
from engine.sampling import RowSampling, make_row_sampler
from engine.state.checkpoint import capture_caches
from engine.state.rows import Rows

from .company import model_of, provider_of
from .conftest import last

PROMPTS = (
    "Name: Anna. Say it again: ",
    "a",
    "one two one two one",
    "Name: Bob. Name: Bob. Name:",
    "The list: 1, 2, 3, 4, 5, ",
)
DEPTH = 3
End = Literal["length", "raises", "cancels", "stops"]


@dataclass(slots=True)
class Taker:
    """Takes tokens; what happens at its `last`-th is its `end`."""

    end: End
    last: int
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    row: Row | None = None

    def take(self, token: int, logprob: float, *, from_draft: bool, round: int) -> bool:
        there = len(self.tokens) + 1 == self.last
        if there and self.end == "raises":
            raise KeyError("the consumer broke")
        self.tokens.append(token)
        self.logprobs.append(logprob)
        if there and self.end == "cancels":
            assert self.row is not None
            self.row.cancelled = True
        return not (there and self.end == "stops")


@dataclass(frozen=True, slots=True)
class Plan:
    """A request: what it is asked, in which round it joins, and how it ends."""

    prompt: int
    joins: int
    budget: int
    end: End
    last: int
    seed: int | None = None

    @property
    def sampling(self) -> Sampling:
        return Sampling() if self.seed is None else Sampling(1.0, seed=self.seed)


PLANS = st.lists(
    st.builds(
        Plan,
        prompt=st.integers(0, len(PROMPTS) - 1),
        joins=st.integers(0, 3),
        budget=st.integers(1, 14),
        end=st.sampled_from(["length", "length", "raises", "cancels", "stops"]),
        last=st.integers(1, 8),
        seed=st.none() | st.integers(0, 9),
    ),
    min_size=1,
    max_size=4,
)


def opened(target: Target, plan: Plan, provider: DraftProvider | None) -> Rounds:
    """One request's rounds, prefilled."""
    prompt = target.encode(PROMPTS[plan.prompt])
    sampling = RowSampling([make_row_sampler(plan.sampling)])
    state, draft = target.new_rows(), None if provider is None else provider.open(sampling)
    taker = Taker(plan.end, plan.last)
    taker.row = row = Row(taker, target.eos_ids, [], prompt[-1], 0, plan.budget)
    cohort = Cohort(state, draft, sampling, [Prompt(prompt, row)])
    while any(cohort.lacking):
        cohort.step()
    return cohort.rounds(DEPTH, target.vocab_size)


def serve(
    target: Target, plans: list[Plan], provider: DraftProvider | None, turn: int
) -> list[tuple[Row, Any]]:
    """Run all plans in one group; per plan its row, and its state captured when it left."""
    waiting = sorted(range(len(plans)), key=lambda number: plans[number].joins)
    members: list[int] = []
    left: dict[int, tuple[Row, Any]] = {}
    group: Rounds | None = None
    for number in range(200):
        while waiting and (group is None or plans[waiting[0]].joins <= number):
            members.append(waiting.pop(0))
            own = opened(target, plans[members[-1]], provider)
            group = own if group is None else group.joined(own)
        if group is None:
            break
        group.step()
        ended = [r for r, row in enumerate(group.rows) if row.end is not None]
        if ended:
            group.close()
        state: Any = group.target
        for r in ended:
            left[members[r]] = (group.rows[r], capture_caches(state.lowered(r)))
        keep = [r for r in range(len(members)) if r not in ended]
        if turn and keep:
            keep = [*keep[turn % len(keep) :], *keep[: turn % len(keep)]]
        members = [members[r] for r in keep]
        if not keep:
            group = None
        elif keep != list(range(len(group.rows))):
            group = group.selected(keep)
    return [left[number] for number in range(len(plans))]


@pytest.mark.parametrize("drafter", ["off", "ngram", "two-model"])
@pytest.mark.parametrize("kind", ["dense", "hybrid"])
@given(plans=PLANS, turn=st.integers(0, 2))
@settings(max_examples=6)
def test_each_row_is_served_as_if_alone(
    kind: str, drafter: str, plans: list[Plan], turn: int
) -> None:
    """`solitude`, `isolation`, `position`: text, log-probabilities, trace and state."""
    target = model_of(kind)
    provider: DraftProvider | None = None
    if drafter != "off":
        provider = provider_of(kind) if drafter == "two-model" else NgramProvider()
    for plan, (row, captured) in zip(plans, serve(target, plans, provider, turn), strict=True):
        ((alone, stored),) = serve(target, [plan], provider, 0)
        taker, expected = row.consumer, alone.consumer
        assert isinstance(taker, Taker)
        assert isinstance(expected, Taker)
        assert (taker.tokens, taker.logprobs) == (expected.tokens, expected.logprobs)
        assert (row.held, row.end, row.step, row.trace) == (
            alone.held,
            alone.end,
            alone.step,
            alone.trace,
        )
        assert captured[0] == stored[0]
        for ours, theirs in zip(captured[1], stored[1], strict=True):
            assert mx.array_equal(ours, theirs)
        check_end(target, plan, row, provider)


def check_end(target: Target, plan: Plan, row: Row, provider: DraftProvider | None) -> None:
    """What a row ended as, against the engine's own stream of one request."""
    prompt = tuple(target.encode(PROMPTS[plan.prompt]))
    request = Request(prompt, plan.budget, plan.sampling)
    live = open_live(target)
    whole = last(list(generate(target, request, provider, depth=DEPTH, live=live)))
    taker = row.consumer
    assert isinstance(taker, Taker)
    reached = len(whole.tokens) >= plan.last
    if not reached or plan.end == "length":
        assert tuple(taker.tokens) == whole.tokens
        assert row.error is None
        assert row.held == live.held
        return
    assert tuple(taker.tokens) == whole.tokens[: plan.last - (plan.end == "raises")]
    if plan.end == "raises":
        assert isinstance(row.error, KeyError)
        assert row.end == "failed"
    if plan.end in ("raises", "cancels") and row.end != "length":
        assert row.trace[-1].retained == 0
        rounds = [trace.retained + 1 for trace in row.trace]
        assert len(row.held) == len(prompt) - 1 + sum(rounds)


def test_rounds_launched_ahead_are_taken_back_before_rows_change(target: Target) -> None:
    """`position`, `membership`: each change settles first, on both sides."""
    plan = Plan(0, 0, 20, "length", 99)
    one, two = opened(target, plan, None), opened(target, plan, None)
    for rounds in (one, two):
        rounds.step()
        assert rounds._ahead is not None
    both = one.joined(two)
    assert [rounds._ahead for rounds in (one, two)] == [None, None]
    state: Any = both.target
    assert state.processed == [len(row.held) for row in both.rows]
    both.step()
    assert both._ahead is not None
    single = both.selected([1])
    assert [both._ahead] == [None]
    assert isinstance(single.target, Rows)
    assert single.target.processed == [len(single.rows[0].held)]
    single.rows[0].end = "stop"
    with pytest.raises(LawError, match="some have ended"):
        single.step()


def test_a_failed_join_of_rounds_leaves_both(
    target: Target, two_model: DraftProvider, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`membership`: the draft rows had joined when the target's could not."""
    plan = Plan(0, 0, 12, "length", 99)
    ((alone, _),) = serve(target, [plan], two_model, 0)
    one, two = opened(target, plan, two_model), opened(target, plan, two_model)
    one.step()
    with monkeypatch.context() as patch:
        calls: list[int] = []
        joined = Rows.joined

        def second_fails(self: Rows, other: Rows) -> Rows:
            calls.append(1)
            if len(calls) == 2:
                raise MemoryError("no room")
            return joined(self, other)

        patch.setattr(Rows, "joined", second_fails)
        with pytest.raises(MemoryError, match="no room"):
            one.joined(two)
    for rounds in (one, two):
        while not rounds.done:
            rounds.step()
        taker, expected = rounds.rows[0].consumer, alone.consumer
        assert isinstance(taker, Taker)
        assert isinstance(expected, Taker)
        assert taker.tokens == expected.tokens
        assert rounds.rows[0].trace == alone.trace
