"""`python -m parity.bench`: the ratio table, and a JSON of every pair."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, NoReturn

import typer
from rich.console import Console

import fixtures
from parity.cli import Command
from parity.cli import main as run_application
from parity.errors import BadInput, Unusable
from parity.report.files import check_writable

app = typer.Typer(
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    help="Measure the engine against mlx-lm, in ratios of interleaved pairs.",
)

KINDS = (fixtures.Kind.REPETITION, fixtures.Kind.NOVEL, fixtures.Kind.SCRIPTS)
"""Prompts whose text goes on for the whole budget: copied, free, and in many bytes."""

LONGEST = 512

GOAL_IDS = {f"P{number}" for number in (1, 2, 3, 5, 7, 8, 9, 10, 11, 12)}


@app.command()
def bench(
    only: Annotated[
        list[str] | None,
        typer.Option("--only", metavar="GOAL", help="One of P1 to P12; repeatable."),
    ] = None,
    pairs: Annotated[int, typer.Option(metavar="N", help="Pairs per figure.")] = 24,
    tokens: Annotated[int, typer.Option(metavar="N", help="New tokens per request.")] = 192,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write every pair to FILE.")
    ] = None,
) -> Command:
    """Print each figure as a median ratio with its bootstrap 95 % interval."""
    if pairs < 1:
        raise BadInput(f"--pairs must be at least 1, got {pairs}")
    if not 8 <= tokens <= LONGEST:
        raise BadInput(f"--tokens must be between 8 and {LONGEST}, got {tokens}")
    if unknown := set(only or ()) - GOAL_IDS:
        known = ", ".join(sorted(GOAL_IDS, key=lambda goal: int(goal[1:])))
        raise BadInput(f"--only {min(unknown)}: the goals are {known}")
    if json_file is not None:
        check_writable("--json", json_file)
    return partial(_bench, only, pairs, tokens, json_file)


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command and exit: 0 whatever the figures are, 2 if there are none."""
    run_application(arguments, app)


def _bench(only: Sequence[str] | None, pairs: int, tokens: int, json_file: Path | None) -> int:
    # Loading MLX takes a second, which a mistyped option need not wait for.
    from parity.bench.figures import GOALS, Setting, measure
    from parity.bench.loops import load_fixtures
    from parity.bench.pairs import FEWEST_PAIRS
    from parity.bench.report import document, rounds_table, table
    from parity.report.document import write
    from parity.report.environment import environment

    models = load_fixtures()
    texts = [prompt.text for prompt in fixtures.prompts() if prompt.kind in KINDS]
    setting = Setting(tuple(tuple(models.target.encode(t)) for t in texts), pairs, tokens)
    made_with = environment()
    stderr = Console(stderr=True)
    measured = []
    with stderr.status("measuring"):
        for one in measure(models, setting, only or GOALS):
            measured.append(one)
    console = Console(width=None if sys.stdout.isatty() else 130)
    console.print(", ".join(f"{k} {v}" for k, v in made_with.items()), highlight=False)
    console.print(table(measured), highlight=False)
    if any(one.rounds for one in measured):
        console.print(rounds_table(measured), highlight=False)
    if pairs < FEWEST_PAIRS:
        console.print(f"{pairs} pairs are too few to say what is met: {FEWEST_PAIRS} are needed")
    if json_file is not None:
        try:
            write(json_file, document(measured, setting, made_with))
        except OSError as error:
            raise Unusable(f"--json {json_file}: not written: {error.strerror}") from error
    return 0
