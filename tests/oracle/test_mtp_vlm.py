"""The engine's next-token heads against mlx-vlm's: equal inputs, first rounds, whole traces.

mlx-vlm feeds Qwen's head behind the final norm and makes rows of GLM's whole prompt; the engine
does both when told, and is compared so. What its own conventions share with mlx-vlm is the module.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import mlx.core as mx
import numpy as np
import pytest

import fixtures
from engine import Request, RoundTrace, Target, generate
from engine.drafters.glm_mtp import DRAFTED, WHOLE_TEXT, open_glm_mtp
from engine.drafters.mtp_provider import MtpProvider
from engine.drafters.qwen_mtp import open_qwen_mtp
from engine.values import Finish
from oracle.drafters import Array, Chain, Drafters, Pair

from .test_drafters_vlm import NEAR, vlm_python

DEPTH = 3
NUM_TOKENS = 40

Name = Literal["qwen_mtp", "glm_mtp"]
NAMES: tuple[Name, ...] = ("qwen_mtp", "glm_mtp")
TARGETS = {"qwen_mtp": "hybrid", "glm_mtp": "mla"}


@pytest.fixture(scope="module")
def drafters() -> Iterator[Drafters]:
    with Drafters(vlm_python()) as running:
        yield running


@pytest.fixture(scope="module", params=NAMES)
def name(request: pytest.FixtureRequest) -> Name:
    chosen: Name = request.param
    return chosen


@pytest.fixture(scope="module")
def target(name: Name) -> Target:
    return Target.load(fixtures.target_dir(TARGETS[name]))


@pytest.fixture(scope="module")
def folder(name: Name, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The trained head, told of mlx-vlm's convention."""
    if name == "glm_mtp":
        return fixtures.target_dir("mla")
    made = tmp_path_factory.mktemp("heads") / "behind"
    shutil.copytree(fixtures.drafter_dir("hybrid-mtp"), made)
    config = json.loads((made / "config.json").read_text(encoding="utf-8"))
    config["target_hidden"] = "behind-norm"
    (made / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return made


@pytest.fixture(scope="module")
def provider(name: Name, target: Target, folder: Path) -> MtpProvider:
    if name == "glm_mtp":
        return open_glm_mtp(target, WHOLE_TEXT)
    return open_qwen_mtp(folder, target)


@pytest.fixture
def pair(name: Name, drafters: Drafters, folder: Path) -> Pair:
    return drafters.pair(name, fixtures.target_dir(TARGETS[name]), folder)


def logits_of(provider: MtpProvider, inputs: Chain) -> tuple[Array, Array]:
    """The engine's logits [N, V] and outputs [N, H] for rows on an empty cache."""
    head, ports = provider.mtp.head, provider.mtp.ports
    mixed = head.mix(ports.embed(mx.array([list(inputs.ids)])), mx.array(inputs.hidden)[None])
    out = head(mixed, head.make_cache())
    return np.array(ports.logits(out))[0], np.array(out)[0]


def rounds_of(
    target: Target, provider: MtpProvider, prompt: list[int]
) -> tuple[Finish, list[RoundTrace]]:
    """A greedy run and its rounds behind the prompt's own."""
    *_, finish = generate(target, Request(tuple(prompt), NUM_TOKENS), provider, depth=DEPTH)
    assert isinstance(finish, Finish)
    return finish, list(finish.rounds[1:])


def test_modules_agree_on_equal_inputs(
    name: Name, target: Target, provider: MtpProvider, pair: Pair
) -> None:
    """`module`: the same ids and hidden states give the same logits and the same next state."""
    ids = max((target.encode(p.text) for p in fixtures.prompts(TARGETS[name])), key=len)[:60]
    draw = np.random.default_rng(2)
    first = pair.first_round(ids, DEPTH)
    invented = draw.standard_normal(first.hidden.shape).astype(np.float32)
    for hidden in (first.hidden, invented):
        inputs = Chain([*ids[1:], first.first_token], hidden)
        logits, out = logits_of(provider, inputs)
        theirs = pair.module(inputs)
        np.testing.assert_allclose(logits, theirs.logits, atol=NEAR)
        np.testing.assert_allclose(out, theirs.hidden, atol=NEAR)


def test_first_rounds_agree(name: Name, target: Target, provider: MtpProvider, pair: Pair) -> None:
    """`draft-trace`: the first drafts behind every prompt, their first made from equal rows."""
    for prompt in fixtures.prompts(TARGETS[name]):
        ids = target.encode(prompt.text)
        theirs = pair.first_round(ids, DEPTH)
        finish, rounds = rounds_of(target, provider, ids)
        assert finish.tokens[0] == theirs.first_token
        assert rounds[0].draft == theirs.drafts, prompt.name
        logits, _ = logits_of(provider, Chain([*ids[1:], theirs.first_token], theirs.hidden))
        np.testing.assert_allclose(logits[-1], theirs.logits[0], atol=NEAR)


def test_traces_agree(name: Name, target: Target, provider: MtpProvider, pair: Pair) -> None:
    """`draft-trace`: every round of every prompt drafts and accepts the same."""
    rounds_compared = accepted = 0
    for prompt in fixtures.prompts(TARGETS[name]):
        ids = target.encode(prompt.text)
        theirs = pair.trace(ids, NUM_TOKENS, DEPTH, eos_ids=sorted(target.eos_ids))
        _, rounds = rounds_of(target, provider, ids)
        ours = [(one.draft, one.accepted) for one in rounds]
        assert ours == [(one.drafts, one.accepted) for one in theirs.rounds], prompt.name
        rounds_compared += len(ours)
        accepted += sum(one.accepted for one in rounds)
    assert rounds_compared > 50
    assert accepted > 50


def test_a_glm_draft_behind_a_prompt_is_a_row_of_its_own(drafters: Drafters) -> None:
    """The engine's own convention: the first row at position 0, whatever the prompt was."""
    of = fixtures.target_dir("mla")
    target = Target.load(of)
    pair = drafters.pair("glm_mtp", of, of)
    for prompt in fixtures.prompts("mla"):
        ids = target.encode(prompt.text)
        first = pair.first_round(ids, DEPTH)
        inputs = Chain([first.first_token], first.hidden[-1:])
        drafts: list[int] = []
        for _ in range(DEPTH):
            output = pair.module(inputs)
            drafts.append(int(output.logits[-1].argmax()))
            hidden = np.concatenate([inputs.hidden, output.hidden[-1:]])
            inputs = Chain([*inputs.ids, drafts[-1]], hidden)
        _, rounds = rounds_of(target, open_glm_mtp(target, DRAFTED), ids)
        assert rounds[0].draft == tuple(drafts), prompt.name
