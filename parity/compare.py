"""The verdict: one expected answer against one actual answer, position by position.

Pure but for the two functions passed in: `measure` tells how close a decision was, `resume` lets
the subject go on after a tie from the oracle's own prefix. The positions of an answer of n content
tokens are its n tokens and then its end, so that n + 1 positions are to be checked.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import zip_longest

from parity.tolerance import Tolerance
from parity.trace import Answer, Trace

MINIMUM_CHECKED = 0.9


class Verdict(StrEnum):
    EQUAL = "equal"
    NEAR_TIE = "near tie"
    SHAPE_TIE = "shape tie"
    DIFFERENT = "different"
    INCONCLUSIVE = "inconclusive"


@dataclass(frozen=True, slots=True)
class Measure:
    """How close the target's decision was at one position, on the oracle's prefix.

    `margin`: how far the lower of the two disputed tokens lies below the best one.
    `delta`: the largest difference of a logit between a one-token forward and a verify window.
    """

    margin: float
    delta: float
    top_logit: float


@dataclass(frozen=True, slots=True)
class Tie:
    """A position where the answers part and the decision was too close to call."""

    position: int
    kind: Verdict
    expected: int | None
    actual: int | None
    margin: float
    delta: float


@dataclass(frozen=True, slots=True)
class Failure:
    """What differs. Of a `token`, `expected` and `actual` are ids, None standing for the end."""

    what: str
    expected: object
    actual: object
    position: int | None = None
    measure: Measure | None = None


@dataclass(frozen=True, slots=True)
class Comparison:
    """What became of one case.

    `unchecked` names what could not be compared: after the ids parted, or because one side does
    not tell. `deviations` say which known deviation of the oracle excuses what.
    `logprob_difference` is the largest one seen, None if no pair was compared.
    """

    verdict: Verdict
    checked: int
    total: int
    ties: tuple[Tie, ...] = ()
    failures: tuple[Failure, ...] = ()
    unchecked: tuple[str, ...] = ()
    logprob_difference: float | None = None
    deviations: tuple[str, ...] = ()


Measurer = Callable[[int, int | None, int | None], Measure | None]
"""(position, expected token, actual token) -> the decision there; None if it cannot be measured."""

Resumer = Callable[[int], Answer | None]
"""n -> the subject's answer when given the expected answer's first n tokens, `logprobs` only for
what comes after them; None if it cannot be resumed."""


def compare(
    expected: Answer,
    actual: Answer,
    tolerance: Tolerance,
    measure: Measurer,
    resume: Resumer,
) -> Comparison:
    """Judge `actual` by `expected`.

    Raises:
        ValueError: both come from one run, or a resumed answer does not begin with its prefix.

    """
    if expected.origin == actual.origin:
        raise ValueError(f"{expected.origin} is compared with itself")
    total = len(expected.ids) + 1
    ties: list[Tie] = []
    failures: list[Failure] = []
    differences: list[float] = []
    current, given = actual, 0
    while True:
        position = first_difference(expected, current, given)
        end = len(expected.ids) if position is None else position
        differences += logprob_differences(expected, current, given, end)
        failures += logprob_failures(expected, current, given, end, tolerance)
        if position is None:
            checked = total
            break
        checked = position + 1
        tokens = token_at(expected, position), token_at(current, position)
        measured = measure(position, *tokens) if was_drawn(expected, current, position) else None
        kind = judge(measured, tolerance)
        if measured is None or kind is Verdict.DIFFERENT:
            failures.append(parting(expected, current, position, measured))
            break
        ties.append(Tie(position, kind, *tokens, measured.margin, measured.delta))
        if position == len(expected.ids):
            break
        resumed = resume(position + 1)
        if resumed is None:
            break
        current, given = resumed, position + 1
        if current.ids[:given] != expected.ids[:given]:
            raise ValueError(f"{current.origin} does not begin with the {given} tokens given to it")
    unchecked: tuple[str, ...]
    deviations: tuple[str, ...] = ()
    if current is actual and checked == total and not ties:
        failures += whole_failures(expected, actual)
        unchecked = untold(expected, actual)
        deviations = text_deviations(expected, actual)
    else:
        unchecked = ("text", "usage") if expected.trace is None else ("text", "usage", "trace")
    return Comparison(
        verdict_of(checked, total, ties, failures, tolerance),
        checked,
        total,
        tuple(ties),
        tuple(failures),
        unchecked,
        max(differences, default=None),
        deviations,
    )


def first_difference(expected: Answer, actual: Answer, start: int) -> int | None:
    """The first position from `start` where the answers part; None if they do not."""
    shared = min(len(expected.ids), len(actual.ids))
    for position in range(start, shared):
        if expected.ids[position] != actual.ids[position]:
            return position
    if len(expected.ids) != len(actual.ids):
        return shared
    if expected.finish_reason != actual.finish_reason:
        return shared
    return None


def token_at(answer: Answer, position: int) -> int | None:
    """The token at a position, None at the end."""
    return answer.ids[position] if position < len(answer.ids) else None


def was_drawn(expected: Answer, actual: Answer, position: int) -> bool:
    """Whether both sides drew at `position`: a token, or the EOS that stopped the answer.

    An answer that ended by its budget drew nothing there, and two ends of different reasons are
    no matter of a margin.
    """
    ended = [answer for answer in (expected, actual) if position >= len(answer.ids)]
    return len(ended) < 2 and all(answer.finish_reason == "stop" for answer in ended)


def judge(measured: Measure | None, tolerance: Tolerance) -> Verdict:
    """Whether a disagreement is excused. One that cannot be measured is not."""
    if measured is None:
        return Verdict.DIFFERENT
    if measured.margin < tolerance.verdict_floor(measured.top_logit):
        return Verdict.NEAR_TIE
    if measured.margin <= 2 * measured.delta:
        return Verdict.SHAPE_TIE
    return Verdict.DIFFERENT


def verdict_of(
    checked: int,
    total: int,
    ties: Sequence[Tie],
    failures: Sequence[Failure],
    tolerance: Tolerance,
) -> Verdict:
    """Sum a case up. Equal is only what was checked to its end and never differed."""
    if failures:
        return Verdict.DIFFERENT
    if ties and not tolerance.ties_allowed:
        return Verdict.DIFFERENT
    if checked < MINIMUM_CHECKED * total:
        return Verdict.INCONCLUSIVE
    if any(tie.kind is Verdict.SHAPE_TIE for tie in ties):
        return Verdict.SHAPE_TIE
    if ties:
        return Verdict.NEAR_TIE
    if checked < total:
        return Verdict.INCONCLUSIVE
    return Verdict.EQUAL


def whole_failures(expected: Answer, actual: Answer) -> list[Failure]:
    """What differs in two answers whose ids and ends agree: text, usage and, if known, trace."""
    counts = [
        ("prompt tokens", expected.prompt_tokens, actual.prompt_tokens),
        ("completion tokens", expected.completion_tokens, actual.completion_tokens),
    ]
    failures: list[Failure] = []
    if not expected.may_read(actual.text, mapped=actual.mapped):
        failures.append(Failure("text", expected.text, actual.text))
    failures += [
        Failure(what, old, new)
        for what, old, new in counts
        if old is not None and new is not None and old != new
    ]
    if expected.trace is not None:
        failures += trace_failures(expected.trace, actual) or round_failures(expected, actual)
    return failures


def text_deviations(expected: Answer, actual: Answer) -> tuple[str, ...]:
    """D21: the text that the ids decode to is right though the oracle served another."""
    if actual.text == expected.text or actual.text not in expected.decodings:
        return ()
    return (
        f"D21: the text is {actual.text!r}, as the ids decode; the oracle served {expected.text!r}",
    )


def untold(expected: Answer, actual: Answer) -> tuple[str, ...]:
    """What two answers that agree were not compared in, because one of them does not tell it."""
    sides = (expected, actual)
    counts = [count for side in sides for count in (side.prompt_tokens, side.completion_tokens)]
    missing = {
        "ids": any(side.mapped for side in sides),
        "last ids": actual.mapped and not expected.shows_all(actual.text),
        "logprobs": any(side.logprobs is None for side in sides),
        "usage": None in counts,
    }
    return tuple(what for what, is_missing in missing.items() if is_missing)


def trace_failures(expected: Trace, actual: Answer) -> list[Failure]:
    """The first round, or else the first token, that came about in another way.

    A round's failure is placed at the first position that the round filled.
    """
    if actual.trace is None:
        return [Failure("trace", "one", None)]
    for number, (old, new) in enumerate(zip_longest(expected.rounds, actual.trace.rounds)):
        if old != new:
            position = sum(len(one.emitted) for one in actual.rounds[:number])
            return [Failure("(drafted, accepted)", old, new, position)]
    flags = zip_longest(expected.from_draft, actual.trace.from_draft)
    for position, (was, now) in enumerate(flags):
        if was != now:
            return [Failure("from-draft flag", was, now, position)]
    return []


def round_failures(expected: Answer, actual: Answer) -> list[Failure]:
    """The first round that drafted or delivered other ids, if the expected answer tells its own.

    It is placed at the first position that the round filled.
    """
    position = 0
    # Their numbers were compared with the traces.
    for old, new in zip(expected.rounds, actual.rounds, strict=False):
        if old.draft != new.draft:
            return [Failure("drafted ids", old.draft, new.draft, position)]
        if old.emitted != new.emitted:
            return [Failure("ids of a round", old.emitted, new.emitted, position)]
        position += len(old.emitted)
    return []


def logprob_differences(expected: Answer, actual: Answer, given: int, end: int) -> list[float]:
    """|difference| of the log-probabilities reported for positions `given` .. `end` - 1."""
    if expected.logprobs is None or actual.logprobs is None:
        return []
    old = expected.logprobs[given:end]
    new = actual.logprobs[: end - given]
    return [abs(p - q) for p, q in zip(old, new, strict=False)]


def logprob_failures(
    expected: Answer, actual: Answer, given: int, end: int, tolerance: Tolerance
) -> list[Failure]:
    """A side without one entry per content token, or the first entry that is too far off.

    Nothing if a side does not tell them.
    """
    if expected.logprobs is None or actual.logprobs is None:
        return []
    if len(expected.logprobs) != len(expected.ids):
        return [Failure("logprob count", len(expected.ids), len(expected.logprobs))]
    if len(actual.logprobs) != len(actual.ids) - given:
        return [Failure("logprob count", len(actual.ids) - given, len(actual.logprobs))]
    for index, difference in enumerate(logprob_differences(expected, actual, given, end)):
        # Written so that a NaN fails.
        if not difference <= tolerance.logprobs:
            position = given + index
            old, new = expected.logprobs[position], actual.logprobs[index]
            return [Failure("logprob", old, new, position)]
    return []


def parting(expected: Answer, actual: Answer, position: int, measured: Measure | None) -> Failure:
    """The failure at the position where the ids or the ends part."""
    old, new = token_at(expected, position), token_at(actual, position)
    if old is None and new is None:
        return Failure("finish reason", expected.finish_reason, actual.finish_reason, position)
    return Failure("token", old, new, position, measured)
