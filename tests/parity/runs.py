"""Runs made up for the pages, with texts that mean something to HTML, XML or Markdown."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hypothesis import strategies as st

from parity.cases import Case, Drafter
from parity.compare import Comparison, Failure, Measure, Tie, Verdict
from parity.report.document import document
from parity.report.words import Setting
from parity.runner import CaseResult, Claim
from parity.trace import Answer, Round
from tests.parity.fakes import SETTING, answer, case

HOSTILE = (
    "</script><script>alert(1)</script>",
    "</style></pre></details><b x='\"'>&amp;&lt;",
    "]]>--><!--",
    "\x00\x08\x0b\x1b\x85\ud800\ufffe\uffff",
    "\u202eabc\u2066 \u2028\u2029\u00a0",
    "שלום مرحبا 👩‍👩‍👧 漢字 \ufffd",
    "| a | b |\n| --- | --- |\n",
    "\n````\n~~~\n# heading\n- item\n1. one\n<b>",
    "\\|`|\\` *x* _y_ [z](http://example.invalid) @who #1",
    "\r\n\t {{ 7 * 7 }} {% raw %}",
)
TEXTS = st.lists(
    st.sampled_from(HOSTILE) | st.text(st.characters(exclude_categories=())), max_size=4
).map("".join)
"""Any text at all, lone surrogates included."""

NAMES = TEXTS.filter(bool)

ROUNDS = (Round((97, 98), 2, (97, 98, 99)), Round((99, 100, 101), 1, (100, 101)))


def ids_of(text: str) -> tuple[int, ...]:
    """A token per character."""
    return tuple(map(ord, text))


def equal(asked: Case, text: str = "abc") -> CaseResult:
    """A case that was answered as expected."""
    ids = ids_of(text)
    total = len(ids) + 1
    old, new = answer(ids), answer(ids, origin="engine", rounds=ROUNDS)
    return CaseResult(asked, Comparison(Verdict.EQUAL, total, total), old, new)


def parted(asked: Case, text: str = "abcdefgh", position: int = 3, token: int = 120) -> CaseResult:
    """A case whose token at `position` came out as `token`."""
    ids = ids_of(text)
    failure = Failure("token", ids[position], token, position, Measure(0.5, 0.0, 3.0))
    got = (*ids[:position], token, *ids[position + 1 :])
    return CaseResult(
        asked,
        Comparison(Verdict.DIFFERENT, position + 1, len(ids) + 1, failures=(failure,)),
        answer(ids),
        answer(got, origin="engine", rounds=ROUNDS),
    )


def tied(
    asked: Case, verdict: Verdict = Verdict.NEAR_TIE, *failures: Failure, position: int = 2
) -> CaseResult:
    """A case with a tie at a position, and perhaps a failure behind it."""
    tie = Tie(position, Verdict.NEAR_TIE, 97 + position, 120, 1e-4, 2e-5)
    ids = ids_of("abcdefgh")
    got = (*ids[:position], 120, *ids[position + 1 :])
    checked = 4 if verdict is Verdict.INCONCLUSIVE else 9
    return CaseResult(
        asked,
        Comparison(verdict, checked, 9, (tie,), failures),
        answer(ids),
        answer(got, origin="engine", rounds=ROUNDS),
    )


def broken(asked: Case, error: str = "RuntimeError: gone") -> CaseResult:
    """A case whose subject broke off."""
    failure = Failure("broke off", "an answer", error)
    return CaseResult(
        asked, Comparison(Verdict.DIFFERENT, 0, 4, failures=(failure,)), answer(), None
    )


def other_text(asked: Case, old: str, new: str) -> CaseResult:
    """A case in which only the texts differ."""
    comparison = Comparison(Verdict.DIFFERENT, 4, 4, failures=(Failure("text", old, new),))
    actual = answer(origin="engine", text=new, rounds=ROUNDS)
    return CaseResult(asked, comparison, answer(text=old), actual)


def run_of(*results: CaseResult, claims: tuple[Claim, ...] = (), **more: Any) -> dict[str, Any]:
    """Results as a document."""
    return document(results, claims, {"backend": "cpu-x"}, "abc", {"dense": SETTING}, **more)


def run_saying(text: str, kind: str) -> dict[str, Any]:
    """A run that says `text` wherever a text may stand, on prompts called `kind`."""

    def asked(depth: int, drafter: Drafter = "ngram") -> Case:
        return replace(case(kind, drafter=drafter, depth=depth), prompt=text, stop=(text,))

    def said(result: CaseResult) -> CaseResult:
        old, new = result.expected, result.actual
        return replace(result, expected=_saying(old, text), actual=_saying(new, text))

    results = [
        said(equal(asked(0), "a" + text)),
        said(parted(asked(1), "a" + text, 0)),
        other_text(asked(3), text + "a", text + "b"),
        said(broken(asked(8), text)),
        said(tied(asked(1, "two-model"), Verdict.INCONCLUSIVE)),
        said(tied(asked(3, "two-model"), Verdict.NEAR_TIE)),
    ]
    return document(
        results,
        (Claim("claims/x", False, text),),
        {"backend": "cpu-x", "machine": text},
        text,
        {"dense": Setting(lambda t: chr(t) if t != 120 else text, ("--target", text))},
        capabilities=[{"name": text, "value": text, "note": text}],
        not_checked=[text],
    )


def _saying(answer: Answer | None, text: str) -> Answer | None:
    return None if answer is None else replace(answer, text=text)
