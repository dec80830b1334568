"""Opening a next-token head's rows: empty, or from a checkpoint that is its own."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

from ..errors import BadInput
from ..sampling import RowSampling
from ..state.checkpoint import Checkpoint, require_schema, restore_caches
from ..state.layouts import Cache
from ..state.memory import Footprint, measure
from ..state.rows import Rows
from ..target import Target
from .mtp_rows import Mtp, MtpRows


class MtpProvider:
    """A head mounted beside its target; `tap` is the hidden state that it was trained on."""

    supports_target_adapters = False

    def __init__(
        self,
        mtp: Mtp,
        target: Target,
        *,
        tap: str,
        depth: int,
        cannot_share: tuple[str, ...] = (),
    ) -> None:
        self.mtp = mtp
        self.target: Target | None = target
        self.id = mtp.id
        self.taps: tuple[str, ...] = (tap,)
        self.default_depth = depth
        self.cannot_share = cannot_share

    @property
    def namespace(self) -> str:
        return self.mtp.namespace

    @property
    def weights_bytes(self) -> int:
        arrays: Any = tree_flatten(self.mtp.head.parameters())
        return sum(array.nbytes for _, array in arrays)

    def state_bytes(self, tokens: int) -> int:
        return self._footprint.bytes(tokens)

    def open(self, sampling: RowSampling, checkpoint: Checkpoint | None = None) -> MtpRows:
        if checkpoint is None:
            return MtpRows(
                self.mtp, sampling, self._rows(self.mtp.head.make_cache(), 0), self._cold, [0]
            )
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
        caches = self.mtp.head.make_cache()
        if made:
            restore_caches(caches, str(attachment.metadata.get("layers")), tensors, made)
        elif tensors:
            raise BadInput(f"checkpoint holds {len(tensors)} arrays of 0 rows, expected 0")
        return MtpRows(self.mtp, sampling, self._rows(caches, made), hidden, [processed])

    def _checked_offset(self, checkpoint: Checkpoint) -> int:
        """How many rows a checkpoint holds."""
        tokens = checkpoint.processed_tokens
        most = max(tokens - 1, 0)
        least = most if self.mtp.convention.whole_text else 0
        made = checkpoint.attachment.metadata.get("draft_offset")
        if type(made) is not int or not least <= made <= most:
            raise BadInput(
                f"checkpoint draft_offset is {made} after {tokens} tokens, "
                f"expected {least if least == most else f'{least} to {most}'}"
            )
        return made

    def _rows(self, caches: list[Cache], made: int) -> Rows:
        return Rows(self.mtp.head, caches, (made,))

    @cached_property
    def _cold(self) -> mx.array:
        """The hidden state [1, 1, H] of a row that has seen nothing."""
        cold = mx.zeros_like(self.mtp.ports.embed(mx.array([[0]])))
        mx.eval(cold)  # an array that is not evaluated belongs to the thread that made it
        return cold

    @cached_property
    def _footprint(self) -> Footprint:
        def forward(ids: mx.array, cache: list[Cache]) -> mx.array:
            rows = mx.zeros((*ids.shape, self._cold.shape[-1]), self._cold.dtype)
            return self.mtp.head(rows, cache)

        found = measure(forward, self.mtp.head.make_cache())
        return Footprint(found.fixed + self._cold.nbytes, found.growing)
