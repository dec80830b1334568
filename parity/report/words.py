"""Sentences about results, and the exit code."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from parity.compare import Failure, Tie, Verdict
from parity.runner import CaseResult, Claim
from parity.trace import round_of

ALL_EQUAL, SOME_DIFFERENT, UNUSABLE, SOME_INCONCLUSIVE, INTERRUPTED = 0, 1, 2, 3, 130


@dataclass(frozen=True, slots=True)
class Setting:
    """What a sentence needs to know about the run.

    `decode` gives the text of one token; `options` name the run's models, none for the fixtures.
    """

    decode: Callable[[int], str]
    options: tuple[str, ...] = ()


def exit_code(results: Sequence[CaseResult], claims: Sequence[Claim]) -> int:
    """0 all equal or tied where ties are allowed, 1 something differs, 3 something is open."""
    verdicts = {result.verdict for result in results}
    if Verdict.DIFFERENT in verdicts:
        return SOME_DIFFERENT
    if not all(claim.met for claim in claims):
        return SOME_DIFFERENT
    if Verdict.INCONCLUSIVE in verdicts:
        return SOME_INCONCLUSIVE
    return ALL_EQUAL


def reproduce(case_id: str, options: Sequence[str] = ()) -> str:
    """The command that runs this case alone."""
    return shlex.join(["python", "-m", "parity", "run", *options, "-k", case_id])


def sentences(result: CaseResult, setting: Setting) -> list[str]:
    """Every failure, tie and excuse of a case: where, what was expected, what came, how close."""
    lines = [_failure(result, failure, setting) for failure in result.comparison.failures]
    lines += [_tie(result, tie, setting) for tie in result.comparison.ties]
    lines += [f"known deviation {said}" for said in result.comparison.deviations]
    if result.verdict is Verdict.INCONCLUSIVE:
        comparison = result.comparison
        lines.append(f"only {comparison.checked} of {comparison.total} positions could be checked")
    return [
        f"{result.case.id}: {line}; {reproduce(result.case.id, setting.options)}" for line in lines
    ]


def closing_line(results: Sequence[CaseResult], claims: Sequence[Claim]) -> str:
    """Cases, positions, ties, deviations, unchecked; and what that comes to."""
    checked = sum(result.comparison.checked for result in results)
    total = sum(result.comparison.total for result in results)
    ties = sum(len(result.comparison.ties) for result in results)
    # What excused a case here; `python -m oracle deviations` runs all that are known.
    deviations = sum(len(result.comparison.deviations) for result in results)
    counts = {v: sum(result.verdict is v for result in results) for v in Verdict}
    said = ", ".join(f"{number} {verdict}" for verdict, number in counts.items() if number)
    unmet = sum(not claim.met for claim in claims)
    claimed = f", {unmet} of {len(claims)} claims unmet" if claims else ""
    return (
        f"{counted(len(results), 'case')} ({said}{claimed}), {checked}/{total} positions checked, "
        f"{counted(ties, 'tie')}, {counted(deviations, 'deviation')}, {total - checked} unchecked"
    )


def counted(number: int, what: str) -> str:
    """A number of things, by the name of one."""
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def _failure(result: CaseResult, failure: Failure, setting: Setting) -> str:
    place = _place(result, failure.position)
    if failure.what != "token":
        old, new = _shown(failure.expected), _shown(failure.actual)
        said = f"{place}{failure.what}: expected {old}, got {new}"
        return said + _drafted(result, failure, setting)
    old, new = _token(failure.expected, setting), _token(failure.actual, setting)
    if failure.measure is None:
        margin = "margin not measured"
    else:
        margin = f"margin {failure.measure.margin:.3g}, delta {failure.measure.delta:.3g}"
    return f"{place}expected {old}, got {new} ({margin})"


def _shown(value: object) -> str:
    return f"{value:.6g}" if isinstance(value, float) else repr(value)


def _drafted(result: CaseResult, failure: Failure, setting: Setting) -> str:
    """What the round at a trace failure drafted, and what came out of it."""
    if failure.what != "(drafted, accepted)" or result.actual is None or failure.position is None:
        return ""
    number = round_of(result.actual.rounds, failure.position)
    if number is None:
        return ""
    one = result.actual.rounds[number]
    drafted, emitted = (
        " ".join(_token(token, setting) for token in ids) or "nothing"
        for ids in (one.draft, one.emitted)
    )
    return f" (drafted {drafted}; emitted {emitted})"


def _tie(result: CaseResult, tie: Tie, setting: Setting) -> str:
    old, new = _token(tie.expected, setting), _token(tie.actual, setting)
    place = _place(result, tie.position)
    return (
        f"{place}{tie.kind} between expected {old} and {new} "
        f"(margin {tie.margin:.3g}, delta {tie.delta:.3g})"
    )


def round_at(result: CaseResult, position: int | None) -> int | None:
    """The round that filled a position, if it is known: after a tie the subject began again."""
    if position is None or result.actual is None:
        return None
    if any(tie.position < position for tie in result.comparison.ties):
        return None
    return round_of(result.actual.rounds, position)


def _place(result: CaseResult, position: int | None) -> str:
    if position is None:
        return ""
    number = round_at(result, position)
    return f"position {position}: " if number is None else f"round {number}, position {position}: "


def _token(token: object, setting: Setting) -> str:
    return f"{token} {setting.decode(token)!r}" if isinstance(token, int) else "the end"
