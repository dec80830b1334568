"""Which cases there are for which model."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

import fixtures
from parity.cases import Case, Source, question_of
from parity.matrix import cells, matrix
from parity.plans import BUILT_IN, SMOLLM2, SMOLLM2_F32, catalogue, given, known, served
from parity.snapshots import FOLDER, PORTABLE, entries_in, entry_name, file_of


def models(cases: Sequence[Case]) -> set[str]:
    return {case.cell.model for case in cases}


def test_a_plan_on_demand_runs_where_a_selector_names_it() -> None:
    assert SMOLLM2_F32 not in models(catalogue())
    assert SMOLLM2_F32 not in models(catalogue(SMOLLM2))
    assert SMOLLM2_F32 in models(catalogue(SMOLLM2_F32))
    assert SMOLLM2_F32 in models(catalogue(f"dense or {SMOLLM2_F32}/serial"))


def test_ids_tell_every_case_of_every_plan_apart() -> None:
    cases = matrix(known())
    assert len({case.id for case in cases}) == len(cases)


@pytest.mark.parametrize("depth", [1, 3, 8])
def test_a_given_model_is_asked_few_questions(depth: int) -> None:
    """A large one answers a question in seconds: the first verdicts must come soon."""
    cases = matrix([given(BUILT_IN, 24, depth)])
    asked = {question_of(case) for case in cases}
    on_servers = [q for q in asked if q.source in (Source.SERVER, Source.SERVER_DRAFT)]
    assert len(on_servers) == 2 * len(BUILT_IN), "one for each lane"
    assert {question.source for question in on_servers} == {Source.SERVER}, "D1: no draft server"
    drafting = [case for case in cases if case.cell.drafter != "off"]
    assert {case.cell.depth for case in drafting} == {depth}
    assert {case.cell.drafter for case in cases} == {"off", "ngram", "two-model"}


def test_a_server_is_asked_in_every_style_and_judged_by_the_plain_oracle() -> None:
    cases = matrix([served(BUILT_IN, 24)])
    assert {case.cell.style for case in cases} == {"once", "stream", "together", "again"}
    assert {case.source for case in cases} == {Source.SERVER}
    assert len({question_of(case) for case in cases}) == len(BUILT_IN)


def test_no_cell_of_any_plan_is_undecided() -> None:
    plans = (*known(), given(BUILT_IN, 24, 3), served(BUILT_IN, 24))
    assert not [one for plan in plans for one in cells(plan) if type(one).__name__ == "Hole"]


def test_the_recorded_ids_of_the_real_model_are_the_stored_ones_of_mlx_lm() -> None:
    """oracle: three prompts, what mlx-lm's generator said of them when they were chosen."""
    stored = fixtures.smollm2_prompts()["prompts"]
    assert len(stored) == 3
    for one in stored:
        for way in ("serial/off/d0", "serial/ngram/d3", "serial/two-model/d3", "batch/off/d0"):
            case_id = f"{SMOLLM2}/{way}/greedy/{one['name']}"
            block = entries_in(file_of(FOLDER, PORTABLE, case_id))[entry_name("text", case_id)]
            ids = next(line for line in block.split("\n") if line.startswith("ids"))
            assert [int(token) for token in ids.split()[1:]] == one["ids"]
