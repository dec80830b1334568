"""Single operations in seconds. They compare nothing: for ratios run `python -m parity.bench`."""

from __future__ import annotations

import random
from typing import Any

import mlx.core as mx
import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from engine.drafters.ngram import History
from engine.rounds import Rounds
from engine.stops import TextStream
from parity.bench.costs import drafter_of
from parity.bench.figures import HISTORY, ROUNDS
from parity.bench.loops import Models, load_fixtures, open_rounds

BUDGET = 4_000
"""More tokens than are timed, within the positions that the fixture knows."""


@pytest.fixture(scope="module")
def models() -> Models:
    return load_fixtures()


@pytest.fixture(scope="module")
def history() -> History:
    draw = random.Random(0).randrange
    made = History(max_n=3, min_n=1)
    made.push([draw(288) for _ in range(HISTORY)])
    return made


def test_ngram_push(benchmark: BenchmarkFixture, history: History) -> None:
    """Index one token behind a long history."""
    benchmark(history.push, [7])


def test_ngram_propose(benchmark: BenchmarkFixture, history: History) -> None:
    """Look up ten ids behind a long history."""
    benchmark(history.propose, 10)


def test_text_of_a_token(benchmark: BenchmarkFixture, models: Models) -> None:
    """Detokenize 64 tokens."""
    ids = models.target.encode("The green dog turns around and around. " * 2)[:64]

    def run() -> str:
        stream = TextStream(models.target.tokenizer, ())
        for token in ids:
            stream.push(token)
        return stream.text

    benchmark(run)


@pytest.mark.parametrize(("kind", "depth"), ROUNDS)
def test_round(benchmark: BenchmarkFixture, models: Models, kind: str, depth: int) -> None:
    """One round behind a short prompt; every timed one is of a new request."""
    prompt = tuple(models.target.encode("Name: Anna. Say it again: "))

    def opened() -> tuple[tuple[Rounds], dict[str, object]]:
        rounds, _, _ = open_rounds(models.target, prompt, BUDGET, drafter_of(models, kind), depth)
        rounds.step()
        mx.synchronize()
        return (rounds,), {}

    run: Any = benchmark.pedantic  # it carries no types
    run(Rounds.step, setup=opened, rounds=50, warmup_rounds=2)
