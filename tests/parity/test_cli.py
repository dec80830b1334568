"""Bad input is one line on stderr and exit 2; an interrupt is one line and exit 130."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import fixtures
from parity import cli
from tests.parity.fakes import PROMPTS

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture(autouse=True)
def prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A small matrix."""
    monkeypatch.setattr(fixtures, "prompts", lambda target="dense": PROMPTS)


def leave(*arguments: str) -> int:
    """Run a command and return its exit code."""
    with pytest.raises(SystemExit) as left:
        cli.main(arguments)
    assert isinstance(left.value.code, int)
    return left.value.code


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        ([], "command"),
        (["nonsense"], "nonsense"),
        (["run", "--nonsense"], "--nonsense"),
        (["run", "--depth", "many"], "many"),
        (["run", "--depth", "-1"], "depth '-1' is not one of 0, 1, 3, 8"),
        (["run", "--lane", "fast"], "lane 'fast' is not one of serial, batch"),
        (["run", "--drafter", "eagle"], "drafter 'eagle' is not one of off, ngram, two-model"),
        (["run", "--drafter", "ngram:x"], "ngram takes no folder"),
        (["run", "--drafter", "two-model:/no/such"], "--drafter two-model:DIR needs --target"),
        (["run", "--target", ".", "--drafter", "two-model:/no/such"], "/no/such does not exist"),
        (["run", "--drafter", "dspark:x"], "dspark takes no folder"),
        (["run", "--target", ".", "--drafter", "dspark:x"], "dspark:x: with --target only off, ng"),
        (
            ["run", "--target", ".", "--drafter", "mtp"],
            "drafter mtp: with --target only off, ngram",
        ),
        (["run", "--prompts", "x"], "--prompts needs --target"),
        (["run", "--target", ".", "--prompts", "/no/such"], "--prompts /no/such cannot be read"),
        (["run", "--target", ".", "--depth", "-1"], "depth '-1' is not a number of at least 0"),
        (["run", "--target", ".", "--max-tokens", "0"], "--max-tokens must be at least 1, got 0"),
        (["run", "--target", "/no/such"], "/no/such does not exist"),
        (["run", "--target", ".", "--drafter", "two-model"], "two-model:DIR"),
        (["run", "-k", "nothing-like-it"], "'nothing-like-it' matches none of"),
        (["run", "-k", "a and"], "selector 'a and'"),
        (["run", "--shard", "3/2"], "shard '3/2'"),
        (["run", "-k", "serial/off", "--depth", "3"], "exclude each other"),
        (["run", "--json", "/no/such/file"], "--json /no/such/file: its folder does not exist"),
        (["run", "--junit", "/no/such/file"], "--junit /no/such/file: its folder does not exist"),
        (["run", "--report", "/dev/null"], "--report /dev/null: is no folder"),
        (["run", "--report", "/dev/null/x/y"], "--report /dev/null/x/y: /dev/null is no folder"),
        (["list", "-k", "nothing-like-it"], "'nothing-like-it' matches none of"),
        (["list", "--coverage", "-k", "nothing-like-it"], "'nothing-like-it' matches no cell"),
        (["list", "--json", "--coverage"], "exclude each other"),
        (["review", "x"], "'x'"),
        (["review", "--accept", "no/such/case"], "no case 'no/such/case'"),
        (["review", "--base", "nowhere"], "nowhere"),
    ],
)
def test_bad_input_is_one_line_that_names_it(
    arguments: list[str],
    names: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Exit 2, nothing on stdout, no traceback, no box."""
    models = Path("/no/models")
    monkeypatch.setattr(fixtures, "target_dir", lambda _: models)
    monkeypatch.setattr(fixtures, "drafter_dir", lambda _: models)
    assert leave(*arguments) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert len(said.err.splitlines()) == 1
    assert names in said.err


def test_a_folder_without_a_model_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What the engine refuses is refused here in its words."""
    assert leave("run", "--target", str(tmp_path)) == 2
    said = capsys.readouterr()
    assert len(said.err.splitlines()) == 1
    assert str(tmp_path) in said.err


def test_an_interrupt_is_130(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C: one line, and the exit code shells expect."""

    def interrupted(*_: object, **__: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "_list", interrupted)
    assert leave("list") == 130
    assert capsys.readouterr().err == "parity: interrupted\n"


@pytest.mark.parametrize(
    "command",
    [("parity", "list"), ("oracle", "deviations", "D25")],
    ids=" ".join,
)
def test_output_that_cannot_be_written_is_one_line(command: tuple[str, ...]) -> None:
    """A full disk is no difference."""
    if not Path("/dev/full").exists():
        pytest.skip("this system has no /dev/full")
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", *command],
            cwd=ROOT,
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    said = f"{command[0]}: cannot write: No space left on device\n"
    assert (done.returncode, done.stderr) == (2, said)


def test_a_defect_of_ours_is_no_difference(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Python's own exit code for a traceback is 1, which says "different" here."""

    def broken(_: str | None = None) -> None:
        raise KeyError("defect")

    monkeypatch.setattr(cli, "catalogue", broken)
    assert leave("list") == 2
    assert "KeyError: 'defect'" in capsys.readouterr().err


def test_list_prints_ids_and_json(capsys: pytest.CaptureFixture[str]) -> None:
    """The JSON says what is asked, of whom, and under which law."""
    assert leave("list", "-k", "dense/serial/two-model/d3/top-p+sequential/novel") == 0
    assert capsys.readouterr().out == "dense/serial/two-model/d3/top-p+sequential/novel\n"
    assert leave("list", "--json", "-k", "dense/serial/two-model/d3/top-p+sequential/novel") == 0
    (case,) = json.loads(capsys.readouterr().out)
    assert (case["temperature"], case["top_p"], case["rng"]) == (0.8, 0.9, "sequential")
    assert case["reference"] == "mlx_lm.server --draft-model"


def test_a_process_says_no_in_one_line() -> None:
    """The same through a real process, which has its own excepthook."""
    done = subprocess.run(
        [sys.executable, "-m", "parity", "run", "--depth", "5"],
        cwd=ROOT,
        env={**os.environ, "COLUMNS": "20"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert done.stderr.splitlines() == ["parity: depth '5' is not one of 0, 1, 3, 8"]


def test_the_commands_need_no_package_of_the_tests() -> None:
    """What README installs is without the extra `test`, and is enough to run and to review."""
    script = (
        "import sys; sys.modules.update(dict.fromkeys(('pytest', 'syrupy', 'hypothesis'), None));"
        "import parity.running, parity.provenance, parity.review, parity.fuzz.cli, parity.bench.cli"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
