"""How many drafts were accepted, by their place in the draft."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from parity.report.facts import Case, grouped


@dataclass(frozen=True, slots=True)
class Acceptance:
    """Rounds that drafted; entry k of `drafted` and `accepted` counts drafts of position k + 1."""

    model: str
    drafter: str
    depth: int
    cases: int
    rounds: int
    drafted: tuple[int, ...]
    accepted: tuple[int, ...]

    @property
    def words(self) -> str:
        """All the numbers, for who cannot see the plot."""
        places = ", ".join(
            f"position {place}: {accepted} of {drafted} accepted"
            for place, (drafted, accepted) in enumerate(
                zip(self.drafted, self.accepted, strict=True), 1
            )
        )
        return f"{self.model}, {self.drafter}, depth {self.depth}, {self.rounds} rounds: {places}"


def acceptances(cases: Iterable[Case]) -> list[Acceptance]:
    """One per model, drafter and depth that drafted anything.

    A draft of position k counts as accepted if its round accepted k or more.
    """
    found = []
    for (model, drafter, depth), group in grouped(cases, "model", "drafter", "depth").items():
        rounds = [
            (len(draft), accepted)
            for case in group
            if case["actual"] is not None
            for draft, accepted, _ in case["actual"]["rounds"]
            if draft
        ]
        longest = max((drafted for drafted, _ in rounds), default=0)
        if longest:
            places = range(1, longest + 1)
            found.append(
                Acceptance(
                    model,
                    drafter,
                    depth,
                    len(group),
                    len(rounds),
                    tuple(sum(drafted >= place for drafted, _ in rounds) for place in places),
                    tuple(sum(accepted >= place for _, accepted in rounds) for place in places),
                )
            )
    return found
