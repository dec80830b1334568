"""The engine as a subject: one run per question."""

from __future__ import annotations

from dataclasses import replace

from parity.cases import GREEDY, Case, Drafter, Row
from parity.subjects import Once
from parity.trace import Answer
from tests.parity.fakes import TOP_P, answer, case


class Counting:
    """Answers with the number of the call."""

    def __init__(self) -> None:
        self.calls = 0

    def answer(
        self,
        case: Case,
        *,
        drafter: Drafter | None = None,
        depth: int | None = None,
        given: tuple[int, ...] = (),
    ) -> Answer | None:
        self.calls += 1
        return answer(origin=f"call {self.calls}: {drafter} {depth}")


def test_lanes_share_a_run_and_nothing_else_does() -> None:
    """mutants: a memory that forgets part of the question would compare another stream."""
    subject = Once(Counting())
    one = case(drafter="ngram", depth=3)
    first = subject.answer(one)
    assert subject.answer(case(lane="batch", drafter="ngram", depth=3)) is first
    assert subject.answer(one, drafter="ngram", depth=3) is first
    others = (
        subject.answer(one, drafter="off", depth=0),
        subject.answer(one, given=(97,)),
        subject.answer(case(depth=8)),
        subject.answer(case(drafter="two-model")),
        subject.answer(case(sampling=TOP_P)),
        subject.answer(case(sampling=replace(TOP_P, seed=99))),
        subject.answer(replace(one, prompt="Twice")),
        subject.answer(replace(one, max_tokens=3)),
        subject.answer(replace(one, stop=("x",))),
        subject.answer(replace(one, group=(Row("novel", "Once", GREEDY, 24),))),
    )
    assert first not in others
    assert len({other.origin for other in others if other}) == len(others)
