"""`draft-trace`: the engine's block drafters against mlx-vlm's, on the same weights.

mlx-vlm samples the first token from the prompt; the engine's first window is headed by the last
token of a prompt. So the engine is given the prompt with mlx-vlm's first token behind it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

import fixtures
from engine import Request, Target, generate, open_drafter
from engine.drafters.context_rows import BlockProvider, ContextRows
from engine.drafters.projected_context import Context, Proposal
from engine.sampling import Greedy, RowSampling
from engine.values import Finish
from fixtures import random_drafters
from oracle.drafters import Array, Block, Drafters, Kind, Pair

from .test_drafters_vlm import NEAR, vlm_python

NUM_TOKENS = 40


@dataclass(frozen=True, slots=True)
class Case:
    """A drafter by its maker in `random_drafters`, or a trained one by its name, and its target."""

    kind: Kind
    target: str
    trained: str | None = None

    def __str__(self) -> str:
        return self.trained or f"{self.kind}-{self.target}"


CASES = (
    Case("dspark", "hybrid"),
    Case("dspark", "sliding"),
    Case("dflash", "hybrid"),
    Case("deepspec", "sliding"),
    Case("dspark", "hybrid", "hybrid-dspark"),
    Case("deepspec", "sliding", "sliding-deepspec"),
)


@dataclass(frozen=True, slots=True)
class Both:
    """One pair of folders, opened by the engine and by mlx-vlm."""

    case: Case
    target: Target
    provider: BlockProvider
    pair: Pair

    @property
    def depth(self) -> int:
        return self.provider.default_depth

    def prompt(self, number: int, most: int = 60) -> list[int]:
        return self.target.encode(fixtures.prompts(self.case.target)[number].text)[:most]


@pytest.fixture(scope="module")
def drafters() -> Iterator[Drafters]:
    with Drafters(vlm_python()) as running:
        yield running


@pytest.fixture(scope="module", params=CASES, ids=str)
def both(
    request: pytest.FixtureRequest, drafters: Drafters, tmp_path_factory: pytest.TempPathFactory
) -> Both:
    case: Case = request.param
    folder = tmp_path_factory.mktemp("blocks") / "drafter"
    if case.trained is None:
        getattr(random_drafters, case.kind)(folder, fixtures.target_dir(case.target), 1)
        if case.kind == "dspark" and case.target == "sliding":
            # The target's head caps its logits; mlx-vlm caps only if the drafter's config says so.
            config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
            (folder / "config.json").write_text(
                json.dumps({**config, "final_logit_softcapping": 30.0}), encoding="utf-8"
            )
    else:
        folder = fixtures.drafter_dir(case.trained)
    target = Target.load(fixtures.target_dir(case.target))
    provider = open_drafter(str(folder), target)
    assert isinstance(provider, BlockProvider)
    full = BlockProvider(provider.id, "whole", provider.model, "", target)  # nothing is pruned
    pair = drafters.pair(
        case.kind,
        fixtures.target_dir(case.target),
        folder,
        norm_values=case.kind == "deepspec",
    )
    return Both(case, target, full, pair)


def proposed(provider: BlockProvider, taps: Array, anchor: int) -> Proposal:
    """The block behind a context of taps [S, layers * H]."""
    rows: ContextRows = provider.open(RowSampling([Greedy()]))
    context = mx.array(taps)[None]
    rows.prefill(mx.zeros((1, len(taps)), mx.uint32), (context,))
    made = provider.model.propose(mx.array([anchor]), Context.of(rows._state), 99)
    mx.eval(made.logits)
    return made


def test_a_block_is_computed_alike(both: Both) -> None:
    """`module`: on equal taps, hidden states, logits before and behind the bias, confidence."""
    draw = np.random.default_rng(5)
    width = both.provider.model.shape.hidden_size * len(both.provider.taps)
    for num_columns in (1, 12, 70):
        taps = draw.standard_normal((num_columns, width)).astype(np.float32)
        ours = proposed(both.provider, taps, 40)
        theirs = both.pair.module(Block(40, taps, both.depth))
        np.testing.assert_allclose(np.array(ours.hidden)[0], theirs.hidden, atol=NEAR)
        np.testing.assert_allclose(np.array(ours.logits)[0], theirs.logits, atol=NEAR)
        assert theirs.base_logits is not None
        np.testing.assert_allclose(np.array(ours.base)[0], theirs.base_logits, atol=NEAR)
        if theirs.confidence is not None:
            np.testing.assert_allclose(np.array(ours.confidence)[0], theirs.confidence, atol=NEAR)
        assert tuple(np.array(ours.tokens)[0].tolist()) == theirs.drafts


def engine_run(both: Both, prompt: list[int], first: int, max_tokens: int) -> Finish:
    request = Request((*prompt, first), max_tokens)
    finish: Any = list(generate(both.target, request, both.provider))[-1]
    assert isinstance(finish, Finish)
    return finish


def test_the_first_round_drafts_the_same(both: Both) -> None:
    """`first round`: each side on the states of its own target, for every prompt."""
    for number in range(len(fixtures.prompts(both.case.target))):
        prompt = both.prompt(number)
        first = both.pair.first_round(prompt, both.depth)
        ours = proposed(both.provider, first.hidden, first.first_token)
        np.testing.assert_allclose(np.array(ours.logits)[0], first.logits, atol=NEAR)
        got = engine_run(both, prompt, first.first_token, both.depth + 1)
        assert got.rounds[0].draft == first.drafts


def test_traces_are_the_same(both: Both) -> None:
    """`draft-trace`: all rounds but those that the budget cuts, where mlx-vlm's blocks are shorter.

    Nine of ten must be equal; a difference is allowed where mlx-vlm's own best two logits are
    nearer than twice the tolerance.
    """
    equal = different = 0
    for number in range(len(fixtures.prompts(both.case.target))):
        prompt = both.prompt(number)
        trace = both.pair.trace(
            prompt, NUM_TOKENS, both.depth, eos_ids=both.target.eos_ids, with_logits=True
        )
        first, *rest = trace.generated
        if not rest:
            continue
        got = engine_run(both, prompt, first, NUM_TOKENS - 1)
        text = [token for token in rest if token not in both.target.eos_ids]
        assert list(got.tokens) == text
        for ours, theirs in zip(got.rounds, trace.rounds, strict=True):
            if len(theirs.drafts) < both.depth:
                break  # the budget's last rounds
            # mlx-vlm goes on counting matches behind an accepted EOS.
            ends = [token in both.target.eos_ids for token in theirs.drafts]
            most = [*ends, True].index(True) + 1
            if ours.draft == theirs.drafts and ours.accepted == min(theirs.accepted, most):
                equal += 1
                continue
            assert theirs.logits is not None
            best = np.sort(theirs.logits, axis=1)
            assert (best[:, -1] - best[:, -2]).min() < 2 * NEAR, (number, ours, theirs)
            different += 1
            break  # the rounds behind it begin elsewhere
    assert equal >= 9 * different
    assert equal > 30
