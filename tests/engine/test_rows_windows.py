"""Windows of many rows: what no token sees any more goes, and memory is bounded."""

from __future__ import annotations

import random
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import RotatingKVCache

from engine.host import read
from engine.state.columns import STEP, Columns
from engine.state.layouts import leaves
from engine.state.rows import Rows

from .company import Company, ids
from .families import WINDOW


@pytest.mark.parametrize("name", ["sliding", "gemma4_text", "gear"])
def test_long_ragged_decodes_pass_the_windows_slack(name: str) -> None:
    """`solitude`: columns are dropped again and again, at other counts in each row."""
    company = Company.of(name, ids(3, 0), ids(60, 1), ids(33, 2))
    draw = random.Random(5)
    places = {id(leaf.place): leaf.place for leaf in columns_of(company.rows)}
    ((place, window),) = [(p, p.window) for p in places.values() if p.window is not None]
    drops = 0
    for number in range(60):
        before = max(place.starts)
        company.round([6], [draw.randrange(7) for _ in range(3)], seed=number)
        drops += max(place.starts) < before
        assert max(place.starts) <= window + 64 + 6
        if number % 10 == 9:
            company.check()
    assert drops >= 2
    assert min(company.rows.processed) > 3 * window / 2


def columns_of(rows: Rows) -> list[Columns]:
    return [leaf for leaf in leaves(rows.caches) if isinstance(leaf, Columns)]


def append(tokens: mx.array, cache: list[Any]) -> mx.array:
    """A model whose keys are the ids."""
    keys = tokens.astype(mx.float32)[:, None, :, None]
    shown: mx.array = cache[0].update_and_fetch(keys, keys)[0]
    return shown


def test_memory_of_a_sliding_row_is_bounded() -> None:
    """`position`: 2,000 ragged steps hold what the last window needs and little more."""
    rows, held = Rows(append, [RotatingKVCache(WINDOW)]), [[0], [0, 1, 2], [0, 1]]
    rows.forward(mx.array([held[0]]))
    for prompt in held[1:]:
        other = Rows(append, [RotatingKVCache(WINDOW)])
        other.forward(mx.array([prompt]))
        rows = rows.joined(other)
    (layer,) = columns_of(rows)
    draw, memory = random.Random(7), 0
    for step in range(2_000):
        window = [[10 * step + r, 10 * step + r + 5] for r in range(3)]
        keep = [draw.randrange(3) for _ in range(3)]
        rows.begin()
        mx.eval(rows.forward(mx.array(window)), rows.arrays())
        rows.resolve(keep)
        for r, kept in enumerate(keep):
            held[r] += window[r][:kept]
        assert layer.keys.shape[2] <= STEP
        if step % 100 == 99:
            for r in range(3):
                (lowered,) = rows.lowered(r)
                expected = held[r][-WINDOW:]
                assert read(lowered.keys)[0][0] == [[float(token)] for token in expected]
                assert lowered.offset == len(held[r])
        if step == 500:
            memory = mx.get_active_memory()
    assert mx.get_active_memory() <= memory + 4 * layer.keys.nbytes


def test_all_columns_stay_where_no_window_is() -> None:
    """The full layers beside sliding ones drop nothing."""
    company = Company.of("sliding", ids(90, 0), ids(120, 1))
    company.append(2, seed=2)
    for layer in columns_of(company.rows):
        if layer.place.window is None:
            assert layer.place.starts == layer.place.offsets == [92, 122]
        else:
            assert max(layer.place.starts) < 92
