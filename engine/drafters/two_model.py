"""A second, smaller model that decodes ahead of the target (Leviathan et al. 2023).

Each draft step samples with the request's own sampler, so at temperature > 0 drafts are sampled
too. Acceptance is exact match, not rejection sampling.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

from ..errors import BadInput, LawError
from ..host import read
from ..sampling import RowSampling, log_softmax
from ..state.checkpoint import (
    Attachment,
    Checkpoint,
    capture_caches,
    require_schema,
)
from ..state.rows import Rows, Undo
from ..target import Target
from .source import Draft, Lender, PrefillMode, Taps

SCHEMA = "standalone-draft-v1"

PROBES = (
    "Hello, world!",
    " 12 + 34 = 46\n",
    "naïve café – Ελλάδα",
    "日本語 🙂",
    "def f(x):\n\treturn x",
)
"""Texts on which tokenizers of different families disagree."""


@dataclass(slots=True)
class Lag:
    """What the draft model has not seen of its own last draft.

    After a full accept that is one id, which the next forward feeds first: `tokens` [B, 1] on the
    device, of which only the rows `lagging` count.
    """

    lagging: tuple[bool, ...]
    tokens: mx.array

    @classmethod
    def none(cls, rows: int) -> Lag:
        return cls((False,) * rows, mx.zeros((rows, 1), mx.uint32))


class TwoModelRows:
    """The draft model's state for a group's rows. See `DraftRows`."""

    prefill_mode: PrefillMode = "tail-split"

    def __init__(self, model: Target, sampling: RowSampling, state: Rows, lag: Lag) -> None:
        self._model = model
        self._sampling = sampling
        self._state = state
        self._lag = lag
        self._round: Draft | None = None

    @property
    def namespace(self) -> str:
        return _namespace(self._model)

    @property
    def row_count(self) -> int:
        return self._state.row_count

    def selected(self, keep: Sequence[int]) -> TwoModelRows:
        lagging = tuple(self._lag.lagging[r] for r in keep)
        lag = Lag(lagging, self._lag.tokens[mx.array(list(keep))])
        sampling = self._sampling.selected(keep)
        return TwoModelRows(self._model, sampling, self._state.selected(keep), lag)

    def joined(self, other: TwoModelRows) -> TwoModelRows:
        ours, theirs = self._lag, other._lag
        lag = Lag(ours.lagging + theirs.lagging, mx.concatenate([ours.tokens, theirs.tokens]))
        sampling = self._sampling.joined(other._sampling)
        return TwoModelRows(self._model, sampling, self._state.joined(other._state), lag)

    def prefill(self, tokens: mx.array, taps: Taps) -> None:
        self._feed(tokens)
        mx.eval(self._state.arrays())

    def draft(
        self, pending: Sequence[int], depth: int, steps: Sequence[int], lender: Lender
    ) -> Draft:
        logits = self._feed(mx.array(list(pending), dtype=mx.uint32)[:, None])
        # Each forward below is one token, and a commit ends behind one of them.
        self._state.begin(Undo.FORWARDS)
        tokens: list[mx.array] = []
        for position in range(depth):
            if position > 0:
                logits = self._state.forward(tokens[-1])
            drawn = self._sampling.sample(log_softmax(logits), [s + position for s in steps])
            mx.async_eval(drawn)
            tokens.append(drawn)
        if not tokens:
            # Nothing is proposed, but the draft model has seen the pending token.
            mx.async_eval(self._state.arrays())
        rows = self.row_count
        drafted = mx.concatenate(tokens, axis=1) if tokens else mx.zeros((rows, 0), mx.uint32)
        self._round = Draft(drafted, (depth,) * rows)
        return self._round

    def commit(self, retained: Sequence[int], taps: Taps) -> None:
        drafted = self._round
        if drafted is None:
            raise LawError("two-model commit without draft")
        depth = drafted.lengths[0]
        self._state.resolve([min(kept, max(depth - 1, 0)) for kept in retained])
        if depth > 0:
            full = tuple(kept == depth for kept in retained)
            self._lag = Lag(full, drafted.tokens[:, depth - 1 :])
        self._round = None

    def capture(self, row: int) -> Checkpoint:
        lagging = self._lag.lagging[row]
        processed = self._state.processed[row] + lagging
        layers, tensors = capture_caches(self._state.lowered(row))
        metadata: dict[str, str | int | bool] = {
            "processed_tokens": processed,
            "pending_last": int(read(self._lag.tokens)[row][0]) if lagging else False,
            "layers": layers,
        }
        return Checkpoint(processed, Attachment(self.namespace, metadata, tensors))

    def _feed(self, tokens: mx.array) -> mx.array:
        """Forward ids [B, N >= 1] behind what lags; the logits [B, 1, V] of each row's last."""
        lag, width = self._lag, tokens.shape[1]
        self._lag = Lag.none(self.row_count)
        if not any(lag.lagging):
            return self._state.forward(tokens)[:, -1:]
        behind = mx.concatenate([lag.tokens, tokens], axis=1)
        if all(lag.lagging):
            return self._state.forward(behind)[:, -1:]
        # Rows without a lag end one token earlier: the padding behind them is taken back.
        lagging = mx.array(lag.lagging)[:, None]
        padded = mx.concatenate([tokens, tokens[:, -1:]], axis=1)
        self._state.begin(Undo.TOKENS)
        logits = self._state.forward(mx.where(lagging, behind, padded))
        self._state.resolve([width + own for own in lag.lagging])
        ends = mx.array([width - 1 + own for own in lag.lagging])[:, None, None]
        return mx.take_along_axis(logits, ends, axis=1)


class TwoModelProvider:
    """A draft model mounted beside a target.

    Raises:
        BadInput: its tokenizer differs from the target's, or its caches cannot be rolled back.
    """

    id = "two-model"
    default_depth = 3
    taps: tuple[str, ...] = ()
    target = None
    supports_target_adapters = False

    def __init__(self, draft: Target, target: Target) -> None:
        for text in PROBES:
            if draft.encode(text) != target.encode(text):
                raise BadInput(
                    f"draft model {draft.path} has another tokenizer than target {target.path}: "
                    f"they encode {text!r} differently"
                )
        if names := draft.new_rows().cannot_step_back:
            raise BadInput(
                f"draft model {draft.path} cannot draft: cache kind {', '.join(names)} "
                "has no rollback"
            )
        if draft.vocab_size != target.vocab_size:
            warnings.warn(
                f"draft vocabulary {draft.vocab_size} differs from target {target.vocab_size}; "
                "drafts beyond the target's are never accepted",
                stacklevel=2,
            )
        self._draft = draft

    @property
    def namespace(self) -> str:
        return _namespace(self._draft)

    @property
    def cannot_share(self) -> tuple[str, ...]:
        # Where some rows lag and some do not, a window is kept in part.
        names = self._draft.new_rows().cannot_roll_back
        kept = tuple(f"cache kind {name} has no rollback" for name in names)
        return (*self._draft.cannot_share, *kept)

    @property
    def weights_bytes(self) -> int:
        arrays: Any = tree_flatten(self._draft.model.parameters())
        return sum(array.nbytes for _, array in arrays)

    def state_bytes(self, tokens: int) -> int:
        return self._draft.footprint.bytes(tokens)

    def open(self, sampling: RowSampling, checkpoint: Checkpoint | None = None) -> TwoModelRows:
        state, lag = self._draft.new_rows(), Lag.none(1)
        rows = TwoModelRows(self._draft, sampling, state, lag)
        if checkpoint is None:
            return rows
        attachment = require_schema(checkpoint, self.namespace)
        processed = attachment.metadata.get("processed_tokens")
        if processed != checkpoint.processed_tokens:
            raise BadInput(
                f"checkpoint stands at {checkpoint.processed_tokens} tokens, "
                f"its attachment at {processed}"
            )
        last = attachment.metadata.get("pending_last")
        if last is not False:
            lag = Lag((True,), mx.array([[last]], dtype=mx.uint32))
        held = checkpoint.processed_tokens - any(lag.lagging)
        layers = str(attachment.metadata.get("layers"))
        state = self._draft.restored_rows(layers, attachment.tensors, held)
        return TwoModelRows(self._draft, sampling, state, lag)


def _namespace(model: Target) -> str:
    return f"{SCHEMA}:{model.identity}"
