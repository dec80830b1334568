"""Rows on mlx-lm's caches: rollback for each kind, transactions, and what is refused."""

from __future__ import annotations

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
from engine.state.layouts import LAYOUTS, cannot_roll_back, layout_of
from engine.state.native import NativeRows

HEADS, DIM = 2, 64
KINDS: list[Callable[[], Any]] = [KVCache, QuantizedKVCache, ConcatenateKVCache]


def keys(tokens: list[int]) -> mx.array:
    """Keys [1, HEADS, N, DIM] that differ per token, head and dimension."""
    base = mx.array(tokens, dtype=mx.float32)[:, None] + mx.arange(DIM) / DIM
    return mx.stack([base, -base])[None]


def append(cache: Any, tokens: list[int]) -> tuple[Any, Any]:
    result: tuple[Any, Any] = cache.update_and_fetch(keys(tokens), keys(tokens) * 2)
    return result


def flat(tree: Any) -> list[Any]:
    return [leaf for t in tree for leaf in flat(t)] if isinstance(tree, tuple | list) else [tree]


@given(
    steps=st.lists(st.tuples(st.integers(1, 300), st.floats(0, 1)), min_size=1, max_size=5),
    tail=st.integers(1, 4),
)
@pytest.mark.parametrize("kind", KINDS)
def test_append_then_drop_equals_never_having_appended(
    kind: Callable[[], Any], steps: list[tuple[int, float]], tail: int
) -> None:
    """`rollback`, `padding`: any appended length and any keep, across the capacity step of 256."""
    cache, twin, held = kind(), kind(), 0
    for appended, share in steps:
        tokens = list(range(held, held + appended))
        append(cache, tokens)
        keep = round(share * appended)
        if keep < appended:
            # Poison what is rejected: nothing may read it.
            spoiled = cache.keys_and_values()
            assert flat(spoiled)[0].shape[2] == held + appended
            drop = layout_of(cache).drop
            assert drop is not None
            drop(cache, appended - keep)
        if keep:
            append(twin, tokens[:keep])
        held += keep
        assert cache.offset == held
    ours = append(cache, [7] * tail)
    theirs = append(twin, [7] * tail)
    for a, b in zip(flat(ours), flat(theirs), strict=True):
        assert a.shape == b.shape
        assert mx.array_equal(a, b)


def test_every_layout_in_the_table_is_tested() -> None:
    assert set(LAYOUTS) == set(KINDS)


@pytest.mark.parametrize(
    "cache",
    [RotatingKVCache(8), ArraysCache(2), ChunkedKVCache(8), CacheList(KVCache()), object()],
    ids=lambda c: type(c).__name__,
)
def test_unknown_kinds_are_named_and_refused(cache: Any) -> None:
    """Unknown is never a silent route: such a kind takes part in no rollback."""
    assert cannot_roll_back([KVCache(), cache]) == (type(cache).__name__,)
    rows = NativeRows(lambda tokens, cache: mx.zeros((1, tokens.shape[1], 4)), [cache])
    rows.begin()
    rows.forward(mx.array([[1, 2]]))
    with pytest.raises(LawError, match=type(cache).__name__):
        rows.resolve([1])
    with pytest.raises(LawError, match="state is lost"):
        rows.begin()


def test_a_subclass_is_another_kind() -> None:
    class Mine(KVCache):
        pass

    mine: Any = Mine
    assert cannot_roll_back([mine()]) == ("Mine",)


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
    assert rows.processed == 1
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
