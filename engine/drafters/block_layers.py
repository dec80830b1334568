"""What a block drafter's layers are made of, whatever family they follow.

Symbols as in `projected_context`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.nn.layers.linear import Linear
from mlx.nn.layers.normalization import RMSNorm

Pair = tuple[mx.array, mx.array]
"""Keys and values [B, heads, columns, dim]."""


@dataclass(frozen=True, slots=True)
class LayerShape:
    """One layer's sizes; of each head's `head_size` numbers the first `turned` are rotated."""

    hidden_size: int
    inner_size: int
    heads: int
    kv_heads: int
    head_size: int
    turned: int
    rope_theta: float
    eps: float


class Attention(Module):
    """Attention from a block over [context ++ block], with no causal mask.

    Where keys are values there is one projection for both: values are normed without a scale, and
    not turned.
    """

    def __init__(
        self, shape: LayerShape, rope: Module, *, scale: float, keys_are_values: bool
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # mlx annotates no constructor
        size, width = shape.hidden_size, shape.head_size
        self.heads, self.kv_heads = shape.heads, shape.kv_heads
        self.scale, self.eps, self.keys_are_values = scale, shape.eps, keys_are_values
        self.q_proj = Linear(size, shape.heads * width, bias=False)
        self.k_proj = Linear(size, shape.kv_heads * width, bias=False)
        if not keys_are_values:
            self.v_proj = Linear(size, shape.kv_heads * width, bias=False)
        self.o_proj = Linear(shape.heads * width, size, bias=False)
        self.q_norm = RMSNorm(width, eps=shape.eps)
        self.k_norm = RMSNorm(width, eps=shape.eps)
        self.rope: Any = rope

    def columns(self, hidden: mx.array, position: int | mx.array) -> Pair:
        """Keys and values of states [B, N, D] from that position on."""
        projected = _by_head(self.k_proj(hidden), self.kv_heads)
        keys = self.rope(self.k_norm(projected), offset=position)
        if self.keys_are_values:
            return keys, mx.fast.rms_norm(projected, None, self.eps)
        return keys, _by_head(self.v_proj(hidden), self.kv_heads)

    def __call__(
        self,
        hidden: mx.array,
        position: int | mx.array,
        lent: Pair | None,
        mask: mx.array | None,
    ) -> mx.array:
        """[B, G, D] of a block; `lent` are the columns of the context."""
        queries = self.q_norm(_by_head(self.q_proj(hidden), self.heads))
        own, turned = self.columns(hidden, position), self.rope(queries, offset=position)
        if lent is not None:
            own = (
                mx.concatenate([lent[0], own[0]], axis=2),
                mx.concatenate([lent[1], own[1]], axis=2),
            )
        seen = mx.fast.scaled_dot_product_attention(turned, *own, scale=self.scale, mask=mask)
        batch, _, width, _ = seen.shape
        out: mx.array = self.o_proj(seen.swapaxes(1, 2).reshape(batch, width, -1))
        return out


class FeedForward(Module):
    """A gated feed-forward network: SwiGLU, GeGLU, by its activation."""

    def __init__(self, shape: LayerShape, activation: Callable[[mx.array], mx.array]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # mlx annotates no constructor
        self.activation = activation
        self.gate_proj = Linear(shape.hidden_size, shape.inner_size, bias=False)
        self.up_proj = Linear(shape.hidden_size, shape.inner_size, bias=False)
        self.down_proj = Linear(shape.inner_size, shape.hidden_size, bias=False)

    def __call__(self, hidden: mx.array) -> mx.array:
        gate = self.activation(self.gate_proj(hidden))
        out: mx.array = self.down_proj(gate * self.up_proj(hidden))
        return out


def _by_head(states: mx.array, heads: int) -> mx.array:
    """[B, N, heads * dim] as [B, heads, N, dim], to be normed and turned."""
    batch, width, _ = states.shape
    return states.reshape(batch, width, heads, -1).swapaxes(1, 2)
