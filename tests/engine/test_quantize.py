"""Quantized keys and values: as mlx-lm's `generate_step` does it, with and without a drafter."""

from __future__ import annotations

import mlx.core as mx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import KVCache, QuantizedKVCache

from engine import BadInput, LawError, Request, Target, generate, open_live
from engine.state.quantize import KVQuantization
from engine.state.rows import Undo

from .conftest import last
from .families import build, ids, target_on
from .puppet import Puppet, scripted

BUDGET = 24


def mlx_lm_tokens(target: Target, prompt: list[int], chunk: int, how: KVQuantization) -> list[int]:
    tokens = []
    for token, _ in generate_step(
        mx.array(prompt),
        target.model,
        max_tokens=BUDGET,
        prefill_step_size=chunk,
        kv_bits=how.bits,
        kv_group_size=how.group_size,
        quantized_kv_start=how.start,
    ):
        if token in target.eos_ids:
            break
        tokens.append(int(token))
    return tokens


def quantized(target: Target, how: KVQuantization) -> Target:
    config = {"vocab_size": target.vocab_size}
    return Target(target.model, target.tokenizer, config, target.path, quantization=how)


@given(
    bits=st.sampled_from([4, 8]),
    start=st.sampled_from([0, 1, 9, 12, 13, 20, 5000]),
    length=st.sampled_from([1, 2, 10, 12]),
    chunk=st.sampled_from([3, 2048]),
    script=st.lists(st.lists(st.booleans(), max_size=5), min_size=1, max_size=4),
)
@settings(max_examples=15)
def test_text_is_mlx_lms_with_and_without_drafts(
    target: Target, bits: int, start: int, length: int, chunk: int, script: list[list[bool]]
) -> None:
    """`lossless`, `chunking`: at the same chunk, which is part of the definition here."""
    how = KVQuantization(bits, 32, start)
    model, prompt = quantized(target, how), ids(length)
    expected = mlx_lm_tokens(target, prompt, chunk, how)
    for drafter in (None, Puppet(scripted(expected, script))):
        live = open_live(model)
        request = Request(tuple(prompt), BUDGET)
        events = list(generate(model, request, drafter, depth=5, live=live, prefill_chunk=chunk))
        assert list(last(events).tokens) == expected
        reached = live.target.processed[0] >= start
        kind = QuantizedKVCache if reached else KVCache
        assert all(type(cache) is kind for cache in live.target.caches)


def test_a_window_ends_where_plain_decoding_would_quantize(target: Target) -> None:
    """`rollback`: nothing is converted before it is known to be kept."""
    rows = quantized(target, KVQuantization(8, 32, start=6)).new_rows()
    rows.forward(mx.array([[1, 2, 3]]))
    assert rows.longest_windows == (3,)
    rows.begin()
    rows.forward(mx.array([[4, 5, 6, 7]]))
    with pytest.raises(LawError, match="may hold 3 tokens here, got 4"):
        rows.resolve([4])
    assert type(rows.caches[0]) is KVCache
    rows.resolve([2])
    assert type(rows.caches[0]) is KVCache
    assert rows.longest_windows == (1,)
    rows.begin(Undo.FORWARDS)
    rows.forward(mx.array([[6]]))
    rows.resolve([1])
    kinds: list[type] = [type(cache) for cache in rows.caches]
    assert set(kinds) == {QuantizedKVCache}
    assert set(rows.longest_windows) == {None}


def test_the_tail_is_never_quantized_again(target: Target) -> None:
    """`rollback`: the packed columns that are kept are untouched."""
    rows = quantized(target, KVQuantization(4, 32, start=0)).new_rows()
    rows.forward(mx.array([[1, 2, 3]]))
    before = [mx.array(part) for part in rows.caches[0].keys_and_values()[0]]
    for keep in (0, 1):
        rows.begin()
        rows.forward(mx.array([[4, 5, 6]]))
        rows.resolve([keep])
    after = rows.caches[0].keys_and_values()[0]
    for ours, theirs in zip(after, before, strict=True):
        assert mx.array_equal(ours[:, :, :3], theirs)
    assert rows.processed[0] == rows.caches[0].offset == 4


def test_a_hybrid_model_quantizes_its_attention_only(target: Target) -> None:
    how = KVQuantization(8, 32, 4)
    model = target_on(build("qwen3_5_wide"), target, quantization=how)
    expected = mlx_lm_tokens(model, ids(10), 2048, how)
    right = Puppet(scripted(expected, [[True, True], [True, False]]))
    for drafter in (None, right):
        events = list(generate(model, Request(tuple(ids(10)), BUDGET), drafter, depth=3))
        assert list(last(events).tokens) == expected


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ((7,), "kv_bits must be one of 2, 3, 4, 5, 6, 8, got 7"),
        ((0,), "kv_bits must be one of"),
        ((4, 48), "kv_group_size must be one of 32, 64, 128, got 48"),
        ((4, 64, -1), "quantized_kv_start must be at least 0, got -1"),
    ],
)
def test_options_that_mlx_does_not_have_are_refused(options: tuple[int, ...], message: str) -> None:
    with pytest.raises(BadInput, match=message):
        KVQuantization(*options)


@pytest.mark.parametrize(
    ("family", "message"), [("gemma4_text", "ring caches"), ("llama", "divisible|multiple|size")]
)
def test_models_that_mlx_lm_cannot_quantize_are_refused(
    family: str, message: str, target: Target
) -> None:
    """D12: when the target is bound, and not in the middle of a text."""
    with pytest.raises(BadInput, match=f"kv_bits cannot serve this model: .*({message})"):
        target_on(build(family), target, quantization=KVQuantization(8, 64))
