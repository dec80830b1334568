"""A group of rows run on the engine's own turns, so that who joins whom and when is repeatable."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from engine import (
    DraftProvider,
    Engine,
    Finish,
    GroupRound,
    Limits,
    Request,
    Stream,
    Target,
    TokenEvent,
)
from parity.trace import Company, company_of

Events = tuple[TokenEvent | Finish, ...]

PREFILL_CHUNK = 64
"""Tokens of a forward over prompts, all its rows together: few, so that rows join a cohort of which
some prompts are half done."""


@dataclass(frozen=True, slots=True)
class Gathering:
    """What each row's reader saw, or what was raised instead, and what the group did."""

    rows: tuple[Events | Exception, ...]
    company: Company


def gather(
    target: Target,
    drafter: DraftProvider | None,
    depth: int,
    requests: Sequence[tuple[int, Request]],
) -> Gathering:
    """Serve requests, each handed in at its turn, until the engine has nothing left to do."""
    rounds: list[GroupRound] = []
    engine = Engine(
        target,
        [] if drafter is None else [drafter],
        limits=Limits(rows=len(requests), prefill_chunk=PREFILL_CHUNK),
        on_round=rounds.append,
    )
    streams: dict[int, Stream] = {}
    turn, is_busy = 0, True
    while is_busy or len(streams) < len(requests):
        for row, (due, request) in enumerate(requests):
            if due == turn:
                streams[row] = engine.submit(
                    request, drafter=None if drafter is None else drafter.id, depth=depth
                )
        is_busy = engine.turn()
        turn += 1
    return Gathering(
        tuple(_read(streams[row]) for row in range(len(requests))),
        company_of(len(requests), [_accepted(one) for one in rounds]),
    )


def _accepted(one: GroupRound) -> Mapping[int, int]:
    return dict(zip(one.requests, one.accepted, strict=True))


def _read(stream: Stream) -> Events | Exception:
    # The engine is idle: a row that has not ended never will.
    stream.close(RuntimeError("the engine has nothing left to do, and the row has not ended"))
    try:
        return tuple(stream)
    except Exception as error:
        return error
