"""JUnit XML: well-formed whatever is said, and never green for what is not equal."""

from __future__ import annotations

from typing import Any
from xml.etree import ElementTree

import pytest
from hypothesis import given

from parity.compare import Verdict
from parity.report.junit import render
from parity.report.text import visible
from parity.runner import CaseResult, Claim
from tests.parity.fakes import case
from tests.parity.runs import NAMES, TEXTS, broken, equal, parted, run_of, run_saying, tied


def parsed(run: dict[str, Any]) -> ElementTree.Element:
    """The XML of a run as a file has it, read back."""
    return ElementTree.fromstring(render(run).encode())


@given(TEXTS, NAMES)
def test_any_text_reads_back(text: str, kind: str) -> None:
    """Well-formed: what XML can hold and prints is there, the rest is written as Python does."""
    run = run_saying(text, kind)
    tests = {one.get("name"): one for one in parsed(run).iter("testcase")}
    for case_id, said in run["cases"].items():
        test = tests[visible(case_id)]
        found = test.find("failure")
        found = test.find("error") if found is None else found
        if found is not None:
            assert found.text == visible("\n".join(said["sentences"]))
    environment = {p.get("name"): p.get("value") for p in parsed(run).iter("property")}
    assert environment["machine"] == visible(text)


@pytest.mark.parametrize(
    ("result", "tag", "kind"),
    [
        (equal(case()), None, None),
        (tied(case(), Verdict.NEAR_TIE), None, None),
        (tied(case(), Verdict.SHAPE_TIE), None, None),
        (parted(case()), "failure", "different"),
        (tied(case(), Verdict.DIFFERENT), "failure", "different"),
        (tied(case(), Verdict.INCONCLUSIVE), "failure", "inconclusive"),
        (broken(case()), "error", "broke off"),
    ],
)
def test_a_verdict_has_its_element(result: CaseResult, tag: str | None, kind: str | None) -> None:
    """Equal and tied pass, different and inconclusive fail, one that broke off is an error."""
    (test,) = parsed(run_of(result)).iter("testcase")
    found = [one for one in test if one.tag != "system-out"]
    assert [(one.tag, one.get("type")) for one in found] == ([(tag, kind)] if tag else [])


def test_nothing_is_skipped() -> None:
    """Inconclusive is not skipped: a job that counts failures must see it."""
    assert "<skipped" not in render(run_of(tied(case(), Verdict.INCONCLUSIVE)))


def test_ties_are_said_even_where_they_are_allowed() -> None:
    """Ties are never waved through."""
    run = run_of(tied(case(), Verdict.NEAR_TIE))
    (said,) = parsed(run).iter("system-out")
    (sentence,) = run["cases"][case().id]["sentences"]
    assert said.text == sentence
    assert "near tie between expected 99 'c' and 120 'x'" in sentence


def test_the_counts_are_those_of_the_elements() -> None:
    """One suite per model, lane and drafter, and one of claims."""
    root = parsed(
        run_of(
            *(equal(case()), parted(case("b")), broken(case("c"))),
            equal(case(drafter="off", depth=0)),
            claims=(Claim("claims/x", False, "x happens"), Claim("claims/y", True, "y")),
        )
    )
    names = {suite.get("name"): suite for suite in root}
    assert list(names) == ["dense.serial.ngram", "dense.serial.off", "claims"]
    for suite in (root, *root):
        for what, tag in (("tests", "testcase"), ("failures", "failure"), ("errors", "error")):
            assert suite.get(what) == str(len(list(suite.iter(tag))))
    assert root.get("tests") == "6"
    assert root.get("failures") == "2"
