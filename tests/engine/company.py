"""Rows in company, each beside its twin: a row of its own that only ever saw what was kept."""

from __future__ import annotations

import copy
import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import ArraysCache, QuantizedKVCache, RotatingKVCache

import fixtures
from engine import Target
from engine.drafters.two_model import TwoModelProvider
from engine.state.checkpoint import capture_caches
from engine.state.columns import Columns
from engine.state.layouts import leaves
from engine.state.quantize import KVQuantization
from engine.state.rows import Rows, Undo

from .families import ROUNDED, build, target_on

TARGETS = ("dense", "hybrid", "sliding", "mla")
ROUND = {"sliding", "mla", *ROUNDED}
"""Models in which the number of tokens or rows of a forward changes rounding, on CPU too."""
TOLERANCE = 1e-4
"""For those, as a share of an array's largest number. mlx-lm's own model alone, given the same
tokens in windows of other widths, is seen to differ by 1.2e-5 of it on the sliding target."""


@cache
def model_of(name: str) -> Target:
    """A trained target; `quantized`, the dense one with small keys; or a family's random model."""
    if name == "quantized":
        near = model_of("dense")
        how = KVQuantization(8, 32, start=0)
        config = {"vocab_size": near.vocab_size}
        return Target(near.model, near.tokenizer, config, near.path, quantization=how)
    if name in TARGETS:
        return Target.load(fixtures.target_dir(name))
    return target_on(build(name), model_of("dense"))


@cache
def provider_of(kind: str) -> TwoModelProvider:
    """The trained target's own draft model."""
    draft = Target.load(fixtures.drafter_dir(f"{kind}-draft"))
    return TwoModelProvider(draft, model_of(kind))


def ids(count: int, seed: int) -> list[int]:
    """That many ids which every model here knows."""
    draw = random.Random(seed)
    return [draw.randrange(5, 95) for _ in range(count)]


@dataclass(slots=True)
class Company:
    """`rows` of the model `name`; `twins[r]` and `held[r]` are row r alone and its tokens."""

    name: str
    rows: Rows
    twins: list[Rows]
    held: list[list[int]]
    spoils: bool = False

    @classmethod
    def of(cls, name: str, *prompts: Sequence[int], spoils: bool = False) -> Company:
        company: Company | None = None
        for prompt in prompts:
            own, twin = prefilled(name, prompt), prefilled(name, prompt)
            one = cls(name, own, [twin], [list(prompt)], spoils)
            if spoils:
                spoil_native(own.caches)
            company = one if company is None else company.joined(one)
        assert company is not None
        return company

    def joined(self, other: Company) -> Company:
        return self._with(
            self.rows.joined(other.rows), self.twins + other.twins, self.held + other.held
        )

    def selected(self, keep: Sequence[int]) -> Company:
        twins, held = [self.twins[r] for r in keep], [list(self.held[r]) for r in keep]
        return self._with(self.rows.selected(keep), twins, held)

    def _with(self, rows: Rows, twins: list[Rows], held: list[list[int]]) -> Company:
        if self.spoils:
            spoil(rows, [0] * len(held))
        return Company(self.name, rows, twins, held, self.spoils)

    def captured(self, row: int) -> Company:
        """That row, stored and restored."""
        layout, tensors = capture_caches(self.rows.lowered(row))
        held = list(self.held[row])
        own = model_of(self.name).restored_rows(layout, tensors, len(held))
        twin = model_of(self.name).new_rows()
        twin.caches, twin.processed = copy.deepcopy(self.twins[row].caches), [len(held)]
        return Company(self.name, own, [twin], [held], self.spoils)

    def round(
        self, widths: Sequence[int], keep: Sequence[int], seed: int, undo: Undo = Undo.TOKENS
    ) -> None:
        """Forwards of those widths in one transaction, of which row r keeps `keep[r]` tokens."""
        self.rows.begin(undo)
        left = list(keep)
        for number, width in enumerate(widths):
            windows = [ids(width, seed + 101 * number + 7 * r) for r in range(len(keep))]
            logits = self.rows.forward(mx.array(windows))
            assert not mx.any(mx.isnan(logits))
            for r, window in enumerate(windows):
                kept = window[: left[r]]
                if kept:
                    self.same(logits[r, : len(kept)], self.twins[r].forward(mx.array([kept]))[0])
                self.held[r] += kept
                left[r] -= len(kept)
        if self.spoils:
            spoil(self.rows, [sum(widths) - kept for kept in keep])
        self.rows.resolve(keep)

    def append(self, width: int, seed: int) -> None:
        """A forward that is kept, outside of any transaction."""
        windows = [ids(width, seed + 7 * r) for r in range(len(self.held))]
        logits = self.rows.forward(mx.array(windows))
        for r, window in enumerate(windows):
            self.same(logits[r], self.twins[r].forward(mx.array([window]))[0])
            self.held[r] += window

    def same(self, ours: mx.array, theirs: mx.array) -> None:
        assert ours.shape == theirs.shape
        if self.name in ROUND:
            scale = max(1.0, mx.abs(theirs).max().item())  # type: ignore[type-var]
            error: Any = mx.abs(ours - theirs).max().item() if ours.size else 0.0
            assert error <= TOLERANCE * scale
        else:
            assert mx.array_equal(ours, theirs)

    def check(self) -> None:
        """`position`, and the same tensors as alone, read through native caches."""
        assert self.rows.processed == [len(held) for held in self.held]
        many = self.rows.lifted() is self.rows
        for r, twin in enumerate(self.twins):
            ours, theirs = leaves(self.rows.lowered(r)), leaves(twin.lowered(0))
            for pair in zip(ours, theirs, strict=True):
                assert type(pair[0]) is type(pair[1])
                ring: Any = pair[0]
                if many and isinstance(ring, RotatingKVCache) and ring.offset:
                    # Fewer columns than a window has are for mlx-lm a ring that may still grow.
                    assert planes_of(ring)[0].shape[2] == min(ring.offset, ring.max_size)
                for a, b in zip(*remembered(*pair), strict=True):
                    self.same(a, b)


def prefilled(name: str, prompt: Sequence[int]) -> Rows:
    """A row of its own that has seen the prompt."""
    rows = model_of(name).new_rows()
    if prompt:
        rows.forward(mx.array([prompt]))
    return rows


def spoil(rows: Rows, rejected: Sequence[int]) -> None:
    """NaN in each row's last `rejected[r]` columns, and in all behind that have been written."""
    for leaf in leaves(rows.caches):
        if isinstance(leaf, Columns) and leaf.planes is not None:
            for r, count in enumerate(rejected):
                end = leaf.place.starts[r] - count
                for plane in leaf.planes:
                    plane[r, :, end : leaf.place.dirty[r]] = junk(plane)


def spoil_native(caches: Sequence[Any]) -> None:
    """NaN in what mlx-lm's own caches have allocated and not written."""
    for leaf in leaves(caches):
        if not isinstance(leaf, ArraysCache) and leaf.keys is not None:
            packed = isinstance(leaf, QuantizedKVCache)
            for plane in [*leaf.keys, *leaf.values] if packed else [leaf.keys, leaf.values]:
                plane[:, :, leaf.offset :] = junk(plane)


def junk(plane: mx.array) -> float | int:
    return 0xFFFFFFFF if plane.dtype == mx.uint32 else float("nan")


def remembered(ours: Any, theirs: Any) -> tuple[list[mx.array], list[mx.array]]:
    """What two native caches of a kind hold that a later token can see, oldest first."""
    if isinstance(ours, ArraysCache):
        slots: Any = zip(ours.cache, theirs.cache, strict=True)
        # What a row has not seen yet is zero in company and absent alone.
        known = [(a, mx.zeros_like(a) if b is None else b) for a, b in slots if a is not None]
        return [a for a, _ in known], [b for _, b in known]
    assert ours.offset == theirs.offset
    if not ours.offset:
        return [], []
    pair = planes_of(ours), planes_of(theirs)
    if not isinstance(ours, RotatingKVCache):
        return pair
    columns = min(planes[0].shape[2] for planes in pair)
    assert columns >= min(ours.offset, ours.max_size - 1)
    found = [[plane[:, :, -columns:] for plane in planes] for planes in pair]
    return found[0], found[1]


def planes_of(leaf: Any) -> list[mx.array]:
    """A native cache's columns in the order of their tokens, nothing else."""
    if isinstance(leaf, RotatingKVCache):
        return [leaf._temporal_order(plane) for plane in (leaf.keys, leaf.values)]
    keys, values = leaf.keys_and_values()
    return [*keys, *values] if isinstance(leaf, QuantizedKVCache) else [keys, values]
