"""Rollback and text over mlx-lm's own models, one tiny random model per family.

Numbers are compared bitwise unless a test says otherwise (float32 on the CPU).
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.models.cache import KVCache, RotatingKVCache

from engine import BadInput, Request, Target, generate, open_live
from engine.clone import with_classes
from engine.drafters.two_model import TwoModelProvider
from engine.host import read
from engine.sampling import Greedy, RowSampling
from engine.state.layouts import leaves
from engine.state.rows import Rows, Undo

from .conftest import finish_of, last
from .families import (
    PROMPTS,
    ROLLED,
    WINDOW,
    arrays_of,
    build,
    equal,
    feed,
    ids,
    rows_of,
    target_on,
)
from .puppet import Puppet, scripted

GREEDY = RowSampling([Greedy()])


@given(
    prompt=st.sampled_from(PROMPTS),
    transactions=st.lists(
        st.tuples(st.lists(st.integers(1, 11), min_size=1, max_size=3), st.floats(0, 1)),
        min_size=1,
        max_size=4,
    ),
)
@settings(max_examples=12)
@pytest.mark.parametrize("family", ROLLED)
def test_append_then_take_back_equals_never_having_appended(
    family: str, prompt: int, transactions: list[tuple[list[int], float]]
) -> None:
    """`rollback`, `chunking`: against a twin fed only the kept tokens, in the same forwards.

    And within 1e-4 against one fed all of them at once.
    """
    rows, twin, held = rows_of(family), rows_of(family), ids(prompt)
    for each in (rows, twin):
        feed(each, held)
    for number, (widths, share) in enumerate(transactions):
        keep = kept = round(share * sum(widths))
        rows.begin()
        for width in widths:
            window = ids(width, seed=number + 1)
            feed(rows, window)
            if kept:
                feed(twin, window[:kept])
            held += window[:kept]
            kept -= min(kept, width)
        rows.resolve([keep])
        assert rows.processed[0] == len(held)
    if family != "llama4":  # whose twin may drop its front a forward later
        for ours, theirs in zip(arrays_of(rows), arrays_of(twin), strict=True):
            assert equal(family, ours, theirs)
    whole = feed(rows_of(family), [*held, 5, 6, 7])
    ours, theirs = (feed(each, [5, 6, 7]) for each in (rows, twin))
    assert equal(family, ours, theirs)
    assert mx.allclose(ours, whole[:, -3:], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", ["gemma4_text", "llama4", "qwen3_5", "falcon_h1", "mamba2"])
def test_the_prompt_may_come_in_any_chunks(family: str) -> None:
    """`chunking`: within 1e-4, for rounding differs with the width (sliding, SSM)."""
    prompt = ids(29)
    whole = feed(rows_of(family), prompt)[:, -1]
    for sizes in ((1,) * 29, (7, 1, 8, 13), (28, 1)):
        rows, start = rows_of(family), 0
        for size in sizes:
            logits = feed(rows, prompt[start : start + size])
            start += size
        assert mx.allclose(logits[:, -1], whole, rtol=1e-4, atol=1e-4)


@given(
    prompt=st.sampled_from(PROMPTS),
    script=st.lists(st.lists(st.booleans(), max_size=5), min_size=1, max_size=6),
)
@settings(max_examples=8)
@pytest.mark.parametrize("family", ROLLED)
def test_drafted_text_is_plain_text(
    family: str, target: Target, prompt: int, script: list[list[bool]]
) -> None:
    """`lossless`, `position`: right and wrong drafts, past the window, in every family."""
    model = target_on(build(family), target)
    request = Request(tuple(ids(prompt)), 24)
    plain, _ = decode(model, request, None)
    drafted, rows = decode(model, request, Puppet(scripted(plain, script)))
    assert drafted == plain
    held = feed(rows_of(family), [*request.prompt, *plain[: rows.processed[0] - prompt], 5])[:, -1]
    assert mx.allclose(feed(rows, [5])[:, -1], held, rtol=1e-4, atol=1e-4)


def decode(
    model: Target, request: Request, drafter: Any, depth: int = 5
) -> tuple[tuple[int, ...], Rows]:
    live = open_live(model)
    events = list(generate(model, request, drafter, depth=depth, live=live))
    assert live.target.processed[0] == len(live.held)
    return last(events).tokens, live.target


@pytest.mark.parametrize("family", ROLLED)
def test_the_context_decides_the_text(family: str, target: Target) -> None:
    """Else a wrong state could pass unseen in the tests above."""
    tokens, _ = decode(target_on(build(family), target), Request(tuple(ids(12)), 24), None)
    assert len(set(tokens)) >= 6


@pytest.mark.parametrize("family", ["qwen3_5", "gemma4_text", "falcon_h1", "llama4"])
@pytest.mark.parametrize("depth", [0, 1, 4])
def test_draft_models_of_every_kind_draft(family: str, depth: int, target: Target) -> None:
    """`lossless`, `companion`: the draft model steps back to a saved boundary, past its window.

    It is the target's own twin, so a state that is right drafts right: all drafts are accepted
    until the text ends.
    """
    model = target_on(build(family), target)
    draft = target_on(build(family), target)
    draft.__dict__["identity"] = "twin"
    provider = TwoModelProvider(draft, model)
    request = Request(tuple(ids(WINDOW - 2)), 24)
    plain, _ = decode(model, request, None)
    finish = finish_of(model, request.prompt, provider, max_tokens=24, depth=depth)
    assert finish.tokens == plain
    assert all(length == depth for length in finish.statistics.acceptance_lengths[:-1])
    assert len(plain) > depth


@given(
    rounds=st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), min_size=1, max_size=6),
    capture_at=st.integers(0, 5),
)
@settings(max_examples=6)
@pytest.mark.parametrize("family", ["qwen3_5", "gemma4_text", "falcon_h1", "llama4"])
def test_draft_states_cover_their_contract(
    family: str, target: Target, rounds: list[tuple[int, int]], capture_at: int
) -> None:
    """`companion`, `capture`: after zero, partial and full accepts; also for a captured twin."""
    draft = target_on(build(family), target)
    draft.__dict__["identity"] = "twin"
    provider = TwoModelProvider(draft, draft)
    rows, twin = provider.open(GREEDY), None
    rows.prefill(mx.array([ids(WINDOW - 3)]))
    held, pending = ids(WINDOW - 3), 5
    for number, (depth, kept) in enumerate(rounds):
        if number == capture_at:
            twin = provider.open(GREEDY, rows.capture(0))
        drafted = read(rows.draft([pending], depth, [0]).tokens)[0]
        assert drafted == greedy(family, [*held, pending], depth)
        kept = min(kept, depth)
        rows.commit([kept])
        if twin is not None:
            assert read(twin.draft([pending], depth, [0]).tokens)[0] == drafted
            twin.commit([kept])
        held += [pending, *drafted[:kept]]
        assert rows.capture(0).processed_tokens == len(held)
        pending = 20 + number


def greedy(family: str, tokens: list[int], count: int) -> list[int]:
    """The family's own continuation, from a fresh state."""
    rows, found = rows_of(family), []
    logits = feed(rows, tokens)
    for _ in range(count):
        found.append(read(mx.argmax(logits[0, -1])))
        logits = feed(rows, found[-1:])
    return found


class Foreign(KVCache):
    """A cache class that the engine does not know."""


def test_an_unknown_cache_class_decodes_plainly_and_is_refused_by_name(target: Target) -> None:
    """Unknown is never a silent route, nor a stop."""
    llama = build("llama")

    class Model(type(llama)):  # type: ignore[misc]  # a class met at run time
        def make_cache(self) -> list[Any]:
            foreign: Any = Foreign
            return [foreign() for _ in self.layers]

    model = target_on(with_classes(llama, lambda m: Model if m is llama else type(m)), target)
    request = Request(tuple(ids(9)), 12)
    with pytest.raises(BadInput, match="cache kind Foreign has no rollback"):
        generate(model, request, Puppet(lambda number, step, depth: [1]))
    with pytest.raises(BadInput, match="cache kind Foreign"):
        TwoModelProvider(model, model)
    assert decode(model, request, None)[0] == decode(target_on(llama, target), request, None)[0]


@pytest.mark.parametrize(
    ("family", "ahead"),
    [("llama", True), ("qwen3_5", True), ("llama4", True), ("gemma4_text", False)],
)
def test_plain_decoding_looks_ahead_where_that_is_free(
    family: str, ahead: bool, target: Target
) -> None:
    """`position`: a stream that is left early holds the tokens of whole rounds, in every kind."""
    rows = rows_of(family)
    assert rows.steps_back_freely is ahead
    model = target_on(build(family), target)
    for taken in (1, 2, 7):
        live = open_live(model)
        events = generate(model, Request(tuple(ids(WINDOW)), 24), live=live)
        for _ in range(taken):
            next(events)
        events.close()
        assert live.target.processed[0] == len(live.held) == WINDOW + taken - 1
        fresh = feed(rows_of(family), [*live.held, 5])[:, -1]
        assert mx.allclose(feed(live.target, [5])[:, -1], fresh, rtol=1e-4, atol=1e-4)


def test_a_ring_is_taken_back_again_and_again() -> None:
    """A rolled-back ring is written in place again: the marks of the next round are its own."""
    rows, twin = rows_of("gemma4_text"), rows_of("gemma4_text")
    for each in (rows, twin):
        feed(each, ids(20))
        feed(each, [3])
    for token in range(4):
        rows.begin(Undo.FORWARDS)
        feed(rows, [token])
        feed(rows, [token + 1])
        rows.resolve([0])
        for ours, theirs in zip(arrays_of(rows), arrays_of(twin), strict=True):
            assert mx.array_equal(ours, theirs)
    assert any(isinstance(leaf, RotatingKVCache) for leaf in leaves(rows.caches))
