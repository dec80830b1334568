"""A run from its first case to its exit code: sessions, the report, the files."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress

from parity.capability import Capability
from parity.cases import Case
from parity.errors import Unusable
from parity.models import Models
from parity.remote.address import Address
from parity.remote.session import open_remote
from parity.report import junit
from parity.report.document import document, write
from parity.report.environment import environment, sources_digest
from parity.report.files import check_folder, check_writable, write_whole
from parity.report.table import capability_table, show, verdict_line
from parity.report.words import Setting, exit_code
from parity.report.write import write_report
from parity.runner import CaseResult, Claim, by_prompt, claims, group_claims, in_running_order
from parity.session import open_session


@dataclass(frozen=True, slots=True)
class Outputs:
    """Files to write, by the option that named them; None for those not asked for."""

    json: Path | None = None
    junit: Path | None = None
    report: Path | None = None

    def check(self) -> None:
        """Refuse what cannot be written before anything runs for it.

        Raises:
            BadInput: naming the option and the path.

        """
        for option, file in (("--json", self.json), ("--junit", self.junit)):
            if file is not None:
                check_writable(option, file)
        if self.report is not None:
            check_folder("--report", self.report)

    def write(self, made: Mapping[str, Any]) -> None:
        """Write what was asked for.

        Raises:
            Unusable: a file cannot be written.

        """
        steps: tuple[tuple[str, Path | None, Callable[[Path], None]], ...] = (
            ("--json", self.json, lambda path: write(path, made)),
            ("--junit", self.junit, lambda path: write_whole(path, junit.render(made))),
            ("--report", self.report, lambda path: write_report(path, made)),
        )
        for option, path, step in steps:
            if path is None:
                continue
            try:
                step(path)
            except OSError as error:
                raise Unusable(f"{option} {path}: not written: {error.strerror}") from error


def quieten_tokenizers() -> None:
    """Keep remarks off stderr about configurations that only a tokenizer is read with."""
    # Behind mlx-lm, which keeps transformers from advising to install other frameworks.
    from transformers.utils import logging

    logging.set_verbosity_error()


@dataclass(slots=True)
class Findings:
    """What a run has come to know so far."""

    results: list[CaseResult]
    settings: dict[str, Setting]
    claims: tuple[Claim, ...] = ()
    capabilities: tuple[Capability, ...] = ()
    not_checked: tuple[str, ...] = ()


def execute(
    cases: Sequence[Case],
    models_of: Callable[[str], Models],
    at: Address | None,
    outputs: Outputs,
    *,
    whole: bool,
) -> int:
    """Run cases on the engine, or on the subject `at` an address; return the exit code.

    `whole`: these are all cases of the matrix, so that its claims are judged too. Those about a
    group are judged whenever a row of it was a case: the group ran with all its rows.

    Raises:
        BadInput, Unusable: see `session.open_session` and `remote.session.open_remote`.

    """
    quieten_tokenizers()
    console = Console(width=None if sys.stdout.isatty() else 110)
    stderr = Console(stderr=True)
    found = Findings([], {})
    with Progress(console=stderr, disable=not stderr.is_terminal, transient=True) as progress:
        task = progress.add_task("comparing", total=len(cases))
        for model in dict.fromkeys(case.cell.model for case in cases):
            ordered = in_running_order(case for case in cases if case.cell.model == model)
            _run_model(
                models_of(model), ordered, at, found, console, lambda: progress.advance(task)
            )
    found.claims += claims(found.results) if whole else group_claims(found.results)
    made_with = environment()
    show(found.results, found.claims, made_with, found.settings, console, found.not_checked)
    outputs.write(
        document(
            found.results,
            found.claims,
            made_with,
            sources_digest(),
            found.settings,
            capabilities=[asdict(one) for one in found.capabilities],
            not_checked=found.not_checked,
        )
    )
    return exit_code(found.results, found.claims)


def _run_model(
    models: Models,
    cases: Sequence[Case],
    at: Address | None,
    found: Findings,
    console: Console,
    advance: Callable[[], None],
) -> None:
    """Run the cases of one model.

    One that was named on the command line is watched: its first verdicts come soon, and each is
    printed as it falls.
    """
    watched = not models.brought_along
    ordered = by_prompt(cases) if watched else cases
    opened = open_session(models) if at is None else open_remote(models, at, ordered)
    with opened as session:
        found.settings[models.name] = session.setting
        begun = session.begin(ordered)
        found.capabilities += tuple(session.capabilities)
        if session.capabilities:
            console.print(capability_table(session.capabilities))
        results: list[CaseResult] = []
        for case in begun:
            results.append(session.run(case))
            advance()
            if watched:
                print(verdict_line(results[-1]), flush=True)  # noqa: T201 - it is a command's output
        found.results += results
        found.claims += session.claims(results)
        found.not_checked += session.not_checked(results)
        session.references.check_alive()
