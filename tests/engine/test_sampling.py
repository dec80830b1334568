"""Where a draw comes from: the positional keys, mlx-lm's order, and the distribution."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlx_lm.sample_utils import make_sampler

from engine import BadInput, Sampling
from engine.host import read
from engine.sampling import (
    Greedy,
    Positional,
    RowSampling,
    Sampler,
    Sequential,
    log_softmax,
    make_row_sampler,
    resolve_seed,
    step_key,
)

V = 16
SAMPLING = st.builds(
    Sampling,
    temperature=st.sampled_from([0.3, 1.0, 2.0]),
    top_p=st.sampled_from([0.0, 0.7, 1.0]),
    top_k=st.sampled_from([0, 1, 4]),
    min_p=st.sampled_from([0.0, 0.1]),
    seed=st.integers(0, 2**64 - 1),
)


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
    sampler = make_row_sampler(sampling)
    whole = read(sampler.draw(window, step))
    alone = sampler.draw(window[position : position + 1], step + position).item()
    group = RowSampling([Greedy(), sampler]).sample(mx.stack([window, window]), [0, step])
    assert whole[position] == alone
    assert group.tolist() == [mx.argmax(window, axis=-1).tolist(), whole]


@given(
    SAMPLING.map(lambda s: Sampling(s.temperature, s.top_p, s.top_k, s.min_p, s.seed, "sequential"))
)
def test_sequential_is_mlx_lm_on_the_global_key(sampling: Sampling) -> None:
    """`oracle-sampled`: same calls, same draws, one call for a whole window."""
    assert sampling.seed is not None
    ours = make_row_sampler(sampling)
    got = [ours.draw(logprobs(n, n), 0).tolist() for n in (1, 1, 4)]
    mx.random.seed(sampling.seed)
    theirs = make_sampler(
        sampling.temperature, sampling.top_p, sampling.min_p, top_k=sampling.top_k
    )
    assert got == [theirs(logprobs(n, n)).tolist() for n in (1, 1, 4)]


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(1.0, seed=11),
        Sampling(0.7, seed=12),
        Sampling(1.0, top_k=4, seed=13),
        Sampling(1.0, top_p=0.8, seed=14),
        Sampling(1.5, min_p=0.1, seed=15),
    ],
    ids=str,
)
def test_draws_have_the_target_distribution(sampling: Sampling) -> None:
    """`distribution`: chi-square of 100,000 positional draws against exact probabilities.

    The filters are written out here in float64; the bound lies beyond the 1e-6 quantile.
    """
    n = 100_000
    row = logprobs(1)
    draws = np.array(Positional(sampling).draw(mx.broadcast_to(row, (n, V)), 0))
    p = filtered(np.array(row[0], dtype=np.float64), sampling)
    counts = np.bincount(draws, minlength=V)
    assert counts[p == 0].sum() == 0
    expected = n * p[p > 0]
    statistic = float(((counts[p > 0] - expected) ** 2 / expected).sum())
    df = int((p > 0).sum()) - 1
    assert statistic < df + 5.2 * np.sqrt(2 * df) + 20, (statistic, df)


def filtered(logp: np.ndarray, sampling: Sampling) -> np.ndarray:
    """Exact probabilities [V] after top-p, min-p and top-k, then temperature."""
    p = np.exp(logp)
    keep = np.ones(V, dtype=bool)
    order = np.argsort(-p)
    if 0 < sampling.top_p < 1:
        above = np.concatenate([[0.0], np.cumsum(p[order])[:-1]])
        keep[order[above >= sampling.top_p]] = False
    if sampling.min_p:
        keep &= p >= p.max() * sampling.min_p
    if sampling.top_k:
        keep[order[sampling.top_k :]] = False
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
        ({"top_k": -1}, "top_k must be at least 0, got -1"),
        ({"seed": -1}, "seed must be between 0"),
        ({"rng": "other"}, "rng must be 'positional' or 'sequential', got 'other'"),
    ],
)
def test_bad_sampling_is_refused(values: dict[str, object], message: str) -> None:
    with pytest.raises(BadInput, match=message):
        Sampling(**values)  # type: ignore[arg-type]
