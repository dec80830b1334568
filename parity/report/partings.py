"""Where two answers part, with what stands around that place on both sides."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from parity.report.facts import Case

BEFORE, AFTER = 4, 3
"""Tokens shown around a position."""

CHARACTERS = 24
"""Characters shown around a place in the text."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A token, or where `token` is None some text, the end, or the words for nothing."""

    text: str
    token: int | None = None


@dataclass(frozen=True, slots=True)
class Place:
    """One place of both answers; `parts` where they part."""

    name: str
    expected: Piece
    actual: Piece
    parts: bool = False


@dataclass(frozen=True, slots=True)
class Parting:
    """In what and where the sides part, and the places around it.

    Rounds count from 0. `resumed`: it lies after a tie, where the subject was made to go on from
    the reference's tokens; what it said after that place is not kept.
    """

    what: str
    position: int | None
    round: int | None
    margin: float | str | None
    delta: float | str | None
    places: tuple[Place, ...]
    resumed: bool = False


NOTHING = Piece("nothing")
NOT_KEPT = Piece("not kept")


def partings(case: Case) -> list[Parting]:
    """The first failure and the first tie that have a position, in order, and then the text.

    None of them if no answer came, or if only a count differs.
    """
    if case["expected"] is None or case["actual"] is None:
        return []
    firsts = [
        min(placed, key=lambda one: int(one["position"]))
        for found in (case["failures"], case["ties"])
        if (placed := [one for one in found if one["position"] is not None])
    ]
    texts = [one for one in case["failures"] if one["what"] == "text"]
    return [
        *(_at(case, one) for one in sorted(firsts, key=lambda one: int(one["position"]))),
        *(_in_text(one["expected"], one["actual"]) for one in texts),
    ]


def _at(case: Case, one: Mapping[str, Any]) -> Parting:
    expected, actual = case["expected"], case["actual"]
    position = one["position"]
    resumed = any(tie["position"] < position for tie in case["ties"])
    length = len(expected["ids"]) if resumed else max(len(expected["ids"]), len(actual["ids"]))
    places = tuple(
        Place(
            f"position {number}",
            _piece(expected, number),
            _resumed(expected, one, number) if resumed else _piece(actual, number),
            number == position,
        )
        for number in range(max(0, position - BEFORE), min(length, position + AFTER) + 1)
    )
    what = one.get("what", one.get("kind"))
    return Parting(what, position, one["round"], one["margin"], one["delta"], places, resumed)


def _piece(answer: Mapping[str, Any], position: int) -> Piece:
    ids = answer["ids"]
    if position < len(ids):
        return Piece(repr(answer["pieces"][position]), ids[position])
    return Piece(f"the end ({answer['finish_reason']})") if position == len(ids) else NOTHING


def _resumed(expected: Mapping[str, Any], one: Mapping[str, Any], position: int) -> Piece:
    """What the subject said when it went on after a tie, as far as it is known."""
    if position > one["position"]:
        return NOT_KEPT
    if position < one["position"] or one.get("what") == "logprob":
        return _piece(expected, position)
    if one.get("what") == "finish reason":
        return Piece(f"the end ({one['actual']})")
    if one["actual_piece"] is None:
        return Piece("the end")
    return Piece(repr(one["actual_piece"]), one["actual"])


def _in_text(expected: str, actual: str) -> Parting:
    shared = min(len(expected), len(actual))
    start = next((n for n in range(shared) if expected[n] != actual[n]), shared)
    before = Piece(repr(expected[max(0, start - CHARACTERS) : start]))
    places = (
        Place(f"up to character {start}", before, before),
        Place(f"from character {start}", _rest(expected, start), _rest(actual, start), parts=True),
    )
    return Parting("text", None, None, None, None, places)


def _rest(text: str, start: int) -> Piece:
    return Piece(repr(text[start : start + CHARACTERS]) if start < len(text) else "the end")
