"""The accept walk and what becomes of a row after it. Pure: ids in, values out.

A drafted token counts only if the target, sampling at the same position, drew the same id. The
text is therefore the target's own, at any temperature and whatever was drafted.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass
from typing import Literal

Broken = Literal["cancelled", "failed"]
"""Why a row ends in the middle: its reader went away, or could not take a token."""

End = Literal[Broken, "stop", "length"]


@dataclass(frozen=True, slots=True)
class Walk:
    """One row's way through its verify window.

    `accepted` counts the drafts that the target confirmed (an EOS among them included) and never
    the token after them. `emitted` is content: accepted drafts and then the correction or bonus,
    without an EOS. `correction` is that last token, or None if the walk ended inside the accepted
    run. `end` is None when the row goes on with the correction as its pending token.
    """

    accepted: int
    emitted: tuple[int, ...]
    correction: int | None
    end: Literal["stop", "length"] | None


def walk(draft: Sequence[int], samples: Iterable[int], remaining: int, eos: Set[int]) -> Walk:
    """Compare the target's `samples` with `draft`, position by position.

    Args:
        draft: the d proposed ids.
        samples: the target's own ids at window positions 0..d; taken one at a time and only as
            far as the walk goes, so that they may be drawn lazily.
        remaining: tokens the row may still emit, at least 1.
        eos: ids that end the text.
    """
    accepted = 0
    emitted: list[int] = []
    for position, token in enumerate(samples):
        matches = position < len(draft) and token == draft[position]
        accepted += matches
        if token in eos:
            return Walk(accepted, tuple(emitted), None, "stop")
        emitted.append(token)
        correction = None if matches else token
        if len(emitted) >= remaining:
            return Walk(accepted, tuple(emitted), correction, "length")
        if not matches:
            return Walk(accepted, tuple(emitted), correction, None)
    raise ValueError(f"{len(draft)} drafts need {len(draft) + 1} samples")


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a row does next: `end` None means another round, with `pending` heading its window.

    `retained` is how many drafts stay in the state behind the window's first token.
    """

    end: End | None
    retained: int
    pending: int | None


def settle(walk: Walk, delivered: int, *, stopped: bool, broken: Broken | None = None) -> Outcome:
    """Decide a row's outcome after delivery.

    Args:
        delivered: how many of `walk.emitted` the consumer took.
        stopped: the consumer ended the text at the last delivered token (a stop string).
        broken: nothing of the draft is kept.
    """
    if broken is not None:
        return Outcome(broken, 0, None)
    retained = min(delivered, walk.accepted)
    if stopped:
        return Outcome("stop", retained, None)
    if walk.end is not None:
        return Outcome(walk.end, retained, None)
    return Outcome(None, retained, walk.correction)
