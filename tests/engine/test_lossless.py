"""A drafter changes time, never text; and the state holds what it must, whatever was drafted."""

from __future__ import annotations

from itertools import zip_longest

import mlx.core as mx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine import (
    BadInput,
    DraftProvider,
    Finish,
    LawError,
    Live,
    Request,
    Sampling,
    Target,
    TokenEvent,
    generate,
    open_live,
)
from engine.drafters.source import PrefillMode
from engine.values import Rng
from oracle import models

from .conftest import finish_of, last
from .puppet import Puppet, scripted
from .samplings import PROCESSED, SAMPLINGS

SCRIPTS = st.lists(st.lists(st.booleans(), max_size=8), min_size=1, max_size=6)


def assert_holds(target: Target, live: Live) -> None:
    """The live state equals a fresh one that has processed exactly `live.held`."""
    assert live.target.processed[0] == len(live.held)
    assert [cache.offset for cache in live.target.caches] == [len(live.held)] * len(
        live.target.caches
    )
    if not live.held:
        return
    fresh = target.new_rows()
    fresh.forward(mx.array([live.held]))
    for ours, theirs in zip(live.target.caches, fresh.caches, strict=True):
        for a, b in zip(ours.keys_and_values(), theirs.keys_and_values(), strict=True):
            assert float(mx.abs(a - b).max()) < 1e-4


@given(script=SCRIPTS, sampling=SAMPLINGS, budget=st.integers(1, 30), depth=st.integers(0, 9))
@pytest.mark.parametrize("mode", ["tail-split", "full"])
def test_any_acceptance_pattern_gives_plain_text_and_the_exact_state(
    target: Target,
    prompt: tuple[int, ...],
    mode: PrefillMode,
    script: list[list[bool]],
    sampling: Sampling,
    budget: int,
    depth: int,
) -> None:
    """`lossless`, `lossless-sampled`, `position`, `budget` for every pattern of right and wrong."""
    plain = finish_of(target, prompt, max_tokens=budget, sampling=sampling)
    puppet = Puppet(scripted(plain.tokens, script), prefill_mode=mode)
    live = open_live(target)
    request = Request(prompt, budget, sampling)
    events = list(generate(target, request, puppet, depth=depth, live=live))
    got = last(events)
    flags = [event.from_draft for event in events if isinstance(event, TokenEvent)]
    assert flags == [i < r.accepted for r in got.rounds for i in range(len(r.emitted))]
    assert (got.tokens, got.text, got.reason, got.usage) == (
        plain.tokens,
        plain.text,
        plain.reason,
        plain.usage,
    )
    assert got.logprobs == pytest.approx(plain.logprobs, abs=1e-3)
    assert_trace_adds_up(got, depth)
    assert_holds(target, live)
    # Everything delivered is held, except a correction or bonus that was delivered last.
    generated = [*prompt, *got.tokens]
    assert live.held == generated[: len(live.held)]
    assert len(generated) - len(live.held) in (0, 1)
    assert puppet.opened[0].committed == [
        r.retained for r in got.rounds[1 if mode == "full" else 0 :]
    ]


def assert_trace_adds_up(finish: Finish, depth: int) -> None:
    emitted = [token for r in finish.rounds for token in r.emitted]
    assert tuple(emitted) == finish.tokens
    for r in finish.rounds:
        assert len(r.draft) <= depth
        assert r.retained <= r.accepted <= len(r.draft)
        assert len(r.emitted) <= len(r.draft) + 1
        assert r.emitted[: r.retained] == r.draft[: r.retained]
    statistics = finish.statistics
    assert statistics.drafted == statistics.accepted + statistics.rejected
    assert sum(statistics.accepted_by_position) == statistics.accepted
    assert sum(statistics.drafted_by_position) == statistics.drafted


@given(
    drafts=st.lists(st.lists(st.integers(0, 2**32 - 1), max_size=5), min_size=1, max_size=5),
    sampling=SAMPLINGS,
)
def test_adversarial_ids_change_nothing(
    target: Target, prompt: tuple[int, ...], drafts: list[list[int]], sampling: Sampling
) -> None:
    """`advice`: random ids, ids that no vocabulary has, and silence leave the text alone."""
    adversary = Puppet(lambda number, step, depth: drafts[number % len(drafts)][:depth])
    plain = finish_of(target, prompt, sampling=sampling)
    got = finish_of(target, prompt, adversary, sampling=sampling, depth=5)
    assert (got.tokens, got.text, got.reason) == (plain.tokens, plain.text, plain.reason)


def test_too_many_drafts_break_the_contract(target: Target, prompt: tuple[int, ...]) -> None:
    """`advice`: an over-eager drafter is reported, with the round, and nothing is emitted."""
    puppet = Puppet(lambda number, step, depth: [7] * (depth + (number == 1)))
    events = generate(target, Request(prompt, 24), puppet, depth=2)
    with pytest.raises(LawError, match=r"round 1: .* lengths \(3,\) for 1 rows at depth 2"):
        list(events)


@given(script=SCRIPTS, close_after=st.integers(1, 20), sampling=SAMPLINGS)
@pytest.mark.parametrize("speculate", [True, False])
def test_closing_at_any_token_leaves_a_settled_state(
    target: Target,
    prompt: tuple[int, ...],
    speculate: bool,
    script: list[list[bool]],
    close_after: int,
    sampling: Sampling,
) -> None:
    """`position`: after an early close the state holds whole rounds and nothing else."""
    plain = finish_of(target, prompt, sampling=sampling)
    puppet = Puppet(scripted(plain.tokens, script)) if speculate else None
    live = open_live(target)
    events = generate(target, Request(prompt, 24, sampling), puppet, depth=6, live=live)
    taken = 0
    for event in events:
        taken += isinstance(event, TokenEvent)
        if taken == close_after:
            break
    events.close()
    assert_holds(target, live)
    assert live.held == [*prompt, *plain.tokens][: len(live.held)]
    assert len(live.held) >= len(prompt) + taken - 1


@given(
    script=SCRIPTS,
    sampling=PROCESSED,
    budget=st.integers(1, 24),
    depth=st.integers(0, 8),
    mode=st.sampled_from(["tail-split", "full"]),
)
@pytest.mark.parametrize("name", ["puppet", "ngram", "two_model"])
def test_processors_and_xtc_are_lossless(
    request: pytest.FixtureRequest,
    target: Target,
    prompt: tuple[int, ...],
    name: str,
    script: list[list[bool]],
    sampling: Sampling,
    budget: int,
    depth: int,
    mode: PrefillMode,
) -> None:
    """`lossless`, `lossless-sampled`: each processor saw what it sees in a plain decode."""
    plain = finish_of(target, prompt, max_tokens=budget, sampling=sampling)
    provider: DraftProvider = Puppet(scripted(plain.tokens, script), prefill_mode=mode)
    if name != "puppet":
        provider = request.getfixturevalue(name)
    got = finish_of(target, prompt, provider, max_tokens=budget, sampling=sampling, depth=depth)
    assert (got.tokens, got.text, got.reason, got.usage) == (
        plain.tokens,
        plain.text,
        plain.reason,
        plain.usage,
    )
    assert got.logprobs == pytest.approx(plain.logprobs, abs=1e-3)


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(0.8, top_p=0.9, seed=1)], ids=str)
@pytest.mark.parametrize("depth", [0, 1, 3, 8])
@pytest.mark.parametrize("name", ["ngram", "two_model"])
def test_real_drafters_are_lossless(
    request: pytest.FixtureRequest,
    target: Target,
    prompt: tuple[int, ...],
    name: str,
    depth: int,
    sampling: Sampling,
) -> None:
    """`lossless`, `lossless-sampled`, `length-one` with the drafters themselves."""
    provider: DraftProvider = request.getfixturevalue(name)
    for text, budget in ((prompt, 24), (prompt[:1], 24), (prompt, 1), (prompt[:1], 1)):
        plain = finish_of(target, text, max_tokens=budget, sampling=sampling)
        live = open_live(target)
        events = generate(target, Request(text, budget, sampling), provider, depth=depth, live=live)
        got = last(list(events))
        assert (got.tokens, got.text, got.reason, got.usage) == (
            plain.tokens,
            plain.text,
            plain.reason,
            plain.usage,
        )
        assert_holds(target, live)


def test_plain_greedy_is_what_the_slow_model_says(target: Target, prompt: tuple[int, ...]) -> None:
    """`lossless`: no cache, no window, no round: the same text."""
    expected = models.no_cache_greedy(target.model, prompt, 24, target.eos_ids)
    assert finish_of(target, prompt).tokens == expected


@pytest.mark.parametrize("chunk", [1, 2, 7, 2048])
def test_prefill_chunks_do_not_matter(
    target: Target, two_model: DraftProvider, prompt: tuple[int, ...], chunk: int
) -> None:
    """`chunking`: the same text and state whatever the chunk."""
    plain = finish_of(target, prompt)
    live = open_live(target)
    events = generate(target, Request(prompt, 24), two_model, live=live, prefill_chunk=chunk)
    assert last(list(events)).tokens == plain.tokens
    assert_holds(target, live)


@given(cut=st.integers(1, 23), sampling=st.one_of(SAMPLINGS, PROCESSED))
def test_a_continued_stream_draws_what_the_whole_one_drew(
    target: Target, prompt: tuple[int, ...], cut: int, sampling: Sampling
) -> None:
    """`chunking`: `first_step` continues a positional stream behind tokens moved to the prompt."""
    whole = finish_of(target, prompt, sampling=sampling)
    cut = min(cut, len(whole.tokens) - 1)
    if cut < 1:
        return
    rest = Request((*prompt, *whole.tokens[:cut]), 24 - cut, sampling, first_step=cut)
    got = last(list(generate(target, rest)))
    assert whole.tokens[:cut] + got.tokens == whole.tokens


def test_a_stop_id_inside_a_burst_ends_the_row(target: Target, prompt: tuple[int, ...]) -> None:
    """`stop`, `budget`: a stop id accepted in mid-burst is not content and not in the state."""
    plain = finish_of(target, prompt)
    stop_id = plain.tokens[4]
    first = plain.tokens.index(stop_id)
    puppet = Puppet(scripted(plain.tokens, [[True] * 8]))
    live = open_live(target)
    request = Request(prompt, 24, stop_ids=frozenset({stop_id}))
    got = last(list(generate(target, request, puppet, depth=8, live=live)))
    assert (got.tokens, got.reason) == (plain.tokens[:first], "stop")
    assert got.usage.completion_tokens == first + 1
    assert live.held == [*prompt, *plain.tokens[:first]]
    assert_holds(target, live)


@pytest.mark.parametrize("failing_forward", [1, 2, 3])
def test_a_failing_layer_poisons_the_state(
    target: Target, prompt: tuple[int, ...], failing_forward: int
) -> None:
    """`poison`: after a failure in any forward the state refuses every further use."""
    live = open_live(target)
    plain = finish_of(target, prompt)
    calls = 0
    model = target.model

    def failing(tokens: mx.array, cache: object) -> mx.array:
        nonlocal calls
        calls += 1
        logits: mx.array = model(tokens, cache=cache)
        if calls > failing_forward:
            raise RuntimeError("layer 3 broke")
        return logits

    live.target._model = failing
    puppet = Puppet(scripted(plain.tokens, [[True, False]]))
    with pytest.raises(RuntimeError, match="layer 3 broke"):
        list(generate(target, Request(prompt, 24), puppet, live=live))
    with pytest.raises(LawError, match="state is lost"):
        live.target.begin()
    with pytest.raises(LawError, match="state is lost"):
        live.target.forward(mx.array([[1]]))
    with pytest.raises(LawError, match="state is lost"):
        live.target.resolve([0])
    if failing_forward > 1:
        committed = puppet.opened[0].committed
        assert len(committed) == failing_forward - 1, "the failed round committed its draft"


def test_a_failing_draft_commit_poisons_the_target_too(
    target: Target, prompt: tuple[int, ...]
) -> None:
    """`poison`: a target one round ahead of its drafter is not usable."""
    puppet = Puppet(lambda number, step, depth: [7], commits=1)
    live = open_live(target)
    with pytest.raises(RuntimeError, match="commit broke"):
        list(generate(target, Request(prompt, 24), puppet, live=live))
    with pytest.raises(LawError, match="state is lost"):
        live.target.begin()


def test_a_live_state_serves_one_stream(target: Target) -> None:
    """`position`: a second stream on it would put its tokens behind the first one's."""
    live = open_live(target)
    first = generate(target, Request((5, 6), 4), live=live)
    with pytest.raises(BadInput, match="belongs to another stream"):
        generate(target, Request((7, 8), 4), live=live)
    assert last(list(first)).tokens == finish_of(target, (5, 6), max_tokens=4).tokens


@pytest.mark.parametrize("rng", ["positional", "sequential"])
def test_streams_do_not_disturb_each_other(
    target: Target, two_model: DraftProvider, prompt: tuple[int, ...], rng: Rng
) -> None:
    """`lossless-sampled`: two streams taken in turn draw what each draws alone."""
    samplings = [Sampling(1.2, seed=5, rng=rng), Sampling(1.2, seed=6, rng=rng)]
    for provider in (None, two_model):
        alone = [finish_of(target, prompt, provider, sampling=s).tokens for s in samplings]
        streams = [generate(target, Request(prompt, 24, s), provider) for s in samplings]
        taken: list[list[int]] = [[], []]
        for pair in zip_longest(*streams):
            for tokens, event in zip(taken, pair, strict=True):
                if isinstance(event, TokenEvent):
                    tokens.append(event.token)
        assert [tuple(tokens) for tokens in taken] == alone
