"""`python -m parity list | run | review`."""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, NoReturn

import typer
from rich.console import Console
from rich.progress import Progress
from typer.exceptions import TyperException

import fixtures
from parity.cases import (
    DEPTHS,
    LANES,
    Case,
    Empty,
    Hole,
)
from parity.errors import BadInput, Unusable
from parity.matrix import extras, matrix, product_cells
from parity.models import Models, choose
from parity.report.words import ALL_EQUAL, INTERRUPTED, SOME_DIFFERENT, UNUSABLE, exit_code
from parity.runner import CaseResult, Claim, claims, in_running_order
from parity.selection import parse, shard

app = typer.Typer(
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    help="Hold an engine to mlx_lm.server, token for token.",
)

Selector = Annotated[
    str | None,
    typer.Option("-k", metavar="EXPR", help="Case ids: substrings, and, or, not, parentheses."),
]


Command = Callable[[], int]
"""What a command line asks for; returns the exit code. typer only reads the line: it would put its
own meaning on an interrupt or a closed pipe."""


@app.command("list")
def list_cases(
    k: Selector = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON array.")] = False,
    coverage: Annotated[
        bool, typer.Option("--coverage", help="Empty cells and why; exit 1 if one has no reason.")
    ] = False,
    unportable: Annotated[
        bool, typer.Option("--unportable", help="Snapshots kept for this backend only.")
    ] = False,
) -> Command:
    """Print the cases of the matrix."""
    if as_json + coverage + unportable > 1:
        raise BadInput("--json, --coverage and --unportable exclude each other")
    if coverage:
        return partial(_coverage, k)
    if unportable:
        return partial(_unportable, k)
    return partial(_list, k, as_json=as_json)


@app.command()
def run(
    k: Selector = None,
    target: Annotated[
        str | None, typer.Option(metavar="DIR", help="A model folder; default: the fixture.")
    ] = None,
    drafter: Annotated[
        str | None,
        typer.Option(metavar="DRAFTER", help="Only off, ngram, two-model or two-model:DIR."),
    ] = None,
    depth: Annotated[str | None, typer.Option(metavar="N", help="Only this draft depth.")] = None,
    lane: Annotated[str | None, typer.Option(help="Only serial or batch.")] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write all results to FILE.")
    ] = None,
    part: Annotated[
        str | None, typer.Option("--shard", metavar="i/n", help="Only every n-th case, from i.")
    ] = None,
) -> Command:
    """Compare the engine with its oracles and say what differs."""
    models = choose(target, drafter)
    every = matrix(fixtures.prompts())
    selected = _selected(every, k)
    cases = _narrowed(selected, models, drafter, depth, lane)
    if part is not None:
        cases = shard(cases, part)
    if not cases:
        raise BadInput("no case is left to run: the options exclude each other")
    if json_file is not None:
        check_writable(json_file)
    left_out = sum(map(models.leaves_out, selected))
    if left_out:
        print(f"{left_out} two-model cases are left out: name a draft, --drafter two-model:DIR")
    whole = models.are_fixtures and len(cases) == len(every)
    return partial(_run, cases, models, json_file, whole=whole)


@app.command()
def review(
    base: Annotated[str, typer.Option(metavar="REV", help="What to compare with.")] = "HEAD",
    accept: Annotated[
        list[str] | None, typer.Option(metavar="CASE", help="Record these cases anew.")
    ] = None,
    more: Annotated[list[str] | None, typer.Argument(metavar="CASE...", hidden=True)] = None,
) -> Command:
    """Say which snapshots differ from those of a git revision, or record cases anew."""
    if more and not accept:
        raise BadInput(f"unexpected argument {more[0]!r}: cases follow --accept")
    if accept:
        return partial(_accept, [*accept, *(more or [])])
    return partial(_review, base)


def main(arguments: Sequence[str] | None = None, application: typer.Typer = app) -> NoReturn:
    """Run a command and exit. What cannot be run is one line on stderr and exit 2."""
    # Asked to end, leave through the blocks that stop servers and remove logs.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        words = list(sys.argv[1:] if arguments is None else arguments)
        command = application(words, standalone_mode=False)
        # --help has printed and left a code.
        code = command if isinstance(command, int) else command()
        sys.stdout.flush()
    except (BadInput, Unusable) as error:
        _leave(" ".join(str(error).split()), UNUSABLE)
    except TyperException as error:
        _leave(" ".join(error.format_message().split()), UNUSABLE)
    except KeyboardInterrupt:
        _leave("interrupted", INTERRUPTED)
    except BrokenPipeError:
        # The reader (head, less) has seen enough; nothing may be flushed into the pipe any more.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(ALL_EQUAL)
    sys.exit(code)


def check_writable(file: Path) -> None:
    """Refuse a file that cannot be written before anything runs for it."""
    folder = file.absolute().parent
    if not folder.is_dir():
        raise BadInput(f"--json {file}: its folder does not exist")
    if file.exists() and not file.is_file():
        raise BadInput(f"--json {file}: is no regular file")
    try:
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise BadInput(f"--json {file}: cannot be written: {error.strerror}") from error


def _leave(line: str, code: int) -> NoReturn:
    print(f"parity: {line}", file=sys.stderr)
    sys.exit(code)


def _selected(cases: Sequence[Case], expression: str | None) -> list[Case]:
    if expression is None:
        return list(cases)
    predicate = parse(expression)
    selected = [case for case in cases if predicate(case.id)]
    if not selected:
        raise BadInput(f"selector {expression!r} matches none of {len(cases)} cases")
    return selected


def _narrowed(
    cases: Sequence[Case],
    models: Models,
    drafter: str | None,
    depth: str | None,
    lane: str | None,
) -> list[Case]:
    if depth is not None and depth not in map(str, DEPTHS):
        raise BadInput(f"depth {depth!r} is not one of {', '.join(map(str, DEPTHS))}")
    if lane is not None and lane not in LANES:
        raise BadInput(f"lane {lane!r} is not one of {', '.join(LANES)}")
    kind = None if drafter is None else drafter.partition(":")[0]
    narrowed = [
        case
        for case in cases
        if (kind is None or case.cell.drafter == kind)
        and (depth is None or str(case.cell.depth) == depth)
        and (lane is None or case.cell.lane == lane)
        and not models.leaves_out(case)
    ]
    # How an answer ends is claimed of the fixtures only.
    return narrowed if models.are_fixtures else [replace(case, finish=None) for case in narrowed]


def _run(cases: Sequence[Case], models: Models, json_file: Path | None, *, whole: bool) -> int:
    # Loading MLX takes a second, which a mistyped option need not wait for.
    from parity.report.document import document, write
    from parity.report.environment import environment, sources_digest
    from parity.report.table import show
    from parity.session import open_session

    results: list[CaseResult] = []
    stderr = Console(stderr=True)
    with (
        open_session(models) as session,
        Progress(console=stderr, disable=not stderr.is_terminal, transient=True) as progress,
    ):
        ordered = in_running_order(cases)
        session.references.ask_ahead(ordered)
        for case in progress.track(ordered, description="comparing"):
            results.append(session.run(case))
        session.references.check_alive()
    claimed: tuple[Claim, ...] = claims(results) if whole else ()
    made_with = environment()
    console = Console(width=None if sys.stdout.isatty() else 110)
    show(results, claimed, made_with, session.setting, console)
    if json_file is not None:
        made = document(results, claimed, made_with, sources_digest(), session.setting)
        try:
            write(json_file, made)
        except OSError as error:
            raise Unusable(f"--json {json_file}: not written: {error.strerror}") from error
    return exit_code(results, claimed)


def _list(expression: str | None, *, as_json: bool) -> int:
    cases = _selected(matrix(fixtures.prompts()), expression)
    if as_json:
        from parity.report.document import asked

        print(json.dumps([asked(case) for case in cases], indent=1))
    else:
        print("\n".join(case.id for case in cases))
    return ALL_EQUAL


def _unportable(expression: str | None) -> int:
    from parity.provenance import unportable
    from parity.report.environment import backend
    from parity.snapshots import FOLDER

    cases = _selected(matrix(fixtures.prompts()), expression)
    lines = unportable(FOLDER, backend(), cases)
    print("\n".join(lines) or f"nothing is kept for {backend()} alone")
    return ALL_EQUAL


def _review(base: str) -> int:
    from parity.review import changed_since

    changed = changed_since(base)
    for lines in changed.values():
        print("\n".join(lines))
    print(f"{len(changed)} cases moved since {base}")
    return SOME_DIFFERENT if changed else ALL_EQUAL


def _accept(case_ids: Sequence[str]) -> int:
    from parity.review import accept_cases

    return accept_cases(case_ids)


def _coverage(expression: str | None) -> int:
    chosen = parse(expression) if expression is not None else lambda _: True
    decided = [one for one in product_cells(fixtures.prompts()) if chosen(_cell_id(one))]
    if not decided:
        raise BadInput(f"selector {expression!r} matches no cell")
    holes = [one for one in decided if isinstance(one, Hole)]
    reasons: dict[str, dict[str, int]] = {}
    for one in decided:
        if isinstance(one, Empty):
            group = one.cell.id.rsplit("/", 1)[0]
            groups = reasons.setdefault(one.reason, {})
            groups[group] = groups.get(group, 0) + 1
    for reason, groups in reasons.items():
        print(f"empty: {reason}")
        for group, number in groups.items():
            print(f"  {group}/*  ({number} cells)")
    for hole in holes:
        print(f"hole: {hole.cell.id} has neither a case nor a reason")
    filled = sum(isinstance(one, Case) for one in decided)
    empty = len(decided) - filled - len(holes)
    named = sum(chosen(case.id) for case in extras(fixtures.prompts()))
    print(
        f"{len(decided)} cells: {filled} cases, {empty} empty with a reason, {len(holes)} holes; "
        f"{named} named cases beside them"
    )
    return 1 if holes else 0


def _cell_id(one: Case | Empty | Hole) -> str:
    return one.cell.id
