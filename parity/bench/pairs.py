"""A figure: the median ratio of interleaved pairs, and how sure it is.

Machines are shared and noisy, and noise lasts longer than one pair. So both sides of a pair run
one right after the other, in alternating order, and only their ratio counts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

RESAMPLES = 10_000
FEWEST_PAIRS = 15

Side = Callable[[int], float]
"""Does the work of pair number i and returns the seconds that count."""


@dataclass(frozen=True, slots=True)
class Pair:
    """Seconds of both sides of a ratio."""

    over_s: float
    under_s: float

    def __post_init__(self) -> None:
        if not (self.over_s >= 0.0 and self.under_s > 0.0):
            raise ValueError(f"a pair needs positive seconds, got {self.over_s} / {self.under_s}")

    @property
    def ratio(self) -> float:
        return self.over_s / self.under_s


def interleave(over: Side, under: Side, num_pairs: int, *, warm_ups: int = 1) -> tuple[Pair, ...]:
    """Run both sides in turn; `over` goes first in even pairs. Warm-ups are not counted."""
    for number in range(warm_ups):
        over(number)
        under(number)
    pairs = []
    for number in range(num_pairs):
        if number % 2 == 0:
            over_s = over(number)
            under_s = under(number)
        else:
            under_s = under(number)
            over_s = over(number)
        pairs.append(Pair(over_s, under_s))
    return tuple(pairs)


def bootstrap(
    ratios: Sequence[float], *, resamples: int = RESAMPLES, seed: int = 0
) -> tuple[float, float]:
    """The 95 % percentile interval of the median (Efron 1979). The same seed, the same interval.

    Raises:
        ValueError: there are no ratios.
    """
    if not ratios:
        raise ValueError("no ratios: at least 1 is needed")
    values = np.asarray(ratios, dtype=np.float64)
    drawn = np.random.default_rng(seed).integers(0, len(values), (resamples, len(values)))
    low, high = np.percentile(np.median(values[drawn], axis=1), [2.5, 97.5])
    return float(low), float(high)


@dataclass(frozen=True, slots=True)
class Goal:
    """What a median ratio should be.

    `or_interval`: it is also met when the interval holds the limit, that is, when the pairs do not
    tell the two sides apart. With fewer pairs than `fewest` nothing is said.
    """

    id: str
    bound: Literal["at least", "at most"]
    limit: float
    or_interval: bool = False
    fewest: int = FEWEST_PAIRS

    def met(self, median: float, interval: tuple[float, float]) -> bool:
        if self.or_interval and interval[0] <= self.limit <= interval[1]:
            return True
        return median >= self.limit if self.bound == "at least" else median <= self.limit


@dataclass(frozen=True, slots=True)
class Figure:
    """The ratio `over / under` of one measurement, held to a goal."""

    goal: Goal
    name: str
    over: str
    under: str
    pairs: tuple[Pair, ...]

    @property
    def median(self) -> float:
        return float(np.median([pair.ratio for pair in self.pairs]))

    @property
    def interval(self) -> tuple[float, float]:
        return bootstrap([pair.ratio for pair in self.pairs])

    @property
    def met(self) -> bool | None:
        """None: too few pairs to tell."""
        if len(self.pairs) < self.goal.fewest:
            return None
        return self.goal.met(self.median, self.interval)
