"""A stored state whose arrays are not the model's is refused before a forward meets them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import mlx.core as mx
import pytest

from engine import BadInput
from engine.state.checkpoint import capture
from tests.engine.pools import target_of

LIES: dict[str, Callable[[mx.array], mx.array]] = {
    "more and smaller heads": lambda a: a.reshape(1, a.shape[1] * 2, a.shape[2], -1),
    "of another dtype": lambda a: a.view(mx.int32),
    "of more and shorter numbers": lambda a: a.view(mx.float16),
}


@pytest.mark.parametrize("lie", LIES.values(), ids=LIES)
@pytest.mark.parametrize("family", ["dense", "sliding", "hybrid", "mla"])
def test_arrays_of_another_geometry_are_refused(
    family: str, lie: Callable[[mx.array], mx.array]
) -> None:
    target = target_of(family)
    rows = target.new_rows()
    rows.forward(mx.array([[1, 2, 3]]))
    held = list(capture(rows.lowered(0)))
    target.rows_holding(held, 3)
    lying = [number for number, one in enumerate(held) if one.arrays and one.arrays[0].ndim == 4]
    assert lying
    for number in lying:
        *others, last = held[number].arrays
        wrong = replace(held[number], arrays=(*others, lie(last)))
        with pytest.raises(BadInput, match=f"cache {number} holds arrays of"):
            target.rows_holding([*held[:number], wrong, *held[number + 1 :]], 3)
