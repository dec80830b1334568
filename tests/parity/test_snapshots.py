"""Where snapshots are kept, what changes them, and that nothing is deleted for not having run."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from parity.snapshots import parse, split_name, text_block, trace_block
from parity.trace import Round
from tests.parity.fakes import answer

ROOT = Path(__file__).parent.parent.parent
MINI = Path(__file__).with_name("mini_matrix.py")

# Margins of (text, trace): safe, text safe only, none safe, no drafter's margin.
KINDS: dict[str, Any] = {
    "both": {"ids": [97, 98], "accepted": [2, 0], "margins": [0.3, 0.02]},
    "half": {"ids": [98, 99], "accepted": [1], "margins": [0.3, 0.01]},
    "none": {"ids": [99], "accepted": [0], "margins": [0.01, 0.5]},
    "free": {"ids": [100], "accepted": [0], "margins": [0.011, None]},
}


@dataclass
class Mini:
    """A copy of the mini matrix in a folder of its own."""

    folder: Path
    said: dict[str, Any]

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        said = self.folder / "said.json"
        said.write_text(json.dumps(self.said))
        return subprocess.run(
            [
                # A folder, as nox has it: from a folder syrupy would delete more than from a file.
                *(sys.executable, "-m", "pytest", "-q", "-rs", "."),
                *("-p", "syrupy", "-p", "xdist", "-p", "no:cacheprovider"),
                *arguments,
            ],
            cwd=self.folder,
            # Other plugins take two seconds to load and have no part in this.
            env={
                **os.environ,
                "MINI": str(said),
                "PYTHONPATH": str(ROOT),
                "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
            },
            capture_output=True,
            text=True,
            check=False,
        )

    def files(self) -> dict[str, str]:
        root = self.folder / "__snapshots__"
        return {
            str(file.relative_to(root)): file.read_text()
            for file in sorted(root.rglob("*"))
            if file.is_file()
        }

    def kept(self) -> set[tuple[str, str, str]]:
        """(storage, kind, part) of every entry."""
        return {
            (Path(name).parts[0], Path(name).stem, split_name(entry)[0])
            for name, text in self.files().items()
            if name.endswith(".ambr")
            for entry in parse(text)
        }


def new_mini(folder: Path) -> Mini:
    (folder / "test_mini.py").write_text(MINI.read_text())
    (folder / "conftest.py").write_text(
        "from parity.collect import keep_all_snapshots as pytest_configure\n"
    )
    said = {"backend": "cpu-here", "version": "1", "kinds": copy.deepcopy(KINDS)}
    return Mini(folder, said)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Mini:
    """Everything recorded once; tests copy it."""
    mini = new_mini(tmp_path_factory.mktemp("recorded"))
    done = mini.run("--snapshot-update")
    assert done.returncode == 0, done.stdout
    return mini


@pytest.fixture
def mini(recorded: Mini, tmp_path: Path) -> Mini:
    """A copy of the recorded matrix."""
    copied = new_mini(tmp_path)
    for name, text in recorded.files().items():
        file = tmp_path / "__snapshots__" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return copied


def test_a_part_is_portable_only_above_the_recording_floor(recorded: Mini) -> None:
    """portable: each part by every decision behind it; no portable trace to a text that is not."""
    assert recorded.kept() == {
        ("portable", "both", "text"),
        ("portable", "both", "trace"),
        ("portable", "half", "text"),
        ("cpu-here", "half", "trace"),
        ("cpu-here", "none", "text"),
        ("cpu-here", "none", "trace"),
        ("portable", "free", "text"),
        ("portable", "free", "trace"),
    }


def test_provenance_stands_beside_and_is_rounded(recorded: Mini) -> None:
    """Margins as powers of two, with the environment they were measured in."""
    stored = json.loads(recorded.files()["provenance.json"])
    cases = stored["backends"]["cpu-here"]
    both = cases["dense/serial/ngram/d3/greedy/both"]
    assert (both["text"], both["trace"]) == (0.25, 0.015625)
    assert cases["dense/serial/ngram/d3/greedy/free"]["trace"] is None
    assert stored["environments"][both["environment"]] == {"mlx": "1"}


def test_a_new_version_that_moves_no_token_changes_no_file(mini: Mini) -> None:
    """Only recording writes; comparing reads no version and no margin."""
    before = mini.files()
    mini.said["version"] = "2"
    mini.said["kinds"]["both"]["margins"] = [0.1, 0.001]
    done = mini.run()
    assert done.returncode == 0, done.stdout
    assert "8 passed" in done.stdout
    assert mini.files() == before


def test_one_change_in_one_snapshot_fails_its_case(mini: Mini) -> None:
    """Ids, text, finish reason and trace are all compared."""
    for name, old, new in (
        ("portable/dense/both.ambr", "ids    97 98", "ids    97 99"),
        ("portable/dense/free.ambr", "text   'd'", "text   'c'"),
        ("portable/dense/half.ambr", "finish length", "finish stop"),
        ("cpu-here/dense/half.ambr", "rounds 1/2", "rounds 2/2"),
    ):
        file = mini.folder / "__snapshots__" / name
        assert old in file.read_text()
        file.write_text(file.read_text().replace(old, new))
    done = mini.run()
    assert done.returncode == 1
    assert "4 failed, 4 passed" in done.stdout
    for failed in ("both: its text", "free: its text", "half: its text", "half: its trace"):
        assert f"dense/serial/ngram/d3/greedy/{failed} is not the recorded one" in done.stdout


@pytest.mark.parametrize("how", [("-k", "both"), ("-n", "2", "-k", "both or free")])
def test_a_partial_recording_deletes_nothing(mini: Mini, how: tuple[str, ...]) -> None:
    """Neither -k nor xdist's workers touch the entries of cases that did not run."""
    before = mini.files()
    mini.said["kinds"]["both"]["ids"] = [98, 97]
    done = mini.run("--snapshot-update", *how)
    assert done.returncode == 0, done.stdout
    after = mini.files()
    assert {name for name in before if after.get(name) != before[name]} == {
        "portable/dense/both.ambr"
    }
    assert set(before) == set(after)
    assert "ids    98 97" in after["portable/dense/both.ambr"]


def test_recording_elsewhere_keeps_what_was_recorded_here(mini: Mini) -> None:
    """A whole run on another backend uses none of this one's entries, and deletes none."""
    before = mini.files()
    mini.said["backend"] = "gpu-there"
    assert mini.run("--snapshot-update").returncode == 0
    after = mini.files()
    here = {name for name in before if name.startswith("cpu-here/")}
    assert here
    assert all(after[name] == before[name] for name in here)
    assert any(name.startswith("gpu-there/") for name in after)


def test_a_part_that_loses_its_margin_leaves_the_portable_file(mini: Mini) -> None:
    """Kept in one place only; the trace follows its text."""
    mini.said["kinds"]["both"]["margins"] = [0.001, 0.5]
    assert mini.run("--snapshot-update", "-k", "both").returncode == 0
    of_both = {entry for entry in mini.kept() if entry[1] == "both"}
    assert of_both == {("cpu-here", "both", "text"), ("cpu-here", "both", "trace")}


def test_a_case_that_left_the_matrix_leaves_the_files_when_recording(mini: Mini) -> None:
    """It is no partial run that drops it: the matrix no longer has it."""
    del mini.said["kinds"]["free"]
    assert mini.run("--snapshot-update", "-k", "both").returncode == 0
    assert {kind for _, kind, _ in mini.kept()} == {"both", "half", "none"}
    assert "greedy/free" not in mini.files()["provenance.json"]


def test_elsewhere_only_what_is_portable_is_compared_and_the_rest_is_said(mini: Mini) -> None:
    """No silent pass on a backend that was never recorded."""
    mini.said["backend"] = "gpu-there"
    done = mini.run()
    assert done.returncode == 0, done.stdout
    assert "5 passed, 3 skipped" in done.stdout
    assert "nothing is recorded for gpu-there" in done.stdout
    mini.said["kinds"]["both"]["ids"] = [1]
    assert mini.run().returncode == 1


def test_a_missing_snapshot_on_a_recorded_backend_is_a_failure(mini: Mini) -> None:
    """And so it is where nothing was ever recorded."""
    (mini.folder / "__snapshots__" / "cpu-here" / "dense" / "none.ambr").unlink()
    done = mini.run()
    assert "2 failed, 6 passed" in done.stdout
    assert "no snapshot of its trace for cpu-here" in done.stdout
    (mini.folder / "__snapshots__" / "provenance.json").unlink()
    mini.said["backend"] = "gpu-there"
    done = mini.run("-k", "none or half")
    assert "3 failed, 1 passed" in done.stdout
    assert "skipped" not in done.stdout


def test_only_an_equal_case_is_recorded(mini: Mini) -> None:
    """Recording does not turn a deviation, a tie or an open case into the truth."""
    before = mini.files()
    verdicts = {"both": "different", "half": "near tie", "none": "inconclusive"}
    for kind, verdict in verdicts.items():
        mini.said["kinds"][kind] |= {"ids": [1, 2], "verdict": verdict}
    done = mini.run("--snapshot-update", "-k", "not free")
    assert done.returncode == 1
    for verdict in verdicts.values():
        assert done.stdout.count(f"not recorded, the verdict is {verdict}") == 2
    assert mini.files() == before


def test_blocks_are_one_line_per_field() -> None:
    """Reviewable: a text with line breaks and quotes stays in its line."""
    odd = answer((97,), text="a\n'\u2028\"", rounds=(Round((1, 2), 1, (3,)), Round((), 0, (4,))))
    assert text_block(odd).count("\n") == 2
    assert trace_block(odd) == "rounds 1/2 0/0"
