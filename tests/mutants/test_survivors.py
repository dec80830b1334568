"""The sum of a mutation session: what it lets pass and what it does not."""

from __future__ import annotations

import sqlite3
import tomllib
from pathlib import Path

import pytest

from .survivors import Change, change_of, explained, results, verdict

ROOT = Path(__file__).parents[2]
ONE = Change("engine/x.py", "a < b", "a <= b")
TWO = Change("engine/x.py", "c", "d")


def test_the_changed_lines_are_found() -> None:
    diff = "--- mutation diff ---\n--- a/x\n+++ b/x\n@@ -1 +1 @@\n same\n-    a < b\n+    a <= b\n"
    assert change_of("engine/x.py", diff) == ONE


def test_what_is_said() -> None:
    assert verdict([TWO] * 4, [ONE], {ONE: "equal"}) == []
    assert verdict([TWO] * 3, [ONE], {ONE: "equal"}) == ["3 of 4 killed, at least 80% wanted"]
    assert "unexplained" in verdict([TWO] * 9, [ONE], {})[0]
    assert "stale" in verdict([TWO] * 9, [], {ONE: "equal"})[0]


@pytest.mark.parametrize("outcome", ["KILLED", "SURVIVED", None])
def test_a_session_is_read_whole(tmp_path: Path, outcome: str | None) -> None:
    """A mutant that was not run is no killed one."""
    session = tmp_path / "session.sqlite"
    with sqlite3.connect(session) as connection:
        connection.execute("create table mutation_specs (module_path, job_id)")
        connection.execute("create table work_results (job_id, diff, test_outcome, worker_outcome)")
        connection.execute("insert into mutation_specs values ('engine/x.py', 1)")
        if outcome:
            row = (1, "-a < b\n+a <= b", outcome, "NORMAL")
            connection.execute("insert into work_results values (?, ?, ?, ?)", row)
    connection.close()
    if outcome is None:
        with pytest.raises(ValueError, match="not judged: not run"):
            results(session)
    else:
        assert results(session) == (([ONE], []) if outcome == "KILLED" else ([], [ONE]))


def test_every_survivor_has_a_reason() -> None:
    assert all(len(reason) > 20 for reason in explained().values())


def test_every_explanation_is_of_a_line_that_is_there() -> None:
    """Else the session, which takes hours, ends with a stale explanation."""
    for change in explained():
        assert change.old in " ".join((ROOT / change.file).read_text(encoding="utf-8").split())


def test_every_mutated_module_is_there() -> None:
    config = tomllib.loads((ROOT / "tests/mutation.toml").read_text(encoding="utf-8"))
    assert all((ROOT / file).is_file() for file in config["cosmic-ray"]["module-path"])
