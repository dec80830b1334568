"""A drafter that proposes what a function says: right, wrong, wild or too much."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Self

import mlx.core as mx

from engine import Draft, Target
from engine.drafters.source import Lender, PrefillMode, Taps
from engine.host import read
from engine.sampling import RowSampling
from engine.state.checkpoint import Attachment, Checkpoint
from engine.state.donors import Donor

Propose = Callable[[int, int, int], Sequence[int]]
"""(round, step, depth) to drafted ids."""


def scripted(truth: Sequence[int], script: Sequence[Sequence[bool]]) -> Propose:
    """Draft the true continuation, off by one wherever the round's script says False.

    A round's script also gives its draft's length; scripts repeat from the first.
    """

    def propose(round: int, step: int, depth: int) -> list[int]:
        plan = script[round % len(script)][:depth]
        known = truth[step : step + len(plan)]
        return [token if right else token + 1 for token, right in zip(known, plan, strict=False)]

    return propose


class Nobody:
    """Lends nothing, for drafters that borrow nothing."""

    def donor(self, windowed: bool) -> Donor:
        raise AssertionError("nothing is lent here")


NOBODY = Nobody()


@dataclass(slots=True)
class PuppetRows:
    """One row; `prefilled` and `committed` tell what the engine reported."""

    propose: Propose
    prefill_mode: PrefillMode
    commits: int | None
    namespace: str = "puppet"
    row_count: int = 1
    rounds: int = 0
    prefilled: list[int] = field(default_factory=list)
    committed: list[int] = field(default_factory=list)

    def selected(self, keep: Sequence[int]) -> Self:
        raise AssertionError("a puppet stays alone")

    def joined(self, other: Self) -> Self:
        raise AssertionError("a puppet stays alone")

    def prefill(self, tokens: mx.array, taps: Taps) -> None:
        self.prefilled += read(tokens)[0]

    def draft(
        self, pending: Sequence[int], depth: int, steps: Sequence[int], lender: Lender
    ) -> Draft:
        draft = Draft.of([self.propose(self.rounds, steps[0], depth)])
        self.rounds += 1
        return draft

    def commit(self, retained: Sequence[int], taps: Taps) -> None:
        if len(self.committed) == self.commits:
            raise RuntimeError("commit broke")
        self.committed += retained

    def capture(self, row: int) -> Checkpoint:
        return Checkpoint(0, Attachment("puppet", {}, ()))


@dataclass(slots=True, eq=False)
class Puppet:
    """The provider; `opened` are the groups it gave out. After `commits` commits one fails."""

    propose: Propose
    prefill_mode: PrefillMode = "tail-split"
    commits: int | None = None
    id: str = "puppet"
    namespace: str = "puppet"
    weights_bytes: int = 0
    default_depth: int = 4
    taps: tuple[str, ...] = ()
    cannot_share: tuple[str, ...] = ("a puppet stays alone",)
    supports_target_adapters: bool = False
    target: Target | None = None
    opened: list[PuppetRows] = field(default_factory=list)

    def state_bytes(self, tokens: int) -> int:
        return 0

    def open(self, sampling: RowSampling, checkpoint: Checkpoint | None = None) -> PuppetRows:
        rows = PuppetRows(self.propose, self.prefill_mode, self.commits)
        self.opened.append(rows)
        return rows
