"""Rows of many: state machines over every kind of layer, each row beside its twin alone."""

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

from engine.state.layouts import rows_of
from engine.state.rows import Undo

from .company import TARGETS, Company, ids

MOST = 4
"""Rows at once."""
FAMILIES = ("gemma4_text", "falcon_h1", "gear", "mamba2", "rwkv7")
LENGTHS = st.sampled_from([1, 2, 7, 8, 9, 30, 31, 32, 33, 70, 255, 257])
SEEDS = st.integers(0, 1 << 20)


class RowsMachine(RuleBasedStateMachine):
    """`solitude`, `membership`, `position`, `rollback`, `capture`: any schedule."""

    name = ""
    least = 0

    @initialize(length=LENGTHS, seed=SEEDS)
    def open(self, length: int, seed: int) -> None:
        self.company = Company.of(self.name, ids(length, seed))

    @precondition(lambda self: self.company.rows.row_count < MOST)
    @rule(length=LENGTHS | st.just(0), seed=SEEDS)
    def join(self, length: int, seed: int) -> None:
        length = max(length, self.least)
        self.company = self.company.joined(Company.of(self.name, ids(length, seed)))

    @precondition(lambda self: self.company.rows.row_count < MOST)
    @rule(data=st.data())
    def capture_and_rejoin(self, data: st.DataObject) -> None:
        row = data.draw(st.integers(0, self.company.rows.row_count - 1))
        self.company = self.company.joined(self.company.captured(row))

    @rule(data=st.data())
    def reorder(self, data: st.DataObject) -> None:
        rows = st.integers(0, self.company.rows.row_count - 1)
        self.company = self.company.selected(data.draw(st.lists(rows, min_size=1, unique=True)))

    @rule(widths=st.lists(st.integers(1, 6), min_size=1, max_size=3), seed=SEEDS, data=st.data())
    def windows(self, widths: list[int], seed: int, data: st.DataObject) -> None:
        keep = [data.draw(st.integers(0, sum(widths))) for _ in self.company.held]
        self.company.round(widths, keep, seed)

    @rule(count=st.integers(1, 4), seed=SEEDS, data=st.data())
    def single_forwards(self, count: int, seed: int, data: st.DataObject) -> None:
        keep = [data.draw(st.integers(0, count)) for _ in self.company.held]
        self.company.round([1] * count, keep, seed, Undo.FORWARDS)

    @rule(width=st.integers(1, 40), seed=SEEDS)
    def append(self, width: int, seed: int) -> None:
        self.company.append(width, seed)

    @invariant()
    def each_is_what_it_would_be_alone(self) -> None:
        self.company.check()


@pytest.mark.parametrize("name", [*TARGETS, "quantized"])
def test_a_row_in_company_is_the_row_alone(name: str) -> None:
    run(name, examples=6, steps=14)


@pytest.mark.parametrize("family", FAMILIES)
def test_so_it_is_in_other_families(family: str) -> None:
    """Mixtures of kinds, and mixers of their own, on random weights."""
    run(family, examples=3, steps=10)


def run(name: str, *, examples: int, steps: int) -> None:
    # What has no tokens yet is not converted yet, and stays apart until it is.
    numbers = {"name": name, "least": int(name == "quantized")}
    nightly = settings().max_examples >= 1_000
    run_state_machine_as_test(
        type(name, (RowsMachine,), numbers),
        settings=settings(max_examples=examples * 50**nightly, stateful_step_count=steps),
    )


def test_a_row_that_had_seen_nothing_goes_back_to_nothing() -> None:
    """`rollback`: beside one whose recurrent state is that of another forward."""
    seen = mx.array([[1.0, 2.0], [3.0, 4.0]])
    state = rows_of([None, seen])
    assert state is not None
    assert state.tolist() == [[0.0, 0.0], [3.0, 4.0]]
    assert rows_of([None, None]) is None
