"""Which models' rows may share forwards: the probe refuses what is wrong, by name."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import pytest
from mlx.nn.layers.base import Module
from mlx_lm.models.cache import CacheList, KVCache, RotatingKVCache, make_prompt_cache

from engine import Target
from engine.clone import with_classes
from engine.drafters.two_model import TwoModelProvider
from engine.state.membership import no_row_form
from engine.state.probe import prove_rows

from .company import TARGETS, model_of
from .families import build, recorder, target_on

ALONE = {
    "llama4": "cache kind ChunkedKVCache has no row layout",
    "bailing_hybrid": "rows cannot share a forward: ValueError: .*rope",
    "bailing_moe_linear": "rows cannot share a forward: ValueError: .*rope",
    "baichuan_m1": "rows cannot share a forward: ValueError: .*rope",
    "longcat_flash_ngram": "rows cannot share a forward: ValueError: .*concatenate",
    "recurrent_gemma": "rows that share a forward are computed wrongly: off by",
}
"""Families of mlx-lm whose rows cannot: most know one position for all rows only."""


@pytest.mark.parametrize("name", TARGETS)
def test_rows_of_the_trained_targets_share(name: str) -> None:
    assert model_of(name).cannot_share == ()


@pytest.mark.parametrize("family", ALONE)
def test_families_that_cannot_are_refused_by_name(family: str) -> None:
    (reason,) = model_of(family).cannot_share
    assert_says(reason, ALONE[family])


def assert_says(reason: str | None, pattern: str) -> None:
    assert reason is not None
    assert re.search(pattern, reason), reason


class FirstOffset:
    """A cache whose rows all stand where the first one does."""

    def __init__(self, cache: Any) -> None:
        self._cache = cache

    @property
    def offset(self) -> Any:
        offset = self._cache.offset
        return offset[0] if isinstance(offset, mx.array) else offset

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cache, name)


def first_offset(x: mx.array, mask: Any, cache: Any) -> tuple[mx.array, Any, Any]:
    return x, mask, FirstOffset(cache)


def no_mask(x: mx.array, mask: Any, cache: Any) -> tuple[mx.array, Any, Any]:
    return x, None if isinstance(mask, mx.array) else mask, cache


def mixed_rows(x: mx.array, mask: Any, cache: Any) -> tuple[mx.array, Any, Any]:
    return x + 0.01 * (x - x.mean(axis=0, keepdims=True)), mask, cache


def last_row_first(x: mx.array, mask: Any, cache: Any) -> tuple[mx.array, Any, Any]:
    if isinstance(mask, mx.array) and mask.ndim == 4:
        mask = mask[::-1]
    return x, mask, cache


@pytest.mark.parametrize("wrong", [first_offset, no_mask, mixed_rows, last_row_first])
def test_a_model_that_is_wrong_on_ragged_rows_is_refused(
    wrong: Callable[..., Any], target: Target
) -> None:
    """Right for one row, and for rows of one length; wrong for the rest."""
    model = build("llama")
    kind = type(model.layers[0].self_attn)

    class Wrong(kind):  # type: ignore[misc, valid-type]  # a class met at run time
        def __call__(self, x: mx.array, mask: Any = None, cache: Any = None) -> Any:
            return super().__call__(*wrong(x, mask, cache))

    def class_of(module: Module) -> type:
        return Wrong if type(module) is kind else type(module)

    broken = target_on(with_classes(model, class_of), target)
    (reason,) = broken.cannot_share
    assert_says(reason, "rows that share a forward are computed wrongly: off by")
    assert target_on(with_classes(model, type), target).cannot_share == ()


def test_a_recurrent_model_without_replay_is_tried_with_whole_windows() -> None:
    """It cannot speculate; plain rows of it may share all the same."""
    model = build("mamba")

    def unproved() -> str:
        return "replay fails"

    assert prove_rows(model, lambda: make_prompt_cache(model), unproved) is None
    assert prove_rows(model, lambda: make_prompt_cache(model), lambda: recorder("mamba")) is None


def test_a_draft_model_without_replay_drafts_for_one_row_only(
    target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows that lag and rows that do not share a window, of which the latter give a token back."""
    draft = Target.load(model_of("hybrid").path)
    monkeypatch.setattr(Target, "_recorder", "replay fails")
    provider = TwoModelProvider(draft, target)
    (reason,) = provider.cannot_share
    assert_says(reason, r"recurrent \(replay fails\)")


def test_kinds_without_a_row_form_are_named_once() -> None:
    ring = RotatingKVCache(8, keep=2)
    assert no_row_form([ring, CacheList(KVCache(), RotatingKVCache(8, keep=4))]) == (
        "RotatingKVCache with kept tokens",
    )
    assert no_row_form([KVCache(), RotatingKVCache(8)]) == ()
    kinds: Any = [object(), KVCache(), object()]
    assert no_row_form(kinds) == ("object",)
