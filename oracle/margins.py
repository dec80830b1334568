"""How close every decision of a finished run was, by replaying its ids through mlx-lm's model.

A margin m is in the space of the decision (log-probability for greedy and for the filters,
log-probability / temperature for a draw) and means: some change of the log-probabilities by m/2
makes another decision, no smaller one does. So two computations that differ by at most δ per logit
can part only where m <= 2δ. A filter's cut counts even where the token at it could not have won.
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

from .models import LanguageModel
from .noise import (
    Filters,
    Floats,
    Policy,
    Positional,
    as_floats,
    draw_margins,
    log_odds,
)

SLACK = 1e-3
"""How far a replay may contradict an emitted id and still be called a tie: the float32 floor.

Pass ``slack`` where the model computes in less: bf16 and fp16 need some ulp of the top logit.
"""


class Draw(NamedTuple):
    """One call of ``categorical`` on ``rows`` rows (None: a vector), of which ``used`` count."""

    key: mx.array
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
    slack: float = SLACK,
) -> tuple[float, ...]:
    """Top-two gap of every generated position, a terminal EOS included."""
    return tuple(_greedy(replay(model, prompt, generated), generated, slack))


def sampled_margins(
    model: LanguageModel,
    prompt: Sequence[int],
    generated: Sequence[int],
    filters: Filters,
    policy: Policy,
    windows: Sequence[tuple[int, int]] | None = None,
    *,
    slack: float = SLACK,
) -> tuple[float, ...]:
    """Margin of every generated position, a terminal EOS included: its draw, or a nearer cut.

    ``windows`` is needed for a two-model run under ``Sequential`` alone: (drafted, emitted) of each
    round. Without it the run drew one token at a time. Temperature 0 is ``greedy_margins``.
    """
    if filters.greedy:
        return greedy_margins(model, prompt, generated, slack=slack)
    draws = _draws(policy, len(generated), windows)
    return tuple(_sampled(replay(model, prompt, generated), generated, filters, draws, slack))


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
    position of its window, or under ``Sequential`` the next key of the shared order.
    """
    draws: Iterator[list[Draw]] | None = None
    if filters is not None and not filters.greedy:
        if policy is None:
            raise ValueError("sampled draft margins need the noise policy")
        draws = _draft_draws(policy, rounds)
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


def replay(model: LanguageModel, prompt: Sequence[int], generated: Sequence[int]) -> mx.array:
    """Log-probabilities [len(generated), V] before each generated id, from one forward.

    In the model's own dtype, in which mlx-lm's samplers see them too.
    """
    if not prompt:
        raise ValueError("the prompt must hold at least 1 token, got 0")
    if not generated:
        raise ValueError("a run to replay must hold at least 1 generated token, got 0")
    ids = [*prompt, *generated[:-1]]
    logits = model(mx.array([ids]), cache=make_prompt_cache(model))[0, len(prompt) - 1 :]
    return logits - mx.logsumexp(logits, axis=-1, keepdims=True)


def _draws(policy: Policy, num: int, windows: Sequence[tuple[int, int]] | None) -> list[Draw]:
    """The draws that gave ``num`` tokens, in order."""
    if isinstance(policy, Positional):
        if windows is not None:
            raise ValueError("positional keys do not depend on windows: pass none")
        return [Draw(policy.key(i), 1, None) for i in range(num)]
    if windows is None:
        return [Draw(key, 1, 1) for key in islice(policy.keys(), num)]
    if sum(emitted for _, emitted in windows) != num:
        raise ValueError(f"windows emit {list(windows)}, but {num} tokens were generated")
    keys = policy.keys()
    draws = []
    for drafted, emitted in windows:
        if not 1 <= emitted <= drafted + 1:
            raise ValueError(f"a window of {drafted} drafts emits 1..{drafted + 1}, got {emitted}")
        *_, key = islice(keys, drafted + 1)  # the draft model's own draws come before the verify's
        draws.append(Draw(key, emitted, drafted + 1))
    return draws


def _draft_draws(policy: Policy, rounds: Sequence[DraftedRound]) -> Iterator[list[Draw]]:
    """The draft model's draws, round by round."""
    if isinstance(policy, Positional):
        step = 0
        for turn in rounds:
            yield [Draw(policy.key(step + i), 1, None) for i in range(len(turn.draft))]
            step += len(turn.emitted)
    else:
        keys = policy.keys()
        for turn in rounds:
            yield [Draw(key, 1, 1) for key in islice(keys, len(turn.draft))]
            next(keys)  # the verify's


def _greedy(logprobs: mx.array, tokens: Sequence[int], slack: float) -> list[float]:
    return [
        _settle(float(row[token] - np.delete(row, token).max()), token, i, slack)
        for i, (row, token) in enumerate(zip(as_floats(logprobs), tokens, strict=True))
    ]


def _sampled(
    logprobs: mx.array,
    tokens: Sequence[int],
    filters: Filters,
    draws: Sequence[Draw],
    slack: float,
) -> list[float]:
    """Margins of ``tokens``, one per row of ``logprobs`` [N, V]."""
    stages = filters.stages(logprobs)
    scaled = stages[-1] * (1.0 / filters.temperature)
    gaps: list[float] = []
    for key, used, rows in draws:
        start, end = len(gaps), len(gaps) + used
        if rows is None:
            window = scaled[start]
        else:
            # Rows behind the first mismatch were drawn too; only their number matters here.
            window = mx.pad(scaled[start:end], [(0, rows - used), (0, 0)])
        gaps += draw_margins(window, key, tokens[start:end])
    cuts = _cut_distances([as_floats(stage) for stage in stages], filters)
    return [
        # A candidate right at a cut may be in for the run and out for the replay.
        0.0 if gap < 0 and cut <= slack else min(_settle(gap, token, i, slack), cut)
        for i, (gap, cut, token) in enumerate(zip(gaps, cuts, tokens, strict=True))
    ]


def _settle(margin: float, token: int, pos: int, slack: float) -> float:
    if margin < -slack:
        raise ReplayError(
            f"replay contradicts id {token} at position {pos} by {-margin:.3g}, more than {slack:g}"
        )
    return max(margin, 0.0)


def _cut_distances(stages: list[Floats], filters: Filters) -> list[float]:
    """Distance of the nearest candidate from any active filter's cut, per row of the stages [N, V].

    Each filter sees what the ones before it left; ``stages`` are ``Filters.stages``.
    """
    inputs = iter(stages)
    distances = np.full(len(stages[0]), np.inf)
    if 0 < filters.top_p < 1:
        mass = np.exp(np.sort(next(inputs), axis=-1))
        above = np.cumsum(mass[:, ::-1], axis=-1)[:, :-1]  # of every candidate but the first
        total = mass.sum(axis=-1, keepdims=True)
        cut = log_odds(np.full_like(total, filters.top_p), 1.0)
        distances = np.minimum(distances, np.abs(log_odds(above, total) - cut).min(axis=-1))
    if filters.min_p > 0:
        ascending = np.sort(next(inputs), axis=-1)
        cut = ascending[:, -1:] + math.log(filters.min_p)
        distances = np.minimum(distances, np.abs(ascending[:, :-1] - cut).min(axis=-1))
    if filters.top_k > 0:
        descending = -np.sort(-next(inputs), axis=-1)
        last, beyond = descending[:, filters.top_k - 1], descending[:, filters.top_k]
        # With fewer candidates than top_k left, it cuts nothing.
        gap = np.where(np.isneginf(beyond), np.inf, last - np.where(np.isneginf(beyond), 0, beyond))
        distances = np.minimum(distances, gap)
    return [float(distance) for distance in distances]


def _last_logits(model: LanguageModel, ids: Sequence[int], width: int) -> Floats:
    cache = make_prompt_cache(model)
    if len(ids) > width:
        mx.eval(model(mx.array([ids[:-width]]), cache=cache))
    return as_floats(model(mx.array([ids[-width:]]), cache=cache)[0, -1])
