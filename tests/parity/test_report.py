"""What is said about a run: exit code, closing line, failure sentences, JSON."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from parity.compare import Comparison, Failure, Measure, Tie, Verdict
from parity.errors import BadInput
from parity.report.document import document, read, write
from parity.report.environment import environment
from parity.report.table import show
from parity.report.words import closing_line, exit_code, sentences
from parity.runner import CaseResult, Claim
from parity.trace import Round
from tests.parity.fakes import SETTING, answer, case

ROUNDS = (Round((97, 98), 2, (97, 98)), Round((99,), 0, (100,)))


def result(verdict: Verdict = Verdict.EQUAL, **fields: object) -> CaseResult:
    """A result with this verdict."""
    comparison = Comparison(verdict, 4, 4, **fields)  # type: ignore[arg-type]
    return CaseResult(case(), comparison, answer(), answer(origin="engine", rounds=ROUNDS))


@pytest.mark.parametrize(
    ("verdicts", "code"),
    [
        ([Verdict.EQUAL], 0),
        ([Verdict.EQUAL, Verdict.NEAR_TIE, Verdict.SHAPE_TIE], 0),
        ([Verdict.EQUAL, Verdict.INCONCLUSIVE], 3),
        ([Verdict.INCONCLUSIVE, Verdict.DIFFERENT], 1),
        ([Verdict.DIFFERENT], 1),
    ],
)
def test_exit_codes(verdicts: list[Verdict], code: int) -> None:
    """0 equal, 1 different, 3 inconclusive; inconclusive is not equal, different beats it."""
    assert exit_code([result(verdict) for verdict in verdicts], ()) == code


def test_a_failure_names_case_round_position_tokens_margin_and_command() -> None:
    """mutants: each is caught with a message that can be acted on."""
    failure = Failure("token", 98, 120, 2, Measure(0.52, 0.0, 3.0))
    (sentence,) = sentences(result(Verdict.DIFFERENT, failures=(failure,)), SETTING)
    assert sentence == (
        "dense/serial/ngram/d3/greedy/novel: round 1, position 2: expected 98 'b', got 120 'x' "
        "(margin 0.52, delta 0); python -m parity run -k dense/serial/ngram/d3/greedy/novel"
    )


def test_a_command_names_the_models_it_ran_on() -> None:
    """Else it would reproduce something else."""
    failure = Failure("token", 98, None, 0)
    setting = replace(SETTING, options=("--target", "my model"))
    (sentence,) = sentences(result(Verdict.DIFFERENT, failures=(failure,)), setting)
    assert "expected 98 'b', got the end (margin not measured)" in sentence
    assert "run --target 'my model' -k dense" in sentence


def test_the_closing_line_counts_positions_and_not_only_cases() -> None:
    """Cases, checked/total, ties, deviations, unchecked."""
    tie = Tie(1, Verdict.NEAR_TIE, 97, 98, 1e-4, 0.0)
    tied = replace(result(), comparison=Comparison(Verdict.INCONCLUSIVE, 2, 4, ties=(tie,)))
    line = closing_line([result(), tied], (Claim("claims/x", False, "x happens"),))
    assert line == (
        "2 cases (1 equal, 1 inconclusive, 1 of 1 claims unmet), 6/8 positions checked, "
        "1 tie, 0 deviations, 2 unchecked"
    )


def test_the_table_ends_with_every_failure_and_the_closing_line() -> None:
    """A reader of the last lines sees the verdict."""
    out = io.StringIO()
    failure = Failure("text", "a", "[b]")
    results = [result(), result(Verdict.DIFFERENT, failures=(failure,))]
    claim = Claim("claims/x", False, "x happens")
    show(results, (claim,), {"mlx": "1.2"}, {"dense": SETTING}, Console(file=out, width=100))
    lines = out.getvalue().splitlines()
    assert lines[0] == "mlx 1.2"
    assert "text: expected 'a', got '[b]'" in lines[-3]
    assert lines[-2] == "claims/x: not met: x happens"
    assert lines[-1] == closing_line(results, (claim,))


def test_a_stored_run_reads_back_what_it_says(tmp_path: Path) -> None:
    """JSON: verdict, answer and rounds survive; a NaN does not make the file unreadable."""
    file = tmp_path / "run.json"
    nan = result(Verdict.DIFFERENT, logprob_difference=float("nan"))
    made = document(
        [nan], (Claim("c", True, "t"),), {"backend": "cpu-x"}, "abc", {"dense": SETTING}
    )
    write(file, made)
    assert list(tmp_path.iterdir()) == [file]
    stored = read(file)
    assert (stored.sources, stored.backend, stored.options) == ("abc", "cpu-x", ())
    (found,) = stored.cases.values()
    assert found.verdict == "different"
    assert found.digest == case().digest
    assert found.actual is not None
    assert found.actual.rounds == ROUNDS
    assert made["exit_code"] == 1


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"schema": 99}', '{"schema": 1, "cases": {}}'])
def test_a_file_that_is_no_stored_run_is_refused(tmp_path: Path, text: str) -> None:
    """Bad input names the file."""
    file = tmp_path / "run.json"
    file.write_text(text)
    with pytest.raises(BadInput, match=r"run\.json"):
        read(file)
    with pytest.raises(BadInput, match=r"none\.json"):
        read(tmp_path / "none.json")


def test_a_run_of_another_schema_is_refused(tmp_path: Path) -> None:
    """Its fields may mean something else."""
    file = tmp_path / "run.json"
    made = document([result()], (), {"backend": "cpu-x"}, "abc", {"dense": SETTING})
    write(file, made | {"schema": 99})
    with pytest.raises(BadInput, match="schema 99"):
        read(file)


def test_a_document_that_cannot_be_written_leaves_nothing_behind(tmp_path: Path) -> None:
    """Nothing half-written."""
    with pytest.raises(TypeError):
        write(tmp_path / "run.json", {"not": json})
    assert list(tmp_path.iterdir()) == []


def test_a_known_deviation_is_said_and_counted() -> None:
    """It excuses a case, and not in silence."""
    excused = result(Verdict.EQUAL)
    excused = replace(excused, comparison=replace(excused.comparison, deviations=("D21: x",)))
    (sentence,) = sentences(excused, SETTING)
    assert "known deviation D21: x" in sentence
    assert ", 1 deviation, " in closing_line([excused], ())
    assert closing_line([excused], ()).startswith("1 case (")


def test_what_was_loaded_in_front_of_mlx_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """`honesty`: another BLAS is another machine."""
    monkeypatch.delenv("LD_PRELOAD", raising=False)
    monkeypatch.delenv("DYLD_INSERT_LIBRARIES", raising=False)
    assert "preloaded" not in environment()
    monkeypatch.setenv("LD_PRELOAD", "libopenblas.so.0")
    assert environment()["preloaded"] == "libopenblas.so.0"
