"""What all pages read out of the document of a run: counts, groups and the verdict in words."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from parity.compare import Verdict

Case = Mapping[str, Any]
"""One case of a document, as `document` makes it."""

TIES = frozenset({Verdict.NEAR_TIE, Verdict.SHAPE_TIE})

# What to read first comes first.
ORDER = (
    Verdict.DIFFERENT,
    Verdict.INCONCLUSIVE,
    Verdict.NEAR_TIE,
    Verdict.SHAPE_TIE,
    Verdict.EQUAL,
)


@dataclass(frozen=True, slots=True)
class Counts:
    """Cases by verdict, and positions."""

    cases: int
    equal: int
    tied: int
    different: int
    inconclusive: int
    checked: int
    total: int


def cases_of(run: Mapping[str, Any]) -> list[Case]:
    """The cases of a document, in its order."""
    return list(run["cases"].values())


def count(cases: Iterable[Case]) -> Counts:
    """Count some cases."""
    cases = tuple(cases)
    verdicts = [Verdict(case["verdict"]) for case in cases]
    return Counts(
        len(cases),
        verdicts.count(Verdict.EQUAL),
        sum(verdict in TIES for verdict in verdicts),
        verdicts.count(Verdict.DIFFERENT),
        verdicts.count(Verdict.INCONCLUSIVE),
        sum(case["checked"] for case in cases),
        sum(case["total"] for case in cases),
    )


def grouped(cases: Iterable[Case], *fields: str) -> dict[tuple[Any, ...], list[Case]]:
    """Cases by the values of some fields, sorted by these."""
    groups: dict[tuple[Any, ...], list[Case]] = {}
    for case in cases:
        groups.setdefault(tuple(case[field] for field in fields), []).append(case)
    return dict(sorted(groups.items()))


def unmet(run: Mapping[str, Any]) -> dict[str, str]:
    """The claims that were not met, by their id."""
    return {name: claim["text"] for name, claim in run["claims"].items() if not claim["met"]}


def broke_off(case: Case) -> bool:
    """Whether the subject gave no answer to compare."""
    return any(failure["what"] == "broke off" for failure in case["failures"])


def tie_sentences(case: Case) -> list[str]:
    """The sentences about ties; `words.sentences` has failures first, then ties, then the rest."""
    start = len(case["failures"])
    return list(case["sentences"][start : start + len(case["ties"])])


def state(run: Mapping[str, Any]) -> Verdict:
    """The verdict of the whole run: that of its worst case, or of a claim that was not met."""
    cases = cases_of(run)
    if unmet(run):
        return Verdict.DIFFERENT
    if not cases:
        return Verdict.INCONCLUSIVE
    found = {case["verdict"] for case in cases}
    return next(verdict for verdict in ORDER if verdict in found)


def verdict_sentence(run: Mapping[str, Any]) -> str:
    """The verdict of the whole run in one sentence."""
    counts = count(cases_of(run))
    number = len(unmet(run))
    claims = f"{number} claim{'s are' if number != 1 else ' is'} not met"
    cases = f"{counts.cases} case{'s' if counts.cases != 1 else ''}"
    if not counts.cases:
        return "Nothing was compared."
    if counts.different:
        differ = "differs" if counts.different == 1 else "differ"
        also = f", and {claims}" if number else ""
        return f"{counts.different} of {cases} {differ} from the reference{also}."
    if number:
        return f"No case differs from the reference, but {claims}."
    if counts.inconclusive:
        verb = "is" if counts.inconclusive == 1 else "are"
        return (
            f"Inconclusive: no case differs from the reference, but {counts.inconclusive} of "
            f"{cases} {verb} not checked far enough to be called equal."
        )
    if counts.tied:
        verb = "ends" if counts.tied == 1 else "end"
        return (
            f"No case differs from the reference; {counts.tied} of {cases} {verb} in a tie "
            "that was too close to call."
        )
    return (
        f"All {cases} equal the reference."
        if counts.cases > 1
        else "The case equals its reference."
    )
