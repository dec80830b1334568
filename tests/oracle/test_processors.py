"""Logits processors against arithmetic on lists."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from oracle.processors import Processors

SIZE = 8
IDS = st.integers(0, SIZE - 1)
LOGITS = st.lists(st.floats(-8, 8, width=32), min_size=SIZE, max_size=SIZE)
CONTEXT_SIZES = st.sampled_from([0, 1, 3, 20])
PENALTIES = st.sampled_from([0.0, 0.5, -1.25, 2.0])
PROCESSORS = st.builds(
    Processors,
    st.dictionaries(IDS, st.floats(-4, 4, width=32)).map(lambda bias: tuple(bias.items())),
    st.sampled_from([0.0, 0.7, 1.0, 1.5]),
    CONTEXT_SIZES,
    PENALTIES,
    CONTEXT_SIZES,
    PENALTIES,
    CONTEXT_SIZES,
)


def slow(processors: Processors, tokens: Sequence[int], logits: Sequence[float]) -> list[float]:
    """What each field says, one token at a time."""
    p, result = processors, list(logits)
    for token, bias in p.logit_bias:
        result[token] += bias
    if p.repetition_penalty:
        for token in set(_last(tokens, p.repetition_context_size)):
            factor = p.repetition_penalty if result[token] < 0 else 1 / p.repetition_penalty
            result[token] *= factor
    for token in set(_last(tokens, p.presence_context_size)):
        result[token] -= p.presence_penalty
    for token in _last(tokens, p.frequency_context_size):
        result[token] -= p.frequency_penalty
    return result


def _last(tokens: Sequence[int], size: int) -> Sequence[int]:
    return tokens[max(0, len(tokens) - size) :] if size else tokens


@given(processors=PROCESSORS, tokens=st.lists(IDS, min_size=1, max_size=24), logits=LOGITS)
def test_processors_do_what_their_fields_say(
    processors: Processors, tokens: list[int], logits: list[float]
) -> None:
    """`lossless`: the bias first, penalties on the last tokens of the whole history; 0 is all."""
    given_logits = mx.array([logits, logits])
    processed = processors.apply(mx.array(tokens), given_logits)
    assert np.array(processed)[0] == pytest.approx(slow(processors, tokens, logits), abs=1e-4)
    assert mx.array_equal(processed[0], processed[1])
    assert np.array(given_logits)[0].tolist() == logits
    if not processors.active:
        assert mx.array_equal(processed, given_logits)


@given(processors=PROCESSORS, tokens=st.lists(IDS, min_size=1), logits=LOGITS, other=LOGITS)
def test_a_difference_of_logits_grows_by_the_gain_at_most(
    processors: Processors, tokens: list[int], logits: list[float], other: list[float]
) -> None:
    """`portable`: what margins divide by."""
    rows = np.array(processors.apply(mx.array(tokens), mx.array([logits, other])))
    before = np.abs(np.array(logits) - np.array(other)).max()
    assert np.abs(rows[0] - rows[1]).max() <= processors.gain * before + 1e-4


def test_the_gain_is_reached() -> None:
    """`portable`: by negative logits above a penalty of 1, by positive ones below it."""
    assert [Processors(repetition_penalty=p).gain for p in (0.0, 1.0, 1.5, 0.5)] == [1, 1, 1.5, 2]
    for penalty, logits in ((1.5, [[-1.0], [-2.0]]), (0.5, [[1.0], [2.0]])):
        processors = Processors(repetition_penalty=penalty)
        rows = np.array(processors.apply(mx.array([0]), mx.array(logits)))
        assert abs(rows[1] - rows[0]) == pytest.approx(processors.gain)


def test_a_penalty_of_one_is_on() -> None:
    """`lossless`: it changes no logit, but mlx-lm processes logits then, row by row."""
    assert not Processors(repetition_context_size=5).active
    assert Processors(repetition_penalty=1.0).active
    assert Processors(logit_bias=((0, 0.0),)).active


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"logit_bias": ((-1, 1.0),)}, r"ids of at least 0, each once, got \[-1\]"),
        ({"logit_bias": ((3, 1.0), (3, 2.0))}, r"each once, got \[3, 3\]"),
        ({"logit_bias": ((3, float("nan")),)}, "the bias of id 3 must be finite, got nan"),
        ({"repetition_penalty": -1}, "repetition_penalty must be finite and at least 0, got -1"),
        ({"repetition_penalty": float("nan")}, "repetition_penalty must be finite"),
        ({"presence_penalty": float("inf")}, "presence_penalty must be finite, got inf"),
        ({"frequency_penalty": float("nan")}, "frequency_penalty must be finite, got nan"),
        ({"repetition_context_size": -1}, r"within 0\.\.2147483648, got -1"),
        ({"presence_context_size": 1 << 32}, "presence_context_size must be within"),
        ({"frequency_context_size": -2}, "frequency_context_size must be within"),
    ],
)
def test_processors_refuse_what_the_server_cannot_do(wrong: dict[str, Any], words: str) -> None:
    """Bad input is named with its limit."""
    with pytest.raises(ValueError, match=words):
        Processors(**wrong)


def test_a_bias_outside_the_vocabulary_is_refused() -> None:
    """mlx would write outside the array, which ends the process sooner or later."""
    with pytest.raises(ValueError, match="logit_bias must name ids below 8, got 8"):
        Processors(logit_bias=((8, 1.0),)).apply(mx.array([1]), mx.zeros((1, 8)))
