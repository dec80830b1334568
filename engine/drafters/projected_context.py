"""Block drafters over a projected context (DFlash, DSpark, DeepSpec).

What the target's tapped layers said at each known token is projected once into keys and values of
the drafter's own layers: the context, kept per row. A round makes one forward over a block
[anchor, mask, mask, ...] in which every position sees the row's whole context and the whole block.
Only context is kept: a commit appends accepted + 1 rows to it, and nothing has to be taken back.

A kind brings its layers, its embedding and its head (`dspark.py`, `deepspec.py`); this module is
what they share. Symbols: B rows, C context columns, G block, K drafts, D hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.nn.layers.embedding import Embedding
from mlx.nn.layers.linear import Linear
from mlx.nn.layers.normalization import RMSNorm

from ..ports import Ports
from ..state.donors import donor_of
from ..state.rows import Rows
from .block_heads import ConfidenceHead, MarkovHead
from .block_layers import Pair


@dataclass(frozen=True, slots=True)
class BlockShape:
    """What a block drafter is, whatever its layers are.

    `drafts` is the trained length, called gamma in the papers. With `reads_anchor` the anchor's own
    position gives the first draft; without, the block has one mask more and each mask gives one.
    `embed_scale` and `softcap` belong to an embedding and a head of its own; a drafter without them
    uses the target's, as the target does.
    """

    hidden_size: int
    vocab_size: int
    eps: float
    drafts: int
    reads_anchor: bool
    mask_id: int
    tap_layers: tuple[int, ...]
    markov_rank: int
    has_confidence: bool
    confidence_reads_markov: bool
    own_embedding: bool = False
    embed_scale: float = 1.0
    own_head: bool = False
    softcap: float | None = None

    @property
    def block(self) -> int:
        return self.drafts + (not self.reads_anchor)


@dataclass(frozen=True, slots=True)
class Context:
    """The context of B rows as a block sees it: for each layer its columns, None if all are cold.

    Row r's are columns 0 .. held[r]-1 and stand at those positions.
    """

    layers: tuple[Pair | None, ...]
    held: tuple[int, ...]

    @classmethod
    def of(cls, state: Rows) -> Context:
        held = tuple(state.processed)
        if max(held) == 0:
            return cls((None,) * len(state.caches), held)
        lent = [donor_of([cache], windowed=False) for cache in state.caches]
        return cls(tuple((donor.keys, donor.values) for donor in lent), held)

    @property
    def position(self) -> int | mx.array:
        """Where each row's block begins: one number, or [B] where rows differ."""
        return self.held[0] if len(set(self.held)) == 1 else mx.array(self.held)

    def mask(self, block: int) -> mx.array | None:
        """Bool [B, 1, 1, C + G] that hides what stands behind a row's own context."""
        if len(set(self.held)) == 1:
            return None
        columns = mx.arange(max(self.held) + block)
        own = columns < mx.array(self.held)[:, None]
        return (own | (columns >= max(self.held)))[:, None, None]


@dataclass(frozen=True, slots=True)
class Proposal:
    """One block, not evaluated: `tokens` [B, K] and what they were chosen by.

    `hidden` [B, drafts, D] is what the head reads, `base` [B, drafts, V] its logits, `logits`
    [B, K, V] those with the bias of the token before, `confidence` [B, K] in float32.
    """

    tokens: mx.array
    hidden: mx.array
    base: mx.array
    logits: mx.array
    confidence: mx.array | None


class BlockModel(Module):
    """A block drafter's weights, named as in the released checkpoints.

    `layers[i].columns(hidden, position)` are keys and values of projected taps or of a block, and
    `layers[i](hidden, position, lent, mask)` is a layer's output on a block. `ports` are the
    target's.
    """

    def __init__(self, shape: BlockShape, layers: Sequence[Module], ports: Ports) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # mlx annotates no constructor
        size, eps = shape.hidden_size, shape.eps
        self.shape = shape
        self.ports = ports
        if shape.own_embedding:
            self.embed_tokens = Embedding(shape.vocab_size, size)
        if shape.own_head:
            self.lm_head = Linear(size, shape.vocab_size, bias=False)
        self.fc = Linear(len(shape.tap_layers) * size, size, bias=False)
        self.hidden_norm = RMSNorm(size, eps=eps)
        self.layers: list[Any] = list(layers)
        self.norm = RMSNorm(size, eps=eps)
        if shape.markov_rank:
            self.markov_head = MarkovHead(shape.vocab_size, shape.markov_rank)
        if shape.has_confidence:
            read = shape.markov_rank if shape.confidence_reads_markov else 0
            self.confidence_head = ConfidenceHead(size, read)

    def columns(self, taps: mx.array, positions: Sequence[Any]) -> list[Pair]:
        """Each layer's keys and values of taps [B, N, taps * D]."""
        context = self.hidden_norm(self.fc(taps))
        return [
            layer.columns(context, position)
            for layer, position in zip(self.layers, positions, strict=True)
        ]

    def extend(self, taps: mx.array, cache: Sequence[Any]) -> mx.array:
        """Append the columns of taps [B, N, taps * D]; a model as `Rows` runs one."""
        pairs = self.columns(taps, [own.offset for own in cache])
        for own, pair in zip(cache, pairs, strict=True):
            own.update_and_fetch(*pair)
        return taps

    def hidden(self, anchors: mx.array, context: Context) -> mx.array:
        """What the head reads, [B, drafts, D], for blocks that begin with anchors [B]."""
        shape = self.shape
        masks = mx.full((anchors.shape[0], shape.block - 1), shape.mask_id, mx.uint32)
        states = self.embed(mx.concatenate([anchors[:, None].astype(mx.uint32), masks], axis=1))
        mask, position = context.mask(shape.block), context.position
        for layer, lent in zip(self.layers, context.layers, strict=True):
            states = layer(states, position, lent, mask)
        normed: mx.array = self.norm(states)
        return normed[:, shape.block - shape.drafts :]

    def embed(self, ids: mx.array) -> mx.array:
        """[B, G, D] of ids [B, G]."""
        if not self.shape.own_embedding:
            return self.ports.embed(ids)
        embedded: mx.array = self.embed_tokens(ids) * self.shape.embed_scale
        return embedded

    def base_logits(self, hidden: mx.array) -> mx.array:
        """[B, N, V] before any bias."""
        if not self.shape.own_head:
            return self.ports.logits(hidden)
        logits: mx.array = self.lm_head(hidden)
        cap = self.shape.softcap
        return logits if cap is None else mx.tanh(logits / cap) * cap

    def biased(self, base: mx.array, before: mx.array) -> mx.array:
        """Logits [..., V] behind the tokens [...] before."""
        return base + self.markov_head(before) if self.shape.markov_rank else base

    def confidence_logits(self, hidden: mx.array, before: mx.array) -> mx.array:
        """[...] in float32: how sure the draft at `hidden` [..., D] is, its sigmoid a share."""
        features = hidden
        if self.shape.confidence_reads_markov:
            features = mx.concatenate([hidden, self.markov_head.markov_w1(before)], axis=-1)
        logits: mx.array = self.confidence_head(features)
        return logits

    def propose(self, anchors: mx.array, context: Context, depth: int) -> Proposal:
        """Draft greedily behind anchors [B]: K = min(depth, drafts), at least 1.

        The block always has its trained length, so a draft does not depend on how many are asked
        for. The maximum is taken over the sum in the model's own dtype, as the references do.
        """
        hidden = self.hidden(anchors, context)
        base = self.base_logits(hidden)
        before, logits = [anchors.astype(mx.uint32)], []
        for number in range(min(depth, self.shape.drafts)):
            logits.append(self.biased(base[:, number], before[-1]))
            before.append(mx.argmax(logits[-1], axis=-1))
        confidence = None
        if self.shape.has_confidence:
            read = mx.stack(before[:-1], axis=1)
            confidence = mx.sigmoid(self.confidence_logits(hidden[:, : read.shape[1]], read))
        return Proposal(
            mx.stack(before[1:], axis=1), hidden, base, mx.stack(logits, axis=1), confidence
        )
