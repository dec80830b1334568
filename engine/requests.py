"""From a request to a row: what is refused, and what a row starts with."""

from __future__ import annotations

from .drafters.source import DraftProvider
from .errors import BadInput
from .processors import make_processors
from .rounds import Consumer, Row
from .sampling import RowSampling, make_row_sampler
from .state.rows import Rows
from .target import Target
from .values import Request, Sampling


def drafter_for(target: Target, drafter: DraftProvider | None) -> DraftProvider | None:
    """`drafter`, or None where an adapter is mounted on the target that it does not support."""
    if drafter is None or target.adapter is None or drafter.supports_target_adapters:
        return drafter
    return None


def require_its_target(target: Target, drafter: DraftProvider | None) -> None:
    """Refuse a drafter that reads another target.

    Raises:
        BadInput: naming both.
    """
    own = None if drafter is None else drafter.target
    if drafter is not None and own is not None and own is not target:
        raise BadInput(
            f"drafter {drafter.id} reads the target that it was opened beside ({own.path}); "
            f"it cannot serve another target object ({target.path})"
        )


def check(
    target: Target,
    rows: Rows,
    request: Request,
    drafter: DraftProvider | None,
    depth: int | None,
) -> int:
    """The draft depth for a request that can be served; the drafter's default if None.

    Raises:
        BadInput: options that cannot be served, a drafter that reads another target, or one on a
            target whose caches cannot be rolled back.
    """
    require_its_target(target, drafter)
    if depth is not None and depth < 0:
        raise BadInput(f"depth must be at least 0, got {depth}")
    if max(request.prompt) >= target.vocab_size or min(request.prompt) < 0:
        raise BadInput(f"prompt ids must be between 0 and {target.vocab_size - 1}")
    request.sampling.check_vocabulary(target.vocab_size)
    if drafter is not None and (names := rows.cannot_roll_back):
        raise BadInput(
            f"drafter {drafter.id} cannot serve this target: cache kind {', '.join(names)} "
            "has no rollback (it decodes without a drafter)"
        )
    if depth is None:
        depth = 0 if drafter is None else drafter.default_depth
    return depth


def make_row_sampling(target: Target, sampling: Sampling) -> RowSampling:
    """That of one row; the seed is resolved."""
    sampler = make_row_sampler(sampling, target.xtc_exempt_ids)
    return RowSampling([sampler], [make_processors(sampling.logits)])


def make_row(
    target: Target, request: Request, consumer: Consumer, held: list[int] | None = None
) -> Row:
    """The row of a request whose prompt is still to be processed."""
    return Row(
        consumer=consumer,
        eos=target.eos_ids | request.stop_ids,
        held=[] if held is None else held,
        pending=request.prompt[-1],
        step=request.first_step,
        remaining=request.max_tokens,
    )
