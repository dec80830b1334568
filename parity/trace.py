"""What an engine answered, in the words of neither side."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Round:
    """One round: the drafted ids, how many of them were accepted, and the ids delivered.

    An accepted EOS counts in `accepted` and is not in `emitted`; the tokens of a stop string are.
    """

    draft: tuple[int, ...]
    accepted: int
    emitted: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Trace:
    """Where the content came from: a flag per content token, (drafted, accepted) per round."""

    from_draft: tuple[bool, ...]
    rounds: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer. `ids` are content: without a terminal EOS and without a stop string's tokens.

    `origin` names the run that gave it, so that no run is ever compared with itself.
    `logprobs` has one entry per content token. `trace` is None and `rounds` is empty where the
    source does not tell.
    """

    origin: str
    ids: tuple[int, ...]
    text: str
    finish_reason: str
    prompt_tokens: int
    completion_tokens: int
    logprobs: tuple[float, ...]
    trace: Trace | None = None
    rounds: tuple[Round, ...] = ()


def round_of(rounds: Sequence[Round], position: int) -> int | None:
    """The round (from 0) that emitted position `position`; the last one for the end."""
    emitted = 0
    for number, one in enumerate(rounds):
        emitted += len(one.emitted)
        if position < emitted:
            return number
    return len(rounds) - 1 if rounds else None
