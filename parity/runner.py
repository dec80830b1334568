"""Cases, one after the other: ask the oracle, ask the engine, compare."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from parity.cases import GREEDY, Case, Drafter, Source
from parity.compare import Comparison, Failure, Measure, Verdict, compare
from parity.errors import Unusable
from parity.plans import DENSE, FAMILIES, READERS_OF, WINDOW
from parity.tolerance import Tolerance
from parity.trace import Answer


class Subject(Protocol):
    """Something that answers cases."""

    def answer(
        self,
        case: Case,
        *,
        drafter: Drafter | None = None,
        depth: int | None = None,
        given: tuple[int, ...] = (),
    ) -> Answer | None:
        """The answer to `case`, with another drafter and depth than the case's if named.

        `given` are content tokens to start from: the answer's ids begin with them, and its
        `logprobs` are only those of the tokens after them. None if the subject cannot start there.
        """
        ...


class Oracle(Protocol):
    """Knows the expected answer of a case; see `references.References`."""

    def expected(self, case: Case) -> Answer: ...

    def check_alive(self) -> None: ...


class Meter(Protocol):
    """Measures decisions; see `probe.Probe`."""

    def measure(
        self, case: Case, prefix: tuple[int, ...], expected: int | None, actual: int | None
    ) -> Measure | None: ...


@dataclass(frozen=True, slots=True)
class CaseResult:
    """One case and what became of it; an answer is None if the case broke off before it."""

    case: Case
    comparison: Comparison
    expected: Answer | None
    actual: Answer | None

    @property
    def verdict(self) -> Verdict:
        return self.comparison.verdict


@dataclass(frozen=True, slots=True)
class Claim:
    """Something that must have happened somewhere in a whole run."""

    id: str
    met: bool
    text: str


def in_running_order(cases: Iterable[Case]) -> list[Case]:
    """The cases ordered so that the engine works while the servers answer, one after the other."""
    order = (
        Source.GENERATE_STEP,
        Source.OWN_PLAIN,
        Source.OWN_ALONE,
        Source.SERVER,
        Source.SERVER_DRAFT,
    )
    return sorted(cases, key=lambda case: order.index(case.source))


def by_prompt(cases: Iterable[Case]) -> list[Case]:
    """The cases ordered so that the first verdicts come soon: one prompt after the other."""
    cases = list(cases)
    kinds = list(dict.fromkeys(case.cell.kind for case in cases))
    return sorted(cases, key=lambda case: kinds.index(case.cell.kind))


def run_case(
    case: Case, oracle: Oracle, subject: Subject, meter: Meter, tolerance: Tolerance
) -> CaseResult:
    """Run one case. Whatever the engine raises is the case's result, and nothing else is.

    Raises:
        Unusable: the oracle is not there, or broke off itself; or a subject that is a server does
            not answer.

    """
    expected = None
    try:
        expected = _expected(case, oracle)
        actual = _answered(case, subject)
        comparison = _compare(case, expected, actual, subject, meter, tolerance)
    except _BrokeOff as error:  # an engine that breaks off is the finding
        return CaseResult(case, _broken(expected, error), expected, None)
    return CaseResult(case, hold_to_claim(case, expected, comparison), expected, actual)


class _BrokeOff(Exception):
    """The subject raised something, or gave no answer."""


def _expected(case: Case, oracle: Oracle) -> Answer:
    try:
        return oracle.expected(case)
    except Unusable:
        raise
    except Exception as error:
        if case.source in (Source.OWN_PLAIN, Source.OWN_ALONE):  # that oracle is the engine
            raise _BrokeOff(_said(error)) from error
        raise Unusable(f"the oracle of {case.id} broke off: {_said(error)}") from error


def _answered(case: Case, subject: Subject) -> Answer:
    try:
        answer = subject.answer(case)
    except Unusable:
        raise
    except Exception as error:
        raise _BrokeOff(_said(error)) from error
    if answer is None:
        raise _BrokeOff("no answer")
    return answer


def _said(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())


def _compare(
    case: Case,
    expected: Answer,
    actual: Answer,
    subject: Subject,
    meter: Meter,
    tolerance: Tolerance,
) -> Comparison:
    def measure(position: int, old: int | None, new: int | None) -> Measure | None:
        return meter.measure(case, expected.ids[:position], old, new)

    def resume(count: int) -> Answer | None:
        try:
            return subject.answer(case, given=expected.ids[:count])
        except Unusable:
            raise
        except Exception as error:
            raise _BrokeOff(_said(error)) from error

    return compare(expected, actual, tolerance, measure, resume)


def hold_to_claim(case: Case, expected: Answer, comparison: Comparison) -> Comparison:
    """A case that claims how its reference ends fails if that one ends otherwise."""
    if case.finish is None or expected.finish_reason == case.finish:
        return comparison
    failure = Failure("claimed finish reason", case.finish, expected.finish_reason)
    failures = (*comparison.failures, failure)
    return replace(comparison, verdict=Verdict.DIFFERENT, failures=failures)


def _broken(expected: Answer | None, error: Exception) -> Comparison:
    total = 1 if expected is None else len(expected.ids) + 1
    return Comparison(
        Verdict.DIFFERENT, 0, total, failures=(Failure("broke off", "an answer", str(error)),)
    )


# The acceptance counts a whole run must have seen, by their name.
ACCEPTS = ("zero", "partial", "full")


def accepts(
    results: Iterable[CaseResult], model: str, drafter: Drafter, *, past: int = 0
) -> set[str]:
    """Which kinds of acceptance occurred in rounds that drafted something.

    `past`: only rounds that began with at least this many tokens, the prompt's included.
    """
    seen = set()
    for result in results:
        cell, actual = result.case.cell, result.actual
        if (cell.model, cell.drafter) != (model, drafter) or actual is None:
            continue
        held = actual.prompt_tokens or 0
        for one in actual.rounds:
            if one.draft and held >= past:
                full = one.accepted == len(one.draft)
                seen.add("zero" if one.accepted == 0 else "full" if full else "partial")
            held += len(one.emitted)
    return seen


def claims(results: Sequence[CaseResult]) -> tuple[Claim, ...]:
    """What the whole matrix claims."""
    return (
        *accept_claims(results),
        *window_claims(results),
        *sampling_claims(results),
        *group_claims(results),
    )


def group_claims(results: Iterable[CaseResult]) -> tuple[Claim, ...]:
    """Rows of each group came and went while others decoded, and accepted different counts.

    Else a group would show no more than a row alone. One whose rows all broke off claims in vain.
    """
    groups: dict[str, list[CaseResult]] = {}
    for result in results:
        if result.case.cell.rows is not None and result.case.cell.rows > 1:
            groups.setdefault(result.case.cell.way, []).append(result)
    return tuple(_group_claim(way, members) for way, members in groups.items())


def _group_claim(way: str, members: Sequence[CaseResult]) -> Claim:
    name = f"claims/{way}"
    answers = [result.actual for result in members if result.actual is not None]
    company = next((answer.company for answer in answers if answer.company is not None), None)
    if company is None:
        return Claim(name, False, f"rows of {way} share rounds: no row tells of any")
    met = company.joined > 0 and company.left > 0
    said = f"rows of {way} join ({company.joined}) and leave ({company.left}) while others decode"
    if members[0].case.cell.drafter != "off":
        met = met and company.ragged > 0
        said += f", and accept different counts ({company.ragged} of {company.rounds} rounds)"
    return Claim(name, met, said)


DRAFTING: tuple[Drafter, ...] = ("ngram", "two-model")


def accept_claims(
    results: Sequence[CaseResult], models: Sequence[str] = (DENSE, *FAMILIES)
) -> tuple[Claim, ...]:
    """Every kind of accept occurs on every fixture, for every drafter that it has."""
    return tuple(
        Claim(
            f"claims/{model}/{drafter}/{kind}-accept",
            kind in accepts(results, model, drafter),
            f"some round of drafter {drafter} on {model} ends in a {kind} accept",
        )
        for model in models
        for drafter in (*DRAFTING, *READERS_OF[model])
        for kind in ACCEPTS
    )


def window_claims(results: Sequence[CaseResult]) -> tuple[Claim, ...]:
    """Past the sliding window speculation goes on: drafts are accepted there, and rejected."""
    return tuple(
        Claim(
            f"claims/sliding/{drafter}/past-the-window",
            {"zero", "partial", "full"} <= accepts(results, "sliding", drafter, past=2 * WINDOW),
            f"two windows into a text drafter {drafter} has drafts accepted and rejected",
        )
        for drafter in DRAFTING
    )


def sampling_claims(results: Sequence[CaseResult]) -> tuple[Claim, ...]:
    """Sampling leads away from the greedy text on most prompts; else it would test nothing.

    Looks at the plain serial cases, which every sampling has.
    """
    texts: dict[str, dict[str, str]] = {}
    for result in results:
        cell = result.case.cell
        plain = (cell.model, cell.lane, cell.drafter) == (DENSE, "serial", "off")
        if plain and result.expected is not None and not isinstance(result.case.prompt, tuple):
            texts.setdefault(cell.sampling.label, {})[cell.kind] = result.expected.text
    greedy = texts.pop(GREEDY.label, {})
    return tuple(
        Claim(
            f"claims/sampling/{label}",
            2 * sum(text != greedy.get(kind) for kind, text in drawn.items()) > len(drawn),
            f"most texts under {label} differ from the greedy ones",
        )
        for label, drawn in sorted(texts.items())
    )
