"""P2 and P12: what a round costs beside its bare forwards, and what an n-gram proposal costs."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache, trim_prompt_cache

from engine import DraftProvider, Target
from engine.drafters.ngram import History, NgramProvider
from engine.drafters.two_model import TwoModelProvider
from engine.sampling import Greedy, RowSampling
from engine.state.rows import Rows
from engine.values import RoundTrace
from parity.bench.loops import Ids, Models, drain, open_rounds
from parity.bench.meter import metered
from parity.bench.pairs import Side

Kind = str
"""off, ngram or two-model."""


def drafter_of(models: Models, kind: Kind) -> DraftProvider | None:
    return {"off": None, "ngram": NgramProvider(), "two-model": models.drafter}[kind]


def rounds_side(
    models: Models, kind: Kind, depth: int, prompts: Sequence[Ids], budget: int
) -> Side:
    """Seconds of all rounds of one request; its prompt is prefilled before."""

    def side(number: int) -> float:
        prompt = prompts[number % len(prompts)]
        drafter = drafter_of(models, kind)
        rounds, _, _ = open_rounds(models.target, prompt, budget, drafter, depth)
        mx.synchronize()
        start = time.perf_counter()
        while not rounds.done:
            rounds.step()
        return time.perf_counter() - start

    return side


@dataclass(frozen=True, slots=True)
class Step:
    """One round's inputs, known beforehand: nothing has to be sampled or read.

    `fed` is what the draft model is fed, `window` what the target is. `forget` and `forget_draft`
    count the tokens that leave the caches at the end.
    """

    fed: tuple[mx.array, ...]
    window: mx.array
    forget: int
    forget_draft: int


def replay(first: int, trace: Sequence[RoundTrace], *, with_draft_model: bool) -> list[Step]:
    """The forwards of recorded rounds. `first` is the last id of the prompt."""
    pending = first
    lag: tuple[int, ...] = ()
    steps: list[Step] = []
    for told in trace:
        fed: tuple[mx.array, ...] = ()
        forget_draft = 0
        if with_draft_model:
            depth, kept = len(told.draft), told.retained
            fed = (_ids(*lag, pending), *map(_ids, told.draft[:-1]))
            forget_draft = depth - 1 - min(kept, depth - 1)
            lag = told.draft[-1:] if kept == depth else ()
        window = _ids(pending, *told.draft)
        steps.append(Step(fed, window, len(told.draft) - told.retained, forget_draft))
        pending = told.emitted[-1]
    mx.eval([[*step.fed, step.window] for step in steps])
    return steps


def bare_side(models: Models, kind: Kind, depth: int, prompts: Sequence[Ids], budget: int) -> Side:
    """Seconds of the same forwards on caches of the same lengths, and of nothing else.

    Each forward is queued as the engine queues it; each round ends with one wait. Plain rounds are
    queued one ahead, as the engine's are.
    """
    with_draft_model = kind == "two-model"
    plans = []
    for prompt in prompts:
        drafter = drafter_of(models, kind)
        rounds, row, _ = open_rounds(models.target, prompt, budget, drafter, depth)
        while not rounds.done:
            rounds.step()
        plans.append(replay(prompt[-1], row.trace, with_draft_model=with_draft_model))
    target, draft = models.target.model, models.draft.model

    def side(number: int) -> float:
        prompt, plan = prompts[number % len(prompts)], plans[number % len(prompts)]
        caches, draft_caches = make_prompt_cache(target), make_prompt_cache(draft)
        drain(Rows(target, caches), None, prompt)
        drain(Rows(draft, draft_caches), None, prompt)
        mx.synchronize()
        start = time.perf_counter()
        if kind == "off":
            _in_advance(target, caches, plan)
        else:
            _one_by_one(target, caches, draft, draft_caches, plan)
        return time.perf_counter() - start

    return side


def _in_advance(target: Any, caches: list[Any], plan: Sequence[Step]) -> None:
    ahead = target(plan[0].window, cache=caches)
    mx.async_eval(ahead)
    for step in plan[1:]:
        logits, ahead = ahead, target(step.window, cache=caches)
        mx.async_eval(ahead)
        mx.eval(logits)
    mx.eval(ahead)


def _one_by_one(
    target: Any, caches: list[Any], draft: Any, draft_caches: list[Any], plan: Sequence[Step]
) -> None:
    for step in plan:
        for ids in step.fed:
            mx.async_eval(draft(ids, cache=draft_caches))
        mx.eval(target(step.window, cache=caches))
        trim_prompt_cache(caches, step.forget)
        trim_prompt_cache(draft_caches, step.forget_draft)


def _ids(*ids: int) -> mx.array:
    return mx.array([ids], dtype=mx.uint32)


@dataclass(frozen=True, slots=True)
class Shares:
    """Where the time of some rounds went, in seconds, and what they waited for.

    `wait_s`: in the calls that wait for the device. `queue_s`: handing it work. `build_s`: the
    models' own Python, which builds graphs. What is left is the engine's: `host_s`.
    """

    rounds: int
    total_s: float
    build_s: float
    wait_s: float
    queue_s: float
    waits: tuple[str, ...]

    @property
    def host_s(self) -> float:
        return self.total_s - self.build_s - self.wait_s - self.queue_s


def shares(models: Models, kind: Kind, depth: int, prompt: Ids, budget: int) -> Shares:
    """Run one request's rounds under the meter."""
    clock = _Clock()
    target = clock.watch(models.target)
    drafter = drafter_of(models, kind)
    if kind == "two-model":
        drafter = TwoModelProvider(clock.watch(models.draft), target)
    rounds, row, _ = open_rounds(target, prompt, budget, drafter, depth)
    mx.synchronize()
    clock.seconds = 0.0
    with metered() as meter:
        start = time.perf_counter()
        while not rounds.done:
            rounds.step()
        total_s = time.perf_counter() - start
    return Shares(
        len(row.trace), total_s, clock.seconds, meter.wait_s, meter.queue_s, tuple(meter.waits)
    )


class _Clock:
    """Adds up the seconds in the calls of models."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def watch(self, bound: Target) -> Target:
        """The same target with every call of its model timed."""
        return Target(
            _Watched(bound.model, self),
            bound.tokenizer,
            {"vocab_size": bound.vocab_size},
            bound.path,
        )


class _Watched:
    """A model whose calls are timed; everything else is the model's own."""

    def __init__(self, model: Any, clock: _Clock) -> None:
        self._model = model
        self._clock = clock

    def __call__(self, *args: Any, **options: Any) -> Any:
        start = time.perf_counter()
        try:
            return self._model(*args, **options)
        finally:
            self._clock.seconds += time.perf_counter() - start

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


def forward_side(target: Target, prompt: Ids, *, repeats: int = 10) -> Side:
    """Seconds of one plain forward behind a short prompt."""
    caches = make_prompt_cache(target.model)
    drain(Rows(target.model, caches), None, prompt)
    token = _ids(prompt[-1])

    def side(_number: int) -> float:
        start = time.perf_counter()
        for _ in range(repeats):
            mx.eval(target.model(token, cache=caches))
            trim_prompt_cache(caches, 1)
        return (time.perf_counter() - start) / repeats

    return side


def proposal_side(num_tokens: int, vocab_size: int, *, repeats: int = 200) -> Side:
    """Seconds to index one token and propose ids behind a history of random ids."""
    draw = random.Random(0).randrange
    history = History(max_n=3, min_n=1)
    history.push([draw(vocab_size) for _ in range(num_tokens)])

    def side(_number: int) -> float:
        ids = [draw(vocab_size) for _ in range(repeats)]
        start = time.perf_counter()
        for token in ids:
            history.push([token])
            history.propose(NgramProvider.default_depth)
        return (time.perf_counter() - start) / repeats

    return side


def ngram_round_side(num_tokens: int, vocab_size: int, *, repeats: int = 200) -> Side:
    """Seconds of a whole `draft` and `commit`, with the draft's array; half of it is kept."""
    draw = random.Random(0).randrange
    rows = NgramProvider().open(RowSampling([Greedy()]))
    lender = Rows(lambda tokens, cache: tokens, [])  # of which nothing is borrowed
    rows.prefill(mx.array([[draw(vocab_size) for _ in range(num_tokens)]], dtype=mx.uint32), ())

    def side(_number: int) -> float:
        ids = [draw(vocab_size) for _ in range(repeats)]
        start = time.perf_counter()
        for token in ids:
            draft = rows.draft([token], NgramProvider.default_depth, [0], lender)
            rows.commit([draft.lengths[0] // 2], ())
        return (time.perf_counter() - start) / repeats

    return side
