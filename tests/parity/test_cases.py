"""The matrix: complete, explained, and with an honest oracle for every case."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from parity import cli
from parity.cases import (
    DEPTHS,
    DRAFTERS,
    LANES,
    MAX_TOKENS,
    SAMPLINGS,
    Empty,
    Hole,
    Question,
    Source,
    question_of,
)
from parity.matrix import (
    EXTRAS,
    RULES,
    Rule,
    cells,
    extras,
    matrix,
    names,
)
from parity.plans import given, known
from tests.parity.fakes import PLAN, PROMPTS, Text


def test_every_cell_of_the_product_is_a_case_or_has_a_reason() -> None:
    """The product is whole: no cell is missing, none is undecided."""
    decided = cells(PLAN)
    axes = len(LANES) * len(DRAFTERS) * len(DEPTHS) * len(SAMPLINGS) * len(PROMPTS)
    assert len({one.cell for one in decided}) == len(decided) == axes
    assert not [one for one in decided if isinstance(one, Hole)]
    assert all(one.reason for one in decided if isinstance(one, Empty))


@pytest.mark.parametrize("left_out", range(len(RULES)))
def test_no_rule_is_idle(left_out: int) -> None:
    """Leaving one out changes the matrix."""
    rules = RULES[:left_out] + RULES[left_out + 1 :]
    plans = (*known(), given(PROMPTS, MAX_TOKENS, 3))
    assert [cells(plan, rules) for plan in plans] != [cells(plan) for plan in plans]


def test_coverage_fails_on_a_hole(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`list --coverage` names the hole and exits with 1."""
    monkeypatch.setattr(cli, "known", lambda: (PLAN,))
    with pytest.raises(SystemExit) as whole:
        cli.main(["list", "--coverage"])
    assert whole.value.code == 0
    assert "0 holes" in capsys.readouterr().out.splitlines()[-1]
    monkeypatch.setattr(cli, "cells", lambda plan: cells(plan, RULES[:-1]))
    with pytest.raises(SystemExit) as holed:
        cli.main(["list", "--coverage"])
    assert holed.value.code == 1
    out = capsys.readouterr().out
    assert "hole: dense/serial/ngram/d1/top-p/novel has neither a case nor a reason" in out


def test_a_rule_has_a_source_or_a_reason() -> None:
    """A rule that decides nothing, or both, cannot be written."""
    with pytest.raises(ValueError, match="a source and a law, or a reason"):
        Rule()
    with pytest.raises(ValueError, match="a source and a law, or a reason"):
        Rule(source=Source.SERVER)
    with pytest.raises(ValueError, match="a source and a law, or a reason"):
        Rule(reason="x", law="y")


def test_case_ids_are_unique_and_say_what_is_asked() -> None:
    """lane/drafter/dDEPTH/sampling/kind, extras included."""
    cases = matrix([PLAN])
    assert len({case.id for case in cases}) == len(cases)
    assert "dense/serial/two-model/d3/top-p+sequential/novel" in {case.id for case in cases}


def test_no_case_is_judged_by_its_own_run() -> None:
    """mutants: the engine's plain stream judges drafting runs only; the plain one has mlx-lm."""
    for case in matrix([PLAN]):
        if case.source is Source.OWN_PLAIN:
            assert case.cell.drafter != "off"


def test_references_are_the_documented_ones() -> None:
    """lossless, oracle-sampled, lossless-sampled: whom to believe, by lane, drafter and mode."""
    expected = {
        ("batch", "off", "greedy"): Source.SERVER,
        ("batch", "ngram", "greedy"): Source.SERVER,
        ("batch", "two-model", "greedy"): Source.SERVER,
        ("serial", "off", "greedy"): Source.SERVER,
        ("serial", "ngram", "greedy"): Source.SERVER,
        ("serial", "two-model", "greedy"): Source.SERVER_DRAFT,
        ("serial", "off", "sequential"): Source.SERVER,
        ("serial", "ngram", "sequential"): Source.SERVER,
        ("serial", "two-model", "sequential"): Source.SERVER_DRAFT,
        ("serial", "off", "positional"): Source.GENERATE_STEP,
        ("serial", "ngram", "positional"): Source.OWN_PLAIN,
        ("serial", "two-model", "positional"): Source.OWN_PLAIN,
    }
    found = {(c.cell.lane, c.cell.drafter, c.cell.sampling.mode): c.source for c in matrix([PLAN])}
    assert found == expected


def test_greedy_two_model_cases_compare_the_trace() -> None:
    """oracle-trace."""
    for case in matrix([PLAN]):
        if case.source is Source.SERVER_DRAFT and case.cell.sampling.mode == "greedy":
            assert case.traced == (not case.stop)


def test_cases_with_equal_questions_share_an_oracle_run() -> None:
    """A draft depth is part of the question only where the oracle itself drafts."""
    by_id = {case.id: question_of(case) for case in matrix([PLAN])}
    assert (
        by_id["dense/serial/ngram/d1/greedy/novel"] == by_id["dense/serial/ngram/d8/greedy/novel"]
    )

    def asked(way: str) -> Question:
        return by_id[f"dense/{way}/novel"]

    assert asked("serial/ngram/d1/greedy") == asked("serial/ngram/d8/greedy")
    assert asked("serial/ngram/d1/greedy") != asked("batch/ngram/d1/greedy")
    assert asked("serial/two-model/d1/greedy") != asked("serial/two-model/d3/greedy")
    assert asked("serial/ngram/d1/top-p") == asked("serial/two-model/d8/top-p")
    assert asked("serial/ngram/d1/top-p") != asked("serial/ngram/d1/top-k")


def test_a_digest_changes_with_anything_that_is_asked() -> None:
    """A stored result cannot answer for another question."""
    case = next(iter(matrix([PLAN])))
    others = (
        replace(case, prompt="other"),
        replace(case, max_tokens=MAX_TOKENS + 1),
        replace(case, stop=("x",)),
        replace(case, source=Source.OWN_PLAIN),
        replace(case, cell=replace(case.cell, sampling=replace(case.cell.sampling, seed=99))),
    )
    assert len({case.digest, *(other.digest for other in others)}) == 1 + len(others)
    json.dumps(case.digest)


def test_prompts_of_one_kind_are_told_apart_by_name() -> None:
    """A kind with several prompts has several cases, and no two have one id."""
    prompts = (*PROMPTS, Text("novel", "m", "Twice"))
    assert {"novel.novel-1", "novel.m", "long"} < names(prompts).keys()
    with pytest.raises(ValueError, match="share a kind and a name"):
        names((*prompts, Text("novel", "m", "Thrice")))


def test_extras_lie_outside_the_product() -> None:
    """Named cases: their kinds are not prompt kinds, and they run in both lanes."""
    kinds = {extra.kind for extra in EXTRAS}
    cases = extras(PLAN)
    assert kinds.isdisjoint(names(PROMPTS))
    assert {case.cell.kind for case in cases} == kinds
    assert {case.cell.lane for case in cases} == set(LANES)
    assert any(case.stop for case in cases)
    assert any(case.max_tokens == 1 for case in cases)


def test_extras_and_telling_kinds_claim_how_they_end() -> None:
    """A stop that never came would be equal on both sides and show nothing."""
    for case in matrix([PLAN]):
        if case.stop or case.max_tokens != MAX_TOKENS:
            assert case.finish is not None
        if case.cell.kind == "early-stop" and case.cell.sampling.mode == "greedy":
            assert case.finish == "stop"
