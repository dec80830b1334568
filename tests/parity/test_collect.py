"""Outcomes as pytest reads them: from a stored run only what it really holds."""

from __future__ import annotations

from dataclasses import replace

import pytest

from parity.collect import PASSING, FromFile, Live
from parity.compare import Comparison, Verdict
from parity.provenance import Margins
from parity.report.document import Stored, StoredRun
from parity.runner import CaseResult, Claim
from tests.parity.fakes import EXACT, SETTING, answer, case


def stored(*claims: Claim) -> FromFile:
    """A stored run of one case."""
    one = Stored(case().digest, "equal", (), answer(origin="engine"))
    return FromFile(StoredRun("sources", (), "cpu-here", {case().id: one}, claims))


def test_a_case_that_was_not_run_is_a_failure() -> None:
    """A stored run of a part does not pass for the whole."""
    assert stored().of(case()).verdict is Verdict.EQUAL
    with pytest.raises(pytest.fail.Exception, match="not in the stored run"):
        stored().of(case(depth=8))


def test_a_case_that_asks_for_something_else_is_a_failure() -> None:
    """The id is the same, the question is not."""
    with pytest.raises(pytest.fail.Exception, match="asks for something else"):
        stored().of(replace(case(), prompt="Twice"))


def test_an_open_case_does_not_pass() -> None:
    """mutants: inconclusive is not equal, for pytest neither."""
    assert frozenset(Verdict) - PASSING == {Verdict.DIFFERENT, Verdict.INCONCLUSIVE}


class FakeSession:
    """What a model's session is asked for."""

    setting = SETTING
    tolerance = EXACT

    def margins(self, _: CaseResult, /) -> Margins:
        return Margins(1.0, None)


def test_claims_are_judged_only_over_all_cases() -> None:
    """A partial run says why it does not judge them."""
    result = CaseResult(case(), Comparison(Verdict.EQUAL, 4, 4), answer(), answer())
    live = Live(lambda _: result, lambda _: FakeSession())
    assert live.claims([case()]) == "1 of 1 cases did not run here"
    live.of(case())
    assert not isinstance(live.claims([case()]), str)
    assert stored().claims([case()]) == "the stored run was not of the whole matrix"
    claim = Claim("c", False, "t")
    assert stored(claim).claims([case()]) == (claim,)
