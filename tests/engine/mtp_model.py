"""A next-token head's rows as a list: every forward starts from nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import mlx.core as mx

from engine.drafters.mtp_rows import Mtp
from engine.host import read
from engine.state.checkpoint import capture_caches


@dataclass(slots=True)
class Slow:
    """One request; `rows` are the ids and hidden states [H] that its rows were made of."""

    mtp: Mtp
    rows: list[tuple[int, mx.array]] = field(default_factory=list)
    hidden: mx.array | None = None
    processed: int = 0
    drafted: list[tuple[int, mx.array]] = field(default_factory=list)
    drafts: list[int] = field(default_factory=list)

    def prefill(self, ids: Sequence[int], hidden: mx.array) -> None:
        for token, state in zip(ids, hidden, strict=True):
            if self.mtp.convention.whole_text and self.hidden is not None:
                self.rows.append((token, self.hidden))
            self.hidden, self.processed = state, self.processed + 1

    def draft(self, pending: int, depth: int) -> list[int]:
        assert self.hidden is not None
        token, hidden = pending, self.hidden
        self.drafted, self.drafts = [], []
        forwards = depth or int(self.mtp.convention.whole_text)
        for _ in range(forwards):
            self.drafted.append((token, hidden))
            hidden = self.forward([*self.rows, *self.drafted])[0][-1]
            token = int(mx.argmax(self.mtp.ports.logits(hidden[None, None])))
            self.drafts.append(token)
        self.drafts = self.drafts[:depth]
        return self.drafts

    def commit(self, kept: int, hidden: mx.array) -> None:
        if not self.mtp.convention.keeps_drafted:
            self.rows += self.drafted[:1]
            self.rows += [(self.drafts[i], hidden[i]) for i in range(kept)]
        else:
            self.rows += self.drafted[: kept + 1]
            if self.drafts and kept == len(self.drafts):
                self.rows.append((self.drafts[-1], hidden[kept - 1]))
        self.hidden, self.processed = hidden[kept], self.processed + 1 + kept

    def tensors(self) -> tuple[mx.array, ...]:
        """What a checkpoint holds."""
        assert self.hidden is not None
        own = self.forward(self.rows)[1] if self.rows else ()
        return (*own, self.hidden[None, None])

    def forward(
        self, rows: Sequence[tuple[int, mx.array]]
    ) -> tuple[mx.array, tuple[mx.array, ...]]:
        """The outputs [N, H] of all rows, and the caches' arrays behind them."""
        head = self.mtp.head
        ids = mx.array([[token for token, _ in rows]])
        hidden = mx.stack([state for _, state in rows])[None]
        caches = head.make_cache()
        out = head(head.mix(self.mtp.ports.embed(ids), hidden), cache=caches)
        return out[0], capture_caches(caches)[1]


def same_numbers(ours: Sequence[mx.array], theirs: Sequence[mx.array]) -> bool:
    """Equal but for the last bits of sums in another order."""
    return [a.shape for a in ours] == [b.shape for b in theirs] and all(
        read(mx.allclose(a, b, rtol=1e-4, atol=1e-4)) for a, b in zip(ours, theirs, strict=True)
    )
