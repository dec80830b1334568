"""One row's caches as a value, in every kind."""

from __future__ import annotations

import mlx.core as mx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.models.cache import ChunkedKVCache, RotatingKVCache, make_prompt_cache

from engine import BadInput
from engine.cache.entry import Reuse
from engine.cache.stored import Stored
from engine.state.checkpoint import restore
from engine.state.forms import Held, cut, cut_from
from tests.engine.company import ids
from tests.engine.families import WINDOW

from .kinds import (
    DELAY,
    KINDS,
    close,
    columns_of,
    fed,
    feed,
    held_by,
    restored,
    same_future,
    same_held,
    stored,
    target_for,
)

TAILS = ([8], [5, 6, 7], [9], [10, 11])


def any_reuse(kind: str, length: int) -> Reuse:
    """Which boundaries a row of `length` tokens, fed at once, can be cut back to."""
    if kind in ("hybrid", "qwen3_5", "falcon_h1", "mamba") or length == 1:
        return Reuse(trimmable=False)
    if kind == "delayed" and length >= DELAY:
        return Reuse(length > DELAY, DELAY)
    return Reuse(trimmable=True)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("length", [1, 3, WINDOW, 3 * WINDOW])
def test_a_stored_state_has_the_same_future_and_is_never_changed(kind: str, length: int) -> None:
    """`roundtrip`: bitwise, twice from one value, whatever the donor does next."""
    rows = fed(kind, ids(length, 1))
    value = stored(kind, rows)
    assert value.num_tokens == length
    assert value.nbytes == sum(array.nbytes for array in value.arrays) > 0
    copies = [mx.array(array) for array in value.arrays]
    expected = [feed(rows, tail) for tail in TAILS]
    for _ in range(2):
        again = restored(kind, value)
        assert same_held(held_by(again), value.leaves)
        for tail, logits in zip(TAILS, expected, strict=True):
            assert mx.array_equal(feed(again, tail), logits)
    for array, copy in zip(value.arrays, copies, strict=True):
        assert mx.array_equal(array, copy, equal_nan=True)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("length", [1, DELAY, 3 * WINDOW])
def test_a_state_cut_back_is_that_of_the_shorter_prompt(kind: str, length: int) -> None:
    """`roundtrip`: at every boundary that it offers; the longer value stays as it is."""
    tokens = ids(length, 2)
    value = stored(kind, fed(kind, tokens))
    assert value.reuse == any_reuse(kind, length)
    copies = [mx.array(array) for array in value.arrays]
    for count in range(length + 1):
        if not value.reuse.serves(count, length):
            with pytest.raises(BadInput, match=f"{length} stored tokens cannot be cut back to"):
                value.trimmed(count)
            continue
        cut_back = value.trimmed(count)
        own = fed(kind, tokens[:count])
        assert cut_back.num_tokens == count
        assert all(
            close(kind, a, b)
            for x, y in zip(cut_back.leaves, held_by(own), strict=True)
            for a, b in zip(columns_of(x), columns_of(y), strict=True)
        )
        if count % WINDOW in (0, 1, WINDOW - 1) or count in (DELAY, length - 1):
            assert same_future(kind, restored(kind, cut_back), own, TAILS)
    for array, copy in zip(value.arrays, copies, strict=True):
        assert mx.array_equal(array, copy, equal_nan=True)


@given(
    steps=st.lists(st.sampled_from([1, 1, 1, 2, 5, 9, 20]), min_size=1, max_size=8),
    kind=st.sampled_from(["gemma4_text", "llama4"]),
)
@settings(max_examples=30)
def test_windows_are_cut_back_only_where_nothing_is_lacking(steps: list[int], kind: str) -> None:
    """`roundtrip`, `longest-prefix`: rings and chunks that any forwards have filled."""
    tokens = ids(sum(steps), 3)
    windows = [tokens[sum(steps[:i]) : sum(steps[: i + 1])] for i in range(len(steps))]
    value = stored(kind, fed(kind, *windows))
    reuse = value.reuse
    served = [count for count in range(1, len(tokens)) if reuse.serves(count, len(tokens))]
    for count in {*served[:1], *served[len(served) // 2 :][:1], *served[-1:]}:
        again, own = restored(kind, value.trimmed(count)), fed(kind, tokens[:count])
        for tail in TAILS:
            ours, theirs = feed(again, tail), feed(own, tail)
            assert mx.allclose(ours, theirs, rtol=1e-4, atol=1e-4)
    rings = [held for held in value.leaves if held.kind == "ring"]
    full = any(held.numbers[1] < held.numbers[0] for held in rings)
    starts = [held.numbers[1] for held in value.leaves if held.kind == "chunked"]
    least = max([1, *(-(-start // WINDOW) * WINDOW for start in starts)])
    trimmable = not full and least < len(tokens)
    assert reuse == (Reuse(True, least) if trimmable else Reuse(trimmable=False))


def test_a_cache_that_stands_elsewhere_is_refused() -> None:
    """`position`: the stored offset was once the keys' length less one."""
    rows = fed("dense", ids(5, 1))
    for tokens in (4, 6):
        with pytest.raises(BadInput, match=f"stands at 5 tokens, expected {tokens}"):
            Stored.of(rows.lowered(0), tokens)


def test_a_state_cut_back_says_so_in_every_layer() -> None:
    """A trim that reports its first layer only leaves windowed and full layers apart."""
    rows = fed("sliding", ids(9, 1))
    value = stored("sliding", rows).trimmed(4)
    assert {held.numbers[0] for held in value.leaves} == {4}
    assert restored("sliding", value).processed == [4]


def test_unused_caches_and_unknown_kinds() -> None:
    """A layer that the model never uses is kept as such; a kind without a form is named."""
    model = target_for("gemma4_text").model
    fresh = make_prompt_cache(model)
    value = Stored.of(fresh, 0)
    assert value.nbytes == 0
    restore(make_prompt_cache(model), value.leaves, 0)
    assert cut_from(value.leaves[0]) == 1
    assert cut(value.leaves[0], 1) is value.leaves[0]
    with pytest.raises(BadInput, match="Unheard has no checkpoint form"):
        Stored.of([Unheard()], 0)
    with pytest.raises(BadInput, match="chunk size of a checkpoint cache are 9"):
        restore([ChunkedKVCache(8)], [Held("chunked", (0, 0, 9), ())], 4)
    with pytest.raises(BadInput, match="malformed"):
        restore([RotatingKVCache(8)], [Held("ring", (4,), ())], 4)


class Unheard:
    """A cache class of the future."""
