"""Block drafters at the seam: a group's projected context, and the provider that opens one."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.utils import tree_flatten
from mlx_lm.models.cache import KVCache

from ..cache.identity import digest_of
from ..errors import BadInput, LawError
from ..host import read
from ..ports import layer_tap
from ..sampling import RowSampling
from ..state.checkpoint import (
    Attachment,
    Checkpoint,
    capture_caches,
    require_schema,
    restore_caches,
)
from ..state.memory import Footprint
from ..state.rows import Rows, Undo
from ..target import Target
from .block_config import Config, thresholds_of
from .block_heads import lengths_kept
from .block_layers import Pair
from .projected_context import BlockModel, BlockShape, Context, Proposal
from .source import Draft, Lender, PrefillMode, Taps
from .weights import Quantization, fill, tensors_of


class ContextRows:
    """The projected context of a group's rows. See `DraftRows`.

    It holds one column for each token that the target's state holds. `proposal` is the last
    round's block; drafting is greedy whatever the request's sampling is.
    """

    prefill_mode: PrefillMode = "tail-split"

    def __init__(
        self,
        model: BlockModel,
        state: Rows,
        namespace: str,
        thresholds: tuple[float, ...] | None,
    ) -> None:
        self.namespace = namespace
        self.proposal: Proposal | None = None
        self._model = model
        self._state = state
        self._thresholds = thresholds
        self._drafted = False

    @property
    def row_count(self) -> int:
        return self._state.row_count

    def selected(self, keep: Sequence[int]) -> ContextRows:
        return self._with(self._state.selected(keep))

    def joined(self, other: ContextRows) -> ContextRows:
        return self._with(self._state.joined(other._state))

    def prefill(self, tokens: mx.array, taps: Taps) -> None:
        self._state.forward(mx.concatenate(list(taps), axis=-1))
        mx.eval(self._state.arrays())

    def draft(
        self, pending: Sequence[int], depth: int, steps: Sequence[int], lender: Lender
    ) -> Draft:
        self._drafted = True
        if depth == 0:
            return Draft.of([()] * self.row_count)
        anchors = mx.array(list(pending), dtype=mx.uint32)
        made = self.proposal = self._model.propose(anchors, Context.of(self._state), depth)
        mx.async_eval(made.tokens)
        lengths = (made.tokens.shape[1],) * self.row_count
        if self._thresholds is not None:
            assert made.confidence is not None
            lengths = lengths_kept(read(made.confidence), self._thresholds)
        return Draft(made.tokens, lengths)

    def commit(self, retained: Sequence[int], taps: Taps) -> None:
        if not self._drafted:
            raise LawError("block drafter's commit without draft")
        self._drafted = False
        kept = [count + 1 for count in retained]
        width = max(kept)
        context = mx.concatenate([tap[:, :width] for tap in taps], axis=-1)
        if min(kept) == width:
            self._state.forward(context)
        else:
            # What a row has rejected becomes columns of zeros, behind its end like any padding.
            own = mx.arange(width) < mx.array(kept)[:, None]
            self._state.begin(Undo.TOKENS)
            self._state.forward(mx.where(own[..., None], context, 0))
            self._state.resolve(kept)
        mx.async_eval(self._state.arrays())

    def capture(self, row: int) -> Checkpoint:
        processed = self._state.processed[row]
        layers, tensors = capture_caches(self._state.lowered(row))
        metadata: dict[str, str | int | bool] = {"processed_tokens": processed, "layers": layers}
        return Checkpoint(processed, Attachment(self.namespace, metadata, tensors))

    def _with(self, state: Rows) -> ContextRows:
        return ContextRows(self._model, state, self.namespace, self._thresholds)


class BlockProvider:
    """A block drafter mounted beside a target.

    `thresholds` are the least confidences by draft position, as `lengths_kept` reads them; None
    drafts to the full length.

    Its identity is that of its weights (`digest`) and of the target, of whose states the context is
    made.

    """

    supports_target_adapters = False
    cannot_share: tuple[str, ...] = ()

    def __init__(
        self,
        id: str,
        schema: str,
        model: BlockModel,
        digest: str,
        target: Target,
        thresholds: Sequence[float] | None = None,
    ) -> None:
        identity = hashlib.sha256((digest + target.identity).encode()).hexdigest()
        self.id = id
        self.model = model
        self.target: Target | None = target
        self.namespace = f"{schema}:{identity}"
        self.thresholds = None if thresholds is None else tuple(thresholds)
        self.default_depth = model.shape.drafts
        self.taps = tuple(map(layer_tap, model.shape.tap_layers))
        self._columns = _of_one_token(model, target)

    @property
    def weights_bytes(self) -> int:
        model: Any = self.model
        arrays: Any = tree_flatten(model.parameters())
        return sum(array.nbytes for _, array in arrays)

    def state_bytes(self, tokens: int) -> int:
        per_token = sum(a.nbytes for pair in self._columns for a in pair)
        return Footprint(0, ((None, per_token),)).bytes(tokens)

    def open(self, sampling: RowSampling, checkpoint: Checkpoint | None = None) -> ContextRows:
        caches: list[Any] = [KVCache() for _ in self.model.layers]
        processed = 0
        if checkpoint is not None:
            self._restore(caches, checkpoint)
            processed = checkpoint.processed_tokens
        state = Rows(self.model.extend, caches, (processed,))
        return ContextRows(self.model, state, self.namespace, self.thresholds)

    def _restore(self, caches: list[Any], checkpoint: Checkpoint) -> None:
        attachment = require_schema(checkpoint, self.namespace)
        processed, tensors = attachment.metadata.get("processed_tokens"), attachment.tensors
        if processed != checkpoint.processed_tokens:
            raise BadInput(
                f"checkpoint stands at {checkpoint.processed_tokens} tokens, "
                f"its attachment at {processed}"
            )
        restore_caches(caches, str(attachment.metadata.get("layers")), tensors, processed)
        known = [array for pair in self._columns for array in pair] if processed else []
        if len(tensors) != len(known):
            raise BadInput(f"checkpoint holds {len(tensors)} arrays, expected {len(known)}")
        for tensor, one in zip(tensors, known, strict=True):
            _, heads, _, size = one.shape
            if tensor.shape != (1, heads, processed, size) or tensor.dtype != one.dtype:
                raise BadInput(
                    f"a checkpoint array is {tensor.shape} x {tensor.dtype}, expected "
                    f"{(1, heads, processed, size)} x {one.dtype}"
                )


def open_block(
    id: str,
    schema: str,
    config: Config,
    target: Target,
    shape: BlockShape,
    layer: Callable[[], Module],
    thresholds: Sequence[float] | None,
) -> BlockProvider:
    """The drafter in a config's folder; an embedding or a head that the folder holds is its own.

    Raises:
        BadInput: thresholds that it cannot have, or tensors that are not the module's.
    """
    where = f"drafter {config.folder}"
    limits, count = thresholds_of(config, shape, thresholds), config.size("num_hidden_layers")
    quantization = Quantization.read(config.fields, where)
    weights = {n.removeprefix("model."): a for n, a in tensors_of(config.folder).items()}
    shape = replace(
        shape,
        own_embedding=shape.own_embedding or "embed_tokens.weight" in weights,
        own_head=shape.own_head or "lm_head.weight" in weights,
    )
    model = BlockModel(shape, [layer() for _ in range(count)], target.ports)
    fill(model, weights, quantization, where)
    files = [config.folder / "config.json", *sorted(config.folder.glob("model*.safetensors"))]
    return BlockProvider(id, schema, model, digest_of(files), target, limits)


def _of_one_token(model: BlockModel, target: Target) -> list[Pair]:
    """The columns of one token, for their shapes and dtypes; nothing is evaluated."""
    one = target.ports.embed(mx.array([[0]]))
    taps = mx.concatenate([one] * len(model.shape.tap_layers), axis=-1)
    return model.columns(taps, [0] * len(model.layers))
