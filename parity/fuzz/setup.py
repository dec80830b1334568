"""What a machine is given: worlds, participants, comparer, explanations, and where to count."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from .contracts import EXPLANATIONS, Key, Violation
from .history import Reference
from .participants import ListModel, Ours, Participant, compare
from .tally import Tally
from .worlds import World

Compare = Callable[[Participant, Participant], str | None]


class Difference(AssertionError):
    """A participant is not what the list says, and nothing known explains it.

    `steps` is the sequence up to here, one operation a line; `key` is None if it is not mlx-lm's.
    """

    def __init__(self, text: str, steps: Sequence[str], key: Key | None = None) -> None:
        super().__init__(text)
        self.text, self.steps, self.key = text, tuple(steps), key


@dataclass(frozen=True, slots=True)
class Setup:
    references: Sequence[Reference]
    explanations: Mapping[Key, str] = field(default_factory=lambda: EXPLANATIONS)
    tally: Tally = field(default_factory=Tally)
    ours: Callable[[World], Participant] = Ours
    truth: Callable[[Reference], ListModel] = ListModel
    compare: Compare = compare

    def violated(self, violation: Violation, steps: Sequence[str]) -> None:
        """Count a broken promise of mlx-lm that is known.

        Raises:
            Difference: it is not.
        """
        name = self.explanations.get(violation.key)
        if name is None:
            raise Difference(f"mlx-lm: {violation}", steps, violation.key)
        self.tally.explained[name, violation.key] += 1
