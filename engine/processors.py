"""Logits processors: penalties and biases, by mlx-lm's own functions.

They act on the target's raw logits, before log-probabilities are made of them. A processor at a
window position must see what a plain decode would have seen there: everything in front of the
window and the window up to that position. The drafts among it are what was emitted, wherever the
walk gets that far; further on nobody looks at the result.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import mlx.core as mx
from mlx_lm.sample_utils import make_logits_processors

from .values import LogitsOptions

LogitsProcessor = Callable[[mx.array, mx.array], mx.array]
"""(ids so far [L], logits [1, V]) to logits [1, V]; mlx-lm's write into the ones they are given."""


class Processors:
    """One row's processors. They need the last `reach` ids in front of a window; None: all."""

    def __init__(self, functions: Sequence[LogitsProcessor], reach: int | None) -> None:
        self._functions = tuple(functions)
        self.reach = reach

    def apply(self, logits: mx.array, known: Sequence[int], window: mx.array) -> mx.array:
        """Logits [N, V] behind each id of `window` [N], which stands behind the `known` ids."""
        seen = mx.concatenate([mx.array(list(known), dtype=mx.uint32), window])
        rows = []
        for position in range(window.shape[0]):
            row = logits[position : position + 1]  # an array of its own: see LogitsProcessor
            for function in self._functions:
                row = function(seen[: len(known) + position + 1], row)
            rows.append(row)
        return mx.concatenate(rows)


def make_processors(options: LogitsOptions) -> Processors | None:
    """The processors for one request; None if nothing is asked for."""
    if not options.active:
        return None
    functions = make_logits_processors(
        dict(options.logit_bias),
        options.repetition_penalty,
        options.repetition_context_size,
        options.presence_penalty,
        options.presence_context_size,
        options.frequency_penalty,
        options.frequency_context_size,
    )
    return Processors(functions, options.reach)
