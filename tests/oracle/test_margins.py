"""Margins: the replay reproduces every run it is told about, and nothing else."""

from __future__ import annotations

import math

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from oracle.inprocess import Loaded, PositionalSampler, Run, plain, sequential_sampler, speculative
from oracle.margins import (
    DraftedRound,
    ReplayError,
    draft_margins,
    floor_pow2,
    greedy_margins,
    replay,
    sampled_margins,
    shape_delta,
)
from oracle.models import LanguageModel
from oracle.noise import GREEDY, Filters, Positional, Sequential
from oracle.processors import NO_PROCESSORS, Processors

TEXT = "The quick brown fox"
NUM_TOKENS = 16
SEED = 2**40 + 3
EACH_FILTER = [
    Filters(0.8),
    Filters(0.8, top_p=0.9),
    Filters(1.0, top_k=5),
    Filters(1.0, min_p=0.05),
    Filters(0.7, top_p=0.8, top_k=10, min_p=0.02),
    Filters(0.9, xtc_probability=0.5, xtc_threshold=0.02),
    Filters(1.0, 0.95, 20, 0.01, xtc_probability=0.8, xtc_threshold=0.03, xtc_special_tokens=(8,)),
]
EACH_PROCESSOR = [
    NO_PROCESSORS,
    Processors(((8, 2.0), (40, -1.0)), 1.3, 12, 0.5, 30, -0.25, 0),
]
each_filter = pytest.mark.parametrize("filters", EACH_FILTER, ids=str)
each_processor = pytest.mark.parametrize("processors", EACH_PROCESSOR, ids=["bare", "processed"])


def _positional(
    target: Loaded,
    prompt: list[int],
    filters: Filters,
    first_step: int = 0,
    processors: Processors = NO_PROCESSORS,
) -> Run:
    sampler = PositionalSampler(SEED, filters, first_step)
    return plain(target, prompt, NUM_TOKENS, sampler, processors=processors)


def test_greedy_margins_are_the_top_two_gaps(target: Loaded) -> None:
    """`portable`: one per generated position, and a changed id is not this run."""
    prompt = target.encode(TEXT)
    run = plain(target, prompt, NUM_TOKENS)
    margins = greedy_margins(target.model, prompt, run.generated)
    logprobs = np.sort(np.array(replay(target.model, prompt, run.generated)), axis=-1)
    assert margins == pytest.approx(logprobs[:, -1] - logprobs[:, -2], abs=1e-6)
    changed = [*run.generated[:-1], run.generated[-1] ^ 1]
    with pytest.raises(ReplayError, match=r"position 15 by .*, more than 0\.001"):
        greedy_margins(target.model, prompt, changed)
    assert greedy_margins(target.model, prompt, changed, slack=99.0) == (*margins[:-1], 0.0)


def test_greedy_margins_see_each_positions_own_history(target: Loaded) -> None:
    """`portable`: the gaps of the processed logits; without the processors it is not this run."""
    prompt = target.encode(TEXT)
    for processors in (Processors(presence_penalty=6.0), Processors(repetition_penalty=1.5)):
        run = plain(target, prompt, 40, processors=processors)
        margins = greedy_margins(target.model, prompt, run.generated, processors=processors)
        for i in range(0, len(margins), 13):
            history = mx.array([*prompt, *run.generated[:i]])
            logits = target.model(history[None])[0, -1:]
            first, second = np.sort(np.array(processors.apply(history, logits))[0])[:-3:-1]
            assert margins[i] == pytest.approx((first - second) / processors.gain, abs=1e-4)
        with pytest.raises(ReplayError):
            greedy_margins(target.model, prompt, run.generated)


@each_processor
@each_filter
def test_sampled_margins_reproduce_plain_runs(
    target: Loaded, filters: Filters, processors: Processors
) -> None:
    """`portable`: under both policies every emitted id is the replay's own decision."""
    prompt = target.encode(TEXT)
    sampler = sequential_sampler(SEED, filters)
    sequential = plain(target, prompt, NUM_TOKENS, sampler, processors=processors)
    positional = _positional(target, prompt, filters, 5, processors)
    for run, policy in ((sequential, Sequential(SEED)), (positional, Positional(SEED, 5))):
        margins = sampled_margins(
            target.model, prompt, run.generated, filters, policy, processors=processors
        )
        assert len(margins) == len(run.generated)
        assert min(margins) > 0
    assert sequential.generated != positional.generated


@each_filter
def test_sampled_margins_reproduce_two_model_runs(
    target: Loaded, draft: Loaded, filters: Filters
) -> None:
    """`portable`: mlx-lm's order of draws, draft steps first, one call for the window."""
    prompt = target.encode(TEXT)
    run = speculative(target, draft, prompt, NUM_TOKENS, 3, sequential_sampler(SEED, filters))
    windows = [(turn.drafted, turn.emitted) for turn in run.rounds]
    margins = sampled_margins(
        target.model, prompt, run.generated, filters, Sequential(SEED), windows
    )
    assert min(margins) > 0


def test_sampled_margins_refuse_another_seed(target: Loaded) -> None:
    """`portable`: the margins of a run under other noise than it saw are not certified."""
    prompt = target.encode(TEXT)
    run = _positional(target, prompt, EACH_FILTER[0])
    with pytest.raises(ReplayError, match="replay contradicts id"):
        sampled_margins(target.model, prompt, run.generated, EACH_FILTER[0], Positional(SEED + 1))


def test_windows_must_fit_the_run(target: Loaded) -> None:
    """Bad input is named with its limit."""
    model, prompt, filters = target.model, [5, 6], EACH_FILTER[0]
    with pytest.raises(ValueError, match="3 tokens were generated"):
        sampled_margins(model, prompt, [1, 2, 3], filters, Sequential(1), [(3, 2)])
    with pytest.raises(ValueError, match=r"emits 1\.\.2, got 3"):
        sampled_margins(model, prompt, [1, 2, 3], filters, Sequential(1), [(1, 3)])
    with pytest.raises(ValueError, match="pass none"):
        sampled_margins(model, prompt, [1, 2, 3], filters, Positional(1), [(2, 3)])


class Fixed:
    """A model whose logits [V] are the same at every position."""

    def __init__(self, logits: mx.array) -> None:
        self._logits = logits
        self.layers: list[object] = []

    def __call__(self, inputs: mx.array, cache: list[object] | None = None) -> mx.array:
        return mx.broadcast_to(self._logits, (*inputs.shape, self._logits.size))


def _xtc(threshold: float, top_p: float = 0.0) -> Filters:
    return Filters(
        1.0, top_p, xtc_probability=1.0, xtc_threshold=threshold, xtc_special_tokens=(0,)
    )


@pytest.mark.parametrize(
    ("filters", "cut"),
    [
        (Filters(1.0, top_k=2), math.log(0.3 / 0.15)),
        (Filters(1.0, min_p=0.25), abs(math.log(0.15 / (0.25 * 0.5)))),
        # Mass above the candidates: 0, 0.5, 0.8, 0.95. The nearest to the cut, in log-odds, is 0.8.
        (Filters(1.0, top_p=0.85), math.log(0.85 / 0.15) - math.log(0.8 / 0.2)),
        # Top-p keeps 0.5 and 0.3, so top-k 2 has nothing left to cut.
        (Filters(1.0, top_p=0.7, top_k=2), math.log(0.8 / 0.2) - math.log(0.7 / 0.3)),
        # XTC: 0.3 is nearest to the threshold, in log-odds. Token 0 stays where the coin is large.
        (_xtc(0.35), math.log(0.35 / 0.65) - math.log(0.3 / 0.7)),
        # 0.5 and 0.3 are above it, and 0.15 is nearest to it.
        (_xtc(0.16), math.log(0.16 / 0.84) - math.log(0.15 / 0.85)),
        # Alone above the threshold a candidate stays, so 0.5 may be as near to it as it likes.
        (_xtc(0.499), math.log(0.499 / 0.501) - math.log(0.3 / 0.7)),
        # 0.5, 0.3 and 0.15 are above it, far away: the last two might change places.
        (_xtc(0.08), math.log(0.08 / 0.92) - math.log(0.05 / 0.95)),
        (_xtc(0.004, top_p=0.9), math.log(0.3 / 0.15)),
    ],
    ids=str,
)
def test_a_margin_is_no_larger_than_the_distance_to_the_nearest_cut(
    filters: Filters, cut: float
) -> None:
    """`portable`: on a distribution where every cut is known by hand."""
    model: LanguageModel = Fixed(mx.log(mx.array([0.5, 0.3, 0.15, 0.05])))
    prompt = [1]
    logprobs = replay(model, prompt, [0])[0]
    seeds = [s for s in range(40) if _draw(logprobs, filters, Positional(s)) == 0]
    margins = [sampled_margins(model, prompt, [0], filters, Positional(s))[0] for s in seeds]
    assert max(margins) == pytest.approx(cut, rel=1e-4)


def _draw(logprobs: mx.array, filters: Filters, policy: Positional) -> int:
    key, coin = policy.bits(0, filters)
    return int(np.array(mx.random.categorical(filters.scaled(logprobs, coin), key=key)))


def test_xtc_has_no_margin_where_its_coin_is_too_large() -> None:
    """`portable`: the coin is exact, and without XTC only the draw can go otherwise."""
    model: LanguageModel = Fixed(mx.log(mx.array([0.5, 0.3, 0.15, 0.05])))
    filters = Filters(1.0, xtc_probability=0.5, xtc_threshold=0.14999)
    margins: dict[bool, list[float]] = {True: [], False: []}
    for seed in range(40):
        policy = Positional(seed)
        token = _draw(replay(model, [1], [0])[0], filters, policy)
        acts = bool(filters.excludes(policy.bits(0, filters).coin))
        margins[acts] += sampled_margins(model, [1], [token], filters, policy)
    assert max(margins[True]) < 1e-3 < min(margins[False])


@pytest.mark.parametrize(
    ("last", "tied"), [(-3.0, False), (-90.0, True), (-100.0, True), (-200.0, False)]
)
def test_a_probability_that_may_have_become_zero_is_a_tie(last: float, tied: bool) -> None:
    """`portable`: at threshold 0 XTC keeps the least float32 above 0, which may be subnormal."""
    model: LanguageModel = Fixed(mx.array([0.0, -1.0, last]))
    filters = _xtc(0.0)
    policy = Positional(1)
    token = _draw(replay(model, [1], [0])[0], filters, policy)
    (margin,) = sampled_margins(model, [1], [token], filters, policy)
    assert (margin == 0) == tied


NUM_IDS = 12
PUSHED = [
    GREEDY,
    Filters(1.0),
    Filters(1.0, top_p=0.8, top_k=5, min_p=0.05),
    Filters(1.0, xtc_probability=1.0, xtc_threshold=0.12),
    Filters(1.5, xtc_probability=1.0, xtc_threshold=0.02),
    Filters(1.0, 0.9, 4, 0.01, xtc_probability=1.0, xtc_threshold=0.1, xtc_special_tokens=(3,)),
]


@pytest.mark.parametrize(
    "processors",
    [
        NO_PROCESSORS,
        Processors(repetition_penalty=1.8),
        Processors(repetition_penalty=0.4, presence_penalty=0.7),
        Processors(((5, 1.5),), frequency_penalty=0.4, frequency_context_size=0),
    ],
    ids=["bare", "penalty", "reward", "additive"],
)
@pytest.mark.parametrize("filters", PUSHED, ids=range(len(PUSHED)))
@given(seed=st.integers(0, 2**32))
def test_no_change_of_the_logits_below_half_a_margin_decides_another_token(
    filters: Filters, processors: Processors, seed: int
) -> None:
    """`portable`: each logit pushed against all the others, through processors, filters and draw.

    From temperature 1 on, where the space of the draw is not wider than that of the logits.
    """
    prompt = [1, 4, 4, 7, 2]
    policy = Positional(seed)
    logits = 2.0 * mx.random.normal((NUM_IDS,), key=mx.random.key(seed))

    def decide(rows: mx.array) -> list[int]:
        processed = processors.apply(mx.array(prompt), rows)
        logprobs = processed - mx.logsumexp(processed, axis=-1, keepdims=True)
        if not filters.greedy:
            key, coin = policy.bits(0, filters)
            noise = mx.random.gumbel((NUM_IDS,), key=key)
            logprobs = filters.scaled(logprobs, coin) + noise
        return [int(token) for token in np.array(mx.argmax(logprobs, axis=-1))]

    (token,) = decide(logits[None])
    (margin,) = sampled_margins(
        Fixed(logits), prompt, [token], filters, policy, processors=processors
    )
    one_up = 2.0 * mx.eye(NUM_IDS) - 1.0
    pushes = mx.concatenate([one_up, -one_up])
    assert margin < 1e-4 or set(decide(logits + 0.49 * margin * pushes)) == {token}


def test_draft_margins_reproduce_greedy_and_positional_drafts(draft: Loaded) -> None:
    """`portable`: drafts made by hand with the draft model, two rounds, one of them empty."""
    prompt = draft.encode(TEXT)
    filters = Filters(0.9, top_p=0.95, xtc_probability=0.5, xtc_threshold=0.02)
    for sampled in (False, True):
        rounds = []
        context = list(prompt)
        step = 0
        for depth, emitted in ((3, (7, 8)), (0, (9,)), (2, (1, 2, 3))):
            sampler = PositionalSampler(SEED, filters, step)
            chosen = sampler if sampled else None
            ids = plain(draft, context, depth, chosen).generated if depth else ()
            rounds.append(DraftedRound(ids, emitted))
            context += emitted
            step += len(emitted)
        options = (filters, Positional(SEED)) if sampled else (None, None)
        margins = draft_margins(draft.model, prompt, rounds, *options)
        assert [len(row) for row in margins] == [3, 0, 2]
        assert min(min(row) for row in margins if row) > 0
        wrong = [DraftedRound((rounds[0].draft[0] ^ 1, *rounds[0].draft[1:]), (7, 8))]
        with pytest.raises(ReplayError):
            draft_margins(draft.model, prompt, wrong, *options)


def test_draft_margins_reproduce_mlx_lms_drafts(target: Loaded, draft: Loaded) -> None:
    """`portable`: under `sequential`, accepted drafts are known from mlx-lm's own flags."""
    prompt = target.encode(TEXT)
    filters = Filters(1.0, top_k=4)
    run = speculative(target, draft, prompt, NUM_TOKENS, 1, sequential_sampler(SEED, filters))
    assert 1 in run.accepted
    rounds = []
    start = 0
    for turn in run.rounds:
        emitted = run.generated[start : start + turn.emitted]
        start += turn.emitted
        # A rejected draft is not reported: find the id that the draft model's own noise decides on.
        rounds.append(DraftedRound(emitted[:1] if turn.accepted else (-1,), emitted))
    known = [
        turn if turn.draft != (-1,) else _redraft(draft, prompt, rounds[:i], turn, filters)
        for i, turn in enumerate(rounds)
    ]
    margins = draft_margins(draft.model, prompt, known, filters, Sequential(SEED))
    assert min(row[0] for row in margins) > 0


def _redraft(
    draft: Loaded, prompt: list[int], before: list[DraftedRound], turn: DraftedRound, f: Filters
) -> DraftedRound:
    context = [*prompt, *(token for earlier in before for token in earlier.emitted)]
    keys = Sequential(SEED).keys()
    for _ in before:
        next(keys), next(keys)
    assert not f.xtc
    scaled = f.scaled(replay(draft.model, context, [0]))
    return DraftedRound(
        (int(np.array(mx.random.categorical(scaled, key=next(keys)))[0]),), turn.emitted
    )


def test_shape_delta_is_zero_for_a_dense_model_on_the_cpu(target: Loaded) -> None:
    """`lossless`: float32, dense, widths 1 to 9 (and CPU: elsewhere this need not be so)."""
    ids = target.encode("The quick brown fox jumps")
    deltas = [shape_delta(target.model, ids, width) for width in range(1, 10)]
    if mx.default_device() == mx.Device(mx.cpu):
        assert deltas == [0.0] * 9
    with pytest.raises(ValueError, match=r"within 1\.\.25, got 26"):
        shape_delta(target.model, ids, 26)


@pytest.mark.parametrize(
    ("x", "floor"),
    [(0.0, 0.0), (1.0, 1.0), (1.99, 1.0), (2.0, 2.0), (1e-3, 2**-10), (math.inf, math.inf)],
)
def test_floor_pow2(x: float, floor: float) -> None:
    """`portable`: recorded margins move only by factors of two."""
    assert floor_pow2(x) == floor


@pytest.mark.parametrize("x", [-1.0, math.nan])
def test_floor_pow2_refuses_what_is_no_margin(x: float) -> None:
    """Bad input is named with its limit."""
    with pytest.raises(ValueError, match="at least 0"):
        floor_pow2(x)
