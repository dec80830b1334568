"""What review says about snapshot files against a git revision."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from parity.errors import BadInput
from parity.review import changed_since

NOVEL, LONG = "dense/serial/ngram/d3/greedy/novel", "dense/batch/off/d0/greedy/long"


def block(part: str, case_id: str, *lines: str) -> str:
    """One entry as it stands in a file."""
    body = "".join(f"  {line}\n" for line in lines)
    return f"# name: test_{part}[{case_id}]\n{body}# ---\n"


def ids_of(text: str) -> str:
    """Ids of an ASCII text under the byte-level tokenizer of the fixtures."""
    from fixtures import tokenizer

    return " ".join(map(str, tokenizer.encode(tokenizer.build(), text)))


def text_entry(case_id: str, text: str, finish: str = "length") -> str:
    """A text entry that fits its ids."""
    return block("text", case_id, f"finish {finish}", f"ids    {ids_of(text)}", f"text   {text!r}")


def trace_entry(case_id: str, rounds: str) -> str:
    """A trace entry."""
    return block("trace", case_id, f"rounds {rounds}")


def write(folder: Path, name: str, *entries: str) -> None:
    """One snapshot file."""
    file = folder / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("# serializer version: 1\n" + "".join(entries))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A snapshot folder in a repository, committed, below the repository's root."""
    folder = tmp_path / "parity" / "__snapshots__"
    write(
        folder,
        "portable/dense/novel.ambr",
        text_entry(NOVEL, "one two three"),
        trace_entry(NOVEL, "3/3 0/3"),
    )
    write(folder, "cpu-here/dense/long.ambr", text_entry(LONG, "abc"))
    (folder / "provenance.json").write_text("{}")
    settings = ["-c", "user.name=t", "-c", "user.email=t@example.org", "-c", "commit.gpgsign=false"]
    for command in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "base"]):
        subprocess.run(["git", *settings, *command], cwd=tmp_path, check=True)
    return folder


def test_nothing_moved_is_nothing(folder: Path) -> None:
    """Margins and versions are never compared."""
    (folder / "provenance.json").write_text('{"other": 1}')
    assert changed_since("HEAD", folder) == {}


def test_a_moved_text_is_shown_at_its_first_difference(folder: Path) -> None:
    """Both texts, the ids there decoded, and the command that reproduces it."""
    write(
        folder,
        "portable/dense/novel.ambr",
        text_entry(NOVEL, "one tOo three"),
        trace_entry(NOVEL, "3/3 0/3"),
    )
    ((case_id, lines),) = changed_since("HEAD", folder).items()
    assert case_id == NOVEL
    assert lines == [
        f"{NOVEL}: the text moved",
        "    first difference at token 5, after 'one t'",
        f"    was {ids_of('wo three')} 'wo three', finish length",
        "        the whole text: 'one two three'",
        f"    now {ids_of('Oo three')} 'Oo three', finish length",
        "        the whole text: 'one tOo three'",
        f"    python -m parity run -k {NOVEL}",
    ]


def test_only_a_trace_that_moved_is_called_so(folder: Path) -> None:
    """A reviewer sees at once that the text did not move."""
    write(
        folder,
        "portable/dense/novel.ambr",
        text_entry(NOVEL, "one two three"),
        trace_entry(NOVEL, "3/3 1/3"),
    )
    (lines,) = changed_since("HEAD", folder).values()
    assert lines[0] == f"{NOVEL}: only the trace moved"
    assert lines[1:3] == ["    was rounds 3/3 0/3", "    now rounds 3/3 1/3"]


def test_a_part_that_is_kept_elsewhere_new_or_gone_is_said(folder: Path) -> None:
    """Losing portability, a case, or a file is a change like any other."""
    write(folder, "portable/dense/novel.ambr", trace_entry(NOVEL, "3/3 0/3"))
    write(folder, "cpu-here/dense/novel.ambr", text_entry(NOVEL, "one two three"))
    (folder / "cpu-here" / "dense" / "long.ambr").unlink()
    write(folder, "cpu-here/dense/utf8.ambr", text_entry("dense/batch/off/d0/greedy/utf8", "x"))
    first_lines = [lines[0] for lines in changed_since("HEAD", folder).values()]
    assert first_lines == [
        f"{LONG}: text removed",
        "dense/batch/off/d0/greedy/utf8: new text",
        f"{NOVEL}: the same text, kept under cpu-here instead of portable",
    ]


def test_another_base_is_another_comparison(folder: Path) -> None:
    """--base names any revision."""
    write(folder, "cpu-here/dense/long.ambr", text_entry(LONG, "abd"))
    commit = [
        "git",
        "-c",
        "user.name=t",
        "-c",
        "user.email=t@example.org",
        "commit",
        "-qam",
        "next",
    ]
    subprocess.run(commit, cwd=folder, check=True)
    assert changed_since("HEAD", folder) == {}
    assert list(changed_since("HEAD~1", folder)) == [LONG]


@pytest.mark.parametrize("revision", ["nowhere", "HEAD:parity", "--all"])
def test_a_base_that_is_no_revision_is_refused(folder: Path, revision: str) -> None:
    """Bad input names the value."""
    with pytest.raises(BadInput, match=revision):
        changed_since(revision, folder)


def test_outside_a_repository_review_is_refused(tmp_path: Path) -> None:
    """Bad input, not a traceback."""
    (tmp_path / "__snapshots__").mkdir()
    with pytest.raises(BadInput, match="not a git repository"):
        changed_since("HEAD", tmp_path / "__snapshots__")
