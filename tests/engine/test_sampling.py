"""Where a draw comes from: the positional keys, mlx-lm's order, and the distribution."""

from __future__ import annotations

from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlx_lm.sample_utils import apply_xtc, make_sampler

from engine import BadInput, LogitsOptions, Sampling
from engine.host import read
from engine.sampling import (
    TOKEN_STREAM,
    XTC_STREAM,
    Greedy,
    Positional,
    RowSampling,
    Sampler,
    Sequential,
    log_softmax,
    make_row_sampler,
    resolve_seed,
    scaled,
    step_key,
    without_top_choices,
)

V = 16
SAMPLING = st.builds(
    Sampling,
    temperature=st.sampled_from([0.3, 1.0, 2.0]),
    top_p=st.sampled_from([0.0, 0.7, 1.0]),
    top_k=st.sampled_from([0, 1, 4]),
    min_p=st.sampled_from([0.0, 0.1]),
    seed=st.integers(0, 2**64 - 1),
    xtc_probability=st.sampled_from([0.0, 0.5, 1.0]),
    xtc_threshold=st.sampled_from([0.0, 0.05, 0.2]),
)
EXEMPT = [3, 7]


def logprobs(rows: int, seed: int = 3) -> mx.array:
    return log_softmax(2 * mx.random.normal((rows, V), key=mx.random.key(seed)))


def test_keys_are_the_documented_ones() -> None:
    """The key of a step is part of every recorded sampled stream: these values may never move."""
    keys = [step_key(0, 0), step_key(0, 1), step_key(7, 0), step_key(2**64 - 1, 10**6)]
    assert keys == [
        (2802244911, 1293516399),
        (2189913628, 1326138252),
        (3098854039, 2125188677),
        (39282206, 2696189183),
    ]
    assert step_key(5, 3, stream=1) != step_key(5, 3, stream=0)


@given(st.integers(0, 2**64 - 1), st.lists(st.integers(0, 10**9), min_size=2, unique=True))
def test_steps_have_keys_of_their_own(seed: int, steps: list[int]) -> None:
    """No two steps of a request share noise, nor do the streams of one step."""
    keys = [step_key(seed, step, stream) for step in steps for stream in (0, 1)]
    assert len(set(keys)) == len(keys)


@given(SAMPLING, st.integers(0, 100), st.integers(1, 6), st.integers(0, 5))
def test_a_draw_depends_on_its_step_alone(
    sampling: Sampling, step: int, width: int, position: int
) -> None:
    """`lossless-sampled`: the same ids one by one, in a window, and beside other rows."""
    position %= width
    window = logprobs(width)
    sampler = make_row_sampler(sampling, EXEMPT)
    whole = read(sampler.draw(window, step))
    alone = sampler.draw(window[position : position + 1], step + position).item()
    group = RowSampling([Greedy(), sampler]).sample(mx.stack([window, window]), [0, step])
    assert whole[position] == alone
    assert group.tolist() == [mx.argmax(window, axis=-1).tolist(), whole]


@given(SAMPLING.map(lambda sampling: replace(sampling, rng="sequential")))
def test_sequential_is_mlx_lm_on_the_global_key(sampling: Sampling) -> None:
    """`oracle-sampled`: same calls, same draws, one call for a whole window."""
    assert sampling.seed is not None
    ours = make_row_sampler(sampling, EXEMPT)
    got = [ours.draw(logprobs(n, n), 0).tolist() for n in (1, 1, 4)]
    mx.random.seed(sampling.seed)
    theirs = make_sampler(
        sampling.temperature,
        sampling.top_p,
        sampling.min_p,
        top_k=sampling.top_k,
        xtc_probability=sampling.xtc_probability,
        xtc_threshold=sampling.xtc_threshold,
        xtc_special_tokens=EXEMPT,
    )
    assert got == [theirs(logprobs(n, n)).tolist() for n in (1, 1, 4)]
    with_processors = replace(sampling, logits=LogitsOptions(presence_penalty=1.0))
    window = make_row_sampler(with_processors, EXEMPT).draw(logprobs(4), 0).tolist()
    mx.random.seed(sampling.seed)
    assert window == [theirs(row[None]).item() for row in logprobs(4)]


@given(
    cells=st.lists(st.sampled_from([-3.0, -1.0, -0.5, 0.0, 0.5, 2.0]), min_size=V, max_size=V),
    noise=st.sampled_from([0.0, 1.0]),
    seed=st.integers(0, 2**32 - 1),
)
@pytest.mark.parametrize(
    ("probability", "threshold", "exempt", "dtype"),
    [
        (0.0, 0.1, [], mx.float32),
        (0.5, 0.05, EXEMPT, mx.float32),
        (1.0, 0.2, [], mx.float32),
        (1.0, 0.0, EXEMPT, mx.bfloat16),
        (0.5, 0.5, [], mx.bfloat16),
    ],
)
def test_xtc_is_mlx_lms_for_the_same_coin(
    cells: list[float],
    noise: float,
    seed: int,
    probability: float,
    threshold: float,
    exempt: list[int],
    dtype: mx.Dtype,
) -> None:
    """Bit for bit, with ties (noise 0) and ids that are never dropped, in both dtypes."""
    window = mx.stack([log_softmax(mx.array(cells)), log_softmax(-mx.array(cells))])
    window = (window + noise * mx.random.normal(window.shape, key=mx.random.key(1))).astype(dtype)
    sampling = Sampling(1.0, xtc_probability=probability, xtc_threshold=threshold)
    coin = mx.random.uniform(key=mx.random.split(mx.random.key(seed))[1])
    got = scaled(window, sampling, coin, exempt)
    mx.random.seed(seed)
    expected = apply_xtc(window, probability, threshold, exempt)
    assert (got.dtype, read(got)) == (expected.dtype, read(expected))


def test_xtc_drops_all_likely_ids_but_the_least() -> None:
    """The definition, by hand: 0.4 and 0.3 go, 0.2 is the least above 0.1 and stays."""
    row = mx.log(mx.array([[0.4, 0.2, 0.3, 0.06, 0.04]]))
    kept = [[v > -mx.inf for v in read(without_top_choices(row, 0.1, e))[0]] for e in ([], [0, 99])]
    assert kept == [[False, True, False, True, True], [True, True, False, True, True]]
    at_the_threshold: float = read(mx.softmax(row, axis=-1))[0][1]
    assert read(without_top_choices(row, at_the_threshold, [])[0])[2] > -mx.inf


@given(SAMPLING.filter(lambda s: s.xtc_probability == 0.5), st.integers(0, 100))
def test_the_coin_of_a_step_has_a_key_of_its_own(sampling: Sampling, step: int) -> None:
    """Part of every recorded XTC stream: coin from stream 1 of the step, token from stream 0."""
    assert sampling.seed is not None
    window = logprobs(4)
    expected = []
    for n, row in enumerate(window):
        keys = [
            mx.array(step_key(sampling.seed, step + n, stream), dtype=mx.uint32)
            for stream in (XTC_STREAM, TOKEN_STREAM)
        ]
        coin = mx.random.uniform(key=keys[0])
        logits = scaled(row[None], sampling, coin, EXEMPT)[0]
        expected.append(mx.random.categorical(logits, key=keys[1]).item())
    assert make_row_sampler(sampling, EXEMPT).draw(window, step).tolist() == expected


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(1.0, seed=11),
        Sampling(0.7, seed=12),
        Sampling(1.0, top_k=4, seed=13),
        Sampling(1.0, top_p=0.8, seed=14),
        Sampling(1.5, min_p=0.1, seed=15),
        Sampling(1.0, xtc_probability=0.3, xtc_threshold=0.1, seed=16),
        Sampling(0.8, top_k=6, xtc_probability=0.7, xtc_threshold=0.05, seed=17),
    ],
    ids=str,
)
def test_draws_have_the_target_distribution(sampling: Sampling) -> None:
    """`distribution`: chi-square of 100,000 positional draws against exact probabilities.

    XTC mixes two distributions by its coin. The filters are written out here in float64; the bound
    lies beyond the 1e-6 quantile.
    """
    n = 100_000
    row = logprobs(1)
    draws = np.array(Positional(sampling).draw(mx.broadcast_to(row, (n, V)), 0))
    logp = np.array(row[0], dtype=np.float64)
    p = sum(
        share * filtered(logp, sampling, xtc=xtc)
        for share, xtc in (
            (1 - sampling.xtc_probability, False),
            (sampling.xtc_probability, True),
        )
    )
    assert isinstance(p, np.ndarray)
    counts = np.bincount(draws, minlength=V)
    assert counts[p == 0].sum() == 0
    expected = n * p[p > 0]
    statistic = float(((counts[p > 0] - expected) ** 2 / expected).sum())
    df = int((p > 0).sum()) - 1
    assert statistic < df + 5.2 * np.sqrt(2 * df) + 20, (statistic, df)


def filtered(logp: np.ndarray, sampling: Sampling, *, xtc: bool) -> np.ndarray:
    """Exact probabilities [V] after top-p, min-p, perhaps XTC, and top-k, then temperature."""
    p = np.exp(logp)
    keep = np.ones(V, dtype=bool)
    order = np.argsort(-p)
    if 0 < sampling.top_p < 1:
        above = np.concatenate([[0.0], np.cumsum(p[order])[:-1]])
        keep[order[above >= sampling.top_p]] = False
    if sampling.min_p:
        keep &= p >= p.max() * sampling.min_p
    if xtc:
        above = np.where(keep, p, 0.0) / p[keep].sum() > sampling.xtc_threshold
        keep &= ~above | (p <= p[above].min(initial=np.inf))
    if sampling.top_k:
        still = np.where(keep, p, -1.0)
        keep[np.argsort(-still)[sampling.top_k :]] = False
    weights = np.where(keep, p ** (1 / sampling.temperature), 0.0)
    result: np.ndarray = weights / weights.sum()
    return result


def test_a_missing_seed_is_drawn() -> None:
    """Two requests without a seed do not repeat each other, and each says what it drew."""
    seeds = {resolve_seed(Sampling(1.0)).seed for _ in range(8)}
    assert len(seeds) == 8
    assert None not in seeds
    assert resolve_seed(Sampling()).seed is None


def test_sequential_refuses_a_group() -> None:
    rows: list[Sampler] = [Sequential(Sampling(1.0, seed=1, rng="sequential")), Greedy()]
    with pytest.raises(BadInput, match="serves 1 row"):
        RowSampling(rows)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"temperature": -0.1}, "temperature must be at least 0, .* got -0.1"),
        ({"temperature": float("nan")}, "temperature must be at least 0, .* got nan"),
        ({"temperature": 1e-40}, "within 1e-30..1e30, got 1e-40"),
        ({"temperature": 1e39}, "within 1e-30..1e30, got 1e"),
        ({"top_p": 1.1}, "top_p must be between 0 and 1, got 1.1"),
        ({"min_p": -1.0}, "min_p must be between 0 and 1, got -1.0"),
        ({"xtc_probability": 1.5}, "xtc_probability must be between 0 and 1, got 1.5"),
        ({"xtc_threshold": 0.6}, "xtc_threshold must be between 0 and 0.5, got 0.6"),
        ({"xtc_threshold": float("nan")}, "xtc_threshold must be between 0 and 0.5, got nan"),
        ({"top_k": -1}, "top_k must be at least 0, got -1"),
        ({"seed": -1}, "seed must be between 0"),
        ({"rng": "other"}, "rng must be 'positional' or 'sequential', got 'other'"),
    ],
)
def test_bad_sampling_is_refused(values: dict[str, object], message: str) -> None:
    with pytest.raises(BadInput, match=message):
        Sampling(**values)  # type: ignore[arg-type]
