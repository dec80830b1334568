"""Nightly rows: each gets its time, goes on where it was, and comes back to what once broke it."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from parity.errors import BadInput
from parity.fuzz import cli
from parity.fuzz.disk import night
from parity.fuzz.disk.budget import Budget
from parity.fuzz.disk.night import Progress, document, load, save, table
from parity.fuzz.disk.rows import ALL, Row


def row(run: Callable[[Budget], None], nightly: int = 100, share: float = 1.0) -> Row:
    return Row("R0", f"row of share {share:g}", "seeds", run, 1, 1, nightly, share)


def counted(met: list[int], wrong: frozenset[int] = frozenset()) -> Callable[[Budget], None]:
    """A row that takes 5 ms a seed; some break it."""

    def run(budget: Budget) -> None:
        for seed in budget.seeds():
            met.append(seed)
            time.sleep(0.005)
            budget.done += 1
            if seed in wrong:
                budget.violated(seed, "is wrong")

    return run


def ran(rows: list[Row], progress: dict[str, Progress], seconds: float) -> list[night.Done]:
    return night.night(progress, time.monotonic() + seconds, lambda text: None, rows)


def test_a_row_goes_on_from_where_the_last_night_ended(tmp_path: Path) -> None:
    file, met = tmp_path / "progress.json", list[int]()
    for _ in range(3):
        progress = load(file)
        done = ran([row(counted(met))], progress, 0.03)
        save(file, progress)
    assert met == list(range(len(met)))
    assert done[0].total == len(met) > done[0].count >= 1


def test_what_broke_a_row_is_tried_first_until_it_holds(tmp_path: Path) -> None:
    file, met = tmp_path / "progress.json", list[int]()
    for wrong in (frozenset({2}), frozenset({2}), frozenset[int]()):
        progress = load(file)
        done = ran([row(counted(met, wrong))], progress, 0.05)
        save(file, progress)
        met.append(-1)
        assert bool(done[0].violations) == bool(wrong)
    first, second, third = " ".join(map(str, met)).split("-1")[:3]
    assert (first.split(), second.split()) == (["0", "1", "2"], ["2"])
    assert third.split()[:3] == ["2", "3", "4"]
    assert progress["R0 row of share 1"].broken == []


def test_time_is_shared_by_weight_and_nobody_is_left_out() -> None:
    small, big, late = list[int](), list[int](), list[int]()
    rows = [row(counted(small)), row(counted(big), share=4)]
    ran(rows, {}, 0.5)
    assert len(big) > 2 * len(small) > 0
    ran([row(counted(late))], {}, 0)
    assert late == [0]


def test_a_row_with_an_end_is_run_once_a_night_and_goes_on_if_it_was_cut_short() -> None:
    met = list[str]()

    def whole(budget: Budget) -> None:
        for _, case in budget.each("abc"):
            met.append(case)
            budget.done += 1

    progress: dict[str, Progress] = {}
    for _ in range(2):
        ran([row(whole, ALL)], progress, 1)
    assert "".join(met) == "abcabc"
    (done,) = ran([row(whole, ALL)], progress, 0)
    assert done.notes == ("1 of 3 cases had their turn",)
    ran([row(whole, ALL)], progress, 1)
    assert "".join(met) == "abcabc" + "a" + "bca"


def test_the_table_and_the_file_tell_what_ran() -> None:
    done = ran([row(counted([], frozenset({1})))], {}, 1)
    assert "R0   row of share 1" in table(done)[1]
    assert "1 VIOLATIONS" in table(done)[1]
    (said,) = document(done)
    assert (said["count"], said["goal"], said["violations"]) == (2, 100, ["seed 1: is wrong"])


@pytest.mark.parametrize("text", ["x", "[]", '{"R0": 7}', '{"R0": {"what": 1}}'])
def test_a_file_that_is_no_progress_is_one_line(tmp_path: Path, text: str) -> None:
    (tmp_path / "file").write_text(text)
    with pytest.raises(BadInput, match="--progress"):
        load(tmp_path / "file")


@pytest.mark.parametrize("wrong", [frozenset[int](), frozenset({0})])
def test_the_command_exits_1_if_a_promise_was_broken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wrong: frozenset[int]
) -> None:
    rows = [row(counted([], wrong))]
    real = night.night
    monkeypatch.setattr(night, "night", lambda done, until, tell: real(done, until, tell, rows))
    with pytest.raises(SystemExit) as left:
        cli.main(["--part", "tier", "--minutes", "0", "--json", str(tmp_path / "counts.json")])
    assert left.value.code == len(wrong)
    (said,) = json.loads((tmp_path / "counts.json").read_text())["tier"]
    assert len(said["violations"]) == len(wrong)
