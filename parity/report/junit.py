"""JUnit XML: one suite per model, lane and drafter, one test case per case, one suite of claims.

The form is the one that Jenkins and GitLab read: https://github.com/testmoapp/junitxml
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from xml.etree import ElementTree

from parity.compare import Verdict
from parity.report.facts import Case, broke_off, cases_of, grouped, tie_sentences
from parity.report.text import visible

FAILING = frozenset({Verdict.DIFFERENT, Verdict.INCONCLUSIVE})


def render(run: Mapping[str, Any]) -> str:
    """A document as JUnit XML; characters that do not print are escaped as Python does."""
    root = ElementTree.Element("testsuites", name="parity")
    for names, cases in grouped(cases_of(run), "model", "lane", "drafter").items():
        name = ".".join(names)
        suite = _suite(root, name, [_case(case, name) for case in cases])
        properties = ElementTree.Element("properties")
        for key, value in run["environment"].items():
            ElementTree.SubElement(
                properties, "property", name=visible(key), value=visible(str(value))
            )
        suite.insert(0, properties)
    if run["claims"]:
        _suite(root, "claims", [_claim(name, claim) for name, claim in run["claims"].items()])
    for what in ("tests", "failures", "errors"):
        root.set(what, str(sum(int(suite.get(what, "0")) for suite in root)))
    root.set("skipped", "0")
    ElementTree.indent(root)
    # As a str it would declare the encoding of the locale.
    said: bytes = ElementTree.tostring(root, encoding="utf-8", xml_declaration=True)
    return said.decode() + "\n"


def _suite(
    root: ElementTree.Element, name: str, tests: Sequence[ElementTree.Element]
) -> ElementTree.Element:
    suite = ElementTree.SubElement(
        root,
        "testsuite",
        name=visible(name),
        tests=str(len(tests)),
        failures=str(sum(test.find("failure") is not None for test in tests)),
        errors=str(sum(test.find("error") is not None for test in tests)),
        skipped="0",
    )
    suite.extend(tests)
    return suite


def _case(case: Case, suite: str) -> ElementTree.Element:
    test = _test(case["id"], f"parity.{suite}")
    sentences = list(case["sentences"])
    verdict = Verdict(case["verdict"])
    if broke_off(case):
        _add(test, "error", "broke off", sentences)
    elif verdict in FAILING:
        _add(test, "failure", str(verdict), sentences)
    if case["ties"]:
        said = ElementTree.SubElement(test, "system-out")
        said.text = visible("\n".join(tie_sentences(case)))
    return test


def _claim(name: str, claim: Mapping[str, Any]) -> ElementTree.Element:
    test = _test(name, "parity.claims")
    if not claim["met"]:
        _add(test, "failure", "claim not met", [f"{name}: not met: {claim['text']}"])
    return test


def _test(name: str, group: str) -> ElementTree.Element:
    return ElementTree.Element("testcase", name=visible(name), classname=visible(group))


def _add(test: ElementTree.Element, tag: str, kind: str, sentences: Sequence[str]) -> None:
    text = visible("\n".join(sentences))
    first, _, _ = text.partition("\n")
    ElementTree.SubElement(test, tag, type=kind, message=first).text = text
