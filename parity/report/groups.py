"""What groups did: who came and went while others decoded, and how unlike they were."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from parity.report.facts import Case, count, grouped


@dataclass(frozen=True, slots=True)
class Group:
    """One group. `cases` are its rows that were compared; the rest is of the whole group.

    `ragged` counts rounds whose rows accepted different counts, `joined` and `left` count rows that
    came and went while others decoded.
    """

    model: str
    drafter: str
    depth: int
    sampling: str
    rows: int
    cases: int
    equal: int
    rounds: int
    ragged: int
    joined: int
    left: int


def groups(cases: Iterable[Case]) -> list[Group]:
    """One per group of which a row was compared; all zero if no row tells what the group did."""
    found = []
    by_group = grouped(
        (case for case in cases if case["rows"] is not None),
        *("model", "drafter", "depth", "sampling_label", "rows"),
    )
    for (model, drafter, depth, sampling, rows), members in by_group.items():
        answers = [case["actual"] for case in members if case["actual"] is not None]
        told = [one["company"] for one in answers if one["company"] is not None]
        did = (told[0][what] if told else 0 for what in ("rounds", "ragged", "joined", "left"))
        counts = count(members)
        found.append(Group(model, drafter, depth, sampling, rows, counts.cases, counts.equal, *did))
    return found
