"""Requests per tiny target, with what each gives on its own: the truth about rows in groups."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import fixtures
from engine import DraftProvider, Finish, Request, Sampling, Target, generate, open_drafter

from .conftest import last

FAMILIES = ("dense", "sliding", "hybrid", "mla")
DRAFTERS = ("off", "ngram", "two-model")
PAIRS = (
    *((family, kind) for family in FAMILIES for kind in DRAFTERS),
    ("dense", "dspark"),
    ("sliding", "assistant"),
    ("hybrid", "mtp"),
    ("mla", "mtp"),
    ("hybrid", "dspark"),
    ("sliding", "deepspec"),
)
"""Each family with each drafter that fits it."""

FOLDERS = {
    "two-model": "draft",
    "assistant": "assistant",
    "mtp": "mtp",
    "dspark": "dspark",
    "deepspec": "deepspec",
}
"""What a kind's fixture is called behind its target's name."""

OWN = (("mla", "mtp"),)
"""What lies in the target's own files."""


@dataclass(frozen=True, slots=True)
class Pool:
    """A target, a drafter and requests that they serve; `alone[i]` is request i's own stream."""

    target: Target
    drafter: DraftProvider | None
    requests: tuple[Request, ...]
    alone: tuple[Finish, ...]


@cache
def target_of(family: str) -> Target:
    return Target.load(fixtures.target_dir(family))


def spec_of(family: str, kind: str) -> str:
    """What names a family's drafter of a kind on the command line."""
    if kind not in FOLDERS or (family, kind) in OWN:
        return kind
    return f"{kind}:{fixtures.drafter_dir(f'{family}-{FOLDERS[kind]}')}"


@cache
def drafter_of(family: str, kind: str) -> DraftProvider | None:
    return open_drafter(spec_of(family, kind), target_of(family))


def requests_of(family: str) -> tuple[Request, ...]:
    """Prompts of 1 token to several windows, budgets of 1 to 24, every way to sample and to end."""
    target = target_of(family)
    texts = [prompt.text for prompt in fixtures.prompts(family)]
    return tuple(
        Request(
            tuple(target.encode(texts[i % len(texts)]))[: (1, 2, 9, 31, 32, 33, 70)[i % 7]],
            max_tokens=(1, 2, 5, 9, 24)[i % 5],
            sampling=(
                Sampling() if i % 3 else Sampling(temperature=0.8, top_p=(0.0, 0.9)[i % 2], seed=i)
            ),
            stop_ids=frozenset({32}) if i % 4 == 0 else frozenset(),
            stop_strings=("e",) if i % 11 == 5 else (),
        )
        for i in range(20)
    )


@cache
def pool(family: str, kind: str) -> Pool:
    """Those requests, and what each is alone."""
    target, drafter = target_of(family), drafter_of(family, kind)
    requests = requests_of(family)
    alone = tuple(last(list(generate(target, request, drafter))) for request in requests)
    return Pool(target, drafter, requests, alone)


def same(got: Finish, alone: Finish) -> bool:
    """Text, trace and reason; log-probabilities where they are the same numbers is not asked."""
    return (got.tokens, got.text, got.reason, got.rounds, got.usage, got.seed) == (
        alone.tokens,
        alone.text,
        alone.reason,
        alone.rounds,
        alone.usage,
        alone.seed,
    )
