"""Rows on mlx-lm's caches: rollback for each kind, transactions, and what is refused.

The models here are arithmetic: what a cache holds can be read off its keys. Real families are in
`test_families.py`.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlx_lm.models.cache import (
    ArraysCache,
    CacheList,
    ChunkedKVCache,
    ConcatenateKVCache,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
)

from engine import LawError, Target
from engine.host import read
from engine.state.columns import Columns, Place, QuantizedColumns
from engine.state.layouts import LAYOUTS, handle, leaves, unknown_kinds
from engine.state.rows import Rows, Undo

DIM = 64
WINDOW = 8
WRONG = 50_000
"""Added to the ids of tokens that will be rejected."""

KINDS: dict[str, Callable[[], Any]] = {
    "plain": KVCache,
    "quantized": QuantizedKVCache,
    "concatenated": ConcatenateKVCache,
    "ring": lambda: RotatingKVCache(WINDOW),
    "ring that keeps its first": lambda: RotatingKVCache(WINDOW, keep=2),
    "ring across its step": lambda: RotatingKVCache(300),
    "chunked": lambda: ChunkedKVCache(WINDOW),
    "recurrent": lambda: ArraysCache(1),
    "list": lambda: CacheList(KVCache(), CacheList(RotatingKVCache(WINDOW), ArraysCache(1))),
}


def append(tokens: mx.array, cache: list[Any]) -> mx.array:
    """A model whose keys are the token ids and whose recurrent state is a sum; logits say both."""
    ids = tokens.astype(mx.float32)[:, None, :, None] + mx.zeros((1, 1, 1, DIM))
    seen = []
    for leaf in leaves(cache):
        if isinstance(leaf, ArraysCache):
            state = mx.zeros((1,)) if leaf[0] is None else leaf[0]
            leaf[0] = state * 0.5 + tokens.sum()
            seen.append(leaf[0])
            continue
        if isinstance(leaf, ChunkedKVCache):
            leaf.maybe_trim_front()
        keys, _ = leaf.update_and_fetch(ids, -ids)
        seen.append((keys if isinstance(keys, mx.array) else keys[2]).sum()[None])
    return mx.concatenate(seen)[None, None]


def arrays_of(leaf: Any) -> list[mx.array]:
    tree: Any = leaf.cache if isinstance(leaf, ArraysCache) else leaf.keys_and_values()
    return [array for entry in tree for array in (entry if isinstance(entry, tuple) else [entry])]


def held_by(leaf: Any) -> list[int]:
    """The ids behind the columns a cache would show to attention, oldest first."""
    keys = leaf.keys_and_values()[0]
    ids = mx.dequantize(*keys) if isinstance(leaf, QuantizedKVCache) else keys
    return [round(number) for number in read(ids[0, 0, :, 0])]


@given(
    prompt=st.sampled_from([1, WINDOW - 1, WINDOW, WINDOW + 1, 3 * WINDOW, 254, 299, 301]),
    transactions=st.lists(
        st.tuples(st.lists(st.integers(1, 12), min_size=1, max_size=4), st.floats(0, 1)),
        min_size=1,
        max_size=5,
    ),
)
@pytest.mark.parametrize("name", KINDS)
def test_append_then_take_back_equals_never_having_appended(
    name: str, prompt: int, transactions: list[tuple[list[int], float]]
) -> None:
    """`rollback`: any forwards, any keep, repeatedly, across the wrap and the capacity step.

    Recurrent layers, which here have nothing to replay with, keep whole forwards. The twin sees
    only what is kept, in the same forwards: then even the arrays are bitwise the same.
    """
    recurrent = any(isinstance(leaf, ArraysCache) for leaf in leaves([KINDS[name]()]))
    undo = Undo.FORWARDS if recurrent else Undo.TOKENS
    rows, twin = (Rows(append, [KINDS[name]()]) for _ in range(2))
    held = list(range(1, prompt + 1))
    for each in (rows, twin):
        each.forward(mx.array([held]))
    for widths, share in transactions:
        keep = round(share * sum(widths))
        if recurrent:
            keep = max(sum(widths[:n]) for n in range(len(widths) + 1) if sum(widths[:n]) <= keep)
        first, kept = len(held) + 1, keep
        rows.begin(undo)
        for width in widths:
            ids = [len(held) + 1 + i + WRONG * (i >= kept) for i in range(width)]
            rows.forward(mx.array([ids]))
            if kept:
                twin.forward(mx.array([ids[:kept]]))
            held += ids[:kept]
            kept -= min(kept, width)
        rows.resolve([keep])
        assert rows.processed[0] == twin.processed[0] == len(held) == first - 1 + keep
        for leaf, other in zip(leaves(rows.caches), leaves(twin.caches), strict=True):
            if not isinstance(leaf, ArraysCache):
                assert leaf.offset == len(held)
            if not isinstance(leaf, ArraysCache | QuantizedKVCache):
                check_columns(leaf, held)
            for ours, theirs in zip(arrays_of(leaf), arrays_of(other), strict=True):
                if not isinstance(leaf, ChunkedKVCache):  # whose twin may drop its front later
                    assert mx.array_equal(ours, theirs)
    for tail in ([7, 8, 9], [7]):
        ours, theirs = (each.forward(mx.array([tail])) for each in (rows, twin))
        assert mx.array_equal(ours, theirs)


def check_columns(leaf: Any, held: list[int]) -> None:
    """Nothing but held tokens, and all that the layer must still see, said without the twin."""
    found = held_by(leaf)
    if isinstance(leaf, RotatingKVCache):
        last = leaf.max_size - 1 - leaf.keep
        must = held if len(held) < leaf.max_size else held[: leaf.keep] + held[-last:]
        assert set(must) <= set(found) <= set(held)
    elif isinstance(leaf, ChunkedKVCache):
        assert found == held[leaf.start_position :]
        assert len(found) >= min(len(held), WINDOW)
    else:
        assert found == held


def test_every_layout_in_the_table_is_tested() -> None:
    """The kinds of one row here, those of many rows in `test_rows.py`."""
    here = {type(leaf) for kind in KINDS.values() for leaf in leaves([kind()])}
    assert set(LAYOUTS) == here | {Columns, QuantizedColumns, Place}


def test_a_handle_keeps_its_numbers_without_a_copy() -> None:
    """What a mark rests on: in-place writes reach an object, not the handles of its array."""
    array = mx.zeros((1 << 20,))
    mx.eval(array)
    before = mx.get_active_memory()
    ours = handle(array)
    mx.eval(ours)
    assert mx.get_active_memory() - before < array.nbytes // 2
    shared = array
    array[3:4] = 5.0
    assert ours is not None
    assert (ours[3].item(), shared[3].item()) == (0.0, 5.0)
    assert handle(None) is None


def test_marks_of_plain_kinds_hold_no_buffer() -> None:
    """Else each in-place write would copy the row's whole buffer."""
    for kind in (KVCache, QuantizedKVCache, ConcatenateKVCache):
        cache: Any = kind()
        rows = Rows(append, [cache])
        rows.forward(mx.array([[1, 2, 3]]))
        rows.begin()
        rows.forward(mx.array([[4, 5]]))
        assert rows._open is not None
        assert rows._open.marks == [[None]]


class Mine(KVCache):
    """A subclass, which may keep its tokens elsewhere."""


@pytest.mark.parametrize("inside", [False, True])
def test_unknown_kinds_are_named_and_decode_plainly(inside: bool) -> None:
    """Unknown is never a silent route: such a kind takes part in no rollback."""
    mine: Any = Mine
    cache: Any = CacheList(KVCache(), mine()) if inside else mine()
    assert unknown_kinds([KVCache(), cache]) == ("Mine",)
    rows = Rows(append, [cache])
    assert rows.cannot_roll_back == rows.cannot_step_back == ("Mine",)
    assert not rows.steps_back_freely
    for _ in range(3):
        rows.begin(Undo.NOTHING)
        rows.forward(mx.array([[1]]))
        rows.resolve([1])
    rows.begin()
    rows.forward(mx.array([[1, 2]]))
    with pytest.raises(LawError, match="Mine"):
        rows.resolve([1])
    with pytest.raises(LawError, match="state is lost"):
        rows.begin()


def test_objects_of_no_cache_class_are_unknown_too() -> None:
    assert unknown_kinds([object(), ArraysCache(2)]) == ("object",)


def test_a_recurrent_state_without_a_recorder_is_refused_inside_a_window() -> None:
    rows = Rows(append, [ArraysCache(1)])
    assert rows.cannot_roll_back == ("recurrent (nothing to replay it with)",)
    assert rows.cannot_step_back == ()
    rows.begin()
    rows.forward(mx.array([[1, 2]]))
    with pytest.raises(LawError, match=r"cannot keep \[1\] of \[2\] tokens"):
        rows.resolve([1])


def test_what_was_to_be_kept_cannot_be_taken_back() -> None:
    rows = Rows(append, [KVCache()])
    rows.begin(Undo.NOTHING)
    rows.forward(mx.array([[1]]))
    with pytest.raises(LawError, match="every one was to be kept"):
        rows.resolve([0])


def test_transactions_have_one_order(target: Target) -> None:
    """`position`: begin, forwards, resolve; anything else is an error and changes nothing."""
    rows = target.new_rows()
    assert rows.row_count == 1
    with pytest.raises(LawError, match="resolve without begin"):
        rows.resolve([0])
    rows.begin()
    with pytest.raises(LawError, match="unresolved"):
        rows.begin()
    rows.forward(mx.array([[5, 6]]))
    rows.forward(mx.array([[7]]))
    for keep in ([4], [-1], [], [1, 1]):
        with pytest.raises(LawError, match=r"within 0\.\.3"):
            rows.resolve(keep)
    rows.resolve([1])
    assert rows.processed == [1]
    assert [cache.offset for cache in rows.caches] == [1] * len(rows.caches)


@given(st.lists(st.tuples(st.integers(1, 5), st.integers(0, 5)), min_size=1, max_size=6))
def test_rejected_columns_never_influence_a_result(
    target: Target, windows: list[tuple[int, int]]
) -> None:
    """`padding`: NaN in every rejected column changes no later logit."""
    clean, spoiled = target.new_rows(), target.new_rows()
    token = 40
    for width, keep in windows:
        window = mx.array([[(token + i) % 90 + 5 for i in range(width)]])
        token += width
        outputs = []
        for rows in (clean, spoiled):
            rows.begin()
            outputs.append(rows.forward(window))
            rows.resolve([min(keep, width)])
        for cache in spoiled.caches:
            cache.keys[..., cache.offset :, :] = float("nan")
            cache.values[..., cache.offset :, :] = float("nan")
        assert mx.array_equal(outputs[0], outputs[1])


@pytest.mark.parametrize("fails_at", ["forward", "resolve"])
def test_a_failure_inside_a_transaction_loses_the_state(fails_at: str) -> None:
    """`poison`: also frees what the transaction held."""

    def model(tokens: mx.array, cache: list[Any]) -> mx.array:
        if fails_at == "forward" and rows.processed[0]:
            cache[0].offset += 1  # half a window
            raise RuntimeError("layer broke")
        return append(tokens, cache)

    rows = Rows(model, [RotatingKVCache(WINDOW)])
    rows.begin()
    rows.forward(mx.array([[1, 2, 3]]))
    if fails_at == "forward":
        with pytest.raises(RuntimeError, match="layer broke"):
            rows.forward(mx.array([[4]]))
    else:
        rows.caches[0].update_and_fetch = None
        with pytest.raises(TypeError):
            rows.resolve([1])
    for use in (rows.begin, lambda: rows.resolve([0]), lambda: rows.forward(mx.array([[1]]))):
        with pytest.raises(LawError, match="state is lost"):
            use()
    assert rows._open is None


def test_counters_of_recurrent_layers_do_not_pile_up_a_graph() -> None:
    """D18: nothing reads them in a row of its own, so each step would add nodes for good."""

    def model(tokens: mx.array, cache: list[Any]) -> mx.array:
        logits = append(tokens, cache)
        cache[0].advance(1)
        return logits

    cache: Any = ArraysCache(1)
    cache.prepare(lengths=[1 << 30])
    rows = Rows(model, [cache])
    for _ in range(10_000):
        rows.begin(Undo.NOTHING)
        mx.async_eval(rows.forward(mx.array([[1]])))
        rows.resolve([1])
    graph = io.StringIO()
    mx.export_to_dot(graph, cache.lengths, cache[0])
    assert graph.getvalue().count("label") < 20
    assert cache.lengths.item() == (1 << 30) - 10_000
