"""`run --subject` as it is typed: real processes, exit codes, and nothing left behind."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import mlx.core as mx
import pytest

import fixtures
from oracle.server import Server
from parity import waiting
from parity.errors import Unusable
from parity.remote import process
from parity.remote.process import SubjectProcess
from tests.parity.altered import Body, Script, altered, drop_ids
from tests.parity.test_process import LONGEST_S, ROOT, is_gone, started, until

TARGET = fixtures.target_dir("dense")
FEW = ("--target", str(TARGET), "--max-tokens", "12", "-k", "capital and (once or stream)")


def run(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """A run to its end, with further variables in its environment.

    A busy machine may make it say on stderr what it waits for; that is left out here.
    """
    done = subprocess.run(
        [sys.executable, "-m", "parity", "run", *arguments],
        cwd=ROOT,
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        check=False,
        timeout=4 * LONGEST_S,
    )
    lines = done.stderr.splitlines(keepends=True)
    done.stderr = "".join(line for line in lines if not line.startswith("parity: waiting for "))
    return done


def serving(model: Path) -> str:
    """The command of an mlx_lm.server."""
    return shlex.join([sys.executable, "-m", "mlx_lm", "server", "--model", str(model)]) + (
        " --port {port}"
    )


@pytest.fixture(scope="module")
def upstream() -> Iterator[Server]:
    """What the altered servers speak for."""
    with Server(TARGET) as server:
        yield server


def test_a_second_mlx_lm_server_is_equal() -> None:
    """Started by us: capabilities, verdicts, what was not checked, and the closing line."""
    done = run(*FEW, "--subject-command", serving(TARGET))
    lines = done.stdout.splitlines()
    assert (done.returncode, done.stderr) == (0, "")
    places = [
        next(i for i, line in enumerate(lines) if line.startswith(start))
        for start in ("ids in answers     yes", "equal ", "not checked: sampling", "2 cases")
    ]
    assert places == sorted(places)
    assert "2 cases (2 equal, 0 of 4 claims unmet), 26/26 positions checked" in lines[-1]


def test_one_scaled_weight_is_different(tmp_path: Path) -> None:
    """The first divergence is a sentence: position, tokens, margin, and how to see it again."""
    model = tmp_path / "scaled"
    shutil.copytree(TARGET, model)
    weights = mx.load(str(model / "model.safetensors"))
    assert isinstance(weights, dict)
    name = "model.layers.1.mlp.down_proj.weight"
    weights[name] = weights[name] * 1.5
    mx.eval(weights)
    mx.save_safetensors(str(model / "model.safetensors"), weights, {"format": "mlx"})
    done = run(*FEW, "--subject-command", serving(model))
    assert (done.returncode, done.stderr) == (1, "")
    assert "claims/subject/logprobs: not met: " in done.stdout
    assert "target/once/greedy/capital: position " in done.stdout
    assert "--subject-command" in done.stdout


def test_another_model_is_different() -> None:
    """One with the same tokenizer: only what it says gives it away."""
    model = fixtures.drafter_dir("dense-draft")
    done = run(*FEW, "--subject-command", serving(model))
    assert (done.returncode, done.stderr) == (1, "")
    assert "different    target/once/greedy/capital" in done.stdout


def test_text_alone_is_compared(upstream: Server) -> None:
    """Without ids: equal, and different at a token of the oracle."""

    def change(request: Body, answer: Body) -> None:
        drop_ids(request, answer)
        if request["max_tokens"] == 12:
            answer["choices"][0]["text"] = answer["choices"][0]["text"][:-1] + "#"

    with altered(Script(upstream.url, change=drop_ids)) as url:
        equal = run(*FEW, "--subject", url)
    assert (equal.returncode, equal.stderr) == (0, "")
    assert "not checked: ids: compared as text, in 2 of 2 cases" in equal.stdout
    with altered(Script(upstream.url, change=change)) as url:
        different = run(*FEW, "--subject", url)
    assert (different.returncode, different.stderr) == (1, "")
    assert "position 11: expected" in different.stdout
    assert "got 40 '#'" in different.stdout


def test_equal_answers_of_another_model_are_not_enough(upstream: Server) -> None:
    """mutants: a claim about the subject does not reach the exit code."""

    def change(request: Body, answer: Body) -> None:
        if request["max_tokens"] < 12:
            answer["usage"]["prompt_tokens"] += 1

    with altered(Script(upstream.url, change=change)) as url:
        done = run(*FEW, "--subject", url)
    assert (done.returncode, done.stderr) == (1, "")
    assert "2 cases (2 equal, 1 of 4 claims unmet)" in done.stdout
    assert "claims/subject/prompt-tokens: not met: " in done.stdout


@pytest.mark.parametrize(
    ("way", "says"),
    [
        ("stall", "no whole answer within 2 s"),
        ("close", "no whole answer: peer closed connection"),
        ("garbage", "not JSON: <html>It works!</html>"),
    ],
)
def test_a_server_that_is_none_is_one_line(way: str, says: str, tmp_path: Path) -> None:
    """Exit 2, nothing on stdout, no log left behind that nobody names."""
    with altered(Script(fails=lambda _: way)) as url:
        done = run(*FEW, "--subject", url, "--timeout", "2", TMPDIR=str(tmp_path))
    assert not list(tmp_path.glob("mlx-parity-*"))
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"parity: subject {url}: POST /v1/completions (prompt ")
    assert says in line


def test_a_server_that_fails_over_a_capability_is_no_verdict(upstream: Server) -> None:
    """Its cases are not just left out: exit 2, and what was asked."""
    script = Script(upstream.url, fails=lambda request: "500" if request.get("stream") else None)
    with altered(script) as url:
        done = run(*FEW, "--subject", url)
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"parity: subject {url}: POST /v1/completions (prompt ")
    assert line.endswith(", streamed): status 500: out of memory")


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_a_subject_of_ours_does_not_outlive_the_run(tmp_path: Path, how: signal.Signals) -> None:
    """However the run ends."""
    pid_file = tmp_path / "pid"
    command = f"sh -c 'echo $$ > {pid_file}; exec sleep 600' {{port}}"
    process = started(*FEW, "--subject-command", command)
    try:
        until(lambda: pid_file.exists() and pid_file.read_text().strip())
        pid = int(pid_file.read_text())
        os.kill(process.pid, how)
        process.communicate(timeout=LONGEST_S)
        until(lambda: is_gone(pid))
    finally:
        process.kill()


def test_a_subject_that_does_not_start_is_one_line() -> None:
    """Its last words, and where the others are."""
    command = f"{sys.executable} -c 'raise RuntimeError(\"no memory\")' {{port}}"
    began_s = time.monotonic()
    done = run(*FEW, "--subject-command", command)
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert "--subject-command ended: RuntimeError: no memory; its log: " in line
    assert time.monotonic() - began_s < LONGEST_S
    log = Path(line.split("its log: ")[1])
    shutil.rmtree(log.parent)


@pytest.mark.parametrize(("status", "says"), [(502, "still status 502"), (None, "nothing answers")])
def test_a_wait_for_a_start_is_told_and_ends_with_the_last_status(
    status: int | None,
    says: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """What is waited for, how long at most, and what came instead."""
    monkeypatch.setattr(process, "START_S", 2.0)
    monkeypatch.setattr(waiting, "PATIENCE_S", 0.1)
    subject = SubjectProcess("sleep 600", None, tmp_path / "log")
    with subject, altered(Script(list_status=status or 0)) as url:
        if status is not None:
            subject.url = url
        with pytest.raises(Unusable, match=f"^--subject-command: {says} at .* after 2 s; its log"):
            subject.await_ready()
        line = f"parity: waiting for --subject-command to answer at {subject.url}, for at most 2 s"
    assert capsys.readouterr().err == line + "\n"


def test_a_subject_needs_a_target() -> None:
    """The oracle must serve something."""
    done = run("--subject", "http://127.0.0.1:1")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "parity: a subject needs --target: the model that the oracle serves\n"
