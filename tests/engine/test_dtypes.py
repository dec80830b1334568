"""Weights in 16 bits or quantized: plain text is mlx-lm's, and drafting does not change it."""

from __future__ import annotations

from functools import lru_cache
from itertools import takewhile
from typing import Any

import mlx.core as mx
import pytest
from mlx.nn.layers.base import Module
from mlx.nn.layers.quantized import quantize
from mlx.utils import tree_flatten, tree_map

import fixtures
from engine import Target, open_drafter
from oracle.inprocess import Loaded, plain
from oracle.margins import greedy_margins
from parity.tolerance import Tolerance

from .conftest import finish_of
from .puppet import Puppet, scripted

HALF = {"bf16": mx.bfloat16, "fp16": mx.float16}
BITS = {"q4": 4, "q8": 8}
BUDGET = 20

# Experts run in float32 on a CPU, quantized or not.
VARIANTS = [
    *((family, form) for family in ("dense", "sliding", "hybrid") for form in (*HALF, *BITS)),
    *(("mla", form) for form in BITS),
]


def converted(target: Target, form: str) -> Target:
    """The target with its weights in another form, in place."""
    model: Any = target.model
    if form in BITS:
        # Of every size that a layer's width allows; what is narrower stays as it is.
        quantize(model, group_size=32, bits=BITS[form], class_predicate=fits)
    else:
        half = HALF[form]
        model.update(
            tree_map(
                lambda a: a.astype(half) if mx.issubdtype(a.dtype, mx.floating) else a,
                model.parameters(),
            )
        )
    mx.eval(model.parameters())
    return target


def fits(_: str, module: Module) -> bool:
    weight = getattr(module, "weight", None)
    return hasattr(module, "to_quantized") and weight is not None and weight.shape[-1] % 32 == 0


@lru_cache(maxsize=1)
def variant(family: str, form: str) -> Target:
    return converted(Target.load(fixtures.target_dir(family)), form)


def is_tie(target: Target, prompt: list[int], generated: tuple[int, ...], position: int) -> bool:
    """Whether windows of another width may decide otherwise at a position."""
    margin = greedy_margins(target.model, prompt, generated[: position + 1], slack=1.0)[-1]
    top = float(mx.abs(target.model(mx.array([[*prompt, *generated[:position]]]))[0, -1]).max())
    return margin < Tolerance(dtype_of(target), "cpu").verdict_floor(top)


def dtype_of(target: Target) -> str:
    logits = target.model(mx.array([[65]]))
    return str(logits.dtype).removeprefix("mlx.core.")


@pytest.mark.parametrize(("family", "form"), VARIANTS)
def test_the_weights_are_in_the_form(family: str, form: str) -> None:
    """Else the tests below would be those of float32."""
    arrays: Any = tree_flatten(variant(family, form).model.parameters())
    packed = [name for name, array in arrays if array.dtype == mx.uint32]
    if form in BITS:
        assert packed
    else:
        assert {array.dtype for _, array in arrays} <= {HALF[form], mx.uint32, mx.int32}
        assert dtype_of(variant(family, form)) in ("bfloat16", "float16", "float32")


@pytest.mark.parametrize(("family", "form"), VARIANTS)
def test_text_in_any_form_is_mlx_lms_and_drafting_leaves_it(family: str, form: str) -> None:
    """`lossless`, `logprobs`: where texts part, the decision was a tie in this form."""
    target = variant(family, form)
    loaded = Loaded(target.model, target.tokenizer, target.eos_ids)
    ngram = open_drafter("ngram", target)
    two_model = open_drafter(f"two-model:{fixtures.drafter_dir(f'{family}-draft')}", target)
    equal = 0
    for prompt in (target.encode(one.text) for one in fixtures.prompts(family)[:2]):
        expected = plain(loaded, prompt, BUDGET)
        ours = finish_of(target, prompt, max_tokens=BUDGET)
        assert (ours.tokens, ours.reason) == (expected.tokens, expected.finish_reason)
        assert ours.logprobs == expected.logprobs
        half_right = Puppet(scripted((*expected.tokens, 0), [[True, True, False], [True], []]))
        for drafter in (ngram, two_model, half_right):
            drafted = finish_of(target, prompt, drafter, max_tokens=BUDGET, depth=3)
            pairs = zip(drafted.tokens, ours.tokens, strict=False)
            same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
            if drafted.tokens == ours.tokens:
                equal += 1
            else:
                assert is_tie(target, prompt, expected.generated, same), (prompt, same)
    assert equal >= 3, "of 6 texts most part at no tie"
