"""Block drafters for tests: folders made on the spot, and contexts seen from outside."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx

import fixtures
from engine import Target, open_drafter
from engine.drafters.context_rows import BlockProvider, ContextRows
from engine.drafters.source import Taps
from fixtures import random_drafters

from .pools import target_of

ROOT = Path(tempfile.mkdtemp(prefix="blocks-"))


@dataclass(frozen=True, slots=True)
class Pair:
    """A drafter by its maker, and the target it is for."""

    maker: str
    family: str

    def __str__(self) -> str:
        return f"{self.maker}-{self.family}"


PAIRS = (
    Pair("dspark", "dense"),
    Pair("dspark", "hybrid"),
    Pair("dflash", "sliding"),
    Pair("deepspec", "sliding"),
)


@cache
def folder_of(pair: Pair) -> Path:
    make: Callable[[Path, Path, int], Path] = getattr(random_drafters, pair.maker)
    return make(ROOT / str(pair), fixtures.target_dir(pair.family), 1)


@cache
def provider_of(pair: Pair) -> BlockProvider:
    provider = open_drafter(str(folder_of(pair)), target_of(pair.family))
    assert isinstance(provider, BlockProvider)
    return provider


def taps_of(target: Target, provider: BlockProvider, tokens: Sequence[int]) -> Taps:
    """What the tapped layers say on tokens [1, N]."""
    rows = target.new_rows(provider.taps)
    rows.forward(mx.array([list(tokens)]))
    return rows.tapped


def context_of(rows: ContextRows, row: int) -> list[mx.array]:
    """One row's columns, layer by layer: keys, then values."""
    return list(rows.capture(row).attachment.tensors)


def near(ours: Sequence[Any], theirs: Sequence[Any], tolerance: float = 1e-4) -> bool:
    """Equal shapes and no number further apart than that."""
    return [a.shape for a in ours] == [b.shape for b in theirs] and all(
        a.size == 0 or float(mx.abs(a - b).max()) <= tolerance
        for a, b in zip(ours, theirs, strict=True)
    )
