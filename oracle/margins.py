"""How close every decision of a finished run was, by replaying its ids through mlx-lm's model.

A margin m is in the space of the decision (log-probability for greedy and for the filters,
log-probability / temperature for a draw) and means: some change of the log-probabilities by m/2
makes another decision, no smaller one does. So two computations that differ by at most δ per logit
can part only where m <= 2δ (of a draw below temperature 1: m <= 2δ / temperature). A filter's cut
counts even where the token at it could not have won.

With logits processors all this is meant of the model's own logits: a repetition penalty p makes a
difference of theirs up to max(p, 1/p) times as large, so margins are divided by that. Then a change
by m/2 need not be enough.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import make_prompt_cache
from numpy.typing import NDArray

from .models import LanguageModel
from .noise import (
    Bits,
    Filters,
    Floats,
    Policy,
    Positional,
    as_floats,
    draw_margins,
    log_odds,
)
from .processors import NO_PROCESSORS, Processors

SLACK = 1e-3
"""How far a replay may contradict an emitted id and still be called a tie: the float32 floor.

Pass ``slack`` where the model computes in less: bf16 and fp16 need some ulp of the top logit.
"""


class Draw(NamedTuple):
    """One sampler call on ``rows`` rows (None: a vector), of which ``used`` count."""

    bits: Bits
    used: int
    rows: int | None


class ReplayError(ValueError):
    """The replay decides for another id than the run did, by more than the slack.

    The noise, the filters or the ids do not belong to this run, or the run was wrong.
    """


@dataclass(frozen=True, slots=True)
class DraftedRound:
    """What one round drafted and what it emitted: accepted ids, the correction, and EOS."""

    draft: tuple[int, ...]
    emitted: tuple[int, ...]


def greedy_margins(
    model: LanguageModel,
    prompt: Sequence[int],
    generated: Sequence[int],
    *,
    processors: Processors = NO_PROCESSORS,
    slack: float = SLACK,
) -> tuple[float, ...]:
    """Top-two gap of every generated position, a terminal EOS included."""
    logprobs = replay(model, prompt, generated, processors)
    return tuple(_greedy(logprobs, generated, slack, processors.gain))


def sampled_margins(
    model: LanguageModel,
    prompt: Sequence[int],
    generated: Sequence[int],
    filters: Filters,
    policy: Policy,
    windows: Sequence[tuple[int, int]] | None = None,
    *,
    processors: Processors = NO_PROCESSORS,
    slack: float = SLACK,
) -> tuple[float, ...]:
    """Margin of every generated position, a terminal EOS included: its draw, or a nearer cut.

    ``windows`` is needed for a two-model run under ``Sequential`` alone: (drafted, emitted) of each
    round. Without it the run drew one token at a time. Temperature 0 is ``greedy_margins``.
    """
    if filters.greedy:
        return greedy_margins(model, prompt, generated, processors=processors, slack=slack)
    draws = _draws(policy, filters, len(generated), windows)
    logprobs = replay(model, prompt, generated, processors)
    return tuple(_sampled(logprobs, generated, filters, draws, slack, processors.gain))


def draft_margins(
    draft_model: LanguageModel,
    prompt: Sequence[int],
    rounds: Sequence[DraftedRound],
    filters: Filters | None = None,
    policy: Policy | None = None,
    *,
    slack: float = SLACK,
) -> tuple[tuple[float, ...], ...]:
    """The draft model's own margin for every drafted id of every round; greedy without ``filters``.

    ``policy`` holds the keys the target used: the i-th draft of a round has the step of the i-th
    position of its window, or under ``Sequential`` the next key of the shared order. Drafts are
    made without logits processors.
    """
    draws: Iterator[list[Draw]] | None = None
    if filters is not None and not filters.greedy:
        if policy is None:
            raise ValueError("sampled draft margins need the noise policy")
        draws = _draft_draws(policy, filters, rounds)
    context = list(prompt)
    result: list[tuple[float, ...]] = []
    for turn in rounds:
        keyed = next(draws) if draws is not None else []
        margins: list[float] = []
        if turn.draft:
            logprobs = replay(draft_model, context, turn.draft)
            if filters is None or draws is None:
                margins = _greedy(logprobs, turn.draft, slack)
            else:
                margins = _sampled(logprobs, turn.draft, filters, keyed, slack)
        result.append(tuple(margins))
        context += turn.emitted
    return tuple(result)


def shape_delta(model: LanguageModel, ids: Sequence[int], width: int) -> float:
    """Largest |Δ logit| at the last position: forwarded alone, or as the last of ``width``.

    ``width`` within 1..len(ids). Both forward the ids before their window first, in one piece.
    """
    if not 1 <= width <= len(ids):
        raise ValueError(f"width must be within 1..{len(ids)}, got {width}")
    return float(np.abs(_last_logits(model, ids, 1) - _last_logits(model, ids, width)).max())


def floor_pow2(x: float) -> float:
    """The largest power of two that is at most ``x``; 0 and infinity stay."""
    if not x >= 0:
        raise ValueError(f"floor_pow2 needs a number of at least 0, got {x}")
    if x == 0 or math.isinf(x):
        return x
    return math.ldexp(0.5, math.frexp(x)[1])


def replay(
    model: LanguageModel,
    prompt: Sequence[int],
    generated: Sequence[int],
    processors: Processors = NO_PROCESSORS,
) -> mx.array:
    """Log-probabilities [len(generated), V] before each generated id, from one forward.

    In the model's own dtype, in which mlx-lm's samplers see them too; of the processed logits, each
    position with the prompt and what was generated before it.
    """
    if not prompt:
        raise ValueError("the prompt must hold at least 1 token, got 0")
    if not generated:
        raise ValueError("a run to replay must hold at least 1 generated token, got 0")
    ids = [*prompt, *generated[:-1]]
    logits = model(mx.array([ids]), cache=make_prompt_cache(model))[0, len(prompt) - 1 :]
    if processors.active:
        history = mx.array(ids)
        rows = [
            processors.apply(history[: len(prompt) + i], logits[i : i + 1])
            for i in range(len(generated))
        ]
        logits = mx.concatenate(rows)
    return logits - mx.logsumexp(logits, axis=-1, keepdims=True)


def _draws(
    policy: Policy, filters: Filters, num: int, windows: Sequence[tuple[int, int]] | None
) -> list[Draw]:
    """The draws that gave ``num`` tokens, in order."""
    if isinstance(policy, Positional):
        if windows is not None:
            raise ValueError("positional keys do not depend on windows: pass none")
        return [Draw(policy.bits(i, filters), 1, None) for i in range(num)]
    calls = policy.bits(filters)
    if windows is None:
        return [Draw(bits, 1, 1) for bits in islice(calls, num)]
    if sum(emitted for _, emitted in windows) != num:
        raise ValueError(f"windows emit {list(windows)}, but {num} tokens were generated")
    draws = []
    for drafted, emitted in windows:
        if not 1 <= emitted <= drafted + 1:
            raise ValueError(f"a window of {drafted} drafts emits 1..{drafted + 1}, got {emitted}")
        *_, bits = islice(calls, drafted + 1)  # the draft model's own come before the verify's
        draws.append(Draw(bits, emitted, drafted + 1))
    return draws


def _draft_draws(
    policy: Policy, filters: Filters, rounds: Sequence[DraftedRound]
) -> Iterator[list[Draw]]:
    """The draft model's draws, round by round."""
    if isinstance(policy, Positional):
        step = 0
        for turn in rounds:
            yield [Draw(policy.bits(step + i, filters), 1, None) for i in range(len(turn.draft))]
            step += len(turn.emitted)
    else:
        calls = policy.bits(filters)
        for turn in rounds:
            yield [Draw(bits, 1, 1) for bits in islice(calls, len(turn.draft))]
            next(calls)  # the verify's


def _greedy(
    logprobs: mx.array, tokens: Sequence[int], slack: float, gain: float = 1.0
) -> list[float]:
    return [
        _settle(float(row[token] - np.delete(row, token).max()) / gain, token, i, slack)
        for i, (row, token) in enumerate(zip(as_floats(logprobs), tokens, strict=True))
    ]


def _sampled(
    logprobs: mx.array,
    tokens: Sequence[int],
    filters: Filters,
    draws: Sequence[Draw],
    slack: float,
    gain: float = 1.0,
) -> list[float]:
    """Margins of ``tokens``, one per row of ``logprobs`` [N, V]."""
    coins = [draw.bits.coin for draw in draws for _ in range(draw.used)]
    tossed = [coin for coin in coins if coin is not None]
    coin = mx.stack(tossed)[:, None] if tossed else None
    stages = filters.stages(logprobs, coin)
    scaled = stages[-1] * (1.0 / filters.temperature)
    gaps: list[float] = []
    for bits, used, rows in draws:
        start, end = len(gaps), len(gaps) + used
        if rows is None:
            window = scaled[start]
        else:
            # Rows behind the first mismatch were drawn too; only their number matters here.
            window = mx.pad(scaled[start:end], [(0, rows - used), (0, 0)])
        gaps += draw_margins(window, bits.key, tokens[start:end])
    excludes = None if coin is None else np.array(filters.excludes(coin))[:, 0]
    cuts = _cut_distances([as_floats(stage) for stage in stages], filters, excludes)
    return [
        # A candidate right at a cut may be in for the run and out for the replay.
        0.0 if gap < 0 and cut <= slack else min(_settle(gap, token, i, slack), cut)
        for i, (gap, cut, token) in enumerate(
            zip((g / gain for g in gaps), (c / gain for c in cuts), tokens, strict=True)
        )
    ]


def _settle(margin: float, token: int, pos: int, slack: float) -> float:
    if margin < -slack:
        raise ReplayError(
            f"replay contradicts id {token} at position {pos} by {-margin:.3g}, more than {slack:g}"
        )
    return max(margin, 0.0)


def _cut_distances(
    stages: list[Floats], filters: Filters, excludes: NDArray[np.bool_] | None
) -> list[float]:
    """Distance of the nearest candidate from any active filter's cut, per row of the stages [N, V].

    Each filter sees what the ones before it left; ``stages`` are ``Filters.stages``. ``excludes``
    [N] says where XTC's coin let it act.
    """
    inputs = iter(stages)
    distances = np.full(len(stages[0]), np.inf)
    if 0 < filters.top_p < 1:
        descending = -np.sort(-next(inputs), axis=-1)
        mass = np.exp(descending)
        above = np.cumsum(mass, axis=-1)[:, :-1]  # of every candidate but the first
        total = mass.sum(axis=-1, keepdims=True)
        cut = log_odds(np.full_like(total, filters.top_p), 1.0)
        distances = np.minimum(distances, np.abs(log_odds(above, total) - cut).min(axis=-1))
        # The last that stays and the first that goes may also change places.
        num_kept = 1 + (above < filters.top_p * total).sum(axis=-1)
        distances = np.minimum(distances, _gaps(descending, num_kept))
    if filters.min_p > 0:
        ascending = np.sort(next(inputs), axis=-1)
        cut = ascending[:, -1:] + math.log(filters.min_p)
        distances = np.minimum(distances, np.abs(ascending[:, :-1] - cut).min(axis=-1))
    if excludes is not None:
        xtc = _xtc_distances(next(inputs), filters.xtc_threshold)
        distances = np.where(excludes, np.minimum(distances, xtc), distances)
    if filters.top_k > 0:
        descending = -np.sort(-next(inputs), axis=-1)
        num_kept = np.full(len(descending), filters.top_k)
        distances = np.minimum(distances, _gaps(descending, num_kept))
    return [float(distance) for distance in distances]


def _xtc_distances(logprobs: Floats, threshold: float) -> Floats:
    """How near XTC is to excluding others, per row of what it is given [N, V].

    A candidate may cross the threshold, in log-odds; or the last two above it may change places, in
    log-probability. The first candidate does not count: alone above the threshold it stays. The
    coin is exact and has no margin. Special tokens count as if they could be excluded.
    """
    descending = -np.sort(-logprobs, axis=-1)
    mass = np.exp(descending)
    total = mass.sum(axis=-1, keepdims=True)
    odds = log_odds(mass, total)[:, 1:]
    # Below the smallest normal float32 a probability may or may not have become 0.
    low, high = (float(log_odds(np.array(max(threshold, t)), 1.0)) for t in (2.0**-149, 2.0**-126))
    distances: Floats = np.maximum(np.maximum(odds - high, low - odds), 0.0).min(axis=-1)
    num_above = (mass > threshold * total).sum(axis=-1)
    return np.minimum(distances, _gaps(descending, num_above - 1))


def _gaps(descending: Floats, num: NDArray[np.int64]) -> Floats:
    """How far the first ``num`` [N] candidates of each row [N, V] lie above the next one.

    Infinite where there are no first ones, or where nothing is left behind them to compare with.
    """
    padded = np.pad(descending, [(0, 0), (1, 1)], constant_values=(np.inf, -np.inf))
    rows, num = np.arange(len(num)), np.maximum(num, 0)
    last, beyond = padded[rows, num], padded[rows, num + 1]
    return np.where(np.isneginf(beyond), np.inf, last - np.where(np.isneginf(beyond), 0, beyond))


def _last_logits(model: LanguageModel, ids: Sequence[int], width: int) -> Floats:
    cache = make_prompt_cache(model)
    if len(ids) > width:
        mx.eval(model(mx.array([ids[:-width]]), cache=cache))
    return as_floats(model(mx.array([ids[-width:]]), cache=cache)[0, -1])
