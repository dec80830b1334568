"""The accept walk and row outcomes, on their own: no model, no arrays."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.acceptance import Broken, Outcome, Walk, settle, walk
from oracle import models

EOS = frozenset({0})
TOKENS = st.integers(0, 3)


@st.composite
def windows(draw: st.DrawFn) -> tuple[list[int], list[int], int]:
    """A draft, the target's samples for its window, and a budget; agreement is common."""
    draft = draw(st.lists(TOKENS, max_size=6))
    samples = [token if draw(st.booleans()) else draw(TOKENS) for token in [*draft, 1]]
    return draft, samples, draw(st.integers(1, 8))


@given(windows())
def test_walk_agrees_with_the_slow_model(window: tuple[list[int], list[int], int]) -> None:
    """`budget`, `lossless`: emitted is the common prefix and then the target's own token."""
    draft, samples, remaining = window
    expected = models.acceptance(draft, samples, remaining, EOS)
    got = walk(draft, samples, remaining, EOS)
    assert (got.accepted, got.emitted, got.correction) == (
        expected.accepted,
        expected.emitted,
        expected.correction,
    )


def test_walk_on_every_small_window() -> None:
    """`budget` (exhaustive): never over budget, never an EOS in content, ends when it must."""
    for d in range(4):
        for draft in product(range(3), repeat=d):
            for samples in product(range(3), repeat=d + 1):
                for remaining in range(1, d + 3):
                    got = walk(draft, samples, remaining, EOS)
                    assert len(got.emitted) <= min(remaining, d + 1)
                    assert 0 not in got.emitted
                    assert got.accepted <= d
                    assert tuple(draft[: got.accepted]) == samples[: got.accepted]
                    assert got.emitted == samples[: len(got.emitted)]
                    assert (got.end == "length") == (len(got.emitted) == remaining)
                    if got.end is None:
                        assert got.correction == got.emitted[-1]
                        assert len(got.emitted) == got.accepted + 1


@given(windows())
def test_walk_draws_no_sample_beyond_its_end(window: tuple[list[int], list[int], int]) -> None:
    """Lazy samples: nothing behind the walk's last position is drawn."""
    draft, samples, remaining = window
    drawn: list[int] = []

    def lazily() -> Iterator[int]:
        for token in samples:
            drawn.append(token)
            yield token

    got = walk(draft, lazily(), remaining, EOS)
    assert len(drawn) == len(got.emitted) + (got.end == "stop")


@pytest.mark.parametrize(
    ("draft", "samples", "remaining", "expected"),
    [
        pytest.param([], [5], 9, Walk(0, (5,), 5, None), id="empty draft samples once"),
        pytest.param([5, 6], [5, 6, 7], 9, Walk(2, (5, 6, 7), 7, None), id="full accept and bonus"),
        pytest.param([5, 6], [5, 9, 7], 9, Walk(1, (5, 9), 9, None), id="correction at a mismatch"),
        pytest.param(
            [5, 0], [5, 0, 7], 9, Walk(2, (5,), None, "stop"), id="an accepted EOS counts"
        ),
        pytest.param([5], [0, 7], 9, Walk(0, (), None, "stop"), id="EOS as correction"),
        pytest.param([5], [5, 0], 9, Walk(1, (5,), None, "stop"), id="EOS as bonus"),
        pytest.param([5, 6], [5, 6, 7], 2, Walk(2, (5, 6), None, "length"), id="budget in the run"),
        pytest.param([5], [6, 7], 1, Walk(0, (6,), 6, "length"), id="budget at the correction"),
    ],
)
def test_walk_table(draft: list[int], samples: list[int], remaining: int, expected: Walk) -> None:
    assert walk(draft, samples, remaining, EOS) == expected


def test_too_few_samples_is_an_error() -> None:
    with pytest.raises(ValueError, match="3 samples"):
        walk([5, 6], [5, 6], 9, EOS)


@given(windows(), st.data(), st.booleans(), st.sampled_from([None, "cancelled", "failed"]))
def test_outcomes_in_their_order(
    window: tuple[list[int], list[int], int],
    data: st.DataObject,
    stopped: bool,
    broken: Broken | None,
) -> None:
    """cancelled > consumer stop > EOS > length > go on; the state keeps delivered drafts only."""
    draft, samples, remaining = window
    verdict = walk(draft, samples, remaining, EOS)
    delivered = data.draw(st.integers(0, len(verdict.emitted)))
    got = settle(verdict, delivered, stopped=stopped, broken=broken)
    assert got.retained <= min(delivered, verdict.accepted)
    if broken is not None:
        assert got == Outcome(broken, 0, None)
    elif stopped:
        assert got == Outcome("stop", min(delivered, verdict.accepted), None)
    else:
        assert got.end == verdict.end
        assert got.pending == (verdict.correction if verdict.end is None else None)
        assert got.retained == min(delivered, verdict.accepted)
