"""Which random bits decide: keys, filters, and what a margin promises."""

from __future__ import annotations

from dataclasses import asdict
from itertools import islice
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.sample_utils import apply_xtc, make_sampler

from oracle.noise import Filters, Positional, Sequential, draw_margins, single_row_draw

VOCABULARY_SIZE = 64
SEEDS = st.integers(0, 2**64 - 1)


def _logits(seed: int, rows: int = 1, spread: float = 2.0) -> mx.array:
    return spread * mx.random.normal((rows, VOCABULARY_SIZE), key=mx.random.key(seed))


def _logprobs(seed: int, rows: int = 1) -> mx.array:
    logits = _logits(seed, rows)
    return logits - mx.logsumexp(logits, axis=-1, keepdims=True)


def _ids(drawn: mx.array) -> list[int]:
    return [int(token) for token in np.array(drawn).reshape(-1)]


def test_positional_words_follow_splitmix64() -> None:
    """`lossless-sampled`: the published first outputs of splitmix64 from state 0, then our fold."""
    assert Positional(0).words(0) == _words(_mix(0xE220A8397B1DCDAF))
    assert Positional(2**64).words(0) == Positional(0).words(0)
    assert Positional(5, first_step=3).words(4) == Positional(5).words(7)
    distinct = {Positional(1).words(step, stream) for step in range(50) for stream in (0, 1)}
    assert len(distinct) == 100


def _mix(z: int) -> int:
    """splitmix64 as its authors print it, in numpy's wrapping arithmetic."""
    with np.errstate(over="ignore"):
        x = np.uint64(z) + np.uint64(0x9E3779B97F4A7C15)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return int(x ^ (x >> np.uint64(31)))


def _words(value: int) -> tuple[int, int]:
    return value >> 32, value & 0xFFFFFFFF


@pytest.mark.parametrize(
    "filters",
    [
        Filters(0.8),
        Filters(0.8, top_p=0.9),
        Filters(1.3, top_k=5),
        Filters(1.0, min_p=0.05),
        Filters(0.7, top_p=0.8, top_k=10, min_p=0.02),
        Filters(1.0, top_p=1.0),
        Filters(0.8, xtc_probability=0.5, xtc_threshold=0.05),
        Filters(
            1.0, 0.9, 6, 0.02, xtc_probability=0.7, xtc_threshold=0.03, xtc_special_tokens=(9,)
        ),
    ],
    ids=str,
)
@pytest.mark.parametrize("rows", [1, 2, 4])
def test_sequential_keys_and_filters_are_those_of_make_sampler(filters: Filters, rows: int) -> None:
    """`oracle-sampled`: filter chain, key order and bits of mlx-lm's own sampler, without it."""
    options = asdict(filters)
    special_tokens = list(options.pop("xtc_special_tokens"))
    temperature = options.pop("temperature")
    sampler = make_sampler(temperature, xtc_special_tokens=special_tokens, **options)
    mx.random.seed(17)
    drawn = [_ids(sampler(_logprobs(call, rows))) for call in range(20)]
    calls = islice(Sequential(17).bits(filters), 20)
    for call, ((key, coin), tokens) in enumerate(zip(calls, drawn, strict=True)):
        scaled = filters.scaled(_logprobs(call, rows), coin)
        assert _ids(mx.random.categorical(scaled, key=key)) == tokens
        assert min(draw_margins(scaled, key, tokens)) >= 0


# 1, 2, 4... equal candidates have exactly these probabilities.
THRESHOLDS = [0.0, 1 / 64, 1 / 16, 0.1, 0.25, 0.5]


@pytest.mark.parametrize("special_tokens", [(), (0,), (2, 5)], ids=str)
@pytest.mark.parametrize("threshold", THRESHOLDS)
@given(seed=SEEDS, num_equal=st.sampled_from([0, 1, 2, 4, 16, 64]))
def test_xtc_is_mlx_lms_given_its_coin(
    threshold: float, special_tokens: tuple[int, ...], seed: int, num_equal: int
) -> None:
    """`oracle-sampled`: ties of candidates, candidates on the threshold, and special tokens too."""
    logprobs = _logprobs(seed, 3)
    if num_equal:
        logprobs = mx.where(mx.arange(VOCABULARY_SIZE) < num_equal, 0.0, -mx.inf)[None]
    filters = Filters(1.0, 0, 0, 0, 0.5, threshold, special_tokens)
    mx.random.seed(seed)
    theirs = apply_xtc(logprobs, 0.5, threshold, list(special_tokens))
    coin = next(Sequential(seed).bits(filters)).coin
    assert mx.array_equal(filters.stages(logprobs, coin)[-1], theirs)


@given(seed=SEEDS)
def test_each_row_has_its_own_coin_or_all_have_one(seed: int) -> None:
    """`lossless-sampled`: a window under `positional` is excluded row by row."""
    filters = Filters(1.0, xtc_probability=0.5, xtc_threshold=0.02)
    calls = [Positional(seed).bits(step, filters) for step in range(4)]
    rows = _logprobs(seed, 4)
    coins = mx.stack([bits.coin for bits in calls if bits.coin is not None])
    window = filters.scaled(rows, coins[:, None])
    for step, (row, coin) in enumerate(zip(rows, coins, strict=True)):
        assert mx.array_equal(window[step], filters.scaled(row, coin))
        assert mx.array_equal(filters.scaled(rows, coin)[step], filters.scaled(row, coin))


def test_a_coin_is_tossed_for_xtc_alone() -> None:
    """`oracle-sampled`: without XTC, and under greedy, a sampler call spends one key."""
    for filters in (Filters(1.0), Filters(0.0, xtc_probability=0.5)):
        assert Positional(3).bits(0, filters).coin is None
        calls = list(islice(Sequential(3).bits(filters), 2))
        assert [bits.coin for bits in calls] == [None, None]
        keys = list(islice(Sequential(3).keys(), 2))
        assert all(mx.array_equal(b.key, key) for b, key in zip(calls, keys, strict=True))
    with pytest.raises(ValueError, match=r"XTC with probability 0\.5 needs a coin"):
        Filters(1.0, xtc_probability=0.5).scaled(_logprobs(1))


def test_one_row_is_drawn_otherwise_than_a_vector() -> None:
    """`lossless-sampled`: why a positional draw is defined on a vector (mlx 0.32.4)."""
    keys = [mx.random.key(seed) for seed in range(8)]
    row = _logits(1)
    as_row = [_ids(mx.random.categorical(row, key=key)) for key in keys]
    as_vector = [_ids(mx.random.categorical(row[0], key=key)) for key in keys]
    assert (single_row_draw() == "cdf") == (as_row != as_vector)


@pytest.mark.parametrize("shape", ["vector", "row", "window"])
@settings(max_examples=25, deadline=None)
@given(seed=SEEDS)
def test_a_margin_is_twice_the_change_that_draws_another_token(shape: str, seed: int) -> None:
    """`portable`: pushing a decision by a little less than m/2 keeps it, a little more does not."""
    key = mx.random.key(seed)
    logits = _logits(seed ^ 1, 3 if shape == "window" else 1)
    scaled = logits[0] if shape == "vector" else logits
    tokens = _ids(mx.random.categorical(scaled, key=key))
    margin = draw_margins(scaled, key, tokens)[0]
    assert margin >= 0

    def survives(push: np.ndarray) -> bool:
        pushed = scaled + mx.array(push if shape == "vector" else push[None])
        return _ids(mx.random.categorical(pushed, key=key))[0] == tokens[0]

    index = np.arange(VOCABULARY_SIZE)
    if shape == "row" and single_row_draw() == "cdf":
        # Push mass over the token's lower edge, then over its upper one.
        pushes = [np.where(index < tokens[0], 1.0, -1.0), np.where(index <= tokens[0], -1.0, 1.0)]
    else:
        pushes = [np.where(index == tokens[0], -1.0, 1.0)]
    small, large = 0.49 * margin, 0.51 * margin + 1e-5
    assert all(survives((small * push).astype(np.float32)) for push in pushes) or margin < 1e-4
    assert not all(survives((large * push).astype(np.float32)) for push in pushes)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"temperature": -0.1}, "temperature must be at least 0"),
        ({"temperature": float("nan")}, "temperature must be at least 0"),
        ({"temperature": 1.0, "top_p": 1.1}, "top_p must be within 0..1"),
        ({"temperature": 1.0, "top_k": -1}, "top_k must be at least 0"),
        ({"temperature": 1.0, "min_p": 2.0}, "min_p must be within 0..1"),
        ({"temperature": 1.0, "xtc_probability": 1.5}, "xtc_probability must be within 0..1"),
        ({"temperature": 1.0, "xtc_threshold": 0.6}, "xtc_threshold must be within 0..0.5"),
        ({"temperature": 1.0, "xtc_special_tokens": (-1,)}, "xtc_special_tokens must be at least"),
    ],
)
def test_filters_refuse_what_names_no_distribution(wrong: dict[str, Any], words: str) -> None:
    """Bad input is named with its limit."""
    with pytest.raises(ValueError, match=words):
        Filters(**wrong)
