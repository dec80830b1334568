"""What the pages read out of a document."""

from __future__ import annotations

from dataclasses import asdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parity.compare import Comparison, Verdict
from parity.report.acceptance import acceptances
from parity.report.facts import cases_of, state, verdict_sentence
from parity.report.text import visible
from parity.report.words import ALL_EQUAL, SOME_DIFFERENT, SOME_INCONCLUSIVE
from parity.runner import CaseResult, Claim
from parity.trace import Round
from tests.parity.fakes import answer, case
from tests.parity.runs import TEXTS, run_of

STATES = {
    SOME_DIFFERENT: {Verdict.DIFFERENT},
    SOME_INCONCLUSIVE: {Verdict.INCONCLUSIVE},
    ALL_EQUAL: {Verdict.EQUAL, Verdict.NEAR_TIE, Verdict.SHAPE_TIE},
}


def result(verdict: Verdict, kind: str) -> CaseResult:
    """A case with this verdict."""
    return CaseResult(case(kind), Comparison(verdict, 4, 4), answer(), answer(origin="engine"))


@given(st.lists(st.sampled_from(Verdict), min_size=1), st.booleans())
def test_the_verdict_of_a_page_is_that_of_the_exit_code(verdicts: list[Verdict], met: bool) -> None:
    """One run, one verdict, in a shell and on a page."""
    results = [result(verdict, f"k{n}") for n, verdict in enumerate(verdicts)]
    run = run_of(*results, claims=(Claim("claims/x", met, "x happens"),))
    assert state(run) in STATES[run["exit_code"]]


@pytest.mark.parametrize(
    ("verdicts", "met", "sentence"),
    [
        ("", True, "Nothing was compared."),
        ("e", True, "The case equals its reference."),
        ("ee", True, "All 2 cases equal the reference."),
        ("ed", True, "1 of 2 cases differs from the reference."),
        ("ddi", False, "2 of 3 cases differ from the reference, and 1 claim is not met."),
        ("ei", False, "No case differs from the reference, but 1 claim is not met."),
        (
            "en",
            True,
            "No case differs from the reference; 1 of 2 cases ends in a tie that was too close "
            "to call.",
        ),
        (
            "nii",
            True,
            "Inconclusive: no case differs from the reference, but 2 of 3 cases are not checked "
            "far enough to be called equal.",
        ),
    ],
)
def test_the_verdict_in_one_sentence(verdicts: str, met: bool, sentence: str) -> None:
    """Different beats a claim, a claim beats inconclusive, and that beats a tie."""
    letters = {verdict.value[0]: verdict for verdict in Verdict}
    results = [result(letters[letter], f"k{n}") for n, letter in enumerate(verdicts)]
    run = run_of(*results, claims=(Claim("claims/x", met, "x happens"),))
    assert verdict_sentence(run) == sentence


DRAFTS = st.lists(
    st.integers(0, 6).flatmap(lambda drafted: st.tuples(st.just(drafted), st.integers(0, drafted))),
    max_size=8,
)


@given(DRAFTS)
def test_no_draft_is_lost_between_rounds_and_positions(drafts: list[tuple[int, int]]) -> None:
    """Summed over positions, drafts and accepts are those of the rounds; a deeper one is rarer."""
    rounds = tuple(Round((7,) * drafted, accepted, (8,)) for drafted, accepted in drafts)
    one = CaseResult(
        case(), Comparison(Verdict.EQUAL, 4, 4), answer(), answer(origin="engine", rounds=rounds)
    )
    run = run_of(one)
    found = acceptances(cases_of(run))
    assert run["acceptance"] == [asdict(group) for group in found]
    assert sum(sum(group.drafted) for group in found) == sum(drafted for drafted, _ in drafts)
    assert sum(sum(group.accepted) for group in found) == sum(accepted for _, accepted in drafts)
    for group in found:
        assert list(group.accepted) == sorted(group.accepted, reverse=True)
        assert all(a <= d for a, d in zip(group.accepted, group.drafted, strict=True))
        assert group.drafted[-1] > 0
        assert group.rounds == group.drafted[0]


@given(TEXTS)
def test_visible_text_can_be_stored_and_seen(text: str) -> None:
    """It encodes, every character of it prints, and text that does already is left alone."""
    shown = visible(text)
    assert shown.encode().decode() == shown
    assert all(c.isprintable() or c in "\n\t" for c in shown)
    assert visible(shown) == shown
    assert shown == text or not all(c.isprintable() or c in "\n\t" for c in text)
