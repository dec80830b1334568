"""Processes that are killed while they serve from a folder of states (R20, R21)."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from engine.cache.inspect import look
from tests.engine.pools import pool

KILLED = (
    ("dense", "off"),
    ("dense", "two-model"),
    ("sliding", "assistant"),
    ("hybrid", "mtp"),
    ("mla", "mtp"),
    ("hybrid", "ngram"),
)
"""Each is killed twice: twelve processes."""

REQUESTS = tuple(map(str, range(0, 20, 2)))


def hosted(folder: Path, family: str, kind: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tests.cache.host", str(folder), family, kind, *REQUESTS]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def check(lines: Sequence[str], family: str, kind: str) -> int:
    """Every whole answer is the one without a tier; how many prompt tokens were kept."""
    own, kept = pool(family, kind), 0
    for line in lines:
        if line.endswith("\n") and line.startswith("["):
            number, tokens, text, cached = json.loads(line)
            assert (tuple(tokens), text) == (own.alone[number].tokens, own.alone[number].text)
            kept += cached
    return kept


@pytest.mark.parametrize(("family", "kind"), KILLED)
def test_text_after_kill(family: str, kind: str, tmp_path: Path) -> None:
    """R21: `kill -9` at random moments of serving and writing; then one that is left alone."""
    draw = random.Random(f"{family} {kind}")
    for _ in range(2):
        with hosted(tmp_path, family, kind) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            time.sleep(draw.random() * 4)
            process.kill()
            check(process.stdout.readlines(), family, kind)
    with hosted(tmp_path, family, kind) as process:
        out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    lines = out.splitlines(keepends=True)
    assert len(lines) == 1 + len(REQUESTS)
    check(lines, family, kind)
    seen = list(look(tmp_path, verify=True))
    assert seen
    assert not [one for one in seen if one.problem]
    assert not list(tmp_path.rglob("*.tmp"))


def test_sigterm_keeps_what_was_begun(tmp_path: Path) -> None:
    """R20: terminated in the middle of generating, it ends in time and loses nothing."""
    with hosted(tmp_path, "dense", "two-model") as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        first = process.stdout.readline()
        process.send_signal(signal.SIGTERM)
        started = time.monotonic()
        _, err = process.communicate(timeout=60)
    assert process.returncode == 143, err
    assert time.monotonic() - started < 35
    assert check([first], "dense", "two-model") == 0
    seen = list(look(tmp_path, verify=True))
    assert seen
    assert not [one for one in seen if one.problem]
    with hosted(tmp_path, "dense", "two-model") as process:
        out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert check(out.splitlines(keepends=True), "dense", "two-model") > 0
