"""Captures of one row's caches, in every kind."""

from __future__ import annotations

import mlx.core as mx
import pytest

from engine import BadInput
from engine.state.checkpoint import capture_caches, restore_caches

from .families import ROLLED, WINDOW, feed, ids, rows_of


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
    tails = ([8], [5, 6, 7], [9])  # first one that a full ring writes in place
    expected = [feed(rows, tail) for tail in tails]
    for _ in range(2):
        fresh = rows_of(family)
        restore_caches(fresh.caches, layout, tensors, length)
        for tail, logits in zip(tails, expected, strict=True):
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
    halves = [states[i] for i in (0, 2, 3, 4, 6, 7)]  # one array of each recurrent layer is lacking
    for family, words, arrays, tokens, message in (
        ("qwen3_5", layout, tensors, 12, "expected 4|where the model has"),
        ("gemma4_text", layout, tensors[:-1], 12, "too few"),
        ("gemma4_text", layout, (*tensors, tensors[0]), 12, "too many"),
        ("gemma4_text", layout, tensors, 11, "stands at 12 tokens, expected 11"),
        ("gemma4_text", layout, [t[:, :, :-1] for t in tensors], 12, "does not hold"),
        ("gemma4_text", layout.replace(":8:0:", ":9:0:"), tensors, 12, "window"),
        ("gemma4_text", layout.replace("ring:", "ring:x"), tensors, 12, "malformed"),
        ("gemma4_text", layout.replace("ring:12", "ring"), tensors, 12, "malformed"),
        ("gemma4_text", "None", tensors, 12, "None has no checkpoint form"),
        ("gemma4_text", "plain:12", tensors[:2], 12, "holds 1 caches"),
        ("gemma4_text", layout, [mx.repeat(t, 2, axis=0) for t in tensors], 12, "1 row"),
        ("qwen3_5", recurrent.replace("recurrent:1:1", "recurrent:1"), halves, 12, "slots"),
        ("qwen3_5", recurrent, [mx.repeat(s, 2, axis=0) for s in states], 12, "1 row"),
    ):
        with pytest.raises(BadInput, match=message):
            restore_caches(rows_of(family).caches, words, arrays, tokens)
