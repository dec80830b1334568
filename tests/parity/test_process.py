"""Real runs in real processes: how they end, and that nothing is left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
LONGEST_S = 180


def started(*arguments: str) -> subprocess.Popen[str]:
    """A run in a session of its own, so that a signal reaches nobody else."""
    return subprocess.Popen(
        [sys.executable, "-m", "parity", "run", *arguments],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def server_of(run: subprocess.Popen[str]) -> int | None:
    """The process id of a server below a run."""
    listed = subprocess.run(
        ["ps", "-axww", "-o", "pid=,ppid=,args="], capture_output=True, text=True, check=True
    )
    rows = [line.split(None, 2) for line in listed.stdout.splitlines()]
    parents = {int(row[0]): int(row[1]) for row in rows}
    for row in rows:
        pid = int(row[0])
        # The watcher's command line holds the server's; the server is the watcher's child.
        if "--prompt-cache-size" in row[-1] and parents.get(parents[pid]) == run.pid:
            return pid
    return None


def until(condition: Callable[[], object]) -> None:
    """Wait for something that must come."""
    deadline = time.monotonic() + LONGEST_S
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.1)


def is_gone(pid: int) -> bool:
    """Whether no process has this id."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


@contextmanager
def whole_matrix() -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A run of everything, once its first server is there."""
    run = started()
    try:
        until(lambda: server_of(run) or run.poll() is not None)
        server = server_of(run)
        assert server is not None, run.communicate()
        yield run, server
    finally:
        if run.poll() is None:
            os.killpg(run.pid, signal.SIGKILL)
        run.communicate()


def test_an_interrupted_run_leaves_no_server() -> None:
    """Ctrl-C: exit 130, one line, no process left."""
    with whole_matrix() as (run, server):
        run.send_signal(signal.SIGINT)
        out, err = run.communicate(timeout=LONGEST_S)
    assert run.returncode == 130
    assert (out, err) == ("", "parity: interrupted\n")
    until(lambda: is_gone(server))


def test_a_killed_server_ends_the_run() -> None:
    """kill -9 of the server: exit 2, one line that names it and its log, no verdict."""
    with whole_matrix() as (run, server):
        os.kill(server, signal.SIGKILL)
        out, err = run.communicate(timeout=LONGEST_S)
    assert run.returncode == 2
    assert out == ""
    assert len(err.splitlines()) == 1
    assert "mlx_lm.server" in err
    log = Path(err.split("its log: ")[1].strip())
    assert log.is_file()
    log.unlink()
    log.parent.rmdir()


def test_a_run_says_what_it_compared(tmp_path: Path) -> None:
    """oracle-sampled, lossless-sampled, stop: a handful of cases through both servers, exit 0."""
    file = tmp_path / "run.json"
    chosen = (
        "dense/serial/two-model/d3 and early-stop and (top-p or /greedy)"
        " or serial/ngram/d8 and stop-across or dense/batch/off/d0/greedy/early-stop"
    )
    run = started("-k", chosen, "--json", str(file), "--report", str(tmp_path / "report"))
    out, err = run.communicate(timeout=LONGEST_S)
    assert (run.returncode, err) == (0, "")
    made = json.loads(file.read_text())
    assert out.splitlines()[-1] == made["summary"]
    written = {one.name for one in (tmp_path / "report").iterdir()}
    assert written == {"index.html", "report.json", "junit.xml", "summary.md"}
    assert json.loads((tmp_path / "report" / "report.json").read_text()) == made
    assert "5 cases (5 equal)" in made["summary"]
    assert {case["reference"] for case in made["cases"].values()} == {
        "mlx_lm.server",
        "mlx_lm.server --draft-model",
        "engine without drafter",
    }
    assert made["claims"] == {}
    assert made["environment"]["tf32"] == "off"
