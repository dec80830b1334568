"""Next-token heads: one decoder layer that drafts from the target's last hidden state.

A row of such a head joins the embedding of one token with the hidden state the target had on the
token before it, goes through the layer and predicts, by the target's own head, the token after
(DeepSeek-V3 report, section 2.2). Only the first draft of a round starts from a true hidden state;
each further one takes the head's own output for it.

What the kinds share is here: rows of any number of requests, their prompts, rounds and checkpoints.
Where kinds differ they say so by a `Convention` and by their module.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import mlx.core as mx

from ..errors import LawError
from ..ports import Ports
from ..sampling import RowSampling, log_softmax
from ..state.checkpoint import Attachment, Checkpoint, capture_caches
from ..state.layouts import Cache
from ..state.rows import Rows, Undo
from .source import Draft, Lender, PrefillMode, Taps


class Head(Protocol):
    """A kind's module. Arrays are [B, N, H]."""

    def mix(self, embeddings: mx.array, hidden: mx.array) -> mx.array:
        """The layer's input, from embeddings and the hidden states before them."""
        ...

    def __call__(self, mixed: mx.array, cache: list[Cache]) -> mx.array:
        """What the target's head reads; it also stands in for the next hidden state."""
        ...

    def make_cache(self) -> list[Cache]: ...

    def parameters(self) -> Any: ...


@dataclass(frozen=True, slots=True)
class Convention:
    """Which tokens a kind makes rows of, and from which hidden states.

    `whole_text`: every token but the first has a row, those of the prompt and pending ones that
    nothing was drafted from included; else rows are made by drafting alone. `keeps_drafted`:
    accepted rows stay as they were drafted, and only a last draft, which has none, gets a row from
    the target's hidden state; else all but the first, which had one, are made again.
    """

    whole_text: bool
    keeps_drafted: bool


@dataclass(frozen=True, slots=True)
class Mtp:
    """A head and the target it drafts for, by that one's `ports`.

    Checkpoints are valid under `schema` and `identity`, which is asked for when needed.
    """

    id: str
    head: Head
    ports: Ports
    convention: Convention
    schema: str
    identity: Callable[[], str]

    @property
    def namespace(self) -> str:
        return f"{self.schema}:{self.identity()}"


@dataclass(slots=True)
class _Round:
    """`made` rows were appended while drafting."""

    draft: Draft
    made: int


class MtpRows:
    """A head's rows for a group's requests. See `DraftRows`.

    `hidden` [B, 1, H] is the target's on each row's last processed token, `processed` counts these;
    at 0 the hidden state counts for nothing.
    """

    prefill_mode: PrefillMode = "full"

    def __init__(
        self,
        mtp: Mtp,
        sampling: RowSampling,
        state: Rows,
        hidden: mx.array,
        processed: Sequence[int],
    ) -> None:
        self._mtp = mtp
        self._sampling = sampling
        self._state = state
        self._hidden = hidden
        self._processed = list(processed)
        self._round: _Round | None = None

    @property
    def namespace(self) -> str:
        return self._mtp.namespace

    @property
    def row_count(self) -> int:
        return len(self._processed)

    def selected(self, keep: Sequence[int]) -> MtpRows:
        return MtpRows(
            self._mtp,
            self._sampling.selected(keep),
            self._state.selected(keep),
            self._hidden[mx.array(list(keep))],
            [self._processed[r] for r in keep],
        )

    def joined(self, other: MtpRows) -> MtpRows:
        return MtpRows(
            self._mtp,
            self._sampling.joined(other._sampling),
            self._state.joined(other._state),
            mx.concatenate([self._hidden, other._hidden]),
            self._processed + other._processed,
        )

    def prefill(self, tokens: mx.array, taps: Taps) -> None:
        (hidden,) = taps
        if self._mtp.convention.whole_text:
            self._append_prompt(tokens, hidden)
        # Compact, so that it does not keep the chunk's whole buffer alive.
        self._hidden = mx.contiguous(hidden[:, -1:])
        self._processed = [count + tokens.shape[1] for count in self._processed]
        mx.eval(self._hidden, self._state.arrays())

    def draft(
        self, pending: Sequence[int], depth: int, steps: Sequence[int], lender: Lender
    ) -> Draft:
        if not all(self._processed):
            raise LawError("a draft before the prompt: there is no hidden state to draft from")
        ids = mx.array(list(pending), dtype=mx.uint32)[:, None]
        hidden = self._hidden
        made = max(depth, 1) if self._mtp.convention.whole_text else depth
        self._state.begin(Undo.FORWARDS)
        tokens = [mx.zeros((self.row_count, 0), mx.uint32)]
        for position in range(made):
            hidden = self._forward(ids, hidden)
            if position < depth:
                logits = self._mtp.ports.logits(hidden)
                ids = self._sampling.sample(log_softmax(logits), [s + position for s in steps])
                mx.async_eval(ids)
                tokens.append(ids)
        if made > depth:
            # Nothing is proposed, but the pending token has its row.
            mx.async_eval(self._state.arrays())
        draft = Draft(mx.concatenate(tokens, axis=1), (depth,) * self.row_count)
        self._round = _Round(draft, made)
        return draft

    def commit(self, retained: Sequence[int], taps: Taps) -> None:
        now = self._round
        if now is None:
            raise LawError(f"{self._mtp.id} commit without draft")
        (hidden,) = taps
        if self._mtp.convention.keeps_drafted:
            keep, first = [min(kept + 1, now.made) for kept in retained], max(now.made - 1, 0)
        else:
            keep, first = [min(1, now.made)] * self.row_count, 0
        self._state.resolve(keep)
        # Rows of the drafts from `first` on come from the target's hidden states before them.
        lacking = [max(kept - first, 0) for kept in retained]
        span = slice(first, first + max(lacking))
        self._append(now.draft.tokens[:, span], hidden[:, span], lacking)
        self._hidden = mx.take_along_axis(hidden, mx.array(list(retained))[:, None, None], axis=1)
        self._processed = [
            count + 1 + kept for count, kept in zip(self._processed, retained, strict=True)
        ]
        mx.async_eval(self._hidden, self._state.arrays())
        self._round = None

    def capture(self, row: int) -> Checkpoint:
        made, processed = self._state.processed[row], self._processed[row]
        hidden = mx.contiguous(self._hidden[row : row + 1])
        mx.eval(hidden)
        layers, tensors = capture_caches(self._state.lowered(row)) if made else ("", ())
        metadata: dict[str, str | int | bool] = {
            "processed_tokens": processed,
            "draft_offset": made,
            "layers": layers,
        }
        return Checkpoint(processed, Attachment(self.namespace, metadata, (*tensors, hidden)))

    def _append_prompt(self, tokens: mx.array, hidden: mx.array) -> None:
        """Rows of a chunk [B, N]; a prompt's first token has none, for want of a hidden state."""
        warm = [count > 0 for count in self._processed]
        width = tokens.shape[1]
        if not any(warm):
            self._append(tokens[:, 1:], hidden[:, :-1], [width - 1] * self.row_count)
            return
        before = mx.concatenate([self._hidden, hidden[:, :-1]], axis=1)
        if not all(warm):
            # Rows that begin here stand one token further, with padding at the end.
            begun = mx.array(warm)[:, None]
            further = mx.concatenate([tokens[:, 1:], tokens[:, -1:]], axis=1)
            tokens = mx.where(begun, tokens, further)
            before = mx.where(begun[..., None], before, hidden)
        self._append(tokens, before, [width - 1 + own for own in warm])

    def _append(self, ids: mx.array, hidden: mx.array, counts: Sequence[int]) -> None:
        """Rows of known ids [B, N] and the hidden states before them, `counts[r]` of row r's."""
        width = ids.shape[1]
        if width == 0:
            return
        if min(counts) == width:
            self._forward(ids, hidden)
            return
        self._state.begin(Undo.TOKENS)
        self._forward(ids, hidden)
        self._state.resolve(counts)

    def _forward(self, ids: mx.array, hidden: mx.array) -> mx.array:
        mixed = self._mtp.head.mix(self._mtp.ports.embed(ids), hidden)
        return self._state.forward(mixed)
