"""Requests in flight, and the batches of those that share forwards.

A batch is a value: another membership is a new batch, built whole from the old ones, which are as
they were if that fails.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, Protocol, Self, TypeVar

from .collector import Collector
from .drafters.source import DraftProvider
from .errors import GroupError
from .prefill import Prompt
from .rounds import Row
from .sampling import RowSampling
from .streams import Stream
from .target import Target


class Joinable(Protocol):
    """Rows as values: a cohort or a group's rounds."""

    def selected(self, keep: Sequence[int]) -> Self: ...

    def joined(self, other: Self) -> Self: ...


Stage = TypeVar("Stage", bound=Joinable)


@dataclass(frozen=True, slots=True)
class Kind:
    """What rows must agree on to share a forward.

    `due`: their keys and values are stored in few bits. `alone` is a number of its own for a row
    that cannot share, None for the others.
    """

    target: Target
    drafter: DraftProvider | None
    depth: int
    due: bool = False
    alone: int | None = None


@dataclass(slots=True, eq=False)
class Member:
    """A request in flight, with its row. `number` counts requests.

    Its prompt and its text come to `tokens` tokens at most, its states to `state_bytes` bytes.
    `checkpointed`: how many tokens its last checkpoint holds that may have been written; 0: none.
    """

    number: int
    kind: Kind
    sampling: RowSampling
    prompt: Prompt
    text: Collector
    stream: Stream
    tokens: int
    state_bytes: int
    checkpointed: int = 0

    @property
    def row(self) -> Row:
        return self.prompt.row


@dataclass(frozen=True, slots=True)
class Batch(Generic[Stage]):
    """Members that share forwards; `stage.rows` or `stage.prompts` are theirs, in this order."""

    kind: Kind
    stage: Stage
    members: tuple[Member, ...]

    def selected(self, keep: Sequence[int]) -> Self:
        members = tuple(self.members[r] for r in keep)
        return replace(self, stage=self.stage.selected(keep), members=members)

    def joined(self, other: Self) -> Self:
        stage = self.stage.joined(other.stage)
        return replace(self, stage=stage, members=self.members + other.members)


def join(batches: dict[Kind, Batch[Stage]], new: Batch[Stage]) -> None:
    """Put rows into the batch of their kind, or into one of their own.

    If the join fails, the newcomers fail and the others are what they were.
    """
    old = batches.get(new.kind)
    try:
        batches[new.kind] = new if old is None else old.joined(new)
    except Exception as error:
        fail(new, error)


def without(batches: dict[Kind, Batch[Stage]], gone: Sequence[Member]) -> dict[Kind, Batch[Stage]]:
    """All batches but for some of their members; those of nobody else are left out."""
    parts = {
        kind: part_of(batch, [r for r, m in enumerate(batch.members) if m not in gone])
        for kind, batch in batches.items()
    }
    return {kind: part for kind, part in parts.items() if part is not None}


def part_of(batch: Batch[Stage], keep: Sequence[int]) -> Batch[Stage] | None:
    """The rows `keep` of a batch, which are in order; None for none."""
    if len(keep) == len(batch.members):
        return batch
    return batch.selected(keep) if keep else None


def fail(batch: Batch[Any], error: Exception) -> None:
    """End a batch whose shared state is lost."""
    rows = len(batch.members)
    said = " ".join(str(error).split()) or "no message"
    for member in batch.members:
        failure = GroupError(f"a group of {rows} ended: {type(error).__name__}: {said}")
        failure.__cause__ = error
        member.stream.close(failure)
