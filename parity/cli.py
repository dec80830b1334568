"""`python -m parity list | run | review`."""

from __future__ import annotations

import io
import json
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, NoReturn

import typer
from typer.exceptions import TyperException

from engine.signals import leave_in_order
from parity.cases import (
    DEPTHS,
    LANES,
    MAX_TOKENS,
    Case,
    Empty,
    Hole,
)
from parity.errors import BadInput, Unusable
from parity.matrix import cells, extras, matrix
from parity.models import Models, given_models, known_models, split_drafter
from parity.plans import BUILT_IN, catalogue, given, known, served
from parity.prompts import read_prompts
from parity.remote.address import START_S, TIMEOUT_S, Address, address
from parity.report.words import (
    ALL_EQUAL,
    INTERRUPTED,
    SOME_DIFFERENT,
    UNUSABLE,
    counted,
)
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
        str | None,
        typer.Option(metavar="DIR|HF-ID", help="Any mlx-lm model; default: the fixtures."),
    ] = None,
    drafter: Annotated[
        str | None,
        typer.Option(metavar="DRAFTER", help="Only off, ngram, two-model or two-model:DIR."),
    ] = None,
    depth: Annotated[str | None, typer.Option(metavar="N", help="Only this draft depth.")] = None,
    lane: Annotated[str | None, typer.Option(help="Only serial or batch.")] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="With --target: a prompt a line, or JSONL."),
    ] = None,
    max_tokens: Annotated[
        int, typer.Option(metavar="N", help="With --target: tokens per answer.")
    ] = MAX_TOKENS,
    subject: Annotated[
        str | None,
        typer.Option(
            metavar="URL|engine",
            help="With --target: an OpenAI-compatible server; default: our engine, in process.",
        ),
    ] = None,
    subject_command: Annotated[
        str | None,
        typer.Option(
            metavar="CMD",
            help=f"Start the subject, within {START_S:g} s; {{port}} in CMD is a free port.",
        ),
    ] = None,
    subject_model: Annotated[
        str | None, typer.Option(metavar="NAME", help="The model that the subject is asked for.")
    ] = None,
    timeout: Annotated[
        float | None,
        typer.Option(
            metavar="SECONDS", help=f"For each request to a subject; default: {TIMEOUT_S:g}."
        ),
    ] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write all results to FILE.")
    ] = None,
    junit_file: Annotated[
        Path | None, typer.Option("--junit", metavar="FILE", help="Write JUnit XML to FILE.")
    ] = None,
    report: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Write a page, JSON, JUnit XML and Markdown into DIR."),
    ] = None,
    part: Annotated[
        str | None, typer.Option("--shard", metavar="i/n", help="Only every n-th case, from i.")
    ] = None,
) -> Command:
    """Compare the engine, or a server, with its oracles and say what differs."""
    at = address(subject, subject_command, subject_model, timeout)
    if at is not None:
        for option, given_one in (("--drafter", drafter), ("--depth", depth), ("--lane", lane)):
            if given_one is not None:
                raise BadInput(f"{option} is for the engine: a server drafts as it likes")
        if target is None:
            raise BadInput("a subject needs --target: the model that the oracle serves")
    kind, folder = split_drafter(drafter, with_target=target is not None)
    if target is None:
        for option, value in (("--prompts", prompts), ("--drafter two-model:DIR", folder or None)):
            if value is not None:
                raise BadInput(f"{option} needs --target")
        every = catalogue(k)
        models_of: Callable[[str], Models] = known_models
    else:
        if max_tokens < 1:
            raise BadInput(f"--max-tokens must be at least 1, got {max_tokens}")
        if depth is not None and not depth.isdecimal():
            raise BadInput(f"depth {depth!r} is not a number of at least 0")
        further: tuple[str, ...] = ()
        if prompts is not None:
            further += ("--prompts", str(prompts))
        if max_tokens != MAX_TOKENS:
            further += ("--max-tokens", str(max_tokens))
        if depth is not None:
            further += ("--depth", depth)
        if at is not None:
            further += at.options
        models = given_models(target, drafter, further)
        asked = BUILT_IN if prompts is None else read_prompts(prompts)
        if at is not None:
            planned = matrix([served(asked, max_tokens)])
        else:
            planned = matrix([given(asked, max_tokens, 3 if depth is None else int(depth))])
        depth = None
        every = tuple(case for case in planned if not models.leaves_out(case))

        def models_of(_: str) -> Models:
            return models

    cases = _narrowed(_selected(every, k), kind, depth, lane)
    if part is not None:
        cases = shard(cases, part)
    if not cases:
        raise BadInput("no case is left to run: the options exclude each other")
    whole = target is None and len(cases) == len(catalogue())
    return partial(_run, cases, models_of, at, (json_file, junit_file, report), whole=whole)


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


@leave_in_order()  # through the blocks that stop servers and remove logs
def main(arguments: Sequence[str] | None = None, application: typer.Typer = app) -> NoReturn:
    """Run a command and exit. What cannot be run is one line on stderr and exit 2."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # what servers say may have no UTF-8 form
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
        _drop_output()
        sys.exit(ALL_EQUAL)
    except OSError as error:  # output that cannot be written, most likely
        _drop_output()
        _leave(f"{error.filename or 'cannot write'}: {error.strerror or error}", UNUSABLE)
    except Exception:  # a defect of ours: python's own exit code for it, 1, would say "different"
        traceback.print_exc()
        sys.exit(UNUSABLE)
    sys.exit(code)


def _drop_output() -> None:
    """What is still to be written to stdout goes nowhere, so that leaving cannot fail over it."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


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
    cases: Sequence[Case], drafter: str | None, depth: str | None, lane: str | None
) -> list[Case]:
    if depth is not None and depth not in map(str, DEPTHS):
        raise BadInput(f"depth {depth!r} is not one of {', '.join(map(str, DEPTHS))}")
    if lane is not None and lane not in LANES:
        raise BadInput(f"lane {lane!r} is not one of {', '.join(LANES)}")
    return [
        case
        for case in cases
        if (drafter is None or case.cell.drafter == drafter)
        and (depth is None or str(case.cell.depth) == depth)
        and (lane is None or case.cell.lane == lane)
    ]


def _run(
    cases: Sequence[Case],
    models_of: Callable[[str], Models],
    at: Address | None,
    paths: tuple[Path | None, Path | None, Path | None],
    *,
    whole: bool,
) -> int:
    # Loading MLX takes a second, which a mistyped option need not wait for.
    from parity.running import Outputs, execute

    outputs = Outputs(*paths)
    outputs.check()
    return execute(cases, models_of, at, outputs, whole=whole)


def _list(expression: str | None, *, as_json: bool) -> int:
    cases = _selected(catalogue(expression), expression)
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

    cases = _selected(catalogue(expression), expression)
    lines = unportable(FOLDER, backend(), cases)
    print("\n".join(lines) or f"nothing is kept for {backend()} alone")
    return ALL_EQUAL


def _review(base: str) -> int:
    from parity.review import changed_since

    changed = changed_since(base)
    for lines in changed.values():
        print("\n".join(lines))
    print(f"{counted(len(changed), 'case')} moved since {base}")
    return SOME_DIFFERENT if changed else ALL_EQUAL


def _accept(case_ids: Sequence[str]) -> int:
    from parity.review import accept_cases

    return accept_cases(case_ids)


def _coverage(expression: str | None) -> int:
    chosen = parse(expression) if expression is not None else lambda _: True
    decided = [one for plan in known() for one in cells(plan) if chosen(_cell_id(one))]
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
            print(f"  {group}/*  ({counted(number, 'cell')})")
    for hole in holes:
        print(f"hole: {hole.cell.id} has neither a case nor a reason")
    filled = sum(isinstance(one, Case) for one in decided)
    empty = len(decided) - filled - len(holes)
    named = sum(chosen(case.id) for plan in known() for case in extras(plan))
    print(
        f"{len(decided)} cells: {filled} cases, {empty} empty with a reason, {len(holes)} holes; "
        f"{named} named cases beside them"
    )
    return 1 if holes else 0


def _cell_id(one: Case | Empty | Hole) -> str:
    return one.cell.id
