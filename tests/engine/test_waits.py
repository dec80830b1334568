"""The host waits for the device once a round, and nowhere else."""

from __future__ import annotations

import pytest

from engine import DraftProvider, Request, Target, generate, open_live
from engine.values import Finish, Sampling
from parity.bench.meter import metered

CELLS = [("off", 0), ("ngram", 3), *(("two-model", depth) for depth in (1, 3, 7))]


@pytest.fixture
def providers(ngram: DraftProvider, two_model: DraftProvider) -> dict[str, DraftProvider | None]:
    return {"off": None, "ngram": ngram, "two-model": two_model}


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(),
        Sampling(temperature=0.8, top_k=20, seed=3),
        Sampling(temperature=0.8, seed=3, rng="sequential"),
    ],
    ids=["greedy", "positional", "sequential"],
)
@pytest.mark.parametrize(("kind", "depth"), CELLS)
def test_a_round_waits_for_the_device_exactly_once(
    target: Target,
    providers: dict[str, DraftProvider | None],
    prompt: tuple[int, ...],
    kind: str,
    depth: int,
    sampling: Sampling,
) -> None:
    """Drafts stay on the device until the verify is launched; then one evaluation brings all."""
    request = Request(prompt, 24, sampling, stop_strings=("never",))
    live = open_live(target)
    with metered() as meter:
        *_, finish = generate(target, request, providers[kind], depth=depth, live=live)
    assert isinstance(finish, Finish)
    assert len(finish.rounds) >= 3
    # The prompt is one chunk for the target and one for the drafter, if there is one.
    before = 1 if kind == "off" else 2
    assert meter.waits[before:] == ["eval"] * len(finish.rounds)
