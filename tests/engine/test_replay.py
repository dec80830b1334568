"""Sliced replay: which modules are replayed, what is recorded, and that nobody else notices."""

from __future__ import annotations

import gc
from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models.cache import ArraysCache, make_prompt_cache

from engine import BadInput, LawError, Request, Target, generate
from engine.clone import with_classes
from engine.state.probe import prove
from engine.state.replay import Recorder, cut

from .conftest import finish_of
from .families import (
    RECURRENT,
    arrays_of,
    build,
    equal,
    feed,
    ids,
    recorder,
    rows_of,
    target_on,
)
from .puppet import Puppet


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


def test_a_model_that_writes_a_recurrent_cache_itself_is_run_again() -> None:
    """`rollback`: outside its layers, beside mixers that write their own."""
    inner = build("qwen3_5")

    class Outside(type(inner)):  # type: ignore[misc]  # a class met at run time
        def __call__(self, tokens: mx.array, cache: list[Any]) -> Any:
            before = 0 if cache[0][0] is None else cache[0][0]
            cache[0][0] = before + tokens.sum(axis=1)
            return super().__call__(tokens, cache=cache[1:]) * before

    model = with_classes(inner, lambda m: Outside if m is inner else type(m))
    found = prove(model, lambda: [ArraysCache(1), *make_prompt_cache(inner)])
    assert isinstance(found, Recorder)
    assert found.rewritten == {2, 4}


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
