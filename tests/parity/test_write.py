"""The folder of a report."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from parity.compare import Comparison, Failure, Measure, Verdict
from parity.report.document import load, write
from parity.report.write import write_report
from parity.runner import CaseResult
from tests.parity.fakes import answer, case
from tests.parity.runs import HOSTILE, equal, parted, run_of, run_saying, tied

FILES = ["index.html", "junit.xml", "report.json", "summary.md"]


def names(folder: Path) -> list[str]:
    """What is in a folder."""
    return sorted(file.name for file in folder.iterdir())


def test_a_report_is_four_files(tmp_path: Path) -> None:
    """And nothing half-written beside them; a second one takes the place of the first."""
    folder = tmp_path / "new" / "folder"
    write_report(folder, run_of(equal(case())))
    write_report(folder, run_of(parted(case())))
    assert names(folder) == FILES
    assert "1 of 1 case differs" in (folder / "index.html").read_text(encoding="utf-8")


def test_a_report_is_made_from_what_was_stored(tmp_path: Path) -> None:
    """Rendered later, from JSON read back, it is the same to the byte."""
    run = run_saying("".join(HOSTILE), "kind")
    write_report(tmp_path / "now", run)
    write_report(tmp_path / "later", load(tmp_path / "now" / "report.json"))
    for name in FILES:
        assert (tmp_path / "now" / name).read_bytes() == (tmp_path / "later" / name).read_bytes()


def test_a_document_that_cannot_be_shown_leaves_nothing(tmp_path: Path) -> None:
    """All or nothing: no file of a report that has no page."""
    run = run_of(equal(case()))
    del run["capabilities"]
    with pytest.raises(Exception, match="capabilities"):
        write_report(tmp_path / "folder", run)
    assert not (tmp_path / "folder").exists()


def test_failures_and_ties_are_data(tmp_path: Path) -> None:
    """What, sides, position, round, margin, delta; JSON has no NaN, so its name stands there."""
    nan, inf = float("nan"), float("inf")
    failures = (
        Failure("token", 100, None, 3, Measure(inf, 0.25, 3.0)),
        Failure("logprob", -0.5, nan, 1),
        Failure("(drafted, accepted)", (3, 1), (3, 2), 0),
    )
    result = parted(case())
    comparison = Comparison(Verdict.DIFFERENT, 4, 9, failures=failures)
    file = tmp_path / "run.json"
    write(file, run_of(CaseResult(case(), comparison, result.expected, result.actual)))
    (said,) = load(file)["cases"].values()
    assert said["failures"][0] == {
        "what": "token",
        "expected": 100,
        "actual": None,
        "expected_piece": "d",
        "actual_piece": None,
        "position": 3,
        "round": 1,
        "margin": "inf",
        "delta": 0.25,
    }
    assert [one["actual"] for one in said["failures"]] == [None, "nan", [3, 2]]
    (case_said,) = run_of(tied(case()))["cases"].values()
    assert case_said["ties"][0]["actual_piece"] == "x"
    assert case_said["ties"][0]["round"] == 0


def test_every_answer_has_the_text_of_its_tokens() -> None:
    """One piece per id."""
    (said,) = run_of(equal(case(), "aé漢"))["cases"].values()
    assert said["actual"]["pieces"] == ["a", "é", "漢"]
    assert said["model"] == "dense"
    assert said["prompt"] == "Once"


def test_the_round_behind_a_tie_is_not_known() -> None:
    """The subject began again there, in rounds that nobody kept."""
    failure = Failure("token", 102, 122, 5, Measure(0.5, 0.0, 3.0))
    (said,) = run_of(tied(case(), Verdict.DIFFERENT, failure))["cases"].values()
    assert said["failures"][0]["round"] is None
    assert ": position 5: expected" in said["sentences"][0]
    assert ": round 0, position 2: near tie" in said["sentences"][1]


def test_json_is_all_ascii(tmp_path: Path) -> None:
    """So that no text can keep it from being written."""
    write(
        tmp_path / "run.json",
        run_of(
            CaseResult(
                case(),
                Comparison(Verdict.EQUAL, 1, 1),
                answer((), text="\ud800"),
                answer((), origin="e"),
            )
        ),
    )
    json.loads((tmp_path / "run.json").read_text(encoding="ascii"))
