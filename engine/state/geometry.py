"""What a model's states look like, whatever they hold: measured on a few tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import mlx.core as mx

from ..errors import BadInput
from .forms import Held, save
from .layouts import RECURRENT, Cache, leaves
from .memory import PROBE

Geometry: TypeAlias = "tuple[tuple[str, tuple[tuple[mx.Dtype, tuple[int, ...]], ...]], ...]"
"""Per leaf its kind, and of each array the dtype and all lengths that do not grow with tokens."""


def measured(model: Any, caches: Sequence[Cache]) -> Geometry:
    """The geometry of a model's own empty caches, which are used up."""
    mx.eval(model(mx.array([PROBE]), cache=list(caches)))
    return tuple(map(_of, map(save, leaves(caches))))


def require_geometry(captured: Sequence[Held], geometry: Geometry) -> None:
    """Refuse what no such model holds, whoever wrote it.

    Raises:
        BadInput: naming the cache.
    """
    for number, (held, (kind, expected)) in enumerate(zip(captured, geometry, strict=False)):
        _, arrays = _of(held)
        # Another kind, or number of arrays, is refused where the caches are filled.
        if held.kind == kind and len(arrays) == len(expected) and arrays != expected:
            raise BadInput(
                f"cache {number} holds arrays of {arrays} where the model has {expected}"
            )


def _of(held: Held) -> tuple[str, tuple[tuple[mx.Dtype, tuple[int, ...]], ...]]:
    grows = held.kind != RECURRENT.name  # in the third length, [1, H, T, D]
    return held.kind, tuple(
        (array.dtype, (*array.shape[:2], *array.shape[3:]) if grows else tuple(array.shape))
        for array in held.arrays
    )
