"""Rollback, checkpoints and text over mlx-lm's own models, one tiny random model per family.

Numbers are compared bitwise unless a test says otherwise (float32 on the CPU).
"""

from __future__ import annotations

import gc
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx.utils import tree_flatten
from mlx_lm.models.cache import ArraysCache, KVCache, RotatingKVCache, make_prompt_cache

from engine import BadInput, LawError, Request, Target, generate, open_live
from engine.drafters.two_model import TwoModelProvider
from engine.host import read
from engine.sampling import Greedy, RowSampling
from engine.state.checkpoint import capture_caches, restore_caches
from engine.state.layouts import leaves
from engine.state.native import NativeRows, Undo
from engine.state.probe import prove
from engine.state.replay import Recorder, cut, with_classes

from .conftest import finish_of, last
from .families import CONFIGS, VOCAB, WINDOW, build
from .puppet import Puppet, scripted

ROLLED = ("llama", "gemma4_text", "glm_moe_dsa", "llama4", "qwen3_5", "falcon_h1", "baichuan_m1")
RECURRENT = tuple(
    name for name in CONFIGS if name not in ("llama", "gemma4_text", "glm_moe_dsa", "llama4")
)
ROUNDED = ("gemma4_text", "glm_moe_dsa", "longcat_flash_ngram")
"""Families in which a window and single tokens round differently: compared within 1e-5."""

GREEDY = RowSampling([Greedy()])

PROMPTS = (1, WINDOW - 1, WINDOW, WINDOW + 1, 3 * WINDOW, 31, 33)


def ids(count: int, seed: int = 0) -> list[int]:
    return [(seed * 31 + 7 * i * i + 3 * i) % VOCAB for i in range(count)]


def rows_of(family: str) -> NativeRows:
    model = build(family)
    caches = make_prompt_cache(model)
    return NativeRows(model, caches, replayer=lambda: recorder(family))


_recorders: dict[str, Recorder | str] = {}


def recorder(family: str) -> Recorder | str:
    if family not in _recorders:
        model = build(family)
        _recorders[family] = prove(model, lambda: make_prompt_cache(model))
    return _recorders[family]


def arrays_of(rows: NativeRows) -> list[mx.array]:
    """What the caches show: live columns and recurrent arrays."""
    found: list[mx.array] = []
    for leaf in leaves(rows.caches):
        if isinstance(leaf, ArraysCache):
            slots: list[Any] = leaf.cache
            found += [slot for slot in slots if slot is not None]
        elif leaf.keys is not None:
            found += leaf.keys_and_values()
    return found


def feed(rows: NativeRows, tokens: Sequence[int]) -> mx.array:
    return rows.forward(mx.array([tokens]))


def equal(family: str, ours: mx.array, theirs: mx.array) -> bool:
    """Bitwise, but for the families that round."""
    if family not in ROUNDED:
        return bool(mx.array_equal(ours, theirs))
    return ours.shape == theirs.shape and bool(mx.allclose(ours, theirs, rtol=1e-5, atol=1e-5))


@pytest.mark.parametrize("family", RECURRENT)
def test_sliced_replay_is_proved_on_every_recurrent_family(family: str) -> None:
    """`rollback`: the probe that is asked before the first speculation, here without tolerance."""
    found = recorder(family)
    assert isinstance(found, Recorder), found
    tried, truth = rows_of(family), rows_of(family)
    for rows in (tried, truth):
        feed(rows, ids(9))
    for keep in range(6):
        tried.begin()
        feed(tried, ids(5, seed=keep))
        tried.resolve([keep])
        if keep:
            feed(truth, ids(5, seed=keep)[:keep])
        for ours, theirs in zip(arrays_of(tried), arrays_of(truth), strict=True):
            assert equal(family, ours, theirs)


@given(
    prompt=st.sampled_from(PROMPTS),
    transactions=st.lists(
        st.tuples(st.lists(st.integers(1, 5), min_size=1, max_size=3), st.floats(0, 1)),
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
        assert rows.processed == len(held)
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


def tree_of(module: Any) -> Any:
    """Modules and arrays by identity, and every attribute."""
    if isinstance(module, dict):
        inside = {key: tree_of(value) for key, value in module.items()}
        return id(module), type(module), inside, dict(getattr(module, "__dict__", {}))
    if isinstance(module, list | tuple):
        return [tree_of(entry) for entry in module]
    return id(module)


@pytest.mark.parametrize("family", ["qwen3_5", "falcon_h1", "baichuan_m1"])
def test_recording_changes_nothing_and_leaves_nothing_behind(family: str, target: Target) -> None:
    """The model object is bitwise what it was; two targets on it do not disturb each other."""
    model, tokens = build(family), mx.array([ids(6)])
    before = tree_of(model)
    expected = model(tokens, cache=make_prompt_cache(model))
    groups = [target_on(model, target).new_rows() for _ in range(2)]
    assert [rows.cannot_roll_back for rows in groups] == [(), ()]
    logits = []
    for rows in groups:
        rows.begin()
        logits.append(rows.forward(tokens))
    for rows in reversed(groups):
        rows.resolve([2])
    follow = [rows.forward(tokens[:, 2:]) for rows in groups]
    assert mx.array_equal(follow[0], follow[1])
    assert mx.allclose(follow[0], expected[:, 2:], rtol=1e-4, atol=1e-4)
    assert all(mx.array_equal(each, expected) for each in logits)
    assert tree_of(model) == before
    assert mx.array_equal(model(tokens, cache=make_prompt_cache(model)), expected)


def test_a_recorder_holds_inputs_only_while_a_transaction_is_open() -> None:
    """A recorded module is in everything else the module that it stands for."""
    model, rows = build("qwen3_5"), rows_of("qwen3_5")
    feed(rows, ids(4))
    rows.begin()
    feed(rows, ids(4))
    assert rows._open is not None
    calls = rows._open.calls[0]
    originals = [layer.linear_attn for layer in model.layers if "linear_attn" in layer]
    assert len(calls) == len(originals) == 2
    for call, original in zip(calls, originals, strict=True):
        assert isinstance(call.module, type(original))
        assert call.module is not original
        assert call.module.num_v_heads == original.num_v_heads
        ours: Any = tree_flatten(call.module.parameters())
        theirs: Any = tree_flatten(original.parameters())
        assert [(n, id(a)) for n, a in ours] == [(n, id(a)) for n, a in theirs]
    recorded = recorder("qwen3_5")
    assert isinstance(recorded, Recorder)
    assert recorded._calls is None


def test_a_resolved_transaction_frees_its_recorded_inputs() -> None:
    rows = rows_of("qwen3_5")
    for _ in range(2):  # the first compiles and fills constants
        mx.eval(feed(rows, ids(4)), rows.arrays())
    before = mx.get_active_memory()
    rows.begin()
    mx.eval(feed(rows, ids(64)))
    assert mx.get_active_memory() > before
    rows.resolve([2])
    mx.eval(rows.arrays())
    gc.collect()
    assert mx.get_active_memory() <= before


@pytest.mark.parametrize("fails_at", ["forward", "replay"])
def test_a_layer_that_raises_loses_the_state(
    fails_at: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`poison`: a layer in mid-window, after others have appended; or a replay."""
    rows = rows_of("qwen3_5")
    feed(rows, ids(4))
    feed(rows, ids(3))
    rows.begin()
    if fails_at == "replay":
        feed(rows, ids(4))
    last_mixer = [layer for layer in build("qwen3_5").layers if "linear_attn" in layer][-1]
    kind = type(last_mixer.linear_attn)

    def broken(*_: Any, **__: Any) -> Any:
        raise RuntimeError("layer broke")

    with monkeypatch.context() as patch:
        patch.setattr(kind, "__call__", broken)
        with pytest.raises(RuntimeError, match="layer broke"):
            feed(rows, ids(4)) if fails_at == "forward" else rows.resolve([2])
    for use in (rows.begin, lambda: rows.resolve([0]), lambda: feed(rows, [1])):
        with pytest.raises(LawError, match="state is lost"):
            use()


def target_on(model: Any, near: Target, **options: Any) -> Target:
    """A model that was built here as a target, with the tokenizer of a loaded one."""
    return Target(model, near.tokenizer, {"vocab_size": VOCAB}, Path("built-here"), **options)


def test_a_replay_that_is_wrong_is_refused_by_name(target: Target) -> None:
    """A mixer that also remembers outside its cache; plain decoding goes on."""
    model = build("mamba")
    kind = type(model.layers[0].mixer)

    class Remembers(kind):  # type: ignore[misc, valid-type]  # a class met at run time
        def __call__(self, x: mx.array, cache: Any) -> Any:
            before = self.get("before", 0.0)
            self.before = x[:, -1:]
            return super().__call__(x + before, cache)

    def class_of(module: Any) -> type:
        return Remembers if type(module) is kind else type(module)

    broken = target_on(with_classes(model, class_of), target)
    (name,) = broken.new_rows().cannot_roll_back
    assert "tokens wrongly: off by" in name
    with pytest.raises(BadInput, match=r"cache kind recurrent \(replay"):
        generate(broken, Request((1, 2, 3)), Puppet(lambda number, step, depth: [1]))
    assert finish_of(broken, (1, 2, 3), max_tokens=4).rounds


def test_a_recurrent_cache_that_no_module_is_handed_is_refused() -> None:
    def make_caches() -> list[Any]:
        return [ArraysCache(1), *make_prompt_cache(build("llama"))]

    class Outside(type(build("llama"))):  # type: ignore[misc]  # a class met at run time
        def __call__(self, tokens: mx.array, cache: list[Any]) -> Any:
            cache[0][0] = tokens
            return super().__call__(tokens, cache=cache[1:])

    llama = build("llama")
    model = with_classes(llama, lambda m: Outside if m is llama else type(m))
    assert prove(model, make_caches) == (
        "replay fails: LookupError: no module is handed recurrent cache 0"
    )


def test_arguments_are_cut_by_what_they_are() -> None:
    hidden, row, grid = mx.zeros((1, 4, 6)), mx.zeros((1, 4)), mx.zeros((4, 9))
    assert cut(hidden, 4, 3).shape == (1, 3, 6)
    assert cut(row, 4, 3).shape == (1, 3)
    assert cut(grid, 4, 3).shape == (3, 8)
    assert cut(grid[None, None], 4, 1).shape == (1, 1, 1, 6)
    assert cut(mx.arange(4), 4, 2).tolist() == [0, 1]
    assert cut(mx.zeros((1, 1, 6)), 4, 3).shape == (1, 1, 6)
    for same in ("causal", None, 5):
        assert cut(same, 4, 3) == same


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
    held = feed(rows_of(family), [*request.prompt, *plain[: rows.processed - prompt], 5])[:, -1]
    assert mx.allclose(feed(rows, [5])[:, -1], held, rtol=1e-4, atol=1e-4)


def decode(
    model: Target, request: Request, drafter: Any, depth: int = 5
) -> tuple[tuple[int, ...], NativeRows]:
    live = open_live(model)
    events = list(generate(model, request, drafter, depth=depth, live=live))
    assert live.target.processed == len(live.held)
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
    rows.append(None)
    rows.prefill(mx.array([ids(WINDOW - 3)]))
    held, pending = ids(WINDOW - 3), 5
    for number, (depth, kept) in enumerate(rounds):
        if number == capture_at:
            twin = provider.open(GREEDY)
            twin.append(rows.capture(0))
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


@pytest.mark.parametrize("family", ROLLED)
@pytest.mark.parametrize("length", [1, 3, WINDOW, 3 * WINDOW])
def test_a_captured_state_has_the_same_future_and_is_never_changed(
    family: str, length: int
) -> None:
    """`capture`: bitwise, twice from one capture, whatever the donor does next."""
    rows = rows_of(family)
    feed(rows, ids(length - 1)) if length > 1 else None
    feed(rows, [4])  # a ring that has just turned by one
    layout, tensors = capture_caches(rows.caches)
    copies = [mx.array(tensor) for tensor in tensors]
    expected = [feed(rows, tail) for tail in ([5, 6, 7], [8], [9])]
    for _ in range(2):
        fresh = rows_of(family)
        restore_caches(fresh.caches, layout, tensors, length)
        for tail, logits in zip(([5, 6, 7], [8], [9]), expected, strict=True):
            assert mx.array_equal(feed(fresh, tail), logits)
    for tensor, copy in zip(tensors, copies, strict=True):
        assert mx.array_equal(tensor, copy)


def test_foreign_captures_are_refused() -> None:
    """`identity-drafter`: other kinds, counts, lengths, windows."""
    rows = rows_of("gemma4_text")
    feed(rows, ids(12))
    layout, tensors = capture_caches(rows.caches)
    other = rows_of("qwen3_5")
    feed(other, ids(12))
    recurrent, states = capture_caches(other.caches)
    for family, words, arrays, tokens, message in (
        ("qwen3_5", layout, tensors, 12, "expected 4|where the model has"),
        ("gemma4_text", layout, tensors[:-1], 12, "too few"),
        ("gemma4_text", layout, (*tensors, tensors[0]), 12, "too many"),
        ("gemma4_text", layout, tensors, 11, "stands at 12 tokens, expected 11"),
        ("gemma4_text", layout, [t[:, :, :-1] for t in tensors], 12, "does not hold"),
        ("gemma4_text", layout.replace(":8:0:", ":9:0:"), tensors, 12, "window"),
        ("gemma4_text", layout.replace("ring:", "ring:x"), tensors, 12, "malformed"),
        ("gemma4_text", "None", tensors, 12, "holds 1 caches"),
        ("qwen3_5", recurrent.replace("recurrent:1:1", "recurrent:1"), states, 12, "slots"),
        ("qwen3_5", recurrent, [mx.repeat(s, 2, axis=0) for s in states], 12, "1 row"),
    ):
        with pytest.raises(BadInput, match=message):
            restore_caches(rows_of(family).caches, words, arrays, tokens)


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
        assert live.target.processed == len(live.held) == WINDOW + taken - 1
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
