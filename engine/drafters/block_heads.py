"""The two small heads of a block drafter: what follows the token before, and how sure it is.

Source: DeepSpec, DSpark's `vanilla` Markov head and its confidence head.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.nn.layers.embedding import Embedding
from mlx.nn.layers.linear import Linear


class MarkovHead(Module):
    """A bias of low rank on the logits, by the token before: W2 W1[token]. Zero W2: no bias."""

    def __init__(self, vocab_size: int, rank: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # mlx annotates no constructor
        self.markov_w1 = Embedding(vocab_size, rank)
        self.markov_w2 = Linear(rank, vocab_size, bias=False)

    def __call__(self, before: mx.array) -> mx.array:
        """[..., V] for ids [...]."""
        bias: mx.array = self.markov_w2(self.markov_w1(before))
        return bias


class ConfidenceHead(Module):
    """The logit of a draft's being right, from its hidden state and, of size `rank`, W1[before]."""

    def __init__(self, hidden_size: int, rank: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # mlx annotates no constructor
        self.proj = Linear(hidden_size + rank, 1, bias=True)

    def __call__(self, features: mx.array) -> mx.array:
        """[...] in float32 of features [..., hidden_size + rank]."""
        logits: mx.array = self.proj(features)[..., 0].astype(mx.float32)
        return logits


def lengths_kept(
    confidence: Sequence[Sequence[float]], thresholds: Sequence[float]
) -> tuple[int, ...]:
    """How many of each row's drafts are kept: those before the first that is not sure enough.

    Position k is kept at a confidence of `thresholds[k]` or more. A position without a threshold
    is never kept. The first may be dropped, too.
    """

    def kept(row: Sequence[float]) -> int:
        sure = [share >= least for share, least in zip(row, thresholds, strict=False)]
        return [*sure, False].index(False)

    return tuple(map(kept, confidence))
