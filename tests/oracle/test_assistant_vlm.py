"""The engine's assistant against mlx-vlm's: module, donors, first drafts, whole traces."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

import fixtures
from engine import Finish, Request, Target, generate
from engine.drafters.assistant import MLX_VLM, AssistantProvider, Convention
from engine.drafters.assistant_model import FULL, SLIDING
from engine.state.donors import Donor
from fixtures import random_drafters
from oracle.drafters import VARIABLE, Drafters, FirstRound, Pair, python_in_environment

NEAR = 2e-4
DEPTH, NUM_TOKENS, WINDOW = 3, 48, 32
WHOLE_WINDOW = Convention(start=MLX_VLM.start)
FOLDERS = ("trained", "tied", "centroids")


@dataclass(frozen=True, slots=True)
class Both:
    """One folder in the engine and in mlx-vlm."""

    target: Target
    folder: Path
    pair: Pair

    def provider(self, convention: Convention) -> AssistantProvider:
        return AssistantProvider(self.folder, self.target, convention)


@pytest.fixture(scope="module")
def drafters() -> Iterator[Drafters]:
    python = python_in_environment()
    if python is None:
        pytest.fail(f"{VARIABLE} must name the Python of mlx-vlm: run nox -s oracle_drafters")
    with Drafters(python) as running:
        yield running


@pytest.fixture(scope="module", params=FOLDERS)
def both(
    request: pytest.FixtureRequest, drafters: Drafters, tmp_path_factory: pytest.TempPathFactory
) -> Both:
    target = fixtures.target_dir("sliding")
    if request.param == "trained":
        folder = fixtures.drafter_dir("sliding-assistant")
    else:
        folder = tmp_path_factory.mktemp("assistant") / "drafter"
        random_drafters.assistant(folder, target, 1, centroids=request.param == "centroids")
    return Both(Target.load(target), folder, drafters.pair("assistant", target, folder))


def prompts(target: Target) -> list[tuple[int, ...]]:
    """Prompts of 1 to 600 tokens, around the window of 32 and its multiples."""
    texts = sorted((prompt.text for prompt in fixtures.prompts("sliding")), key=len)
    return [tuple(target.encode(text)) for text in texts]


class Handed:
    """Lends what mlx-vlm's target handed over."""

    def __init__(self, first: FirstRound, window: int) -> None:
        assert first.num_valid is not None
        self._first, self._window, self._length = first, window, first.num_valid

    def donor(self, windowed: bool) -> Donor:
        planes = self._first.keys_values[SLIDING if windowed else FULL]
        keys, values = map(mx.array, planes)
        held = keys.shape[2]
        window = self._window if windowed else None
        return Donor(keys, values, (held,), (self._length,), window)


def step_by_step(provider: AssistantProvider, first: FirstRound, depth: int) -> Any:
    """Scores [K, V] by the engine's network on mlx-vlm's inputs; -inf where it scores nothing."""
    lender = Handed(first, WINDOW)
    lent = {kind: provider.lent(lender.donor(kind == SLIDING)) for kind in provider.kinds}
    token, hidden = mx.array([[first.first_token]]), mx.array(first.hidden)[None]
    rows = []
    for number in range(depth):
        position = provider.position((lender._length,), number)
        state, hidden = provider.model(provider.ports.embed(token), hidden, lent, position)
        ids, scores = provider.model.scores(state)
        if ids is not None:
            blank = mx.full((1, 1, first.logits.shape[1]), -mx.inf)
            scores = mx.put_along_axis(blank, ids, scores, axis=-1)
        rows.append(np.array(scores[0, 0]))
        token = provider.model.choose(state)
    return np.stack(rows)


def test_the_module_computes_what_mlx_vlms_does(both: Both) -> None:
    """`draft-trace`: equal inputs, equal logits, for prompts before, at and behind the window."""
    provider = both.provider(WHOLE_WINDOW)
    for prompt in prompts(both.target):
        first = both.pair.first_round(prompt, DEPTH)
        ours = step_by_step(provider, first, DEPTH)
        scored = np.isfinite(ours)
        np.testing.assert_allclose(ours[scored], first.logits[scored], atol=NEAR)
        assert tuple(ours.argmax(1)) == first.drafts


def test_positions_and_window_are_seen(both: Both) -> None:
    """The same comparison fails by far where either convention is another."""
    prompt = max(prompts(both.target), key=len)
    first = both.pair.first_round(prompt, DEPTH)
    for other in (Convention(), MLX_VLM, Convention(start=-1, step=1)):
        ours = step_by_step(both.provider(other), first, DEPTH)
        both_score = np.isfinite(ours)
        assert np.abs(ours[both_score] - first.logits[both_score]).max() > 10 * NEAR


def test_the_lent_layers_are_the_ones_mlx_vlm_hands_over(both: Both) -> None:
    """The last layers of each kind that own keys; theirs may show more than the window."""
    for prompt in prompts(both.target):
        first = both.pair.first_round(prompt, DEPTH)
        rows = both.target.new_rows()
        rows.forward(mx.array([prompt]))
        assert first.num_valid == len(prompt)
        for kind, (keys, values) in first.keys_values.items():
            donor = rows.donor(kind == SLIDING)
            assert donor.offsets == (len(prompt),)
            shown = min(len(prompt), WINDOW) if kind == SLIDING else len(prompt)
            lent = donor.last([shown])
            for ours, theirs in ((lent.keys, keys), (lent.values, values)):
                np.testing.assert_allclose(ours, theirs[:, :, -shown:], atol=NEAR)


def finish_of(both: Both, convention: Convention, prompt: Sequence[int]) -> Finish:
    request = Request(tuple(prompt), NUM_TOKENS)
    *_, finish = generate(both.target, request, both.provider(convention), depth=DEPTH)
    assert isinstance(finish, Finish)
    return finish


def test_the_first_drafts_are_mlx_vlms(both: Both) -> None:
    """Through the engine's own prefill, taps and lent keys."""
    for prompt in prompts(both.target):
        first = both.pair.first_round(prompt, DEPTH)
        finish = finish_of(both, WHOLE_WINDOW, prompt)
        assert finish.tokens[0] == first.first_token
        assert finish.rounds[1].draft == first.drafts, len(prompt)


def by_place(rounds: Iterable[tuple[tuple[int, ...], int]]) -> dict[int, tuple[int, ...]]:
    """Each round's drafts by how many tokens the text had before it."""
    found, place = {}, 1
    for drafts, accepted in rounds:
        found[place] = drafts
        place += accepted + 1
    return found


def places_before_any_drop(num_prompt: int, told: dict[int, tuple[int, ...]]) -> set[int]:
    """Where mlx-vlm's cache still has every key.

    It drops some when a forward comes to stand on more than a window, if the prompt was longer than
    one, or else when it goes 32 tokens beyond.
    """
    whole: set[int] = set()
    for place, drafts in sorted(told.items()):
        whole.add(place)
        if num_prompt > WINDOW or num_prompt + place + len(drafts) > 2 * WINDOW:
            break
    return whole


def test_whole_traces_are_mlx_vlms(both: Both) -> None:
    """`draft-trace`: the rounds are the same, but where the two show a sliding layer other keys.

    mlx-vlm shows the whole window until its cache drops keys and one key fewer then; the engine is
    told one of the two for a whole text. With the one that holds at a place, drafts are equal.
    """
    equal, total = 0, 0
    for prompt in prompts(both.target):
        theirs = both.pair.trace(prompt, NUM_TOKENS, DEPTH, eos_ids=both.target.eos_ids)
        told = by_place((turn.drafts, turn.accepted) for turn in theirs.rounds)
        ours = {
            convention: by_place(
                (turn.draft, turn.accepted)
                for turn in finish_of(both, convention, prompt).rounds[1:]
            )
            for convention in (MLX_VLM, WHOLE_WINDOW)
        }
        whole = places_before_any_drop(len(prompt), told)
        for place, drafts in told.items():
            found = ours[WHOLE_WINDOW if place in whole else MLX_VLM]
            if place in found:
                assert found[place] == drafts, (len(prompt), place)
        equal += sum(told[place] == ours[MLX_VLM].get(place) for place in told)
        total += len(told)
    assert equal >= 0.9 * total, (equal, total)
