"""What a run did, in counts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from .contracts import Key


@dataclass(slots=True)
class Tally:
    """`classes` counts operations in which a cache class took part; `compared` counts states.

    `takes` counts what the tiers handed out, by where it came from.
    """

    sequences: int = 0
    compared: int = 0
    operations: Counter[str] = field(default_factory=Counter)
    classes: Counter[str] = field(default_factory=Counter)
    explained: Counter[tuple[str, Key]] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    takes: Counter[str] = field(default_factory=Counter)

    def operation(self, kind: str, classes: Iterable[str]) -> None:
        self.operations[kind] += 1
        self.classes.update(classes)

    def lines(self) -> list[str]:
        """A table for a terminal."""
        done = sum(self.operations.values())
        lines = [f"{self.sequences} sequences, {done} operations, {self.compared} states compared"]
        lines += _block("operations", self.operations)
        lines += _block("cache classes", self.classes)
        lines += _block("takes from tiers", self.takes)
        lines += _block("declined, by name", self.refused)
        named = {f"{name}: {words(key)}": n for (name, key), n in self.explained.items()}
        return lines + _block("explained differences of mlx-lm", Counter(named))

    def document(self) -> dict[str, Any]:
        """The same for a file."""
        return {
            "sequences": self.sequences,
            "compared": self.compared,
            "operations": dict(sorted(self.operations.items())),
            "classes": dict(sorted(self.classes.items())),
            "takes": dict(sorted(self.takes.items())),
            "declined": dict(sorted(self.refused.items())),
            "explained": [
                {"deviation": name, "broken": words(key), "count": n}
                for (name, key), n in sorted(self.explained.items(), key=str)
            ],
        }


def words(key: Key) -> str:
    """`RotatingKVCache, ring is full: not so: a cache that ...`."""
    when = f", {key.condition}" if key.condition else ""
    return f"{key.kind}{when}: not so: {key.promise.value}"


def _block(title: str, counter: Counter[str]) -> list[str]:
    width = max((len(str(n)) for n in counter.values()), default=1)
    rows = [f"  {n:>{width}}  {name}" for name, n in counter.most_common()]
    return [f"{title}:", *(rows or ["  none"])]
