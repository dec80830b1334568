"""The second oracle's client says in one line what is wrong, without an mlx-vlm to ask."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from oracle.drafters import Block, Chain, Drafters, Kind, Pair, python_in_environment
from oracle.vlm_process import VERSION, WorkerFailed

from .test_server import running, soon

GREETING = f'{{"mlx": "0", "mlx-vlm": "{VERSION}"}}'
StandIn = Callable[[str], Path]


@pytest.fixture
def stand_in(tmp_path: Path) -> StandIn:
    """Write an executable that is started as a Python would be, and runs other code."""

    def write(code: str) -> Path:
        path = tmp_path / "python"
        command = shlex.join([sys.executable, "-c", f"import os, sys, time\n{code}"])
        path.write_text(f"#!/bin/sh\nexec {command}\n", encoding="utf-8")
        path.chmod(0o755)
        return path

    return write


def failure(python: Path, **options: float) -> str:
    with pytest.raises(WorkerFailed) as raised, Drafters(python, **options):
        pass
    return str(raised.value)


def folder(path: Path) -> Path:
    path.mkdir()
    (path / "config.json").write_text("{}", encoding="utf-8")
    return path


def test_an_environment_that_is_none_is_named(tmp_path: Path, stand_in: StandIn) -> None:
    """`one line`: no such Python, one without mlx-vlm, and one with another version of it."""
    missing = tmp_path / "nowhere" / "python"
    assert failure(missing) == (
        f"no Python of an mlx-vlm environment at {missing}: No such file or directory"
    )
    assert failure(Path(sys.executable)) == f"{sys.executable}: mlx-vlm is not installed"
    other = stand_in("""print('{"mlx": "0", "mlx-vlm": "0.1"}')""")
    assert failure(other) == f"{other} has mlx-vlm 0.1, the oracle is {VERSION}"


def test_a_worker_that_dies_says_its_last_words(stand_in: StandIn) -> None:
    """`one line`: exit code and the last line of stderr; the log keeps the lines before."""
    python = stand_in("print('first', file=sys.stderr); sys.exit('no memory')")
    with pytest.raises(WorkerFailed) as raised:
        Drafters(python).__enter__()
    assert str(raised.value) == "the mlx-vlm worker died at the start (exit 1): no memory"
    assert raised.value.log == "first\nno memory"
    assert "(exit 3): it wrote nothing" in failure(stand_in("os._exit(3)"))


def test_a_worker_that_hangs_is_ended(stand_in: StandIn, tmp_path: Path) -> None:
    """`time limit`: at the start and at a request; nothing is left running, nor asked again."""
    assert failure(stand_in("time.sleep(60)"), timeout_s=0.3) == (
        "the mlx-vlm worker did not answer the start within 0.3 s"
    )
    python = stand_in(f"print({GREETING!r}, flush=True); time.sleep(60)")
    model = folder(tmp_path / "model")
    with Drafters(python, timeout_s=2.0) as drafters:
        with pytest.raises(WorkerFailed, match=r"did not answer describe within 2 s"):
            drafters.pair("dspark", model, model)
        assert not running(drafters.process.pid)
        with pytest.raises(WorkerFailed, match=r"worker is not running"):
            drafters.pair("dspark", model, model)


def test_it_is_gone_behind_the_block(stand_in: StandIn) -> None:
    """`close`: an idle worker ends with its input, a busy one is killed."""
    with Drafters(stand_in(f"print({GREETING!r}, flush=True); sys.stdin.read()")) as drafters:
        assert running(drafters.process.pid)
    assert soon(lambda: not running(drafters.process.pid))


def test_a_refusal_and_a_failure_differ(stand_in: StandIn, tmp_path: Path) -> None:
    """`errors`: what mlx-vlm rules out is the caller's `ValueError`, what breaks in it is not."""
    model = folder(tmp_path / "model")
    answers = ['{"refused": "no taps"}', '{"failed": "KeyError: 1"}']
    code = f"for line in {[GREETING, *answers]!r}: print(line, flush=True)\nsys.stdin.read()"
    with Drafters(stand_in(code)) as drafters:
        with pytest.raises(ValueError, match=r"^no taps$"):
            drafters.pair("dspark", model, model)
        with pytest.raises(WorkerFailed, match=r"^mlx-vlm failed at describe: KeyError: 1$"):
            drafters.pair("dspark", model, model)


DESCRIPTION = (
    '{"answer": {"drafter_class": "D", "target_class": "T", "caches": [], "block_size": 4, '
    '"tap_layers": [], "tensors": {}}}'
)


def test_bad_input_never_reaches_the_worker(stand_in: StandIn, tmp_path: Path) -> None:
    """`bad input`: each is refused by value and limit; the stand-in would not answer it."""
    model = folder(tmp_path / "model")
    code = f"for line in {[GREETING, DESCRIPTION]!r}: print(line, flush=True)\nsys.stdin.read()"
    with pytest.raises(ValueError, match=r"timeout_s must be above 0, got 0"):
        Drafters("python", timeout_s=0)
    with Drafters(stand_in(code), timeout_s=20.0) as drafters:
        unknown: Kind = "eagle3"  # type: ignore[assignment]  # that is the point
        with pytest.raises(ValueError, match=r"kind must be one of assistant, .* got 'eagle3'"):
            drafters.pair(unknown, model, model)
        with pytest.raises(ValueError, match=r"model folder .*nowhere has no config.json"):
            drafters.pair("dspark", model, tmp_path / "nowhere")
        pair = drafters.pair("dspark", model, model)
        with pytest.raises(ValueError, match=r"at least 1 token, got 0"):
            pair.first_round([], 1)
        with pytest.raises(ValueError, match=r"depth must be at least 1, got 0"):
            pair.first_round([1], 0)
        with pytest.raises(ValueError, match=r"max_tokens must be at least 1, got 0"):
            pair.trace([1], 0, 1)
        with pytest.raises(ValueError, match=r"dspark takes Block inputs, got Chain"):
            pair.module(Chain([1], np.zeros((1, 4), np.float32)))
        with pytest.raises(ValueError, match=r"depth must be at least 1, got 0"):
            pair.module(Block(1, np.zeros((1, 4), np.float32), 0))
        chain = Pair(drafters.process, "qwen_mtp", model, model, norm_values=False)
        with pytest.raises(ValueError, match=r"for N >= 1 ids, got \(1, 4\) for 2"):
            chain.module(Chain([1, 2], np.zeros((1, 4), np.float32)))


def test_the_environment_variable_names_the_python(monkeypatch: pytest.MonkeyPatch) -> None:
    """`option`: without it there is no second oracle, and its tests are not collected."""
    monkeypatch.setitem(os.environ, "MLX_PARITY_MLX_VLM_PYTHON", "/x/python")
    assert python_in_environment() == Path("/x/python")
    monkeypatch.delitem(os.environ, "MLX_PARITY_MLX_VLM_PYTHON")
    assert python_in_environment() is None
