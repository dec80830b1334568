"""Thresholds are fitted to what was accepted, and hold on text they have not seen."""

from __future__ import annotations

import json
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

import fixtures
from engine.drafters.calibration import Position, Trial, apply, fit_thresholds, interval
from engine.drafters.context_rows import BlockProvider
from engine.drafters.dspark import CALIBRATION, open_dspark
from fixtures import blocks, pool, select, tokenizer

from .pools import target_of

TRIALS = st.lists(
    st.builds(
        Trial,
        st.tuples(*[st.sampled_from([0.1, 0.2, 0.5, 0.7, 0.9])] * 3),
        st.integers(0, 3),
    ),
    min_size=1,
    max_size=40,
)


@given(TRIALS, st.sampled_from([0.3, 0.5, 0.8, 1.0]), st.integers(1, 5))
def test_a_threshold_is_the_lowest_that_is_precise_enough(
    trials: list[Trial], precision: float, min_kept: int
) -> None:
    """By trying every confidence that occurs, on the trials that earlier positions keep."""
    thresholds = fit_thresholds(trials, precision, min_kept)
    alive = trials
    for k in range(3):
        good = []
        for level in sorted({trial.confidence[k] for trial in alive}):
            kept = [trial for trial in alive if trial.confidence[k] >= level]
            right = sum(trial.accepted > k for trial in kept)
            if len(kept) >= min_kept and right >= precision * len(kept):
                good.append(level)
        assert thresholds[k : k + 1] == tuple(good[:1])
        if not good:
            assert len(thresholds) == k
            break
        alive = [trial for trial in alive if trial.confidence[k] >= good[0]]
    for position in apply(trials, thresholds):
        assert position.kept >= min_kept
        assert position.precision >= precision


def test_a_sure_head_is_cut_where_it_says() -> None:
    """Drafts are right as often as their confidence says: at 0.8 the cut is where the mean is."""
    draw = random.Random(3)
    sure = [draw.random() for _ in range(20_000)]
    trials = [Trial((share,), int(draw.random() < share)) for share in sure]
    (threshold,) = fit_thresholds(trials, 0.8)
    assert threshold == pytest.approx(0.6, abs=0.03)


def test_an_interval_is_wilsons() -> None:
    """Values from his formula by hand; nothing seen says nothing."""
    assert interval(Position(0, 0)) == (0.0, 1.0)
    assert interval(Position(10, 10)) == pytest.approx((0.7225, 1.0), abs=1e-4)
    assert interval(Position(100, 80)) == pytest.approx((0.7112, 0.8666), abs=1e-4)


@pytest.mark.parametrize("family", ["dense", "hybrid"])
def test_stored_thresholds_reach_their_precision_on_held_out_prompts(family: str) -> None:
    """`calibrated`: 95 % intervals of each position's precision reach what was fitted for.

    The prompts are of the pool: neither trained nor calibrated on. Thresholds are about something:
    without them the precision is below, with them some drafts are kept and some are not.
    """
    target, folder = target_of(family), fixtures.drafter_dir(f"{family}-dspark")
    stored = json.loads((folder / CALIBRATION).read_text(encoding="utf-8"))
    provider = open_dspark(folder, target)
    assert provider.thresholds == tuple(stored["thresholds"])
    whole = BlockProvider("whole", "whole", provider.model, "", target)
    made = tokenizer.build()
    texts = [prompt.text for prompt in pool.prompts(select.GENERAL, 6)]
    found = blocks.trials(whole, target, [tokenizer.encode(made, text) for text in texts])
    drafts = provider.model.shape.drafts
    plain, kept = apply(found, (0.0,) * drafts), apply(found, provider.thresholds)
    assert kept
    for position in kept:
        assert interval(position)[1] >= stored["precision"], kept
    total = Position(sum(p.kept for p in kept), sum(p.accepted for p in kept))
    before = Position(sum(p.kept for p in plain), sum(p.accepted for p in plain))
    assert before.precision < stored["precision"] <= interval(total)[1]
    assert total.kept > 100
    assert total.precision > before.precision
