"""Snapshots: what is kept of a passed case, and in which file (`amber` writes them).

Compared are ids, text and finish reason (part `text`) and accepted/drafted per round (part
`trace`). Each part lives in one of two files per model and prompt kind: under `portable/` if every
decision behind it had a margin above the recording floor, else under the backend it was recorded
on.
Nothing is ever deleted for not having run: an entry goes only when its part moves to the other
file or its case has left the matrix.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Literal

from parity.cases import Case
from parity.plans import KV_BITS
from parity.trace import Answer

Part = Literal["text", "trace"]
PARTS: tuple[Part, ...] = ("text", "trace")

FOLDER = Path(__file__).parent / "__snapshots__"
PORTABLE = "portable"

_NAME = re.compile(r"test_(text|trace)\[(.+)\]")


def text_block(answer: Answer) -> str:
    """The text part: finish reason, ids, and the text as a Python literal."""
    ids = " ".join(map(str, answer.ids))
    return f"finish {answer.finish_reason}\nids    {ids}\ntext   {answer.text!r}"


def trace_block(answer: Answer) -> str:
    """The trace part: accepted/drafted of each round."""
    return "rounds " + " ".join(f"{one.accepted}/{len(one.draft)}" for one in answer.rounds)


BLOCKS: Mapping[Part, Callable[[Answer], str]] = {"text": text_block, "trace": trace_block}


def parts_of(case: Case) -> tuple[Part, ...]:
    """What is kept of a case: without a drafter there is no trace to speak of.

    Nothing with quantized keys and values, whose margins are not known (see `probe`).
    """
    if case.cell.model in KV_BITS:
        return ()
    return ("text",) if case.cell.drafter == "off" else PARTS


def entry_name(part: Part, case_id: str) -> str:
    """The name of an entry, which is the name of the test that writes it."""
    return f"test_{part}[{case_id}]"


def split_name(name: str) -> tuple[str, str]:
    """(part, case id) of an entry's name.

    Raises:
        ValueError: not a name that this suite writes.

    """
    match = _NAME.fullmatch(name)
    if match is None:
        raise ValueError(f"{name!r} is not the name of a snapshot of this suite")
    return match[1], match[2]


def file_of(folder: Path, storage: str, case_id: str) -> Path:
    """Where a case's entries are kept: one file per storage, model and prompt kind."""
    model, _, rest = case_id.partition("/")
    kind = rest.rsplit("/", 1)[-1]
    return folder / storage / model / f"{kind}.ambr"


def files(folder: Path) -> list[Path]:
    """Every snapshot file there is."""
    return sorted(folder.glob("*/*/*.ambr"))


def storage_in(file: Path) -> str:
    """The storage a file belongs to."""
    return file.parent.parent.name


def parse(text: str) -> dict[str, str]:
    """Entries by name from the text of one snapshot file."""
    entries: dict[str, str] = {}
    name, lines = "", list[str]()
    for line in text.split("\n"):
        if line.startswith("# name: "):
            name, lines = line.removeprefix("# name: "), []
        elif line == "# ---":
            entries[name] = "\n".join(lines)
        elif line.startswith("  "):
            lines.append(line[2:])
    return entries


def entries_in(file: Path) -> dict[str, str]:
    """Entries by name; none if there is no such file."""
    return parse(file.read_text(encoding="utf-8")) if file.is_file() else {}


def storage_of(folder: Path, part: Part, case_id: str, backend: str) -> str | None:
    """Which storage holds an entry for this backend: `portable`, the backend's own, or None."""
    for storage in (PORTABLE, backend):
        if entry_name(part, case_id) in entries_in(file_of(folder, storage, case_id)):
            return storage
    return None


def strangers(folder: Path, case_ids: Collection[str]) -> list[tuple[Path, str]]:
    """Entries, of any storage, whose case is not in the matrix: (file, name)."""
    return [
        (file, name)
        for file in files(folder)
        for name in entries_in(file)
        if split_name(name)[1] not in case_ids
    ]
