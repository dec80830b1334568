"""The tiny trained target, its draft model, and the slow truth about what they hold."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

import fixtures
from engine import DraftProvider, Request, Sampling, Target, generate, open_drafter
from engine.values import Finish, TokenEvent


@pytest.fixture(scope="session")
def target() -> Target:
    return Target.load(fixtures.target_dir("dense"))


@pytest.fixture(scope="session")
def two_model(target: Target) -> DraftProvider:
    provider = open_drafter(f"two-model:{fixtures.drafter_dir('dense-draft')}", target)
    assert provider is not None
    return provider


@pytest.fixture(scope="session")
def ngram(target: Target) -> DraftProvider:
    provider = open_drafter("ngram", target)
    assert provider is not None
    return provider


@pytest.fixture(scope="session")
def prompt(target: Target) -> tuple[int, ...]:
    return tuple(target.encode("Name: Anna. Say it again: "))


def finish_of(
    target: Target,
    prompt: Sequence[int],
    provider: DraftProvider | None = None,
    *,
    max_tokens: int = 24,
    sampling: Sampling | None = None,
    depth: int | None = None,
) -> Finish:
    """Run one request to its end."""
    request = Request(tuple(prompt), max_tokens, sampling or Sampling())
    return last(list(generate(target, request, provider, depth=depth)))


def last(events: Sequence[TokenEvent | Finish]) -> Finish:
    """A stream's `Finish`, after a check that it is the only one and the last."""
    finish = events[-1]
    assert isinstance(finish, Finish)
    tokens = [event for event in events if isinstance(event, TokenEvent)]
    assert len(tokens) == len(events) - 1
    assert tuple(event.token for event in tokens) == finish.tokens
    assert "".join(event.text for event in tokens) + finish.tail == finish.text
    return finish
