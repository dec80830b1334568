"""The rows for as long as there is time, from where the last night ended."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from parity.errors import BadInput
from parity.report.files import write_whole

from .budget import Budget
from .full_disk import Unmountable
from .rows import ALL, ROWS, Row


@dataclass(slots=True)
class Progress:
    """Of one row, over all nights. `broken` are seeds that once found something: the corpus."""

    done: int = 0
    next: int = 0
    broken: list[int] = field(default_factory=list)


def load(file: Path | None) -> dict[str, Progress]:
    """What earlier nights did, by row.

    Raises:
        BadInput: the file is there and is not one of these.
    """
    if file is None or not file.exists():
        return {}
    try:
        return {name: Progress(**said) for name, said in json.loads(file.read_text()).items()}
    except (ValueError, TypeError, AttributeError) as error:
        raise BadInput(f"--progress {file}: is no record of earlier runs: {error}") from None


def save(file: Path | None, progress: dict[str, Progress]) -> None:
    if file is not None:
        said = {name: asdict(row) for name, row in progress.items()}
        write_whole(file, json.dumps(said, indent=1) + "\n")


@dataclass(frozen=True, slots=True)
class Done:
    """What a row did this night."""

    row: Row
    count: int
    seconds: float
    total: int
    violations: tuple[str, ...]
    notes: tuple[str, ...]


def night(
    progress: dict[str, Progress],
    until: float,
    tell: Callable[[str], None],
    rows: Sequence[Row] = ROWS,
) -> list[Done]:
    """Run every row: first those that have an end, then the others by their shares of the time.

    At least one seed of each is run, and all that found something before.
    """
    done = []
    ordered = sorted(rows, key=lambda row: row.nightly != ALL)
    for place, row in enumerate(ordered):
        shares = sum(other.share for other in ordered[place:])
        left = max(until - time.monotonic(), 0.0)
        part = left * row.share / shares
        seconds = part if row.nightly != ALL else min(2 * part, 4 * row.ci_s)
        tell(f"{row.id} {row.what}")
        done.append(_row(row, progress.setdefault(f"{row.id} {row.what}", Progress()), seconds))
    return done


def _row(row: Row, progress: Progress, seconds: float) -> Done:
    violations: list[str] = []
    began = time.monotonic()
    for seed in list(progress.broken):
        again = Budget(1, seconds, seed)
        _run(row, again)
        violations += again.violations
        if not again.violations:
            progress.broken.remove(seed)
    budget = Budget(ALL, seconds, progress.next)
    if not violations:
        _run(row, budget)
        violations += budget.violations
    if budget.failed is not None:
        progress.broken.append(budget.failed)
    count = budget.done
    progress.done += count
    progress.next = budget.next
    took = time.monotonic() - began
    notes = (*budget.notes[-1:], *(() if budget.whole else (_turns(budget),)))
    return Done(row, count, took, progress.done, tuple(violations), notes)


def _turns(budget: Budget) -> str:
    return f"{budget.next - budget.first} of {budget.cases} cases had their turn"


def _run(row: Row, budget: Budget) -> None:
    try:
        (row.run if row.night is None else row.night)(budget)
    except Unmountable as error:
        budget.notes.append(str(error))


def table(done: Sequence[Done]) -> list[str]:
    """A line a row: this night, all nights, the goal."""
    lines = [f"{'':<4} {'':<42} {'this run':>11} {'in all':>12} {'goal':>12}  {'seconds':>7}"]
    for row in done:
        goal = "all" if row.row.nightly == ALL else f"{row.row.nightly:,}"
        note = "".join(f"  {note}" for note in row.notes)
        bad = f"  {len(row.violations)} VIOLATIONS" if row.violations else ""
        lines.append(
            f"{row.row.id:<4} {row.row.what:<42} {row.count:>11,} {row.total:>12,} {goal:>12}"
            f"  {row.seconds:>7.1f}  {row.row.unit}{bad}{note}"
        )
    return lines


def document(done: Sequence[Done]) -> list[dict[str, Any]]:
    """The same for a file."""
    return [
        {
            "row": row.row.id,
            "what": row.row.what,
            "unit": row.row.unit,
            "count": row.count,
            "total": row.total,
            "goal": None if row.row.nightly == ALL else row.row.nightly,
            "seconds": round(row.seconds, 1),
            "violations": list(row.violations),
            "notes": list(row.notes),
        }
        for row in done
    ]
