"""One row's states as a value that can be kept, and rows that go on from such a value."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .cache.entry import Tokens
from .cache.prompt_cache import Kept
from .cache.stored import Stored
from .drafters.source import DraftProvider, DraftRows
from .errors import BadInput
from .rounds import TargetRows
from .sampling import RowSampling
from .state.rows import Rows
from .target import Target


@dataclass(frozen=True, slots=True)
class Start:
    """The states of one row that hold the same tokens: none, or a prefix of its prompt."""

    rows: Rows
    draft: DraftRows | None


def started(
    target: Target, drafter: DraftProvider | None, samplers: RowSampling, kept: Kept
) -> Start:
    """States of one row from what was kept of one.

    Raises:
        BadInput: it does not fit.
    """
    taps = () if drafter is None else drafter.taps
    rows = target.rows_holding(kept.stored.leaves, len(kept.tokens), taps)
    if drafter is None:
        return Start(rows, None)
    if len(kept.checkpoints) != 1:
        raise BadInput(f"a drafter's state has 1 checkpoint, got {len(kept.checkpoints)}")
    return Start(rows, drafter.open(samplers, kept.checkpoints[0]))


def captured(
    target: Target, rows: TargetRows, draft: DraftRows | None, row: int, tokens: Sequence[int]
) -> Kept:
    """What one row's settled states hold, which is `tokens`, as a value."""
    stored = Stored.of(rows.lowered(row), len(tokens), target.quantization)
    checkpoints = () if draft is None else (draft.capture(row),)
    return Kept(namespace_of(target, draft), as_tokens(tokens), stored, checkpoints)


def namespace_of(target: Target, draft: DraftRows | None) -> str:
    """What states must agree on, beside the tokens, for one to stand for the other."""
    return target.namespace(None if draft is None else draft.namespace)


def as_tokens(tokens: Sequence[int]) -> Tokens:
    """Ids as the tiers hold them."""
    return np.asarray(tokens, dtype=np.int32)
