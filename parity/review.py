"""What moved in the snapshots between a git revision and the working tree, in text."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from fixtures import tokenizer
from parity.errors import BadInput
from parity.plans import DENSE, catalogue
from parity.report.words import ALL_EQUAL, SOME_DIFFERENT, UNUSABLE, reproduce
from parity.snapshots import (
    FOLDER,
    entries_in,
    entry_name,
    files,
    parse,
    parts_of,
    split_name,
    storage_in,
)

Decode = Callable[[Sequence[str]], str]
Stored = dict[tuple[str, str], dict[str, str]]
"""(case id, part) -> storage -> block."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One stored part: where it is kept and what it says."""

    storage: str
    block: str


@dataclass(frozen=True, slots=True)
class Move:
    """One part of one case that is not as it was; None where a side has no entry."""

    case_id: str
    part: str
    old: Entry | None
    new: Entry | None

    @property
    def said(self) -> str:
        """What happened, in a few words."""
        if self.old is None:
            return f"new {self.part}"
        if self.new is None:
            return f"{self.part} removed"
        if self.old.block != self.new.block:
            return f"the {self.part} moved"
        return f"the same {self.part}, kept under {self.new.storage} instead of {self.old.storage}"


def changed_since(base: str, folder: Path = FOLDER) -> dict[str, list[str]]:
    """Every case that moved since `base`, with the lines that say how."""
    by_case: dict[str, list[Move]] = {}
    for move in moves_between(at_revision(folder, base), in_working_tree(folder)):
        by_case.setdefault(move.case_id, []).append(move)
    return {case_id: list(_describe(case_id, moves)) for case_id, moves in by_case.items()}


def moves_between(old: Stored, new: Stored) -> list[Move]:
    """All moves, ordered by case and then text before trace."""
    return [
        Move(case_id, part, before, after)
        for case_id, part in sorted(old.keys() | new.keys())
        for before, after in _pairs(old.get((case_id, part), {}), new.get((case_id, part), {}))
    ]


def _pairs(old: dict[str, str], new: dict[str, str]) -> Iterator[tuple[Entry | None, Entry | None]]:
    """What differs by storage; an entry that left one storage for another is one pair."""
    for storage in sorted(old.keys() & new.keys()):
        if old[storage] != new[storage]:
            yield Entry(storage, old[storage]), Entry(storage, new[storage])
    gone = [Entry(storage, old[storage]) for storage in sorted(old.keys() - new.keys())]
    come = [Entry(storage, new[storage]) for storage in sorted(new.keys() - old.keys())]
    while gone or come:
        yield gone.pop(0) if gone else None, come.pop(0) if come else None


def in_working_tree(folder: Path) -> Stored:
    """All entries as the files say now."""
    return _stored(
        (storage_in(file), name, block)
        for file in files(folder)
        for name, block in entries_in(file).items()
    )


def at_revision(folder: Path, revision: str) -> Stored:
    """All entries as they were at a git revision.

    Raises:
        BadInput: no such revision, or no repository.

    """
    _git(folder, "rev-parse", "--verify", "--quiet", "--end-of-options", f"{revision}^{{commit}}")
    listed = _git(folder, "ls-tree", "-r", "-z", "--name-only", revision, f"./{folder.name}/")
    return _stored(
        (storage_in(Path(name)), entry, block)
        for name in listed.split("\0")
        if name.endswith(".ambr")
        for entry, block in parse(_git(folder, "show", f"{revision}:./{name}")).items()
    )


def _stored(entries: Iterator[tuple[str, str, str]]) -> Stored:
    stored: Stored = {}
    for storage, name, block in entries:
        part, case_id = split_name(name)
        stored.setdefault((case_id, part), {})[storage] = block
    return stored


def _git(folder: Path, *arguments: str) -> str:
    """Run a reading git command next to the snapshot folder."""
    try:
        done = subprocess.run(
            ["git", *arguments], cwd=folder.parent, capture_output=True, check=True
        )
    except FileNotFoundError as error:
        raise BadInput("review needs git, which is not installed") from error
    except subprocess.CalledProcessError as error:
        said = error.stderr.decode(errors="replace").strip() or "no such revision"
        raise BadInput(f"git {' '.join(arguments)}: {said}") from error
    return done.stdout.decode("utf-8")


def _describe(case_id: str, moves: Sequence[Move]) -> Iterator[str]:
    text_moved = any(move.part == "text" for move in moves)
    said = ", ".join(move.said for move in moves)
    yield f"{case_id}: {said}" if text_moved else f"{case_id}: only {said}"
    for move in moves:
        if move.old and move.new and move.old.block != move.new.block:
            differ = _texts_differ if move.part == "text" else _traces_differ
            decode = _decode if case_id.startswith(f"{DENSE}/") else None
            yield from (f"    {line}" for line in differ(move.old.block, move.new.block, decode))
    yield f"    {reproduce(case_id)}"


def _traces_differ(old: str, new: str, _: Decode | None) -> Iterator[str]:
    yield f"was {old}"
    yield f"now {new}"


def _texts_differ(old: str, new: str, decode: Decode | None) -> Iterator[str]:
    """The first token that differs, and what either side says from there on.

    Without `decode` in ids; the whole texts are stored and shown anyway.
    """
    show = decode or (lambda _: "…")
    before, after = _fields(old), _fields(new)
    old_ids, new_ids = before["ids"].split(), after["ids"].split()
    same = 0
    while same < min(len(old_ids), len(new_ids)) and old_ids[same] == new_ids[same]:
        same += 1
    yield f"first difference at token {same}, after {show(old_ids[:same])!r}"
    for word, ids, fields in (("was", old_ids, before), ("now", new_ids, after)):
        rest = ids[same:]
        yield f"{word} {' '.join(rest) or '-'} {show(rest)!r}, finish {fields['finish']}"
        yield f"    the whole text: {ast.literal_eval(fields['text'])!r}"


def _fields(block: str) -> dict[str, str]:
    return {
        name: value.strip()
        for name, _, value in (line.partition(" ") for line in block.split("\n"))
    }


def _decode(ids: Sequence[str]) -> str:
    return tokenizer.decode(tokenizer.build(), [int(token) for token in ids])


def accept_cases(case_ids: Sequence[str]) -> int:
    """Record the snapshots of these cases anew, and no others; pytest says how it went.

    Raises:
        BadInput: there is no such case.

    """
    # With the ids as a selector the plans that run on demand are among them.
    known = {case.id: case for case in catalogue(" ".join(case_ids))}
    for case_id in case_ids:
        if case_id not in known:
            raise BadInput(f"no case {case_id!r} among {len(known)}; see python -m parity list")
    tests = [
        f"parity/test_matrix.py::{entry_name(part, case_id)}"
        for case_id in case_ids
        for part in parts_of(known[case_id])
    ]
    command = [sys.executable, "-m", "pytest", "-q", "--no-header", "--snapshot-update", *tests]
    code = subprocess.run(command, cwd=FOLDER.parent.parent, check=False).returncode
    if code == 0:
        return ALL_EQUAL
    return UNUSABLE if code == UNUSABLE else SOME_DIFFERENT
