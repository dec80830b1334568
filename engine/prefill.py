"""Processing the prompt: in chunks, with the drafter fed the same ones."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from .drafters.source import DraftRows, PrefillMode
from .state.rows import Rows

CHUNK = 2048
"""Tokens per forward, as in mlx_lm.server. It bounds memory; the text does not depend on it."""


def prefill(
    target: Rows,
    draft: DraftRows | None,
    prompt: Sequence[int],
    *,
    chunk: int = CHUNK,
) -> tuple[int, mx.array | None]:
    """Process one row's prompt into empty states.

    Returns:
        The number of target forwards, and the logits [1, V] behind the last token in `full` mode.
        In `tail-split` mode the last token is left out (it heads the first window): None.
    """
    mode: PrefillMode = "tail-split" if draft is None else draft.prefill_mode
    known = prompt[:-1] if mode == "tail-split" else prompt
    logits: mx.array | None = None
    forwards = 0
    for start in range(0, len(known), chunk):
        tokens = mx.array([known[start : start + chunk]], dtype=mx.uint32)
        logits = target.forward(tokens)[:, -1, :]
        if draft is not None:
            draft.prefill(tokens)
        mx.eval(target.arrays())
        mx.clear_cache()
        forwards += 1
    return forwards, logits if mode == "full" else None
