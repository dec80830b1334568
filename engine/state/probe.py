"""What a model is tried for once: exact replay, and rows that share a forward.

A family's own code decides both, and neither can be read from its signatures.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.utils import tree_flatten

from .layouts import RECURRENT, Cache, layout_of, leaves
from .replay import Recorder, find_writers
from .rows import Replayer, Rows

PREFIX = (7, 3, 11)
WINDOW = (5, 2, 13, 1)

TOLERANCE = {mx.float32: 1e-4, mx.float16: 1e-2, mx.bfloat16: 3e-2}
"""Largest difference, as a share of an array's largest number.

Not bitwise: the layers below a mixer may round a window otherwise than single tokens, on CPU in
float32 too (MoE, SSM). A replay that is wrong misses by the size of a token's effect."""


def prove(model: Module, make_caches: Callable[[], list[Cache]]) -> Recorder | str:
    """The model's recorder, if replay passes the probe; else the reason why not.

    Every keep of a window of four, one after the other on one state, against a state that only
    ever saw what was kept.
    """
    try:
        writers, rewritten = find_writers(model, mx.array([PREFIX]), make_caches())
        recorder = Recorder(model, writers, rewritten)
        tried = Rows(model, make_caches(), replayer=lambda: recorder)
        truth = Rows(model, make_caches())
        for rows in (tried, truth):
            rows.forward(mx.array([PREFIX]))
        for keep in range(len(WINDOW) + 1):
            tried.begin()
            tried.forward(mx.array([WINDOW]))
            tried.resolve([keep])
            if keep:
                truth.forward(mx.array([WINDOW[:keep]]))
            if (error := _distance(tried, truth, rewritten)) is not None:
                return f"replay keeps {keep} of {len(WINDOW)} tokens wrongly: {error}"
    except Exception as error:
        # A family's own code, handed cut inputs, raises whatever it likes.
        return f"replay fails: {type(error).__name__}: {_one_line(error)}"
    return recorder


def prove_rows(
    model: Module, make_caches: Callable[[], list[Cache]], replayer: Replayer
) -> str | None:
    """Whether rows of different lengths can share forwards; None, or the reason why not.

    Four rows, one of them new and one of a single token, append a window, keep each another part of
    it and append a token. Their logits and what stays are those of rows on their own.
    """

    def alone() -> Rows:
        return Rows(model, make_caches(), replayer=replayer)

    prefixes, window = (
        [PREFIX, PREFIX[1:2] * 5, PREFIX[:1], ()],
        (WINDOW, WINDOW[::-1], WINDOW[1:] + WINDOW[:1], WINDOW[2:] + WINDOW[:2]),
    )
    try:
        truths, many = [alone() for _ in prefixes], alone()
        speculates = not many.cannot_roll_back
        for number, prefix in enumerate(prefixes):
            own = alone() if number else many
            for rows in (truths[number], own):
                if prefix:
                    rows.forward(mx.array([prefix]))
            many = many.joined(own) if number else own
        steps = [
            (mx.array(window), (4, 1, 2, 3) if speculates else (4,) * 4),
            (mx.array([[3]] * 4), (1,) * 4),
        ]
        for tokens, keeps in steps:
            many.begin()
            logits = many.forward(tokens)
            many.resolve(keeps)
            for r, truth in enumerate(truths):
                kept = tokens[r : r + 1, : keeps[r]]
                if (error := _off(logits[r, : keeps[r]], truth.forward(kept)[0])) is not None:
                    return f"rows that share a forward are computed wrongly: {error}"
    except Exception as error:
        return f"rows cannot share a forward: {type(error).__name__}: {_one_line(error)}"
    return None


def _distance(tried: Rows, truth: Rows, rewritten: set[int]) -> str | None:
    for number, pair in enumerate(zip(leaves(tried.caches), leaves(truth.caches), strict=True)):
        if layout_of(pair[0]) is not RECURRENT and number not in rewritten:
            continue
        for ours, theirs in zip(*map(_arrays, pair), strict=True):
            if (error := _off(ours, theirs)) is not None:
                return error
    return None


def _off(ours: mx.array, theirs: mx.array) -> str | None:
    if ours.shape != theirs.shape:
        return f"shape {ours.shape} instead of {theirs.shape}"
    scale, error = _largest(theirs), _largest(ours - theirs)
    if not error <= TOLERANCE.get(theirs.dtype, 0.0) * scale:
        return f"off by {error:.1e} of {scale:.1e}"
    return None


def _arrays(leaf: Cache) -> list[mx.array]:
    """What a leaf holds that counts, in the order of its slots."""
    tree = leaf.cache if layout_of(leaf) is RECURRENT else leaf.keys_and_values()
    flat: Any = tree_flatten(tree)
    return [array for _, array in flat if array is not None]


def _largest(array: mx.array) -> float:
    number: Any = mx.abs(array).max().item() if array.size else 0.0
    return float(number)


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
