"""How far apart two log-probabilities may be: one table by dtype and backend."""

from __future__ import annotations

import math
from dataclasses import dataclass

from parity.errors import BadInput

_ULPS = 4
# Bits of the significand, the hidden one included.
_SIGNIFICAND = {"bfloat16": 8, "float16": 11}
# Top logits of the models in use lie below it; it sets the 16-bit limits that know no logit.
_USUAL_TOP_LOGIT = 31.0


@dataclass(frozen=True, slots=True)
class Tolerance:
    """Limits in log-probability for one dtype on one device ("cpu" or "gpu")."""

    dtype: str
    device: str

    def __post_init__(self) -> None:
        if self.dtype != "float32" and self.dtype not in _SIGNIFICAND:
            known = ", ".join(("float32", *_SIGNIFICAND))
            raise BadInput(f"dtype {self.dtype} has no tolerance; known are {known}")

    def verdict_floor(self, top_logit: float) -> float:
        """A decision whose margin is below this may fall either way."""
        if self.dtype == "float32":
            return 1e-3
        return _ULPS * ulp(self.dtype, top_logit)

    @property
    def recording_floor(self) -> float:
        """A snapshot is portable only if the margin of every decision exceeds this."""
        return max(1e-2, 2 * self.verdict_floor(_USUAL_TOP_LOGIT))

    @property
    def logprobs(self) -> float:
        """Two reports of one token's log-probability may differ by at most this."""
        return self.verdict_floor(_USUAL_TOP_LOGIT)

    @property
    def ties_allowed(self) -> bool:
        """Whether a tie is a tie, or a failure.

        In float32 on the CPU windows of every width round alike: a tie there has another cause.
        """
        return not (self.dtype == "float32" and self.device == "cpu")


def ulp(dtype: str, number: float) -> float:
    """The gap between neighbours of a 16-bit `dtype` at the size of `number`."""
    exponent = math.frexp(abs(number) or 1.0)[1]
    return math.ldexp(1.0, exponent - _SIGNIFICAND[dtype])
