"""P3: rows that share forwards, against mlx-lm's batches and against themselves alone."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import mlx.core as mx
from mlx_lm.generate import BatchGenerator
from mlx_lm.models.cache import make_prompt_cache, trim_prompt_cache

from engine import DraftProvider, Target
from engine.prefill import Cohort, Prompt
from engine.rounds import Rounds, Row
from engine.sampling import Greedy, RowSampling
from parity.bench.loops import Collector, Ids, Models, engine_ids
from parity.bench.pairs import Side
from parity.errors import Unusable

Batch = Callable[[Sequence[Ids], int], list[list[int]]]
"""Prompts and a budget to each one's generated ids."""


def engine_group(models: Models, depth: int, *, lifted: bool = False) -> Batch:
    """All prompts in one group, ids only; depth 0 is plain.

    `lifted`: also a single row stands on the caches of many.
    """
    drafter = models.drafter if depth else None

    def run(prompts: Sequence[Ids], budget: int) -> list[list[int]]:
        rounds, readers = open_group(models.target, prompts, budget, drafter, depth, lifted)
        while not rounds.done:
            rounds.step()
            going = [r for r, row in enumerate(rounds.rows) if row.end is None]
            if going and len(going) < len(rounds.rows):
                rounds = rounds.selected(going)
        return [reader.ids for reader in readers]

    return run


def open_group(
    target: Target,
    prompts: Sequence[Ids],
    budget: int,
    drafter: DraftProvider | None,
    depth: int,
    lifted: bool,
) -> tuple[Rounds, list[Collector]]:
    """A group behind its prefilled prompts, without text, events or EOS."""
    readers = [Collector() for _ in prompts]
    waiting: Cohort | None = None
    group: Rounds | None = None
    for prompt, reader in zip(prompts, readers, strict=True):
        sampling = RowSampling([Greedy()])
        rows = target.new_rows()
        draft = None if drafter is None else drafter.open(sampling)
        row = Row(reader, frozenset(), [], prompt[-1], 0, budget)
        one = Cohort(rows.lifted() if lifted else rows, draft, sampling, [Prompt(prompt, row)])
        waiting = one if waiting is None else waiting.joined(one)
    while waiting is not None:
        waiting.step()
        lacking = waiting.lacking
        done = [r for r, n in enumerate(lacking) if n == 0]
        if done:
            ready = waiting.selected(done).rounds(depth, target.vocab_size)
            group = ready if group is None else group.joined(ready)
        rest = [r for r, n in enumerate(lacking) if n]
        waiting = waiting.selected(rest) if rest else None
    assert group is not None
    return group, readers


def mlx_lm_batch(models: Models) -> Batch:
    """mlx-lm's BatchGenerator on the same prompts, all from the start."""

    def run(prompts: Sequence[Ids], budget: int) -> list[list[int]]:
        size = len(prompts)
        batch = BatchGenerator(
            models.target.model, completion_batch_size=size, prefill_batch_size=size
        )
        numbers = batch.insert([list(prompt) for prompt in prompts], [budget] * size)
        ids: dict[int, list[int]] = {number: [] for number in numbers}
        going = size
        while going:
            for answer in batch.next()[1]:
                ids[answer.uid].append(answer.token)
                going -= answer.finish_reason is not None
        batch.close()
        return [ids[number] for number in numbers]

    return run


def one_by_one(models: Models, depth: int) -> Batch:
    """The engine's single-row loop, one prompt after the other."""
    loop = engine_ids(models, depth)

    def run(prompts: Sequence[Ids], budget: int) -> list[list[int]]:
        return [loop(prompt, budget) for prompt in prompts]

    return run


def timed_batch(
    batch: Batch, prompts: Sequence[Ids], expected: Sequence[list[int]], budget: int
) -> Side:
    """From the prompts to the last token.

    Raises:
        Unusable: the ids are not the expected ones; nothing that was timed is of use then.
    """

    def side(_number: int) -> float:
        start = time.perf_counter()
        ids = batch(prompts, budget)
        seconds = time.perf_counter() - start
        if ids != list(expected):
            raise Unusable("the batches disagree: their times compare nothing")
        mx.synchronize()
        return seconds

    return side


def bare_forwards(models: Models, rows: int, depth: int, context: int, repeats: int = 8) -> float:
    """Seconds of one round's forwards alone, mlx-lm's caches: depth drafts, one window."""
    target, draft = models.target.model, models.draft.model
    tokens = mx.zeros((rows, context), mx.uint32)
    caches, draft_caches = make_prompt_cache(target), make_prompt_cache(draft)
    mx.eval(target(tokens, cache=caches), draft(tokens, cache=draft_caches))
    fastest = float("inf")
    for _ in range(repeats):
        start = time.perf_counter()
        for _position in range(depth):
            mx.eval(draft(tokens[:, :1], cache=draft_caches))
        mx.eval(target(tokens[:, : depth + 1], cache=caches))
        fastest = min(fastest, time.perf_counter() - start)
        trim_prompt_cache(caches, depth + 1)
        trim_prompt_cache(draft_caches, depth)
    return fastest


def most_possible(models: Models, rows: int, depth: int, context: int) -> float:
    """How much faster a group can be than its rows in turn, if forwards were all there is.

    Forwards take the longer the more tokens they hold; on a CPU nearly in proportion.
    """
    alone = bare_forwards(models, 1, depth, context)
    return rows * alone / bare_forwards(models, rows, depth, context)
