"""The text report: one line per lane, drafter, depth and sampling, then failures in full."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from parity.capability import Capability
from parity.compare import Verdict
from parity.report.words import Setting, closing_line, sentences
from parity.runner import CaseResult, Claim

Row = tuple[str, str, str, str, str]


def show(
    results: Sequence[CaseResult],
    claims: Sequence[Claim],
    environment: Mapping[str, str | int],
    settings: Mapping[str, Setting],
    console: Console,
    not_checked: Sequence[str] = (),
) -> None:
    """Print the whole report; what was not checked and the closing line come last."""
    said = ", ".join(f"{name} {value}" for name, value in environment.items())
    console.print(escape(said), soft_wrap=True, highlight=False)
    console.print(summary(results))
    for result in results:
        for sentence in sentences(result, settings[result.case.cell.model]):
            console.print(escape(sentence), soft_wrap=True)
    for claim in claims:
        if not claim.met:
            console.print(escape(f"{claim.id}: not met: {claim.text}"), soft_wrap=True)
    for said in not_checked:
        console.print(escape(f"not checked: {said}"), soft_wrap=True, highlight=False)
    console.print(escape(closing_line(results, claims)), soft_wrap=True, highlight=False)


def capability_table(capabilities: Sequence[Capability]) -> Table:
    """What a subject was found to offer."""
    table = Table(box=None, pad_edge=False)
    for name in ("subject", "", ""):
        table.add_column(name)
    for one in capabilities:
        table.add_row(*map(escape, (one.name, one.value, one.note)))
    return table


def verdict_line(result: CaseResult) -> str:
    """One case in one line, for runs that are watched."""
    comparison = result.comparison
    return f"{result.verdict:<13}{result.case.id}  {comparison.checked}/{comparison.total}"


def summary(results: Sequence[CaseResult]) -> Table:
    """Verdicts counted over prompt kinds."""
    table = Table(box=None, pad_edge=False)
    for name in ("model", "lane", "drafter", "depth", "sampling"):
        table.add_column(name)
    for name in ("cases", "equal", "tied", "differ", "open", "checked", "max |Δ logprob|"):
        table.add_column(name, justify="right")
    for row, group in groupby(sorted(results, key=_row), key=_row):
        cells = list(group)
        tied = _count(cells, Verdict.NEAR_TIE) + _count(cells, Verdict.SHAPE_TIE)
        counts = (
            len(cells),
            _count(cells, Verdict.EQUAL),
            tied,
            _count(cells, Verdict.DIFFERENT),
            _count(cells, Verdict.INCONCLUSIVE),
        )
        checked = sum(r.comparison.checked for r in cells)
        total = sum(r.comparison.total for r in cells)
        seen = [d for r in cells if (d := r.comparison.logprob_difference) is not None]
        table.add_row(
            *map(str, row),
            *(str(count or "") for count in counts),
            f"{checked}/{total}",
            f"{max(seen):.1e}" if seen else "",
        )
    return table


def _row(result: CaseResult) -> Row:
    cell = result.case.cell
    if cell.style is not None:  # what a server drafts with is its own
        return cell.model, cell.column, "", "", cell.sampling.label
    return cell.model, cell.column, cell.drafter, str(cell.depth), cell.sampling.label


def _count(results: Sequence[CaseResult], verdict: Verdict) -> int:
    return sum(result.verdict is verdict for result in results)
