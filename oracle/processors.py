"""What mlx_lm.server does to logits before it normalises them: a bias, and three penalties."""

from __future__ import annotations

import math
from dataclasses import dataclass

import mlx.core as mx
from mlx_lm.sample_utils import make_logits_processors

MAX_CONTEXT_SIZE = 1 << 31
"""mlx slices with 32-bit numbers; a larger size ends the server's worker (mlx-lm 0.32.2)."""


@dataclass(frozen=True, slots=True)
class Processors:
    """Fields and defaults of a request; the bias comes first, then the penalties as they stand.

    A penalty of 0 is off. A repetition penalty of 1 changes no logit, but it is on: mlx-lm then
    takes the path with processors. A context size counts the last tokens of prompt and answer, and
    0 means all of them (mlx-lm 0.32.2).
    """

    logit_bias: tuple[tuple[int, float], ...] = ()
    """Pairs of id and what is added to its logit, each id once."""
    repetition_penalty: float = 0.0
    repetition_context_size: int = 20
    presence_penalty: float = 0.0
    presence_context_size: int = 20
    frequency_penalty: float = 0.0
    frequency_context_size: int = 20

    def __post_init__(self) -> None:
        ids = [token for token, _ in self.logit_bias]
        if min(ids, default=0) < 0 or len(set(ids)) < len(ids):
            raise ValueError(f"logit_bias must name ids of at least 0, each once, got {ids}")
        for token, bias in self.logit_bias:
            if not math.isfinite(bias):
                raise ValueError(f"the bias of id {token} must be finite, got {bias}")
        if not 0 <= self.repetition_penalty < math.inf:
            raise ValueError(
                f"repetition_penalty must be finite and at least 0, got {self.repetition_penalty}"
            )
        for name in ("presence", "frequency"):
            penalty: float = getattr(self, f"{name}_penalty")
            if not math.isfinite(penalty):
                raise ValueError(f"{name}_penalty must be finite, got {penalty}")
        for name in ("repetition", "presence", "frequency"):
            size: int = getattr(self, f"{name}_context_size")
            if not 0 <= size <= MAX_CONTEXT_SIZE:
                raise ValueError(
                    f"{name}_context_size must be within 0..{MAX_CONTEXT_SIZE}, got {size}"
                )

    @property
    def active(self) -> bool:
        """Whether mlx-lm makes any processor of these fields."""
        penalties = (self.repetition_penalty, self.presence_penalty, self.frequency_penalty)
        return bool(self.logit_bias) or any(penalties)

    @property
    def gain(self) -> float:
        """How much a difference between two computations of a logit can grow, at most."""
        penalty = self.repetition_penalty
        return max(penalty, 1 / penalty) if penalty else 1.0

    def apply(self, tokens: mx.array, logits: mx.array) -> mx.array:
        """Logits [R, V] after ``tokens`` [N], the whole history, as mlx-lm would have them.

        Raises ``ValueError`` for a bias outside the vocabulary: mlx would write outside the array.
        """
        size = logits.shape[-1]
        for token, _ in self.logit_bias:
            if token >= size:
                raise ValueError(f"logit_bias must name ids below {size}, got {token}")
        processors = make_logits_processors(
            dict(self.logit_bias),
            self.repetition_penalty,
            self.repetition_context_size,
            self.presence_penalty,
            self.presence_context_size,
            self.frequency_penalty,
            self.frequency_context_size,
        )
        processed = logits + 0  # mlx-lm's penalties write into what they are given
        for processor in processors:
            processed = processor(tokens, processed)
        return processed


NO_PROCESSORS = Processors()
