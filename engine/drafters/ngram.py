"""Prompt lookup: propose what followed the last few tokens the first time they occurred.

No weights and no sampling. Source: prompt lookup decoding (Saxena 2023), here with the first
occurrence and the longest suffix winning.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import mlx.core as mx

from ..errors import BadInput, LawError
from ..host import read
from ..sampling import RowSampling
from ..state.checkpoint import Attachment, Checkpoint, require_schema
from .source import Draft, Lender, PrefillMode, Taps

SCHEMA = "ngram-history-v1"


@dataclass(slots=True)
class History:
    """One row's tokens and where each short run of them first began.

    A run is indexed once a token follows it, so the tail itself is never its own match.
    `first[k]` maps k ids to the smallest start position.
    """

    max_n: int
    min_n: int
    tokens: list[int] = field(default_factory=list)
    first: dict[int, dict[tuple[int, ...], int]] = field(default_factory=dict)

    def push(self, ids: Sequence[int]) -> None:
        for token in ids:
            end = len(self.tokens)
            for k in range(self.min_n, min(self.max_n, end) + 1):
                run = tuple(self.tokens[end - k : end])
                self.first.setdefault(k, {}).setdefault(run, end - k)
            self.tokens.append(token)

    def propose(self, n: int) -> list[int]:
        """At most n ids that followed the longest known suffix; empty if there is none."""
        for k in range(min(self.max_n, len(self.tokens) - 1), self.min_n - 1, -1):
            start = self.first.get(k, {}).get(tuple(self.tokens[-k:]))
            if start is not None:
                return self.tokens[start + k : start + k + n]
        return []


class NgramRows:
    """Histories of a group's rows. See `DraftRows`."""

    prefill_mode: PrefillMode = "tail-split"

    def __init__(self, max_n: int, min_n: int, rows: Sequence[History]) -> None:
        self._max_n, self._min_n = max_n, min_n
        self._rows = list(rows)
        self._drafts: list[list[int]] | None = None

    @property
    def namespace(self) -> str:
        return _namespace(self._max_n, self._min_n)

    @property
    def row_count(self) -> int:
        return len(self._rows)

    def selected(self, keep: Sequence[int]) -> NgramRows:
        return NgramRows(self._max_n, self._min_n, [self._rows[r] for r in keep])

    def joined(self, other: NgramRows) -> NgramRows:
        return NgramRows(self._max_n, self._min_n, self._rows + other._rows)

    def prefill(self, tokens: mx.array, taps: Taps) -> None:
        rows: list[list[int]] = read(tokens)
        for history, ids in zip(self._rows, rows, strict=True):
            history.push(ids)

    def draft(
        self, pending: Sequence[int], depth: int, steps: Sequence[int], lender: Lender
    ) -> Draft:
        for history, token in zip(self._rows, pending, strict=True):
            history.push([token])
        self._drafts = [history.propose(depth) for history in self._rows]
        return Draft.of(self._drafts)

    def commit(self, retained: Sequence[int], taps: Taps) -> None:
        if self._drafts is None:
            raise LawError("n-gram commit without draft")
        for history, draft, kept in zip(self._rows, self._drafts, retained, strict=True):
            history.push(draft[:kept])
        self._drafts = None

    def capture(self, row: int) -> Checkpoint:
        tokens = self._rows[row].tokens
        metadata = {"max": self._max_n, "min": self._min_n}
        vector = mx.array(tokens, dtype=mx.int32)
        return Checkpoint(len(tokens), Attachment(SCHEMA, metadata, (vector,)))


class NgramProvider:
    """Opens n-gram groups. `max_n` is clamped to at least 1, `min_n` to 1..max_n."""

    id = "ngram"
    weights_bytes = 0
    default_depth = 10
    taps: tuple[str, ...] = ()
    target = None
    supports_target_adapters = True
    cannot_share: tuple[str, ...] = ()

    def __init__(self, max_n: int = 3, min_n: int = 1) -> None:
        self._max_n = max(1, max_n)
        self._min_n = min(max(1, min_n), self._max_n)

    @property
    def namespace(self) -> str:
        return _namespace(self._max_n, self._min_n)

    def state_bytes(self, tokens: int) -> int:
        # About 100 bytes for each indexed run, and an id.
        return tokens * (100 * (self._max_n - self._min_n + 1) + 8)

    def open(self, sampling: RowSampling, checkpoint: Checkpoint | None = None) -> NgramRows:
        history = History(self._max_n, self._min_n)
        if checkpoint is not None:
            history.push(self._stored_tokens(checkpoint))
        return NgramRows(self._max_n, self._min_n, [history])

    def _stored_tokens(self, checkpoint: Checkpoint) -> list[int]:
        attachment = require_schema(checkpoint, SCHEMA)
        policy = (attachment.metadata.get("max"), attachment.metadata.get("min"))
        if policy != (self._max_n, self._min_n):
            raise BadInput(
                f"checkpoint n-gram policy is {policy}, expected {(self._max_n, self._min_n)}"
            )
        if len(attachment.tensors) != 1 or attachment.tensors[0].ndim != 1:
            raise BadInput("an n-gram checkpoint holds 1 vector")
        (vector,) = attachment.tensors
        if vector.shape[0] != checkpoint.processed_tokens or vector.dtype != mx.int32:
            raise BadInput(
                f"checkpoint history is {vector.shape[0]} x {vector.dtype}, "
                f"expected {checkpoint.processed_tokens} x int32"
            )
        tokens: list[int] = read(vector)
        return tokens


def _namespace(max_n: int, min_n: int) -> str:
    return f"{SCHEMA}:{max_n}:{min_n}"
