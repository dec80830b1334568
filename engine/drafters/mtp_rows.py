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
from functools import cached_property
from typing import Any, Protocol

import mlx.core as mx
from mlx.utils import tree_flatten

from ..errors import BadInput, LawError
from ..ports import Ports
from ..sampling import RowSampling, log_softmax
from ..state.checkpoint import (
    Attachment,
    Checkpoint,
    capture_caches,
    require_schema,
    restore_caches,
)
from ..state.layouts import Cache
from ..state.memory import Footprint, measure
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
        provider: MtpProvider,
        sampling: RowSampling,
        state: Rows,
        hidden: mx.array,
        processed: Sequence[int],
    ) -> None:
        self._provider = provider
        self._sampling = sampling
        self._state = state
        self._hidden = hidden
        self._processed = list(processed)
        self._round: _Round | None = None

    @property
    def namespace(self) -> str:
        return self._provider.namespace

    @property
    def row_count(self) -> int:
        return len(self._processed)

    def selected(self, keep: Sequence[int]) -> MtpRows:
        return MtpRows(
            self._provider,
            self._sampling.selected(keep),
            self._state.selected(keep),
            self._hidden[mx.array(list(keep))],
            [self._processed[r] for r in keep],
        )

    def joined(self, other: MtpRows) -> MtpRows:
        return MtpRows(
            self._provider,
            self._sampling.joined(other._sampling),
            self._state.joined(other._state),
            mx.concatenate([self._hidden, other._hidden]),
            self._processed + other._processed,
        )

    def prefill(self, tokens: mx.array, taps: Taps) -> None:
        (hidden,) = taps
        if self._provider.convention.whole_text:
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
        made = max(depth, 1) if self._provider.convention.whole_text else depth
        self._state.begin(Undo.FORWARDS)
        tokens = [mx.zeros((self.row_count, 0), mx.uint32)]
        for position in range(made):
            hidden = self._forward(ids, hidden)
            if position < depth:
                logits = self._provider.ports.logits(hidden)
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
            raise LawError(f"{self._provider.id} commit without draft")
        (hidden,) = taps
        if self._provider.convention.keeps_drafted:
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
        provider = self._provider
        return self._state.forward(provider.head.mix(provider.ports.embed(ids), hidden))


class MtpProvider:
    """A head mounted beside the target that `ports` are of.

    Args:
        tap: the target's hidden state that the head was trained on.
        identity: what its checkpoints are valid under beside `schema`; asked for when needed.
    """

    supports_target_adapters = False

    def __init__(
        self,
        head: Head,
        ports: Ports,
        convention: Convention,
        *,
        id: str,
        schema: str,
        tap: str,
        depth: int,
        identity: Callable[[], str],
        cannot_share: tuple[str, ...] = (),
    ) -> None:
        self.head = head
        self.ports = ports
        self.convention = convention
        self.id = id
        self.taps: tuple[str, ...] = (tap,)
        self.default_depth = depth
        self.cannot_share = cannot_share
        self._schema = schema
        self._identity = identity

    @cached_property
    def namespace(self) -> str:
        return f"{self._schema}:{self._identity()}"

    @property
    def weights_bytes(self) -> int:
        arrays: Any = tree_flatten(self.head.parameters())
        return sum(array.nbytes for _, array in arrays)

    def state_bytes(self, tokens: int) -> int:
        return self._footprint.bytes(tokens)

    def open(self, sampling: RowSampling, checkpoint: Checkpoint | None = None) -> MtpRows:
        if checkpoint is None:
            return MtpRows(self, sampling, self._rows(self.head.make_cache(), 0), self._cold, [0])
        attachment = require_schema(checkpoint, self.namespace)
        processed = attachment.metadata.get("processed_tokens")
        if processed != checkpoint.processed_tokens:
            raise BadInput(
                f"checkpoint stands at {checkpoint.processed_tokens} tokens, "
                f"its attachment at {processed}"
            )
        made = self._checked_offset(checkpoint)
        *tensors, hidden = attachment.tensors or (mx.zeros(0),)
        if hidden.shape != self._cold.shape or not mx.issubdtype(hidden.dtype, mx.floating):
            raise BadInput(
                f"checkpoint hidden state is {hidden.shape} x {hidden.dtype}, "
                f"expected {self._cold.shape} x floating"
            )
        caches = self.head.make_cache()
        if made:
            restore_caches(caches, str(attachment.metadata.get("layers")), tensors, made)
        elif tensors:
            raise BadInput(f"checkpoint holds {len(tensors)} arrays of 0 rows, expected 0")
        return MtpRows(self, sampling, self._rows(caches, made), hidden, [processed])

    def _checked_offset(self, checkpoint: Checkpoint) -> int:
        """How many rows a checkpoint holds."""
        tokens = checkpoint.processed_tokens
        most = max(tokens - 1, 0)
        least = most if self.convention.whole_text else 0
        made = checkpoint.attachment.metadata.get("draft_offset")
        if type(made) is not int or not least <= made <= most:
            raise BadInput(
                f"checkpoint draft_offset is {made} after {tokens} tokens, "
                f"expected {least if least == most else f'{least} to {most}'}"
            )
        return made

    def _rows(self, caches: list[Cache], made: int) -> Rows:
        return Rows(self.head, caches, (made,))

    @cached_property
    def _cold(self) -> mx.array:
        """The hidden state [1, 1, H] of a row that has seen nothing."""
        cold = mx.zeros_like(self.ports.embed(mx.array([[0]])))
        mx.eval(cold)  # an array that is not evaluated belongs to the thread that made it
        return cold

    @cached_property
    def _footprint(self) -> Footprint:
        def forward(ids: mx.array, cache: list[Cache]) -> mx.array:
            rows = mx.zeros((*ids.shape, self._cold.shape[-1]), self._cold.dtype)
            return self.head(rows, cache)

        found = measure(forward, self.head.make_cache())
        return Footprint(found.fixed + self._cold.nbytes, found.growing)
