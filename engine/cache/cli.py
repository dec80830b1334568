"""`python -m engine cache`: what a durable tier's folder holds, and what is wrong with it."""

from __future__ import annotations

import json
import time
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..errors import BadInput
from .inspect import Seen, clean, look

app = typer.Typer(help="The files of a durable tier.", rich_markup_mode=None)

Folder = Annotated[str, typer.Argument(metavar="DIR", help="what --ssd-cache named")]
Json = Annotated[bool, typer.Option("--json", help="JSON instead of a table")]

UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


@app.command("ls")
def list_command(folder: Folder, as_json: Json = False) -> None:
    """Every entry: what model and drafter it belongs to, how many tokens, how large, how old."""
    found = list(look(_there(folder)))
    if as_json:
        print(json.dumps([_row(seen) for seen in found], ensure_ascii=False))
        return
    table = Table(box=None, pad_edge=False)
    for name in ("entry", "model", "holds", "tokens", "size", "used"):
        table.add_column(name, justify="right" if name in ("tokens", "size", "used") else "left")
    for seen in found:
        row = _row(seen)
        cells = (
            row["entry"][:8],
            row["model"],
            row["holds"] if seen.state == "readable" else f"{seen.state}: {seen.problem}",
            str(row["tokens"] or ""),
            _size(seen.size),
            "" if seen.used_s is None else _age(time.time() - seen.used_s),
        )
        table.add_row(*(Text(_printable(cell)) for cell in cells))
    if found:
        _print(table)
    total = sum(seen.size for seen in found)
    print(f"{_entries(found)}, {_size(total)}")


@app.command("show")
def show_command(
    folder: Folder,
    entry: Annotated[str, typer.Argument(help="the beginning of an entry's name")],
    as_json: Json = False,
) -> None:
    """One entry: everything its header says, and its tensors."""
    matching = [seen for seen in look(_there(folder)) if seen.place.name.startswith(entry)]
    if len(matching) != 1:
        raise BadInput(
            f"the entries in {folder} that begin with {entry!r} are {len(matching)}; "
            "1 is needed (ls names them)"
        )
    row = _row(matching[0]) | _details(matching[0])
    if as_json:
        print(json.dumps(row, ensure_ascii=False))
        return
    for key, value in row.items():
        for number, line in enumerate(value if isinstance(value, list) else [value]):
            said = line if isinstance(line, str) else json.dumps(line, ensure_ascii=False)
            print(f"{'' if number else key:14} {_printable(said)}")


@app.command("verify")
def verify_command(folder: Folder, as_json: Json = False) -> None:
    """Check every byte of every entry; exit 1 if one is damaged, or cannot be read."""
    found = list(look(_there(folder), verify=True))
    bad = [seen for seen in found if seen.state != "readable"]
    count = Counter(seen.state for seen in bad)
    if as_json:
        rows = [{"file": str(s.place), "state": s.state, "problem": s.problem} for s in bad]
        print(json.dumps({"entries": len(found), "problems": rows}, ensure_ascii=False))
    else:
        for seen in bad:
            print(f"{seen.state}: {seen.place}: {_printable(seen.problem)}")
        counts = ", ".join(f"{count[state]} {state}" for state in ("damaged", "unread", "foreign"))
        print(f"{_entries(found)}, {counts}")
    if count["damaged"] or count["unread"]:
        raise typer.Exit(1)


@app.command("gc")
def gc_command(
    folder: Folder,
    max_bytes: Annotated[int | None, typer.Option(help="keep the most recent ones up to")] = None,
    verify: Annotated[bool, typer.Option("--verify", help="look for damage in every byte")] = False,
    as_json: Json = False,
) -> None:
    """Remove files with damaged headers and what killed writers left; keep to --max-bytes.

    Exit 1 if something could not be looked at or removed.
    """
    if max_bytes is not None and max_bytes < 0:
        raise BadInput(f"--max-bytes must be at least 0, got {max_bytes}")
    removed = clean(_there(folder), max_bytes=max_bytes, verify=verify)
    if as_json:
        print(json.dumps(asdict(removed)))
    else:
        print(
            f"removed {removed.damaged} damaged, {removed.orphans} left by writers, "
            f"{removed.evicted} above the cap; {_size(removed.freed_bytes)} of entries freed"
            + (f"; {removed.failed} could not be looked at or removed" if removed.failed else "")
        )
    if removed.failed:
        raise typer.Exit(1)


def _there(folder: str) -> Path:
    if not folder:
        raise BadInput("DIR is empty; a folder is needed")
    if not Path(folder).is_dir():
        wrong = "is not a folder" if Path(folder).exists() else "does not exist"
        raise BadInput(f"cache folder {folder} {wrong}")
    return Path(folder)


def _row(seen: Seen) -> dict[str, Any]:
    header = seen.header
    row: dict[str, Any] = {
        "entry": seen.place.name.partition(".")[0],
        "file": str(seen.place),
        "bytes": seen.size,
        "used": None if seen.used_s is None else round(seen.used_s, 3),
        "state": seen.state,
        "problem": seen.problem,
        "model": "",
        "holds": "",
        "tokens": 0,
    }
    if header is not None:
        drafts = ", ".join(a.schema.partition(":")[0] for a in header.entry.attachments)
        holds = "unfinished generation" if header.entry.generation is not None else "prompt"
        row["model"] = header.origin.identity.model
        row["holds"] = holds + (f" with {drafts}" if drafts else "")
        row["tokens"] = len(header.entry.tokens)
    return row


def _details(seen: Seen) -> dict[str, Any]:
    header = seen.header
    if header is None:
        return {}
    entry, origin = header.entry, header.origin
    reuse = entry.reuse
    return {
        "fingerprint": origin.identity.fingerprint,
        "tokenizer": origin.identity.tokenizer,
        "created": origin.created,
        "namespace": entry.namespace,
        "codec": entry.codec,
        "serves": f"{reuse.minimum} to all tokens" if reuse.trimmable else "all its tokens only",
        "layout": list(entry.layout),
        "attachments": [f"{a.schema} {json.dumps(dict(a.metadata))}" for a in entry.attachments],
        "tensors": [f"{t.name} {t.dtype} {list(t.shape)}" for t in entry.tensors],
    }


def _printable(text: str) -> str:
    """What anyone may have written into a file, without what a terminal would act on."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def _entries(found: list[Seen]) -> str:
    """How many there are, folders that could not be read left out."""
    count = sum(seen.used_s is not None for seen in found)
    return f"{count} entr{'y' if count == 1 else 'ies'}"


def _print(table: Table) -> None:
    """Print it as every other text is: a reader that has gone is an error that `main` knows."""
    console = Console(width=None if Console().is_terminal else 160)
    with console.capture() as text:
        console.print(table)
    print(text.get(), end="")


def _size(count: int) -> str:
    size, unit = float(count), 0
    while size >= 1024 and unit < len(UNITS) - 1:
        size, unit = size / 1024, unit + 1
    return f"{count} B" if unit == 0 else f"{size:.1f} {UNITS[unit]}"


def _age(seconds: float) -> str:
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{int(seconds / length)} {unit} ago"
    return f"{max(0, int(seconds))} s ago"
