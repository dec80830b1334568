"""Known deviations are claims: checked in shape, run, and loud when they stop being true."""

from __future__ import annotations

import ast
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet

from oracle import cli
from oracle.known import (
    CLAIMS,
    Claims,
    ClaimsError,
    Deviation,
    State,
    check,
    check_all,
    mlx_lm_version,
    read_claims,
    select,
)

ALLOWED = {"mlx", "mlx_lm", "tokenizers", "transformers"}
IDS = [f"D{number}" for number in range(1, 28)]


@pytest.fixture(scope="module")
def claims() -> Claims:
    return read_claims()


def test_every_reproducer_can_be_pasted_into_a_report(claims: Claims) -> None:
    """`honest-gap`: short, and in need of nothing of ours."""
    assert [d.id for d in claims.deviations] == IDS
    files = sorted(d.file.name for d in claims.deviations)
    assert files == sorted(file.name for file in CLAIMS.parent.glob("*.py"))
    for deviation in claims.deviations:
        source = deviation.file.read_text(encoding="utf-8")
        assert len(source.splitlines()) <= 40
        imported = set()
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Import):
                imported |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 0
                assert node.module is not None
                imported.add(node.module.split(".")[0])
        assert imported - ALLOWED <= set(sys.stdlib_module_names)


def test_every_claim_covers_the_pinned_release(claims: Claims) -> None:
    """`honest-gap`: a claim that leaves it out would never be tried."""
    assert claims.pinned == mlx_lm_version()
    for deviation in claims.deviations:
        assert claims.pinned in deviation.affects


@pytest.mark.parametrize("name", IDS)
def test_it_is_live_on_the_pinned_release(claims: Claims, name: str) -> None:
    """`honest-gap`: run, not only written down."""
    (deviation,) = select(claims, name)
    finding = check(deviation, claims.pinned)
    assert (finding.state, finding.error) == (State.LIVE, "")
    assert finding.as_claimed
    assert finding.expected != finding.actual


def written(folder: Path, script: str, **changes: object) -> Path:
    """A claims file of one entry, and its reproducer."""
    (folder / "repro.py").write_text(script, encoding="utf-8")
    fields: dict[str, object] = {
        "id": "D0",
        "title": "t",
        "reason": "r",
        "trigger": "t",
        "affects": "==0.32.2",
        "links": [],
        "file": "repro.py",
        **changes,
    }
    lines = [f"{key} = {value!r}" for key, value in fields.items() if value is not None]
    path = folder / "claims.toml"
    text = "\n".join(['pinned = "0.32.2"', "[[deviation]]", *lines])
    path.write_text(text.replace("True", "true"), encoding="utf-8")
    return path


DIFFERENT = "print('expected: 1'); print('actual: 2')"
EQUAL = "print('expected: 1'); print('actual: 1')"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"title": None}, "D0: title must be a text, got None"),
        ({"id": None}, "an entry without id: id must be a text"),
        ({"reason": " "}, "D0: reason must be a text"),
        ({"affects": "0.32"}, "D0: affects must be a range like '==0.32.2', got '0.32'"),
        ({"links": ["ftp://x"]}, "D0: links must be a list of https addresses"),
        ({"links": None}, "D0: links must be a list of https addresses"),
        ({"file": "other.py"}, r"D0: there is no other\.py beside the claims"),
        ({"colour": "red"}, "D0: unknown fields colour"),
    ],
)
def test_malformed_claims_are_named(tmp_path: Path, changes: dict[str, object], words: str) -> None:
    """`honest-gap`: the file is data, and checked as such."""
    with pytest.raises(ClaimsError, match=words):
        read_claims(written(tmp_path, DIFFERENT, **changes))


def test_unreadable_and_double_claims_are_named(tmp_path: Path) -> None:
    """`honest-gap`: likewise."""
    path = written(tmp_path, DIFFERENT)
    entry = path.read_text(encoding="utf-8").split("\n", 1)[1]
    path.write_text(f"{path.read_text(encoding='utf-8')}\n{entry}", encoding="utf-8")
    with pytest.raises(ClaimsError, match="an id occurs twice in D0, D0"):
        read_claims(path)
    path.write_text("pinned = 1", encoding="utf-8")
    with pytest.raises(ClaimsError, match="pinned must be a release of mlx-lm, got 1"):
        read_claims(path)
    path.write_text("[", encoding="utf-8")
    with pytest.raises(ClaimsError, match="cannot be read"):
        read_claims(path)


@pytest.mark.parametrize(
    ("script", "affects", "code", "words"),
    [
        (DIFFERENT, "==0.32.2", 0, "1 as claimed, 0 not"),
        (EQUAL, "==0.32.2", 1, "STALE: it is not live on 0.32.2"),
        (DIFFERENT, "<0.32", 1, "STALE: it is live on 0.32.2, which its range leaves out"),
        (EQUAL, "<0.32", 1, "STALE: its range leaves out 0.32.2, the pinned release"),
        ("print('expected: 1')", "==0.32.2", 1, "STALE: the claim could not be tried"),
        ("1 / 0", "==0.32.2", 1, "did not run: ZeroDivisionError"),
    ],
)
def test_a_false_claim_on_the_pinned_release_exits_1(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    script: str,
    affects: str,
    code: int,
    words: str,
) -> None:
    """`honest-gap`: it fails when it stops being true, and when it was never tried."""
    claims = read_claims(written(tmp_path, script, affects=affects))
    monkeypatch.setattr(cli, "read_claims", lambda: claims)
    assert cli.main(["deviations"]) == code
    assert words in capsys.readouterr().out


@pytest.mark.parametrize("script", [EQUAL, DIFFERENT, "1 / 0"])
@pytest.mark.parametrize("affects", ["==0.32.2", ">=0.32,<10"])
def test_on_another_release_a_false_claim_is_a_notice(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    script: str,
    affects: str,
) -> None:
    """`honest-gap`: `--mlx-lm PATH` decides which mlx-lm is imported."""
    site = tmp_path / "site"
    (site / "mlx_lm").mkdir(parents=True)
    (site / "mlx_lm" / "__init__.py").touch()
    (site / "mlx_lm" / "_version.py").write_text('__version__ = "9.9"', encoding="utf-8")
    claims = read_claims(written(tmp_path, f"import mlx_lm._version; {script}", affects=affects))
    monkeypatch.setattr(cli, "read_claims", lambda: claims)
    assert cli.main(["deviations", "--mlx-lm", str(site)]) == 0
    out = capsys.readouterr().out
    assert "on mlx-lm 9.9 (the claims are for 0.32.2)" in out
    true = (script == DIFFERENT) == (affects != "==0.32.2") and script != "1 / 0"
    assert ("notice" in out) == (not true)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["deviations", "D99"], "unknown deviation 'D99': known are D1, D2"),
        (["deviations", "--mlx-lm", "/no/such"], "/no/such holds no mlx_lm package with a version"),
        (["deviations", "--bogus"], "--bogus"),
        (["deviations", "D1", "D2"], "D2"),
        (["bogus"], "bogus"),
        ([], "Missing command"),
    ],
)
def test_unusable_input_is_one_line_and_exit_2(
    capsys: pytest.CaptureFixture[str], arguments: list[str], words: str
) -> None:
    """Bad input: on standard error, without a traceback, naming the value."""
    assert cli.main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert words in captured.err
    assert captured.err.count("\n") == 1


def test_ids_are_found_in_any_case(claims: Claims) -> None:
    """`d2` is D2."""
    assert [d.id for d in select(claims, "d2")] == ["D2"]
    assert select(claims, None) == claims.deviations


def test_a_reproducer_that_hangs_is_ended(
    claims: Claims, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bounded wait."""
    monkeypatch.setattr("oracle.known.RUN_TIMEOUT_S", 0.3)
    script = tmp_path / "hang.py"
    script.write_text("import time; time.sleep(60)", encoding="utf-8")
    hanging: Deviation = replace(claims.deviations[0], file=script, affects=SpecifierSet("==1"))
    finding = check(hanging, "1")
    assert finding.error == "not done within 0.3 s"
    assert not finding.as_claimed


def of(folder: Path, scripts: dict[str, str], like: Deviation) -> list[Deviation]:
    """Deviations ``like`` another, with scripts of their own."""
    found = []
    for name, script in scripts.items():
        file = folder / f"{name}.py"
        file.write_text(script, encoding="utf-8")
        found.append(replace(like, id=name, file=file))
    return found


def test_findings_come_in_the_order_of_the_claims(claims: Claims, tmp_path: Path) -> None:
    """Two run at a time: the second waits for the first to be told, however quick it is."""
    met = tmp_path / "met"
    place = f"import pathlib, time; met = pathlib.Path({str(met)!r})\n"
    slow = f"{place}while not met.exists(): time.sleep(0.01)\n{DIFFERENT}"
    scripts = {"slow": slow, "quick": f"{place}met.touch(); {EQUAL}", "last": DIFFERENT}
    findings = list(check_all(of(tmp_path, scripts, claims.deviations[0]), "1"))
    states = [(finding.deviation.id, finding.state) for finding in findings]
    assert states == [("slow", State.LIVE), ("quick", State.NOT_LIVE), ("last", State.LIVE)]


LEAVING = """
import subprocess, sys, time, pathlib
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
pathlib.Path(__file__).with_name("pid").write_text(str(child.pid))
time.sleep(60)
"""


@pytest.mark.parametrize("end", ["time out", "close"])
def test_nothing_is_left_running(
    claims: Claims, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    """What a reproducer started, such as a server, ends with it."""
    pid = tmp_path / "pid"
    scripts = {"first": DIFFERENT, "leaving": LEAVING}
    findings = check_all(of(tmp_path, scripts, claims.deviations[0]), "1")
    next(findings)
    deadline = time.monotonic() + 60
    while not (pid.exists() and pid.read_text()) and time.monotonic() < deadline:
        time.sleep(0.01)
    if end == "time out":
        monkeypatch.setattr("oracle.known.RUN_TIMEOUT_S", 0.1)
        assert next(findings).error == "not done within 0.1 s"
    else:
        findings.close()
    assert not runs(int(pid.read_text()))


def runs(pid: int) -> bool:
    """Whether a process does; one that ended and was not yet waited for does not."""
    done = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True)
    return done.stdout.strip()[:1] not in ("", "Z")
