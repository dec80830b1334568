"""A model for each cache kind, and rows on it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx_lm.models.cache import ConcatenateKVCache

from engine import Target
from engine.cache.stored import Stored
from engine.state.checkpoint import capture
from engine.state.forms import Held
from engine.state.quantize import KVQuantization
from engine.state.rows import Rows
from tests.engine.company import ROUND, TARGETS, TOLERANCE, model_of
from tests.engine.families import build, target_on

DELAY = 12
"""From how many tokens on `delayed` stores few bits."""

KINDS = (
    *TARGETS,
    "quantized",
    "delayed",
    "concatenated",
    "gemma4_text",  # rings, some of them unused
    "glm_moe_dsa",  # lists of plain caches
    "llama4",  # chunked beside plain
    "qwen3_5",  # recurrent beside plain
    "falcon_h1",  # lists of a recurrent and a plain one
    "mamba",  # recurrent only
)


class Concatenating(Module):
    """A model on caches that keep exactly what they were given."""

    def __init__(self, model: Any) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.model = model

    @property
    def layers(self) -> list[Any]:
        layers: list[Any] = self.model.layers
        return layers

    def make_cache(self) -> list[Any]:
        return [ConcatenateKVCache() for _ in self.layers]

    def __call__(self, tokens: mx.array, cache: list[Any]) -> mx.array:
        logits: mx.array = self.model(tokens, cache=cache)
        return logits


@cache
def target_for(kind: str) -> Target:
    near = model_of("dense")
    if kind == "concatenated":
        return target_on(Concatenating(build("llama")), near)
    if kind == "delayed":
        how = KVQuantization(8, 32, DELAY)
        return Target(
            near.model, near.tokenizer, {"vocab_size": near.vocab_size}, near.path, quantization=how
        )
    return model_of(kind)


def fed(kind: str, *windows: Sequence[int]) -> Rows:
    """A row that has seen the windows, one forward for each."""
    rows = target_for(kind).new_rows()
    for tokens in windows:
        feed(rows, tokens)
    return rows


def feed(rows: Rows, tokens: Sequence[int]) -> mx.array:
    logits = rows.forward(mx.array([list(tokens)]))
    mx.eval(logits, rows.arrays())
    return logits


def stored(kind: str, rows: Rows) -> Stored:
    return Stored.of(rows.lowered(0), rows.processed[0], target_for(kind).quantization)


def restored(kind: str, value: Stored) -> Rows:
    return target_for(kind).rows_holding(value.leaves, value.num_tokens)


def same_future(kind: str, ours: Rows, theirs: Rows, windows: Sequence[Sequence[int]]) -> bool:
    """Bitwise, but within the tolerance for models in which a forward's width rounds."""
    return all(close(kind, feed(ours, w), feed(theirs, w)) for w in windows)


def close(kind: str, ours: mx.array, theirs: mx.array) -> bool:
    if kind not in ROUND:
        return bool(mx.array_equal(ours, theirs))
    worst, scale = float(mx.max(mx.abs(ours - theirs))), float(mx.max(mx.abs(theirs)))
    return ours.shape == theirs.shape and worst <= TOLERANCE * scale


def same_held(ours: Sequence[Held], theirs: Sequence[Held]) -> bool:
    """Numbers, shapes, dtypes and bytes."""
    return [held.word for held in ours] == [held.word for held in theirs] and all(
        a.shape == b.shape and a.dtype == b.dtype and bool(mx.array_equal(a, b, equal_nan=True))
        for x, y in zip(ours, theirs, strict=True)
        for a, b in zip(x.arrays, y.arrays, strict=True)
    )


def columns_of(held: Held) -> list[mx.array]:
    """The arrays of a cache that has dropped nothing, without room for tokens to come."""
    if held.kind != "ring":
        return list(held.arrays)
    return [array[:, :, : held.numbers[0]] for array in held.arrays]


def held_by(rows: Rows) -> tuple[Held, ...]:
    return capture(rows.lowered(0))
