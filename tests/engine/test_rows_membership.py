"""Joins and selections that fail change nothing; a captured row is the row, to the last bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import CacheList, ChunkedKVCache, KVCache, RotatingKVCache

from engine import LawError
from engine.state import membership
from engine.state.checkpoint import capture_caches
from engine.state.columns import Columns
from engine.state.layouts import leaves
from engine.state.rows import Rows, Undo

from .company import TARGETS, Company, ids, planes_of, prefilled

MODELS = [*TARGETS, "quantized", "falcon_h1"]


def ragged(name: str) -> Company:
    company = Company.of(name, ids(30, 0), ids(3, 1), ids(41, 2))
    company.round([5], [2, 0, 5], seed=3)
    return company


def image(rows: Rows) -> list[Any]:
    """Every number of a state: those behind the rows' ends, too."""
    found: list[Any] = [list(rows.processed)]
    for leaf in leaves(rows.caches):
        if isinstance(leaf, Columns):
            place = leaf.place
            found.append((list(place.offsets), list(place.starts), list(place.dirty)))
            planes = leaf.planes or []
        elif hasattr(leaf, "offset"):
            found.append(leaf.offset)
            planes = [] if leaf.keys is None else planes_of(leaf)
        else:
            planes = [slot for slot in leaf.cache if slot is not None]
        found += [
            (plane.shape, bytes(mx.contiguous(plane).reshape(-1).view(mx.uint8)))
            for plane in planes
        ]
    return found


def failing_at(monkeypatch: pytest.MonkeyPatch, at: int) -> None:
    """Layer number `at` raises, when its rows are as good as built."""
    count = 0

    def breaks(build: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal count
            built = build(*args, **kwargs)
            count += 1
            if count == at:
                raise MemoryError("no room for a layer")
            return built

        return call

    monkeypatch.setattr(Columns, "selected", breaks(Columns.selected))
    monkeypatch.setattr(Columns, "joined", breaks(Columns.joined))
    monkeypatch.setattr(membership, "_recurrent", breaks(membership._recurrent))


@pytest.mark.parametrize("name", MODELS)
def test_a_layer_that_fails_leaves_all_rows_as_they_were(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`membership`: byte-identical, the donor as well, and both have the future they had."""
    company, donor = ragged(name), Company.of(name, ids(9, 4))
    before = image(company.rows), image(donor.rows)
    layers = len(leaves(company.rows.caches))
    for at in (1, 2, layers):
        changes: list[Callable[[], Rows]] = [
            lambda: company.rows.joined(donor.rows),
            lambda: donor.rows.joined(company.rows),
            lambda: company.rows.selected([2, 0]),
        ]
        for change in changes:
            with monkeypatch.context() as patch:
                failing_at(patch, at)
                with pytest.raises(MemoryError, match="no room"):
                    change()
            assert (image(company.rows), image(donor.rows)) == before
    company.append(2, seed=5)
    donor.append(2, seed=6)
    company = company.selected([2, 0]).joined(donor)
    company.round([4], [1, 4, 0], seed=7)
    company.check()


@pytest.mark.parametrize("name", MODELS)
def test_new_rows_share_nothing_that_is_written_to(name: str) -> None:
    """`membership`: the rows they came from may be kept, and have the future they had."""
    company, donor = ragged(name), Company.of(name, ids(9, 4))
    before = image(company.rows), image(donor.rows)
    for rows in (
        company.rows.joined(donor.rows),
        donor.rows.joined(company.rows),
        company.rows.selected([1]),
        donor.rows.lifted(),
    ):
        rows.begin()
        rows.forward(mx.array([ids(3, 5)] * rows.row_count))
        rows.resolve([1] * rows.row_count)
        rows.forward(mx.array([ids(3, 5)] * rows.row_count))
        mx.eval(rows.arrays())
        assert (image(company.rows), image(donor.rows)) == before


@pytest.mark.parametrize("name", MODELS)
def test_a_captured_row_is_the_row(name: str) -> None:
    """`capture`: stored, restored, joined and stored again it is the same arrays."""
    company = ragged(name)
    for row in range(3):
        stored = capture_caches(company.rows.lowered(row))
        again = company.selected([1]).joined(company.captured(row))
        layout, tensors = capture_caches(again.rows.lowered(1))
        assert layout == stored[0]
        for ours, theirs in zip(tensors, stored[1], strict=True):
            assert mx.array_equal(ours, theirs)


def test_rows_of_another_model_are_refused_and_change_nothing() -> None:
    """`membership`: a kind of layer in the wrong place."""
    ours, theirs = ragged("llama"), Company.of("falcon_h1", ids(4, 0))
    before = image(ours.rows), image(theirs.rows)
    for one, two in ((ours.rows, theirs.rows), (theirs.rows, ours.rows)):
        with pytest.raises(LawError, match=r"Columns and ArraysCache|ArraysCache and Columns"):
            one.joined(two)
    assert (image(ours.rows), image(theirs.rows)) == before


def test_rows_stored_in_other_ways_are_not_joined() -> None:
    """Quantized and plain rows, also where one of them holds no token yet."""
    quantized = Company.of("quantized", ids(4, 0), ids(3, 1))
    for plain in (prefilled("dense", ()), prefilled("dense", ids(2, 0))):
        for ours, theirs in ((quantized.rows, plain), (plain, quantized.rows)):
            with pytest.raises(LawError, match="Columns"):
                ours.joined(theirs)


@pytest.mark.parametrize("kind", [lambda: ChunkedKVCache(8), lambda: RotatingKVCache(8, keep=2)])
def test_kinds_without_a_row_form_are_not_lifted(kind: Callable[[], Any]) -> None:
    """A ring that keeps its first tokens would be taken for one that does not."""

    def rows() -> Rows:
        return Rows(lambda tokens, cache: tokens, [CacheList(KVCache(), kind())])

    for change in (rows().lifted, lambda: rows().joined(rows())):
        with pytest.raises(LawError, match=r"KVCache.* has no row layout"):
            change()


def test_membership_is_between_rounds_only() -> None:
    rows = ragged("dense").rows
    rows.begin()
    for change in (
        lambda: rows.joined(prefilled("dense", ids(3, 0))),
        lambda: prefilled("dense", ids(3, 0)).joined(rows),
        lambda: rows.selected([0]),
        lambda: rows.lowered(0),
        rows.lifted,
    ):
        with pytest.raises(LawError, match="inside a round"):
            change()
    rows.poison(MemoryError("gone"))
    for change in (lambda: rows.selected([0]), lambda: rows.lowered(0), rows.lifted):
        with pytest.raises(LawError, match="state is lost"):
            change()


def test_layers_that_remember_unequally_have_places_of_their_own() -> None:
    """`membership`: an empty row has one place for all, whichever of the two comes first."""

    def model(tokens: mx.array, cache: list[Any]) -> mx.array:
        """Uses the second of its layers only."""
        second = leaves(cache)[1]
        mask = second.make_mask(tokens.shape[1], window_size=None, return_array=True)
        keys = tokens.astype(mx.float32)[:, None, :, None]
        shown = mx.swapaxes(second.update_and_fetch(keys, keys)[0], 2, 3)
        return mx.where(True if mask is None else mask, shown, 0).sum(axis=-1)[:, 0, :, None]

    def fresh() -> Rows:
        return Rows(model, [CacheList(KVCache(), KVCache())])

    for first in (0, 1):
        pair = [fresh(), fresh()]
        pair[first].forward(mx.array([[10, 20, 30]]))
        rows = pair[0].joined(pair[1])
        rows.begin(Undo.TOKENS)
        rows.forward(mx.array([[1, 2], [1, 2]]))
        rows.resolve([1, 1])
        logits = rows.forward(mx.array([[5], [5]]))
        assert logits[first].item() == 66
        assert logits[1 - first].item() == 6
