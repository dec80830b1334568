"""The one table of limits."""

from __future__ import annotations

import pytest

from parity.errors import BadInput
from parity.tolerance import Tolerance, ulp


def test_float32_limits_do_not_depend_on_the_logit() -> None:
    """1e-3 for a verdict, 1e-2 for a recording."""
    limits = Tolerance("float32", "cpu")
    assert limits.verdict_floor(1.0) == limits.verdict_floor(1e6) == limits.logprobs == 1e-3
    assert limits.recording_floor == 1e-2


def test_only_float32_on_the_cpu_knows_no_ties() -> None:
    """Other kernels round windows of other widths in other ways."""
    assert not Tolerance("float32", "cpu").ties_allowed
    assert Tolerance("float32", "gpu").ties_allowed
    assert Tolerance("bfloat16", "cpu").ties_allowed


@pytest.mark.parametrize(
    ("dtype", "number", "gap"),
    [
        ("bfloat16", 1.0, 2.0**-7),
        ("bfloat16", 1.99, 2.0**-7),
        ("bfloat16", 2.0, 2.0**-6),
        ("bfloat16", -17.0, 2.0**-3),
        ("float16", 1.0, 2.0**-10),
        ("float16", 17.0, 2.0**-6),
    ],
)
def test_sixteen_bit_limits_are_four_ulp_at_the_top_logit(
    dtype: str, number: float, gap: float
) -> None:
    """bfloat16 has 8 bits of significand, float16 has 11, the hidden one included."""
    assert ulp(dtype, number) == gap
    assert Tolerance(dtype, "gpu").verdict_floor(number) == 4 * gap
    assert Tolerance(dtype, "gpu").recording_floor >= 2 * 4 * ulp(dtype, 31.0)


def test_an_unknown_dtype_is_refused() -> None:
    """Bad input names the value and what is known."""
    with pytest.raises(BadInput, match="float64 has no tolerance; known are float32"):
        Tolerance("float64", "cpu")
