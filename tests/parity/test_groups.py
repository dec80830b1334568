"""Groups: what they claim, and that a row which is wrong, swapped or gone is found."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import fixtures
from engine import Engine, Request, Stream, Target
from parity import grouped, subjects
from parity.cases import READERS, Case, Cell, Source
from parity.compare import Comparison, Verdict
from parity.grouped import Gathering
from parity.plans import DENSE, FAMILIES, READERS_OF, catalogue
from parity.report.groups import groups
from parity.report.markdown import render as markdown
from parity.report.page import render as page
from parity.report.words import SOME_DIFFERENT, exit_code
from parity.runner import CaseResult, claims, group_claims, run_case
from parity.subjects import EngineSubject, Once
from parity.trace import Company, company_of
from tests.parity.fakes import EXACT, FakeMeter, FakeOracle, answer, case
from tests.parity.runs import broken, run_of

WAY = "dense/batch/ngram/d3/greedy/b4"


@pytest.fixture(scope="module")
def subject() -> Once:
    """The engine on the dense fixture."""
    target = Target.load(fixtures.target_dir("dense"))
    return Once(EngineSubject.open(target, fixtures.drafter_dir("dense-draft")))


def rows_of(way: str) -> list[Case]:
    """The cases of one group."""
    return [one for one in catalogue(way) if one.cell.way == way]


def results_of(way: str, subject: Once) -> list[CaseResult]:
    """A group's cases, each held to what its row says alone."""
    return [
        run_case(one, FakeOracle(alone), subject, FakeMeter(None), EXACT)
        for one in rows_of(way)
        if (alone := subject.answer(one.alone)) is not None
    ]


def test_every_fixture_has_groups_of_every_size_with_every_drafter() -> None:
    """solitude: B 1, 2, 4 and 8; drawn ones on dense, of 4 elsewhere; the real model in pairs."""
    found = {
        (one.cell.model, one.cell.drafter, one.cell.sampling.mode, one.cell.rows)
        for one in catalogue()
        if one.group
    }
    drafters = ("off", "ngram", "two-model")
    assert found == {
        *(
            (model, drafter, mode, rows)
            for model in (DENSE, *FAMILIES)
            for drafter in drafters
            for mode in ("greedy", "positional")
            for rows in ((1, 2, 4, 8) if mode == "greedy" or model == DENSE else (4,))
        ),
        *(("smollm2", drafter, "greedy", 2) for drafter in drafters),
        # Those that read hidden states have no cases beside these.
        *(
            (model, drafter, mode, rows)
            for model, readers in READERS_OF.items()
            for drafter in readers
            for mode in ("greedy", "positional")
            for rows in (2, 4, 8)
        ),
    }


def test_rows_differ_in_prompt_budget_and_seed_and_come_at_different_turns() -> None:
    """Rows that were all alike could be swapped unseen."""
    for one in catalogue():
        rows = one.group
        for what in ("kind", "prompt", "max_tokens"):
            assert len({getattr(row, what) for row in rows}) == len(rows)
        if one.cell.sampling.mode != "greedy":
            assert len({row.sampling.seed for row in rows}) == len(rows)
        if len(rows) > 1:
            assert len({row.turn for row in rows}) > 1
        if rows:
            row = rows[one.row]
            assert (row.prompt, row.max_tokens) == (one.prompt, one.max_tokens)
            assert [other.id for other in one.together] == [
                other.id for other in rows_of(one.cell.way)
            ]


def test_plain_rows_are_held_to_mlx_lm_and_drafting_ones_to_themselves_alone() -> None:
    """lossless, solitude: and alone they are cases of their own."""
    sources = {(o.cell.drafter, o.cell.sampling.mode): o.source for o in catalogue() if o.group}
    drafting = {
        (drafter, mode): Source.OWN_ALONE
        for drafter in ("ngram", "two-model", *READERS)
        for mode in ("greedy", "positional")
    }
    plain = {("off", "greedy"): Source.SERVER, ("off", "positional"): Source.GENERATE_STEP}
    assert sources == plain | drafting


@pytest.mark.parametrize("way", [WAY, "dense/batch/two-model/d3/top-p/b4"])
def test_the_engines_rows_are_what_they_are_alone(way: str, subject: Once) -> None:
    """solitude: ids, text, log-probabilities and rounds; the group was ragged and changed."""
    results = results_of(way, subject)
    assert [result.verdict for result in results] == [Verdict.EQUAL] * 4
    (claim,) = group_claims(results)
    assert claim.met
    first, *others = [result.actual.company for result in results if result.actual is not None]
    assert all(other is first for other in others), "one run for all rows"


def test_a_swapped_row_is_caught(subject: Once, monkeypatch: pytest.MonkeyPatch) -> None:
    """mutants: two rows get each other's streams."""
    gather = grouped.gather

    def swapping(*asked: Any) -> Gathering:
        gathering = gather(*asked)
        first, second, *rest = gathering.rows
        return replace(gathering, rows=(second, first, *rest))

    monkeypatch.setattr(subjects, "gather", swapping)
    target = Target.load(fixtures.target_dir("dense"))
    wrong = Once(EngineSubject.open(target, None))
    verdicts = []
    for one in rows_of(WAY):
        alone = subject.answer(one.alone)
        assert alone is not None
        result = run_case(one, FakeOracle(alone), wrong, FakeMeter(None), EXACT)
        verdicts.append(result.verdict)
    assert verdicts == [Verdict.DIFFERENT] * 2 + [Verdict.EQUAL] * 2


class Forgetful(Engine):
    """Loses its third request."""

    taken = 0

    def submit(self, request: Request, **options: Any) -> Stream:
        self.taken += 1
        if self.taken == 3:
            return Stream(lambda: None)
        return super().submit(request, **options)


def test_a_dropped_row_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """mutants: whoever waited for a row that nobody serves would wait for ever."""
    monkeypatch.setattr(grouped, "Engine", Forgetful)
    wrong = Once(EngineSubject.open(Target.load(fixtures.target_dir("dense")), None))
    gone = rows_of(WAY)[2]
    result = run_case(gone, FakeOracle(answer()), wrong, FakeMeter(None), EXACT)
    assert result.verdict is Verdict.DIFFERENT
    assert "the row has not ended" in str(result.comparison.failures[0].actual)


def row(kind: str, company: Company | None, **cell: object) -> CaseResult:
    """An equal row of a group of two."""
    fields = {"model": "dense", "lane": "batch", "drafter": "ngram", "depth": 3, "rows": 2, **cell}
    asked = case(kind)
    named = Cell(sampling=asked.cell.sampling, kind=kind, **fields)  # type: ignore[arg-type]
    group = replace(rows_of("dense/batch/ngram/d3/greedy/b2")[0].group[0], kind=kind)
    one = replace(asked, cell=named, group=(group,))
    actual = replace(answer(origin="engine"), company=company)
    return CaseResult(one, Comparison(Verdict.EQUAL, 4, 4), answer(), actual)


@pytest.mark.parametrize(
    ("company", "drafter", "met"),
    [
        (Company(2, 9, 4, 1, 1), "ngram", True),
        (Company(2, 9, 0, 1, 1), "ngram", False),
        (Company(2, 9, 0, 1, 1), "off", True),
        (Company(2, 9, 4, 0, 1), "ngram", False),
        (Company(2, 9, 4, 1, 0), "off", False),
        (None, "off", False),
    ],
)
def test_a_group_that_shows_nothing_fails(company: Company | None, drafter: str, met: bool) -> None:
    """Rows that never differ, or never come or go, would be equal in an engine without groups."""
    results = [row("a", company, drafter=drafter), row("b", company, drafter=drafter)]
    (claim,) = group_claims(results)
    assert claim.id == f"claims/{results[0].case.cell.way}"
    assert claim.met is met
    assert (exit_code(results, (claim,)) == SOME_DIFFERENT) is not met
    assert claim in claims(results)


def test_a_row_alone_claims_nothing_and_a_group_that_broke_off_claims_in_vain() -> None:
    """No answer is no evidence."""
    assert group_claims([row("a", Company(1, 9, 0, 0, 0), rows=1)]) == ()
    (claim,) = group_claims([broken(row("a", None).case)])
    assert not claim.met


def test_what_a_group_did_is_read_off_its_rounds() -> None:
    """Joins and leaves are seen by those who were there before, and stayed."""
    rounds = [{0: 1}, {0: 2, 1: 2}, {0: 0, 1: 3}, {1: 1}]
    assert company_of(2, rounds) == Company(2, 4, ragged=1, joined=1, left=1)
    assert company_of(2, [{0: 1}, {1: 2}]) == Company(2, 2, 0, 0, 0)
    assert company_of(2, [{0: 1, 1: 2}] * 2) == Company(2, 2, 2, 0, 0)


@given(st.lists(st.dictionaries(st.integers(0, 4), st.integers(0, 3), min_size=1), max_size=6))
def test_a_group_has_no_more_joins_and_leaves_than_rows(rounds: list[dict[int, int]]) -> None:
    """Somebody is first, and somebody is last."""
    seen = {request for one in rounds for request in one}
    company = company_of(5, rounds)
    assert company.joined <= max(len(seen) - 1, 0)
    assert company.left <= max(len(seen) - 1, 0)
    assert company.ragged <= company.rounds == len(rounds)


def test_pages_say_what_groups_did() -> None:
    """JSON, page and Markdown: ragged rounds, joins and leaves."""
    told = row("a", Company(2, 9, 4, 1, 3))
    run = run_of(told, row("b", Company(2, 9, 4, 1, 3)), broken(row("c", None, rows=4).case))
    first = run["cases"][told.case.id]
    assert (first["lane"], first["rows"], first["turn"]) == ("batch b2", 2, 0)
    company = {"rows": 2, "rounds": 9, "ragged": 4, "joined": 1, "left": 3}
    assert first["actual"]["company"] == company
    two, four = groups(run["cases"].values())
    assert (two.rows, two.cases, two.equal, two.ragged, two.joined, two.left) == (2, 2, 2, 4, 1, 3)
    assert (four.rows, four.cases, four.equal, four.rounds) == (4, 1, 0, 0)
    line = "| `dense` | `ngram` | 3 | `greedy` | 2 | 2/2 | 9 | 4 | 1 | 3 |"
    assert line in markdown(run).splitlines()
    shown = page(run)
    assert '<section id="groups"' in shown
    assert "<td>2</td><td>2</td><td>2</td><td>9</td><td>4</td><td>1</td><td>3</td>" in shown
    alone = run_of(replace(told, case=told.case.alone))
    assert "No group was run." in page(alone)
    assert "### Groups" not in markdown(alone)


def test_a_group_starts_in_the_middle_of_one_row_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """After a tie a row goes on from given tokens; its companions start at their prompts."""
    gather, seen = grouped.gather, list[list[int]]()

    def watching(*asked: Any) -> Gathering:
        seen.append([len(request.prompt) for _, request in asked[3]])
        return gather(*asked)

    monkeypatch.setattr(subjects, "gather", watching)
    subject = Once(EngineSubject.open(Target.load(fixtures.target_dir("dense")), None))
    one = rows_of(WAY)[0]
    whole = subject.answer(one)
    assert whole is not None
    rest = subject.answer(one, given=whole.ids[:5])
    assert rest is not None
    assert rest.ids == whole.ids
    (first, *others), resumed = seen
    assert resumed == [first + 5, *others]
