"""P1: the engine's loops against mlx-lm's generators on the same loaded model.

Like with like: ids against `generate_step` and `speculative_generate_step`, events with text and
log-probabilities against `stream_generate`. All run on greedily for the whole budget.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
from mlx_lm.generate import generate_step, speculative_generate_step, stream_generate

import fixtures
from engine import DraftProvider, Request, Target, TokenEvent, generate
from engine.drafters.source import DraftRows
from engine.drafters.two_model import TwoModelProvider
from engine.rounds import Rounds, Row
from engine.sampling import Greedy, RowSampling
from engine.state.rows import Rows
from parity.bench.pairs import Side
from parity.errors import Unusable

Ids = tuple[int, ...]
Loop = Callable[[Ids, int], list[int]]
"""Prompt ids and a budget to generated ids."""


@dataclass(frozen=True, slots=True)
class Models:
    """The target, a draft model, and the latter as the engine's drafter."""

    target: Target
    draft: Target
    drafter: DraftProvider


@dataclass(slots=True)
class Collector:
    """The least a consumer can do."""

    ids: list[int] = field(default_factory=list)

    def take(self, token: int, logprob: float, *, from_draft: bool, round: int) -> bool:
        self.ids.append(token)
        return True


def drain(rows: Rows, draft: DraftRows | None, prompt: Ids) -> None:
    """Process all of a prompt but its last token, at once."""
    tokens = mx.array([prompt[:-1]], dtype=mx.uint32)
    rows.forward(tokens)
    if draft is not None:
        draft.prefill(tokens)
    mx.eval(rows.arrays())


def open_rounds(
    target: Target, prompt: Ids, budget: int, drafter: DraftProvider | None, depth: int
) -> tuple[Rounds, Row, Collector]:
    """The engine's rounds behind a prefilled prompt, without text, events or EOS."""
    sampling = RowSampling([Greedy()])
    rows = target.new_rows()
    draft = None if drafter is None else drafter.open(sampling)
    drain(rows, draft, prompt)
    collector = Collector()
    row = Row(collector, frozenset(), list(prompt[:-1]), prompt[-1], 0, budget)
    rounds = Rounds(rows, draft, sampling, [row], depth=depth, vocab_size=target.vocab_size)
    return rounds, row, collector


def engine_ids(models: Models, depth: int) -> Loop:
    """The engine's loop without text; depth 0 is plain."""
    drafter = models.drafter if depth else None

    def run(prompt: Ids, budget: int) -> list[int]:
        rounds, _, collector = open_rounds(models.target, prompt, budget, drafter, depth)
        while not rounds.done:
            rounds.step()
        return collector.ids

    return run


def mlx_lm_ids(models: Models, depth: int) -> Loop:
    """mlx-lm's id generators; depth 0 is plain."""
    target, draft = models.target.model, models.draft.model

    def plain(prompt: Ids, budget: int) -> list[int]:
        # The stub says array; what comes is an int.
        steps: Any = generate_step(mx.array(prompt), target, max_tokens=budget)
        return [token for token, _ in steps]

    def speculative(prompt: Ids, budget: int) -> list[int]:
        steps: Any = speculative_generate_step(
            mx.array(prompt), target, draft, num_draft_tokens=depth, max_tokens=budget
        )
        return [token for token, _, _ in steps]

    return speculative if depth else plain


def engine_events(models: Models, depth: int) -> Loop:
    """`engine.generate`, every event taken."""
    drafter = models.drafter if depth else None

    def run(prompt: Ids, budget: int) -> list[int]:
        events = generate(models.target, Request(prompt, budget), drafter, depth=depth)
        return [event.token for event in events if isinstance(event, TokenEvent)]

    return run


def mlx_lm_events(models: Models, depth: int) -> Loop:
    """`mlx_lm.stream_generate`, every response taken."""

    def run(prompt: Ids, budget: int) -> list[int]:
        responses = stream_generate(
            models.target.model,
            models.target.tokenizer,
            mx.array(prompt),
            max_tokens=budget,
            draft_model=models.draft.model if depth else None,
            num_draft_tokens=depth,
        )
        return [response.token for response in responses]

    return run


def timed(loop: Loop, prompts: Sequence[Ids], expected: Sequence[list[int]], budget: int) -> Side:
    """From the prompt to the last token; prompts take turns.

    mlx-lm's plain loop leaves one forward behind. The device finishes it outside the time.

    Raises:
        Unusable: the ids are not the expected ones; nothing that was timed is of use then.
    """

    def side(number: int) -> float:
        which = number % len(prompts)
        start = time.perf_counter()
        ids = loop(prompts[which], budget)
        seconds = time.perf_counter() - start
        if ids != expected[which]:
            raise Unusable(f"the loops disagree on prompt {which}: their times compare nothing")
        mx.synchronize()
        return seconds

    return side


def load_fixtures() -> Models:
    """The dense fixture and its draft model."""
    target = Target.load(fixtures.target_dir("dense"))
    draft = Target.load(fixtures.drafter_dir("dense-draft"))
    return Models(target, draft, TwoModelProvider(draft, target))
