"""A second, smaller model that decodes ahead of the target (Leviathan et al. 2023).

Each draft step samples with the request's own sampler, so at temperature > 0 drafts are sampled
too. Acceptance is exact match, not rejection sampling.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
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
    restore_caches,
)
from ..state.native import NativeRows, Undo
from ..target import Target
from .source import Draft, PrefillMode

SCHEMA = "standalone-draft-v1"

PROBES = (
    "Hello, world!",
    " 12 + 34 = 46\n",
    "naïve café – Ελλάδα",
    "日本語 🙂",
    "def f(x):\n\treturn x",
)
"""Texts on which tokenizers of different families disagree."""


class TwoModelRows:
    """The draft model's state for a group's rows. See `DraftRows`; one row on native caches.

    After a full accept the draft model has not seen its own last draft. `_lag` keeps that id
    [1, 1] on the device, and the next round feeds it in front of the pending token.
    """

    prefill_mode: PrefillMode = "tail-split"

    def __init__(self, model: Target, sampling: RowSampling) -> None:
        self._model = model
        self._sampling = sampling
        self._state: NativeRows | None = None
        self._lag: mx.array | None = None
        self._round: Draft | None = None

    @property
    def namespace(self) -> str:
        return f"{SCHEMA}:{self._model.identity}"

    @property
    def row_count(self) -> int:
        return 0 if self._state is None else 1

    def append(self, checkpoint: Checkpoint | None) -> None:
        if self._state is not None:
            raise BadInput("a group on native caches holds 1 row, got a second")
        state, lag = self._model.new_rows(), None
        if checkpoint is not None:
            state, lag = self._restored(checkpoint)
        self._state, self._lag = state, lag

    def filter_rows(self, keep: Sequence[int]) -> None:
        if not keep:
            self._state, self._lag = None, None

    def prefill(self, tokens: mx.array) -> None:
        state = self._require_state()
        state.forward(self._behind_lag(tokens))
        self._lag = None
        mx.eval(state.arrays())

    def draft(self, pending: Sequence[int], depth: int, steps: Sequence[int]) -> Draft:
        state = self._require_state()
        # The forwards below are cut where a commit may end: only whole ones are taken back.
        state.begin(Undo.FORWARDS)
        fed = self._behind_lag(mx.array([pending], dtype=mx.uint32).reshape(-1, 1))
        tokens: list[mx.array] = []
        # Depth 0 proposes nothing, but the draft model must still see the pending token.
        for position in range(max(depth, 1)):
            logits = state.forward(fed)[:, -1:, :]
            if depth == 0:
                mx.async_eval(state.arrays())
                break
            fed = self._sampling.sample(log_softmax(logits), [s + position for s in steps])
            mx.async_eval(fed)
            tokens.append(fed)
        drafted = mx.concatenate(tokens, axis=1) if tokens else mx.zeros((1, 0), mx.uint32)
        self._round = Draft(drafted, (depth,) * len(pending))
        return self._round

    def commit(self, retained: Sequence[int]) -> None:
        state, drafted = self._require_state(), self._round
        if drafted is None:
            raise LawError("two-model commit without draft")
        (depth,), (kept,) = drafted.lengths, retained
        lag = 0 if self._lag is None else 1
        state.resolve([lag + 1 + min(kept, max(depth - 1, 0))])
        self._lag = drafted.tokens[:, depth - 1 :] if 0 < depth == kept else None
        self._round = None

    def capture(self, row: int) -> Checkpoint:
        state = self._require_state()
        lag = False if self._lag is None else int(read(self._lag)[0][0])
        processed = state.processed + (self._lag is not None)
        layers, tensors = capture_caches(state.caches)
        metadata: dict[str, str | int | bool] = {
            "processed_tokens": processed,
            "pending_last": lag,
            "layers": layers,
        }
        return Checkpoint(processed, Attachment(self.namespace, metadata, tensors))

    def _restored(self, checkpoint: Checkpoint) -> tuple[NativeRows, mx.array | None]:
        attachment = require_schema(checkpoint, self.namespace)
        processed = attachment.metadata.get("processed_tokens")
        if processed != checkpoint.processed_tokens:
            raise BadInput(
                f"checkpoint stands at {checkpoint.processed_tokens} tokens, "
                f"its attachment at {processed}"
            )
        lag = attachment.metadata.get("pending_last")
        held = checkpoint.processed_tokens - (lag is not False)
        rows = self._model.new_rows()
        layers = str(attachment.metadata.get("layers"))
        restore_caches(rows.caches, layers, attachment.tensors, held)
        rows.processed = held
        return rows, None if lag is False else mx.array([[lag]], dtype=mx.uint32)

    def _behind_lag(self, tokens: mx.array) -> mx.array:
        return tokens if self._lag is None else mx.concatenate([self._lag, tokens], axis=1)

    def _require_state(self) -> NativeRows:
        if self._state is None:
            raise LawError("the group has no row")
        return self._state


class TwoModelProvider:
    """A draft model mounted beside a target.

    Raises:
        BadInput: its tokenizer differs from the target's, or its caches cannot be rolled back.
    """

    id = "two-model"
    default_depth = 3
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
    def weights_bytes(self) -> int:
        arrays: Any = tree_flatten(self._draft.model.parameters())
        return sum(array.nbytes for _, array in arrays)

    def open(self, sampling: RowSampling) -> TwoModelRows:
        return TwoModelRows(self._draft, sampling)
