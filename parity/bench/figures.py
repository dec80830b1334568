"""What is measured: each goal, its two sides, and where a round's time goes."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from parity.bench import cheap, tiers
from parity.bench.costs import (
    Kind,
    Shares,
    bare_side,
    forward_side,
    ngram_round_side,
    proposal_side,
    rounds_side,
    shares,
)
from parity.bench.groups import (
    Batch,
    engine_group,
    mlx_lm_batch,
    most_possible,
    one_by_one,
    timed_batch,
)
from parity.bench.loops import (
    Ids,
    Loop,
    Models,
    engine_events,
    engine_ids,
    mlx_lm_events,
    mlx_lm_ids,
    timed,
)
from parity.bench.pairs import Figure, Goal, Pair, Side, interleave
from parity.errors import Unusable

LIKE_FOR_LIKE = Goal("P1", "at least", 1.0, or_interval=True)
ROUND = Goal("P2", "at most", 1.10)
HOST = Goal("P2", "at most", 0.02)
BATCH = Goal("P3", "at least", 0.95)
IN_GROUP = {4: Goal("P3", "at least", 2.5), 8: Goal("P3", "at least", 3.5)}
SPEEDUP = Goal("P5", "at least", 1.3)
CHEAP = Goal("P5", "at most", 0.3)
RIGHT = Goal("P5", "at least", 0.8)
NGRAM = Goal("P12", "at most", 0.01)
GOALS = ("P1", "P2", "P3", "P5", "P7", "P8", "P9", "P10", "P11", "P12")

DEPTHS = (0, 1, 3, 7)
ROUNDS: tuple[tuple[Kind, int], ...] = (
    ("off", 0),
    ("ngram", 3),
    ("two-model", 1),
    ("two-model", 3),
    ("two-model", 7),
)
LOOPS: tuple[tuple[str, Callable[[Models, int], Loop], Callable[[Models, int], Loop]], ...] = (
    ("ids", mlx_lm_ids, engine_ids),
    ("events", mlx_lm_events, engine_events),
)
HISTORY = 100_000


@dataclass(frozen=True, slots=True)
class Setting:
    """How much is measured. Prompts take turns: with 3 of them, 6 pairs see every order."""

    prompts: tuple[Ids, ...]
    num_pairs: int = 24
    budget: int = 192
    history: int = HISTORY


@dataclass(frozen=True, slots=True)
class Measured:
    """A figure, and the rounds behind it; `load` is the machine's 1-minute load average.

    `possible`: the most that this ratio could be here, the bare forwards being what they are.
    """

    figure: Figure
    load: float
    rounds: tuple[Shares, ...] = ()
    possible: float | None = None


def measure(models: Models, setting: Setting, goals: Sequence[str] = GOALS) -> Iterator[Measured]:
    """Measure one figure after the other.

    Raises:
        Unusable: two loops that are compared do not give the same ids.
    """
    if "P1" in goals:
        for depth in DEPTHS:
            for what, theirs, ours in LOOPS:
                yield _like_for_like(
                    what, theirs(models, depth), ours(models, depth), depth, setting
                )
    if "P2" in goals:
        for kind, depth in ROUNDS:
            common = (models, kind, depth, setting.prompts, setting.budget)
            sides = rounds_side(*common), bare_side(*common)
            yield _figure(ROUND, _name(kind, depth), "round", "its bare forwards", *sides, setting)
            yield _host_work(models, kind, depth, setting)
    if "P3" in goals:
        yield from _groups(models, setting)
    if "P5" in goals:
        yield from _speedup(cheap.cheap_pair(models), setting)
    few = min(setting.num_pairs, 2 * tiers.FEW)
    if {"P7", "P8", "P9"} & {*goals}:
        for figure in tiers.large_entries(few):
            if figure.goal.id in goals:
                yield Measured(figure, os.getloadavg()[0])
    if "P10" in goals:
        yield Measured(tiers.hit(models.target, few), os.getloadavg()[0])
    if "P11" in goals:
        for figure in tiers.many_entries(few):
            yield Measured(figure, os.getloadavg()[0])
    if "P12" in goals:
        forward = forward_side(models.target, setting.prompts[0])
        vocab_size = models.target.vocab_size
        for name, side in (
            ("push + propose", proposal_side(setting.history, vocab_size)),
            ("draft + commit", ngram_round_side(setting.history, vocab_size)),
        ):
            yield _figure(NGRAM, f"ngram {name}", name, "forward", side, forward, setting)


def _like_for_like(what: str, theirs: Loop, ours: Loop, depth: int, setting: Setting) -> Measured:
    expected = [theirs(prompt, setting.budget) for prompt in setting.prompts]
    if any(len(ids) != setting.budget for ids in expected):
        raise Unusable(f"{what} at depth {depth}: a prompt ends before {setting.budget} tokens")
    over, under = (
        timed(loop, setting.prompts, expected, setting.budget) for loop in (theirs, ours)
    )
    name = f"{what}, {_name('two-model' if depth else 'off', depth)}"
    return _figure(LIKE_FOR_LIKE, name, "mlx-lm", "engine", over, under, setting)


def _speedup(models: Models, setting: Setting) -> Iterator[Measured]:
    """Plain text against the same text with drafts; and what the drafts are like that it takes."""
    name = _name("two-model", cheap.DEPTH)
    expected = [engine_ids(models, 0)(prompt, setting.budget) for prompt in setting.prompts]
    plain, drafted = (
        timed(engine_ids(models, depth), setting.prompts, expected, setting.budget)
        for depth in (0, cheap.DEPTH)
    )
    yield _figure(SPEEDUP, f"cheap {name}", "plain", "with drafts", plain, drafted, setting)
    draft, target = (
        forward_side(model, setting.prompts[0]) for model in (models.draft, models.target)
    )
    yield _figure(CHEAP, "its cost", "draft step", "target step", draft, target, setting)
    counts = cheap.accepted(models, setting.prompts, setting.budget)
    pairs = tuple(counts[i % len(counts)] for i in range(setting.num_pairs))
    figure = Figure(RIGHT, "its acceptance", "accepted", "drafted", pairs)
    yield Measured(figure, os.getloadavg()[0])


def _groups(models: Models, setting: Setting) -> Iterator[Measured]:
    """Plain rows beside mlx-lm's, rows beside themselves alone, and a row in a group of one."""
    for rows in (1, 2, 4, 8):
        theirs, ours = ("mlx-lm", mlx_lm_batch(models)), ("engine", engine_group(models, 0))
        yield _batches(BATCH, f"plain rows, B {rows}", theirs, ours, rows, setting)
    for rows, goal in IN_GROUP.items():
        alone, ours = ("rows in turn", one_by_one(models, 3)), ("group", engine_group(models, 3))
        measured = _batches(goal, f"two-model depth 3, B {rows}", alone, ours, rows, setting)
        longest = max(map(len, setting.prompts)) + setting.budget // 2
        yield replace(measured, possible=most_possible(models, rows, 3, longest))
    for depth in (0, 3):
        name = f"{_name('two-model' if depth else 'off', depth)}, a group of one"
        alone = "native row", one_by_one(models, depth)
        yield _batches(
            BATCH, name, alone, ("group", engine_group(models, depth, lifted=True)), 1, setting
        )


def _batches(
    goal: Goal,
    name: str,
    over: tuple[str, Batch],
    under: tuple[str, Batch],
    rows: int,
    setting: Setting,
) -> Measured:
    prompts = tuple(setting.prompts[i % len(setting.prompts)] for i in range(rows))
    expected = over[1](prompts, setting.budget)
    if any(len(ids) != setting.budget for ids in expected):
        raise Unusable(f"{name}: a prompt ends before {setting.budget} tokens")
    top, bottom = (
        timed_batch(side, prompts, expected, setting.budget) for _, side in (over, under)
    )
    return _figure(goal, name, over[0], under[0], top, bottom, setting)


def _host_work(models: Models, kind: Kind, depth: int, setting: Setting) -> Measured:
    runs = tuple(
        shares(models, kind, depth, setting.prompts[i % len(setting.prompts)], setting.budget)
        for i in range(setting.num_pairs)
    )
    pairs = tuple(Pair(run.host_s, run.total_s) for run in runs)
    figure = Figure(HOST, _name(kind, depth), "host work", "round", pairs)
    return Measured(figure, os.getloadavg()[0], runs)


def _figure(
    goal: Goal, name: str, over: str, under: str, top: Side, bottom: Side, setting: Setting
) -> Measured:
    # Each prompt once before anything counts: new shapes compile kernels.
    pairs = interleave(top, bottom, setting.num_pairs, warm_ups=len(setting.prompts))
    return Measured(Figure(goal, name, over, under, pairs), os.getloadavg()[0])


def _name(kind: Kind, depth: int) -> str:
    return "plain" if kind == "off" else f"{kind} depth {depth}"
