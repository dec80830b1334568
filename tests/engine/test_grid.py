"""The grid of speculation: how often the drafter is right, how deep, where the window ends.

R22: a scripted drafter right with probability 0, .5, .9 or 1, at depths 1 to 8, on prompts around
and past the window, in every family, with the stream left at any token. The nightly profile runs
more of it; a failure prints the seed that draws it again.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from json import loads

import mlx.core as mx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fixtures
from engine import DraftProvider, Request, Target, generate, open_drafter, open_live
from engine.values import TokenEvent

from .conftest import finish_of
from .puppet import Puppet, scripted

FAMILIES = ("dense", "sliding", "hybrid", "mla")
WINDOW = 32
LENGTHS = (WINDOW - 1, WINDOW, WINDOW + 1, 3 * WINDOW)
BUDGET = 16
PER_FAMILY = 2500 if os.environ.get("HYPOTHESIS_PROFILE") == "nightly" else 250
SEED = int(os.environ.get("MLX_PARITY_SEED", "22"))
EVERY = 10
"""Every so many draws the state that is left behind is compared as well."""


@lru_cache(maxsize=1)
def loaded(family: str) -> Target:
    return Target.load(fixtures.target_dir(family))


@lru_cache(maxsize=1)
def drafters(family: str) -> dict[str, DraftProvider | None]:
    folder = fixtures.drafter_dir(f"{family}-draft")
    specs = ("ngram", f"two-model:{folder}")
    return {spec.partition(":")[0]: open_drafter(spec, loaded(family)) for spec in specs}


@lru_cache(maxsize=1)
def text_of(family: str) -> tuple[int, ...]:
    """Ids of the family's longest prompt, at least three windows of them."""
    target = loaded(family)
    ids = max((target.encode(one.text) for one in fixtures.prompts(family)), key=len)
    assert len(ids) >= 3 * WINDOW
    return tuple(ids)


@lru_cache(maxsize=8)
def truth(family: str, length: int) -> tuple[int, ...]:
    """What plain decoding says after the first `length` ids, an EOS not included."""
    return finish_of(loaded(family), text_of(family)[:length], max_tokens=BUDGET).tokens


@dataclass(frozen=True)
class Drawn:
    """One point of the grid. `close_at`: the stream is left after so many tokens."""

    length: int
    right: float
    depth: int
    close_at: int | None
    script: tuple[tuple[bool, ...], ...]

    @classmethod
    def by(cls, dice: random.Random) -> Drawn:
        right = dice.choice((0.0, 0.5, 0.9, 1.0))
        script = tuple(
            tuple(dice.random() < right for _ in range(dice.randint(0, 8)))
            for _ in range(dice.randint(1, 6))
        )
        close_at = dice.choice((None, *range(1, BUDGET)))
        return cls(dice.choice(LENGTHS), right, dice.randint(1, 8), close_at, script)


@pytest.mark.parametrize("part", range(2))
@pytest.mark.parametrize("family", FAMILIES)
def test_whatever_is_drafted_the_text_is_plain_and_the_state_holds_it(
    family: str, part: int
) -> None:
    """`lossless`, `position`, `rollback`."""
    dice = random.Random(f"{SEED}/{family}/{part}")
    for number in range(PER_FAMILY // 2):
        drawn = Drawn.by(dice)
        where = f"seed {SEED}, {family}, part {part}, draw {number}: {drawn}"
        prompt, expected = text_of(family)[: drawn.length], truth(family, drawn.length)
        live = open_live(loaded(family))
        puppet = Puppet(scripted((*expected, 0), drawn.script))
        request = Request(prompt, BUDGET)
        stream = generate(loaded(family), request, puppet, depth=drawn.depth, live=live)
        events = list(islice(stream, drawn.close_at))
        stream.close()
        tokens = tuple(event.token for event in events if isinstance(event, TokenEvent))
        assert tokens == expected[: len(tokens)], where
        assert len(tokens) == min(drawn.close_at or BUDGET, len(expected)), where
        known = (*prompt, *expected)
        assert tuple(live.held) == known[: len(live.held)], where
        assert live.target.processed[0] == len(live.held) >= len(prompt) - 1, where
        if number % EVERY == 0:
            assert difference_from_fresh(family, live.target, live.held) < 1e-4, where


def difference_from_fresh(family: str, rows: object, held: list[int]) -> float:
    """|difference| of the logits behind 2 further tokens from those of a fresh state."""
    fresh = loaded(family).new_rows()
    fresh.forward(mx.array([held]))
    probe = mx.array([[65, 66]])
    ours, theirs = (state.forward(probe) for state in (rows, fresh))  # type: ignore[attr-defined]
    return float(mx.abs(ours - theirs).max())


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=max(12, settings().max_examples // 4))
@given(length=st.integers(1, 3 * WINDOW), budget=st.integers(1, 100), data=st.data())
def test_real_drafters_say_the_plain_text_at_any_length_and_budget(
    family: str, length: int, budget: int, data: st.DataObject
) -> None:
    """`lossless`, `length-one`: prompts of one token to three windows."""
    name = data.draw(st.sampled_from(("ngram", "two-model")), label="drafter")
    depth = data.draw(st.integers(0, 8), label="depth")
    target, prompt = loaded(family), text_of(family)[:length]
    plain = finish_of(target, prompt, max_tokens=budget)
    drafted = finish_of(target, prompt, drafters(family)[name], max_tokens=budget, depth=depth)
    assert (drafted.tokens, drafted.text, drafted.reason, drafted.usage) == (
        plain.tokens,
        plain.text,
        plain.reason,
        plain.usage,
    )
    assert drafted.logprobs == pytest.approx(plain.logprobs, abs=1e-3)


def test_the_command_line_drafts_past_a_window() -> None:
    """`lossless`: as a user runs it."""
    prompt = fixtures.prompts("sliding")[0].text

    def said(drafter: str) -> dict[str, object]:
        command = [sys.executable, "-m", "engine", "generate", "--json", "--max-tokens", "40"]
        options = ["--target", str(fixtures.target_dir("sliding")), "--drafter", drafter]
        done = subprocess.run(
            [*command, *options, "--prompt", prompt], capture_output=True, check=True, text=True
        )
        answer: dict[str, object] = loads(done.stdout)
        return answer

    plain, drafted = said("off"), said("ngram")
    assert drafted["tokens"] == plain["tokens"]
    assert drafted["statistics"] != plain["statistics"]
