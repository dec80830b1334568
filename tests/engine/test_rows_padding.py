"""What stands behind a row's end, rejected or never written, never enters a result."""

from __future__ import annotations

import mlx.core as mx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.state.columns import Columns
from engine.state.layouts import leaves
from engine.state.rows import Rows

from .company import TARGETS, Company, ids, spoil

LENGTHS = st.sampled_from([1, 5, 31, 33, 70, 250])
ROUNDS = st.lists(
    st.tuples(st.integers(1, 5), st.lists(st.integers(0, 5), min_size=3, max_size=3)),
    min_size=1,
    max_size=5,
)


@pytest.mark.parametrize("name", [*TARGETS, "quantized", "gemma4_text"])
@given(lengths=st.lists(LENGTHS, min_size=3, max_size=3), rounds=ROUNDS, late=LENGTHS)
@settings(max_examples=3)
def test_nan_behind_the_rows_ends_changes_nothing(
    name: str, lengths: list[int], rounds: list[tuple[int, list[int]]], late: int
) -> None:
    """`padding`: in keys, values, scales and biases; in donors, too, before they join."""
    company = Company.of(name, *(ids(n, seed) for seed, n in enumerate(lengths)), spoils=True)
    for number, (width, keep) in enumerate(rounds):
        company.round([width], [min(kept, width) for kept in keep], seed=number)
    company = company.selected([2, 0])
    company = company.joined(Company.of(name, ids(late, 9), spoils=True))
    company = company.joined(company.captured(0)).selected([0, 3, 2])
    for number, (width, keep) in enumerate(rounds):
        company.round([width, 1], [min(kept, width + 1) for kept in keep], seed=-number)
    company.append(1, seed=7)
    company.append(3, seed=8)
    company.check()


def test_rows_that_become_aligned_and_part_again_bring_nothing_back() -> None:
    """`padding`: an aligned write covers its own columns only; the next ragged one the rest."""
    company = Company.of("dense", ids(4, 0), ids(6, 1), spoils=True)
    company.round([5], [5, 0], seed=0)  # 9 and 6 tokens
    company.round([5], [1, 4], seed=1)  # 10 and 10
    company.append(1, seed=2)
    company.round([4], [4, 0], seed=3)
    company.round([2], [1, 2], seed=4)
    company.append(1, seed=5)
    company.check()


@pytest.mark.parametrize("name", ["dense", "sliding", "quantized"])
def test_behind_what_was_written_are_zeros(name: str) -> None:
    """`padding`: what a place calls clean is clean, after ragged rounds, joins and compaction."""
    company = Company.of(name, ids(40, 0), ids(3, 1), ids(90, 2))
    for number in range(30):
        company.round([5], [number % 6, 5 - number % 6, 3], seed=number)
        if number % 10 == 9:
            company = company.selected([1, 2]).joined(Company.of(name, ids(number, number)))
        clean(company.rows)
    spoil(company.rows, [0, 0, 0])
    company.append(2, seed=1)
    clean(company.rows)


def clean(rows: Rows) -> None:
    for leaf in leaves(rows.caches):
        if isinstance(leaf, Columns) and leaf.planes is not None:
            for r, dirty in enumerate(leaf.place.dirty):
                assert leaf.place.starts[r] <= dirty
                assert not any(mx.any(plane[r, :, dirty:]) for plane in leaf.planes)
