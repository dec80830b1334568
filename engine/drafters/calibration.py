"""Confidence thresholds by draft position, fitted to what was accepted. Numbers in and out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True, slots=True)
class Trial:
    """One round drafted in full: the confidence of each draft, and how many were accepted."""

    confidence: tuple[float, ...]
    accepted: int


@dataclass(frozen=True, slots=True)
class Position:
    """What thresholds make of one draft position: drafts kept there, and accepted of them."""

    kept: int
    accepted: int

    @property
    def precision(self) -> float:
        return self.accepted / self.kept if self.kept else 1.0


def fit_thresholds(
    trials: Sequence[Trial], precision: float, min_kept: int = 30
) -> tuple[float, ...]:
    """The lowest threshold of each position at which kept drafts are accepted often enough.

    Position k is fitted on the trials that keep all positions before it, since a draft is cut at
    its first unsure token. The thresholds end at the first position that no threshold makes precise
    enough on at least `min_kept` drafts: it is never drafted.
    """
    thresholds: list[float] = []
    alive = list(trials)
    for k in range(max(len(trial.confidence) for trial in trials)):
        ranked = sorted(alive, key=lambda trial: -trial.confidence[k])
        lowest, right = None, 0
        for number, (trial, following) in enumerate(pairwise([*ranked, None]), 1):
            assert trial is not None
            right += trial.accepted > k
            ends = following is None or following.confidence[k] < trial.confidence[k]
            if ends and number >= min_kept and right >= precision * number:
                lowest = trial.confidence[k]
        if lowest is None:
            break
        thresholds.append(lowest)
        alive = [trial for trial in alive if trial.confidence[k] >= lowest]
    return tuple(thresholds)


def apply(trials: Sequence[Trial], thresholds: Sequence[float]) -> tuple[Position, ...]:
    """What the thresholds keep of each position that has one."""
    found: list[Position] = []
    alive = list(trials)
    for k, lowest in enumerate(thresholds):
        alive = [trial for trial in alive if trial.confidence[k] >= lowest]
        found.append(Position(len(alive), sum(trial.accepted > k for trial in alive)))
    return tuple(found)


def interval(position: Position, z: float = 1.96) -> tuple[float, float]:
    """Wilson's interval of the precision, 95 % by default (Wilson 1927)."""
    n = position.kept
    if n == 0:
        return 0.0, 1.0
    share, spread = position.precision, z * z / n
    middle = (share + spread / 2) / (1 + spread)
    half = z / (1 + spread) * (share * (1 - share) / n + spread / (4 * n)) ** 0.5
    return middle - half, middle + half
