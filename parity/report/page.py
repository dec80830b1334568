"""One HTML page of a run that opens from a file: no script, no network, nothing beside it.

`page.html.j2` says what stands where, `page.css` how it looks; both are data of this package.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from parity.compare import Verdict
from parity.report.acceptance import acceptances
from parity.report.facts import (
    ORDER,
    Case,
    cases_of,
    count,
    grouped,
    state,
    verdict_sentence,
)
from parity.report.groups import groups
from parity.report.partings import partings
from parity.report.text import visible

FOLDER = Path(__file__).parent

ROW = ("model", "lane", "drafter", "depth", "sampling_label")
"""What makes a line of the matrix; its first three make a block."""

MARKS = {
    Verdict.EQUAL: "=",
    Verdict.NEAR_TIE: "≈",
    Verdict.SHAPE_TIE: "≈",
    Verdict.DIFFERENT: "≠",
    Verdict.INCONCLUSIVE: "?",
}


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the matrix; a cell holds its cases, at most one unless runs were merged."""

    name: str
    cells: tuple[tuple[Case, ...], ...]


@dataclass(frozen=True, slots=True)
class Block:
    """The lines of one model, lane and drafter."""

    name: str
    rows: tuple[Row, ...]


def render(run: Mapping[str, Any]) -> str:
    """A document as a page; characters that do not print are escaped as Python does."""
    cases = cases_of(run)
    kinds = tuple(dict.fromkeys(case["kind"] for case in cases))
    # As they stand in the matrix.
    in_order = [case for row in grouped(cases, *ROW).values() for case in row]
    by_verdict = grouped(in_order, "verdict")
    ordered = [(verdict, by_verdict.get((verdict,), [])) for verdict in ORDER]
    return (
        _environment()
        .get_template("page.html.j2")
        .render(
            run=run,
            state=state(run),
            verdict=verdict_sentence(run),
            counts=count(cases),
            verdicts=[(verdict, len(group)) for verdict, group in ordered if group],
            kinds=kinds,
            blocks=blocks(cases, kinds),
            unequal=[case for verdict, group in ordered[:-1] for case in group],
            equal=ordered[-1][1],
            acceptances=acceptances(cases),
            groups=groups(cases),
            marks=MARKS,
        )
        .lstrip()
    )


def blocks(cases: Iterable[Case], kinds: Sequence[str]) -> list[Block]:
    """The matrix: blocks of rows, a column per prompt kind."""
    return [
        Block(
            " · ".join(names),
            tuple(
                Row(
                    f"d{depth} {sampling}",
                    tuple(tuple(c for c in row if c["kind"] == kind) for kind in kinds),
                )
                for (depth, sampling), row in grouped(block, *ROW[3:]).items()
            ),
        )
        for names, block in grouped(cases, *ROW[:3]).items()
    ]


def anchor(case_id: str) -> str:
    """The name of a case's place on the page: no two cases share one, and links need no escapes."""
    return "case/" + "".join(
        c if c.isascii() and (c.isalnum() or c in "/-_.+") else f"~{ord(c):x}~" for c in case_id
    )


def slug(verdict: str) -> str:
    """A verdict as the name of a CSS class."""
    return verdict.replace(" ", "-")


def number(value: float | str | None) -> str:
    """A number of a document, which may be missing or the name of one that JSON has not."""
    if value is None:
        return "–"
    return f"{value:.3g}" if isinstance(value, float) else str(value)


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=FileSystemLoader(FOLDER),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_visible,
    )
    environment.filters |= {
        "anchor": anchor,
        "slug": slug,
        "number": number,
        "repr": repr,
        "partings": partings,
    }
    return environment


def _visible(value: object) -> object:
    # What is HTML already, jinja has marked.
    return visible(value) if isinstance(value, str) and not hasattr(value, "__html__") else value
