"""mlx-lm's generators as we drive them, against the slow truth."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from oracle.inprocess import (
    Loaded,
    PositionalSampler,
    Round,
    load,
    plain,
    rounds_of,
    speculative,
)
from oracle.models import acceptance, no_cache_greedy
from oracle.noise import Filters, Positional
from oracle.processors import Processors

from .tiny import byte_id

NUM_TOKENS = 20
TOP_P = Filters(0.9, top_p=0.95)


@pytest.mark.parametrize("text", ["a", "The quick brown fox", "Zażółć 日本 🙂"])
@pytest.mark.parametrize("depth", [0, 1, 3, 8])
def test_speculative_and_plain_runs_equal_the_slow_model(
    target: Loaded, draft: Loaded, text: str, depth: int
) -> None:
    """`lossless`: both generators, at every depth, against no cache at all."""
    prompt = target.encode(text)
    truth = no_cache_greedy(target.model, prompt, NUM_TOKENS, target.eos_ids)
    run = plain(target, prompt, NUM_TOKENS)
    sped = speculative(target, draft, prompt, NUM_TOKENS, depth)
    assert run.tokens == sped.tokens == truth
    assert sped.logprobs == pytest.approx(run.logprobs, abs=1e-5)
    assert len(run.logprobs) == len(sped.from_draft) == NUM_TOKENS
    assert sum(turn.emitted for turn in sped.rounds) == NUM_TOKENS
    assert sum(sped.accepted) == sum(sped.from_draft)


def test_a_perfect_draft_is_accepted_whole(target: Loaded) -> None:
    """`oracle-trace`: the target as its own draft gives full accepts, cut by the budget."""
    run = speculative(target, target, target.encode("abc"), 10, 3)
    assert run.rounds == (Round(3, 3, 4), Round(3, 3, 4), Round(2, 2, 2))


def test_eos_ends_a_run_and_is_not_content(chains: Path) -> None:
    """`budget`: a terminal EOS is generated, accepted and counted in its round, never content."""
    model = load(chains)
    run = plain(model, model.encode("P"), 20)
    assert model.tokenizer.decode(list(run.tokens)) == "qrst"
    assert run.generated == (*run.tokens, 0)
    assert run.finish_reason == "stop"
    assert len(run.logprobs) == 4
    sped = speculative(model, model, model.encode("P"), 20, 3)
    assert sped.generated == run.generated
    assert sped.rounds == (Round(3, 3, 4), Round(3, 1, 1))
    assert sped.accepted == (3, 1)
    assert sped.from_draft == (True, True, True, False)
    assert plain(model, model.encode("P"), 4).finish_reason == "length"


def test_rounds_follow_from_the_flags() -> None:
    """`oracle-trace`: zero, partial and full accepts, and a budget inside the accepted run."""
    flags = [False, True, True, False, True, True, True, False, True]
    assert rounds_of(flags, 9, 3) == (
        Round(3, 0, 1),
        Round(3, 2, 3),
        Round(3, 3, 4),
        Round(1, 1, 1),
    )
    assert rounds_of([False, False], 5, 0) == (Round(0, 0, 1), Round(0, 0, 1))
    assert rounds_of([], 5, 3) == ()


def test_rounds_agree_with_the_walk(target: Loaded, draft: Loaded) -> None:
    """`oracle-trace`: replaying each round through the slow walk gives the counts of the flags."""
    prompt = target.encode("The quick brown fox")
    run = speculative(target, draft, prompt, NUM_TOKENS, 3)
    assert {0, 1} <= set(run.accepted)
    context, start = list(prompt), 0
    for turn in run.rounds:
        drafted = no_cache_greedy(draft.model, context, turn.drafted)
        samples = no_cache_greedy(target.model, context, turn.drafted + 1)
        walk = acceptance(drafted, samples, NUM_TOKENS - start, target.eos_ids)
        assert (walk.accepted, len(walk.emitted)) == (turn.accepted, turn.emitted)
        context += walk.emitted
        start += turn.emitted


def test_positional_sampling_continues_where_it_stopped(target: Loaded) -> None:
    """`lossless-sampled`: a run cut in two and resumed at its step is the whole run."""
    prompt = target.encode("The quick")
    whole = plain(target, prompt, 12, PositionalSampler(9, TOP_P))
    first = plain(target, prompt, 5, PositionalSampler(9, TOP_P))
    rest = plain(target, [*prompt, *first.tokens], 7, PositionalSampler(9, TOP_P, first_step=5))
    assert first.tokens + rest.tokens == whole.tokens
    assert plain(target, prompt, 12, PositionalSampler(10, TOP_P)).tokens != whole.tokens
    assert plain(target, prompt, 12, PositionalSampler(9, Filters(0.0))) == plain(
        target, prompt, 12
    )


def test_positional_sampling_tosses_a_coin_for_each_position(target: Loaded) -> None:
    """`lossless-sampled`: by hand, one forward per token; the coin has a stream of its own."""
    filters = Filters(0.9, xtc_probability=0.5, xtc_threshold=0.001)  # acts on nearly all
    tokens = target.encode("The quick")
    run = plain(target, tokens, 10, PositionalSampler(9, filters))
    acted = []
    for step, token in enumerate(run.generated):
        logits = target.model(mx.array([tokens]))[0, -1]
        coin = mx.random.uniform(key=Positional(9).key(step, stream=1))
        acted.append(bool(coin <= 0.5))
        scaled = filters.scaled(logits - mx.logsumexp(logits), coin)
        assert np.array(mx.random.categorical(scaled, key=Positional(9).key(step))) == token
        tokens.append(token)
    assert set(acted) == {True, False}


def test_bad_input_is_named(target: Loaded, draft: Loaded, tmp_path: Path) -> None:
    """`length-one`: what cannot be run is refused before anything runs."""
    with pytest.raises(ValueError, match=r"has no config\.json"):
        load(tmp_path)
    with pytest.raises(ValueError, match="at least 1 token"):
        plain(target, [], 5)
    with pytest.raises(ValueError, match="max_tokens must be at least 1, got 0"):
        plain(target, [byte_id(65)], 0)
    with pytest.raises(ValueError, match="num_draft_tokens must be at least 0, got -1"):
        speculative(target, draft, [byte_id(65)], 5, -1)
    with pytest.raises(ValueError, match="cannot count steps"):
        speculative(target, draft, [byte_id(65)], 5, 2, PositionalSampler(1, Filters(1.0)))
    processors = Processors(repetition_penalty=1.0)
    with pytest.raises(ValueError, match=r"not applied as in plain text here \(D5\)"):
        speculative(target, draft, [byte_id(65)], 5, 2, processors=processors)
