"""`python -m parity.fuzz`: the machines for a while, then what they did."""

from __future__ import annotations

import logging
import secrets
import signal
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from parity.cli import Command
from parity.cli import main as run_application
from parity.errors import BadInput, Unusable
from parity.report.files import check_writable

app = typer.Typer(
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    help="Drive our states, mlx-lm's caches and the durable tier through random operations.",
)

ALL_WORLDS = (
    "llama",
    "concatenated",
    "quantized",
    "sliding",
    "limited",
    "chunked",
    "recurrent",
    "pairs",
    "hybrid",
)
PARTS = ("caches", "tier")
"""Caches in memory beside mlx-lm's; the durable tier under crashes, faults and hostile files."""

LONGEST_MINUTES = 24 * 60
SEEDS = 2**32


@app.command()
def fuzz(
    minutes: Annotated[float, typer.Option(metavar="M", help="How long, in minutes.")] = 10.0,
    seed: Annotated[
        int | None, typer.Option(metavar="S", help="The first seed; a failing one replays it.")
    ] = None,
    no_deviations: Annotated[
        bool, typer.Option("--no-deviations", help="Explain nothing: find each kind anew.")
    ] = False,
    world: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="Only this world; repeatable.")
    ] = None,
    part: Annotated[
        list[str] | None,
        typer.Option(metavar="PART", help="Only caches or only tier; half of the time each."),
    ] = None,
    progress: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Where the tier's rows go on from, and what broke them."),
    ] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write the counts to FILE.")
    ] = None,
) -> Command:
    """Print what was found and what was done. At least one seed is run on every world and row.

    With --seed, --world or --no-deviations only the caches are asked.
    """
    chosen = world or ALL_WORLDS
    of_caches = world or no_deviations or seed is not None
    parts = part or (PARTS[:1] if of_caches else PARTS)
    if not 0 <= minutes <= LONGEST_MINUTES:
        raise BadInput(f"--minutes must be between 0 and {LONGEST_MINUTES}, got {minutes:g}")
    if seed is not None and not 0 <= seed < SEEDS:
        raise BadInput(f"--seed must be between 0 and {SEEDS - 1}, got {seed}")
    if unknown := set(chosen) - set(ALL_WORLDS):
        raise BadInput(f"--world {min(unknown)}: the worlds are {', '.join(ALL_WORLDS)}")
    if unknown := set(parts) - set(PARTS):
        raise BadInput(f"--part {min(unknown)}: the parts are {', '.join(PARTS)}")
    for option, file in (("--json", json_file), ("--progress", progress)):
        if file is not None:
            check_writable(option, file)
    return partial(_both, parts, minutes, seed, chosen, no_deviations, progress, json_file)


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command and exit: 0 if all held, 1 if not, 2 if it cannot run.

    What does not hold is an unexplained difference, or a violation of a promise of the tier.
    """
    run_application(arguments, app)


def _both(
    parts: Sequence[str],
    minutes: float,
    seed: int | None,
    chosen: Sequence[str],
    no_deviations: bool,
    progress: Path | None,
    json_file: Path | None,
) -> int:
    from parity.report.document import write

    # Hypothesis lets an interrupt through, and takes an exit for a failing example.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    document: dict[str, Any] = {}
    failed = 0
    if "tier" in parts:  # first: it is free of mlx, whose threads do not outlive a fork
        failed |= _tier(minutes / len(parts), progress, document)
    if "caches" in parts:
        failed |= _caches(minutes / len(parts), seed, chosen, no_deviations, document)
    if json_file is not None:
        try:
            write(json_file, document)
        except OSError as error:
            raise Unusable(f"--json {json_file}: not written: {error.strerror}") from error
    return failed


def _tier(minutes: float, file: Path | None, document: dict[str, Any]) -> int:
    from parity.fuzz.disk import night
    from parity.fuzz.disk.budget import quiet

    quiet()
    progress = night.load(file)
    until = time.monotonic() + 60 * minutes
    try:
        done = night.night(progress, until, lambda text: print(text, file=sys.stderr, flush=True))
    finally:
        night.save(file, progress)
    for row in done:
        for violation in row.violations:
            print(f"violation of {row.row.id}, {row.row.what}: {violation}")
    violations = sum(len(row.violations) for row in done)
    print("\n".join(night.table(done)))
    print(f"violations of the tier's promises: {violations}", flush=True)
    document["tier"] = night.document(done)
    return 1 if violations else 0


def _caches(
    minutes: float,
    seed: int | None,
    chosen: Sequence[str],
    no_deviations: bool,
    document: dict[str, Any],
) -> int:
    # Loading MLX takes a second, which a mistyped option need not wait for.
    try:
        import hypothesis  # noqa: F401  # here for the one line it is missing in
    except ModuleNotFoundError as error:
        raise Unusable("hypothesis is not installed: pip install -e '.[test]'") from error
    from engine.folders import require_compiler
    from oracle import device
    from parity.fuzz.contracts import EXPLANATIONS
    from parity.fuzz.history import Reference
    from parity.fuzz.run import batches, discover
    from parity.fuzz.setup import Setup
    from parity.fuzz.tally import words
    from parity.fuzz.worlds import build_worlds

    device.apply()
    require_compiler()
    logging.getLogger("engine.cache").setLevel(logging.ERROR)  # files are damaged on purpose
    started = time.monotonic()
    first = secrets.randbelow(SEEDS) if seed is None else seed
    print(f"first seed {first}", flush=True)
    explanations = {} if no_deviations else EXPLANATIONS
    worlds = [world for world in build_worlds() if world.name in chosen]
    setup = Setup([Reference(world) for world in worlds], explanations)
    run = discover if no_deviations else batches
    found: list[dict[str, Any]] = []
    last = None
    for batch in run(setup, first, started + 60 * minutes):
        if batch.seed != last and not no_deviations:
            print(f"seed {batch.seed}", file=sys.stderr, flush=True)
        last = batch.seed
        if batch.difference is None:
            continue
        key = batch.difference.key
        name = None if key is None else EXPLANATIONS.get(key)
        found.append(
            {
                "seed": batch.seed,
                "difference": batch.difference.text,
                "steps": list(batch.difference.steps),
                "deviation": name,
                "broken": None if key is None else words(key),
            }
        )
        print(f"difference {len(found)}, seed {batch.seed}: {batch.difference.text}")
        print("".join(f"    {step}\n" for step in batch.difference.steps), end="")
        print(f"    known as {name}" if name else "    not known", flush=True)
        if not no_deviations:
            break
    took_s = time.monotonic() - started
    print("\n".join(setup.tally.lines()))
    print(f"unexplained differences: {len(found)}, after {took_s:.0f} s")
    document |= {
        "first_seed": first,
        "last_seed": last,
        "seconds": round(took_s, 1),
        "deviations_used": not no_deviations,
        "differences": found,
        **setup.tally.document(),
    }
    return 1 if found else 0
