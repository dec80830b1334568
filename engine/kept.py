"""From one row's states to a value that can be kept, and from such a value to rows that go on."""

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
from .state.checkpoint import Checkpoint
from .state.rows import Rows
from .target import Target


@dataclass(frozen=True, slots=True)
class Start:
    """What a row starts from: its target's and its drafter's state, which hold the same tokens."""

    rows: Rows
    draft: DraftRows | None


def started(
    target: Target,
    drafter: DraftProvider | None,
    samplers: RowSampling,
    stored: Stored,
    checkpoints: Sequence[Checkpoint],
) -> Start:
    """States of one row from what was kept of one, which is left as it is.

    Raises:
        BadInput: it does not fit the target or the drafter, or the two stand at different tokens.
    """
    taps = () if drafter is None else drafter.taps
    rows = target.rows_holding(stored.leaves, stored.num_tokens, taps)
    if drafter is None:
        return Start(rows, None)
    if len(checkpoints) != 1:
        raise BadInput(f"a drafter's state has 1 checkpoint, got {len(checkpoints)}")
    (checkpoint,) = checkpoints
    if checkpoint.processed_tokens != stored.num_tokens:
        raise BadInput(
            f"a drafter's state of {checkpoint.processed_tokens} tokens cannot stand beside its "
            f"target's of {stored.num_tokens}"
        )
    return Start(rows, drafter.open(samplers, checkpoint))


def captured(
    target: Target, rows: TargetRows, draft: DraftRows | None, row: int, tokens: Sequence[int]
) -> Kept:
    """What one row's settled states hold, which is `tokens`, as a value of its own.

    Raises:
        BadInput: there are no tokens, or a state holds another number of them.
    """
    stored = Stored.of(rows.lowered(row), len(tokens), target.quantization)
    checkpoints = () if draft is None else (draft.capture(row),)
    return Kept(namespace_of(target, draft), as_tokens(tokens), stored, checkpoints)


def namespace_of(target: Target, drafter: DraftProvider | DraftRows | None) -> str:
    """What states must agree on, beside their tokens, to stand for each other."""
    return target.namespace(None if drafter is None else drafter.namespace)


def as_tokens(tokens: Sequence[int]) -> Tokens:
    """Ids as the tiers hold them: int32 [N]."""
    return np.asarray(tokens, dtype=np.int32)
