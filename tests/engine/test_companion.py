"""Two-model rows of many: each drafts what a fresh group of its own would, fed the same tokens."""

from __future__ import annotations

import mlx.core as mx
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from engine import LawError, Sampling
from engine.drafters.two_model import TwoModelRows
from engine.host import read
from engine.sampling import Greedy, Positional, RowSampling

from .company import ids, provider_of
from .puppet import NOBODY

MOST = 4
LENGTHS = st.sampled_from([1, 2, 5, 30, 33])
SEEDS = st.integers(0, 1 << 20)


class CompanionMachine(RuleBasedStateMachine):
    """`companion`, `membership`, `capture`, `solitude`: rows that lag beside rows that do not."""

    kind = ""

    @initialize(length=LENGTHS, seed=SEEDS)
    def open(self, length: int, seed: int) -> None:
        self.provider = provider_of(self.kind)
        self.held: list[list[int]] = []
        self.samplings: list[RowSampling] = []
        self.rows = self.cohort(1, length, seed)

    def cohort(self, count: int, length: int, seed: int) -> TwoModelRows:
        """New rows that see their prompts together."""
        own = [
            RowSampling([Positional(Sampling(1.0, seed=seed)) if (seed + r) % 3 == 0 else Greedy()])
            for r in range(count)
        ]
        rows = self.provider.open(own[0])
        for sampling in own[1:]:
            rows = rows.joined(self.provider.open(sampling))
        prompts = [ids(length, seed + r) for r in range(count)]
        rows.prefill(mx.array(prompts, dtype=mx.uint32), ())
        self.held += prompts
        self.samplings += own
        return rows

    @precondition(lambda self: len(self.held) < MOST)
    @rule(length=LENGTHS, seed=SEEDS, data=st.data())
    def join(self, length: int, seed: int, data: st.DataObject) -> None:
        count = data.draw(st.integers(1, MOST - len(self.held)))
        self.rows = self.rows.joined(self.cohort(count, length, seed))

    @rule(seed=SEEDS)
    def fail_to_join(self, seed: int) -> None:
        """`membership`: a refused join changes nothing."""
        other = self.provider.open(RowSampling([Greedy()]))
        other._state.poison(MemoryError("gone"))
        with pytest.raises(LawError, match="state is lost"):
            self.rows.joined(other)

    @rule(data=st.data())
    def reorder(self, data: st.DataObject) -> None:
        rows = st.integers(0, len(self.held) - 1)
        keep = data.draw(st.lists(rows, min_size=1, unique=True))
        self.rows = self.rows.selected(keep)
        self.held = [self.held[r] for r in keep]
        self.samplings = [self.samplings[r] for r in keep]

    @precondition(lambda self: len(self.held) < MOST)
    @rule(data=st.data())
    def capture_and_rejoin(self, data: st.DataObject) -> None:
        row = data.draw(st.integers(0, len(self.held) - 1))
        again = self.provider.open(self.samplings[row], self.rows.capture(row))
        self.rows = self.rows.joined(again)
        self.held.append(list(self.held[row]))
        self.samplings.append(self.samplings[row])

    @rule(depth=st.integers(0, 4), seed=SEEDS, data=st.data())
    def round(self, depth: int, seed: int, data: st.DataObject) -> None:
        pending = ids(len(self.held), seed)
        steps = [len(held) for held in self.held]
        draft = self.rows.draft(pending, depth, steps, NOBODY)
        drafted: list[list[int]] = read(draft.tokens)
        assert draft.lengths == (depth,) * len(self.held)
        for r, held in enumerate(self.held):
            fresh = self.provider.open(self.samplings[r])
            fresh.prefill(mx.array([held], dtype=mx.uint32), ())
            alone = fresh.draft([pending[r]], depth, [steps[r]], NOBODY)
            assert drafted[r] == read(alone.tokens)[0]
        kept = [data.draw(st.sampled_from([0, depth]) | st.integers(0, depth)) for _ in pending]
        self.rows.commit(kept, ())
        for r, held in enumerate(self.held):
            held += [pending[r], *drafted[r][: kept[r]]]

    @invariant()
    def each_covers_what_was_committed(self) -> None:
        assert self.rows.row_count == len(self.held)
        for r, held in enumerate(self.held):
            stored = self.rows.capture(r)
            assert stored.processed_tokens == len(held)
            if stored.attachment.metadata["pending_last"] is not False:
                assert stored.attachment.metadata["pending_last"] == held[-1]


@pytest.mark.parametrize("kind", ["dense", "hybrid", "sliding"])
def test_a_row_drafts_what_it_would_alone(kind: str) -> None:
    """Sliding models round: a draft may be a tie there, so the examples are always the same."""
    run_state_machine_as_test(
        type(kind, (CompanionMachine,), {"kind": kind}),
        settings=settings(
            max_examples=8 * 50 ** (settings().max_examples >= 1_000),
            stateful_step_count=15,
            derandomize=kind == "sliding",
        ),
    )


@pytest.mark.parametrize("kind", ["dense", "hybrid", "sliding"])
def test_every_mixture_of_lags(kind: str) -> None:
    """`companion`: full beside partial beside zero accepts, in each order, and after depth 0."""
    provider, sampling = provider_of(kind), RowSampling([Greedy()])
    for depths in ((3, 2, 3), (3, 0, 3), (1, 3, 1)):
        for turn in range(3):
            rows, held = provider.open(sampling), [ids(4, 0), ids(4, 1), ids(4, 2)]
            rows = rows.joined(provider.open(sampling)).joined(provider.open(sampling))
            rows.prefill(mx.array(held, dtype=mx.uint32), ())
            for number, depth in enumerate(depths):
                pending = ids(3, number)
                draft: list[list[int]] = read(rows.draft(pending, depth, [0] * 3, NOBODY).tokens)
                for r in range(3):
                    fresh = provider.open(sampling)
                    fresh.prefill(mx.array([held[r]], dtype=mx.uint32), ())
                    assert (
                        read(fresh.draft(pending[r : r + 1], depth, [0], NOBODY).tokens)[0]
                        == draft[r]
                    )
                kept = [(depth, depth // 2, 0)[(r + turn) % 3] for r in range(3)]
                rows.commit(kept, ())
                for r in range(3):
                    held[r] += [pending[r], *draft[r][: kept[r]]]
