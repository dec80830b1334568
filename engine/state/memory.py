"""How many bytes a row's state comes to: measured on a few tokens, then counted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

from .columns import STEP
from .layouts import RECURRENT, Cache, layout_of, leaves

PROBE = (1, 2)


@dataclass(frozen=True, slots=True)
class Footprint:
    """A row's state: `fixed` bytes, and per kind of layer (window or None, bytes per token).

    `dtypes` are the names of what its arrays hold.
    """

    fixed: int
    growing: tuple[tuple[int | None, int], ...]
    dtypes: tuple[str, ...] = ()

    def bytes(self, tokens: int) -> int:
        """The state after that many tokens, with the columns that are allocated ahead."""
        allocated = -(-tokens // STEP) * STEP
        return self.fixed + sum(
            size * (allocated if window is None else min(allocated, window + STEP))
            for window, size in self.growing
        )


def measure(model: Any, caches: Sequence[Cache]) -> Footprint:
    """The footprint of a model's own empty caches, which are used up."""
    mx.eval(model(mx.array([PROBE]), cache=list(caches)))
    fixed = 0
    growing: dict[int | None, int] = {}
    dtypes: set[str] = set()
    for leaf in leaves(caches):
        flat: Any = tree_flatten(leaf.state)
        arrays = [a for _, a in flat if isinstance(a, mx.array)]
        size = sum(a.nbytes for a in arrays)
        dtypes |= {str(a.dtype).removeprefix("mlx.core.") for a in arrays}
        if layout_of(leaf) is RECURRENT:
            fixed += size
        elif leaf.keys is not None:
            shown: Any = tree_flatten(leaf.keys_and_values())
            window = getattr(leaf, "max_size", None)
            per_token = sum(a.nbytes for _, a in shown) // len(PROBE)
            growing[window] = growing.get(window, 0) + per_token
    return Footprint(fixed, tuple(growing.items()), tuple(sorted(dtypes)))
