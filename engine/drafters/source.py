"""The seam between rounds and whatever proposes tokens.

A drafter may be wrong, adversarial or silent: it changes time, never text. It sees a group of
B >= 1 rows; a single request is a group of one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, Self

import mlx.core as mx

from ..sampling import RowSampling
from ..state.checkpoint import Checkpoint
from ..state.donors import Donor
from ..target import Target

Taps = tuple[mx.array, ...]
"""Hidden states [B, N, H] of the target's last forward, one for each of the provider's `taps`."""

PrefillMode = Literal["tail-split", "full"]
"""`tail-split`: both models drain the prompt to its last token, which heads the first window.
`full`: the prompt is forwarded whole and the first token is sampled from it."""


@dataclass(frozen=True, slots=True)
class Draft:
    """What a drafter proposes for one round.

    `tokens` are ids [B, K] on the device; of row r only the first `lengths[r]` columns count.
    The lengths are authoritative: 0 means one plain target step.
    """

    tokens: mx.array
    lengths: tuple[int, ...]

    @classmethod
    def of(cls, rows: Sequence[Sequence[int]]) -> Draft:
        """A draft from ids on the host, one sequence per row."""
        width = max(map(len, rows))
        padded = [[*row, *[0] * (width - len(row))] for row in rows]
        tokens = mx.array(padded, dtype=mx.uint32).reshape(len(rows), width)
        return cls(tokens, tuple(map(len, rows)))


class Lender(Protocol):
    """The target's rows, as far as a drafter may read them between rounds."""

    def donor(self, windowed: bool) -> Donor: ...


class DraftRows(Protocol):
    """The drafter's memory of a group's rows.

    Order of calls: `prefill` the prompts in chunks, then `draft` and `commit` in turn. `selected`,
    `joined` and `capture` are legal only between committed rounds, or between prefill chunks. The
    first two return new rows; of those they came from only what is not continued may be dropped.
    """

    @property
    def namespace(self) -> str:
        """That of the provider that opened them."""
        ...

    @property
    def prefill_mode(self) -> PrefillMode: ...

    @property
    def row_count(self) -> int: ...

    def selected(self, keep: Sequence[int]) -> Self:
        """The rows `keep`, at least one, in that order."""
        ...

    def joined(self, other: Self) -> Self:
        """These rows and the other's behind them. A failure leaves both as they were."""
        ...

    def prefill(self, tokens: mx.array, taps: Taps) -> None:
        """Process known ids [B, N] and the hidden states the target had on them."""
        ...

    def draft(
        self, pending: Sequence[int], depth: int, steps: Sequence[int], lender: Lender
    ) -> Draft:
        """Propose up to `depth` ids per row.

        `pending[r]` is row r's last known token, which nothing has processed yet. Draft position p
        of row r is sampled, if the drafter samples, at step `steps[r] + p`. What `lender` lends is
        good until this round's verify.
        """
        ...

    def commit(self, retained: Sequence[int], taps: Taps) -> None:
        """Keep, per row, the pending token and the first `retained[r]` drafted ones.

        `taps` are those of the verify window, whose first token is the pending one.
        """
        ...

    def capture(self, row: int) -> Checkpoint:
        """An owned copy of one row."""
        ...


class DraftProvider(Protocol):
    """A drafter as mounted beside a target. It lives as long as the engine and opens groups."""

    @property
    def id(self) -> str: ...

    @property
    def namespace(self) -> str:
        """Schema and identity under which its rows' checkpoints are valid."""
        ...

    @property
    def weights_bytes(self) -> int: ...

    @property
    def default_depth(self) -> int: ...

    @property
    def taps(self) -> tuple[str, ...]:
        """Names of the target's hidden states that it reads; see `ports`."""
        ...

    @property
    def target(self) -> Target | None:
        """The one target object that it serves; None if it serves any.

        A drafter that reads a target holds its arrays: another object made of the same files, or
        loaded in another way, is another target.
        """
        ...

    @property
    def supports_target_adapters(self) -> bool:
        """Whether it drafts for a target with an adapter mounted.

        False for one that was made for the base model, or agrees with it: under an adapter it
        would be wrong too often to be worth its time. Then `generate` decodes without it.
        """
        ...

    def state_bytes(self, tokens: int) -> int:
        """What a row's state comes to after that many tokens."""
        ...

    @property
    def cannot_share(self) -> tuple[str, ...]:
        """Why its rows must each be a group of one; empty if they need not."""
        ...

    def open(self, sampling: RowSampling, checkpoint: Checkpoint | None = None) -> DraftRows:
        """One row, empty or restored, whose sampled drafts use the row's own sampler.

        Raises:
            BadInput: the checkpoint has another schema, policy or length.
        """
        ...
