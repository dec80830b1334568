"""The command line: ``python -m oracle deviations [ID] [--mlx-lm PATH]``."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from .known import ClaimsError, Finding, State, check_all, mlx_lm_version, read_claims, select

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)


@app.callback()
def oracle() -> None:
    """What mlx-lm says, and where it is known to be wrong."""


@app.command()
def deviations(
    id: Annotated[
        str | None, typer.Argument(help="Only this one, such as D2.", show_default=False)
    ] = None,
    mlx_lm: Annotated[
        Path | None,
        typer.Option("--mlx-lm", metavar="PATH", help="Try the mlx-lm in this folder instead."),
    ] = None,
) -> None:
    """Run the reproducers of the known deviations of mlx-lm.

    Exit code 0: all as claimed · 1: a claim is stale on the pinned mlx-lm · 2: unusable input. On
    any other mlx-lm a claim that does not hold is a notice.
    """
    claims = read_claims()
    selected = select(claims, id)
    version = mlx_lm_version(mlx_lm)
    pinned = version == claims.pinned
    num_stale = 0
    for finding in check_all(selected, version, mlx_lm):
        typer.echo(describe(finding))
        if not finding.as_claimed or (pinned and not finding.claimed):
            num_stale += 1
            typer.echo(f"     {'STALE' if pinned else 'notice'}: {complaint(finding)}")
    other = "" if pinned else f" (the claims are for {claims.pinned})"
    typer.echo(
        f"{len(selected)} deviation{'s' if len(selected) != 1 else ''} on mlx-lm {version}{other}: "
        f"{len(selected) - num_stale} as claimed, {num_stale} not"
    )
    if num_stale and pinned:
        raise typer.Exit(1)


def describe(finding: Finding) -> str:
    """What one reproducer said."""
    deviation = finding.deviation
    lines = [f"{deviation.id:<5}{deviation.title}"]
    if finding.state is State.FAILED:
        lines.append(f"     {finding.state.value}: {finding.error}")
    else:
        lines.append(f"     expected: {finding.expected}")
        lines.append(f"     actual:   {finding.actual}")
        lines.append(f"     {finding.state.value} (claimed for mlx-lm {deviation.affects})")
    return "\n".join(lines)


def complaint(finding: Finding) -> str:
    """Why a finding is not what the claims say, and what to do about it."""
    match finding.state, finding.claimed:
        case State.FAILED, _:
            return "the claim could not be tried"
        case State.LIVE, _:
            return f"it is live on {finding.version}, which its range leaves out: widen the range"
        case _, True:
            return (
                f"it is not live on {finding.version}: end its range, and remove what relied on it"
            )
        case _:
            return f"its range leaves out {finding.version}, the pinned release: remove the claim"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; unusable input ends in one line on standard error and exit code 2."""
    try:
        code = app(args=arguments, standalone_mode=False)
    except ClaimsError as error:
        message = str(error)
    except OSError as error:  # output that cannot be written, most likely
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        message = f"{error.filename or 'cannot write'}: {error.strerror or error}"
    except Exception as error:
        # Typer's usage errors: of click in older releases, of a private module in newer ones.
        usage = getattr(error, "format_message", None)
        if usage is None:
            raise
        message = usage()
    else:
        if code == 130:
            sys.stderr.write("oracle: interrupted\n")
        return int(code or 0)
    sys.stderr.write(f"oracle: {' '.join(message.split())}\n")
    return 2
