"""DeepSpec, the released DSpark drafter for Gemma 4 (architecture `Gemma4DSparkModel`).

Gemma-shaped layers in which keys are values: one projection gives both, values are normed without a
scale and not turned. It has an embedding and a head of its own. Source: deepseek-ai/DeepSpec,
deepspec/modeling/dspark/gemma4/modeling.py. (mlx-vlm 0.7.10 leaves out the norm of the values.)
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import mlx.core as mx
from mlx.nn.layers.activations import gelu_approx
from mlx.nn.layers.base import Module
from mlx.nn.layers.normalization import RMSNorm
from mlx_lm.models.rope_utils import ProportionalRoPE

from ..folders import check_folder
from ..target import Target
from .block_config import Config, block_shape, layer_shape
from .block_layers import Attention, FeedForward, LayerShape, Pair
from .context_rows import BlockProvider, open_block
from .projected_context import BlockShape

SCHEMA = "deepspec-context-v1"
FULL = "full_attention"


class Layer(Module):
    """One layer, a norm before and behind each branch; see `BlockModel`."""

    def __init__(self, shape: LayerShape) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # mlx annotates no constructor
        size, eps = shape.hidden_size, shape.eps
        rope = ProportionalRoPE(shape.head_size, shape.turned, base=shape.rope_theta)
        self.self_attn = Attention(shape, rope, scale=1.0, keys_are_values=True)
        self.mlp = FeedForward(shape, gelu_approx)
        self.input_layernorm = RMSNorm(size, eps=eps)
        self.post_attention_layernorm = RMSNorm(size, eps=eps)
        self.pre_feedforward_layernorm = RMSNorm(size, eps=eps)
        self.post_feedforward_layernorm = RMSNorm(size, eps=eps)
        self.layer_scalar = mx.ones((1,))

    def columns(self, hidden: mx.array, position: int | mx.array) -> Pair:
        return self.self_attn.columns(hidden, position)

    def __call__(
        self,
        hidden: mx.array,
        position: int | mx.array,
        lent: Pair | None,
        mask: mx.array | None,
    ) -> mx.array:
        seen = self.self_attn(self.input_layernorm(hidden), position, lent, mask)
        hidden = hidden + self.post_attention_layernorm(seen)
        inner = self.mlp(self.pre_feedforward_layernorm(hidden))
        out: mx.array = (hidden + self.post_feedforward_layernorm(inner)) * self.layer_scalar
        return out


def open_deepspec(
    folder: Path, target: Target, *, min_confidence: float | None = None
) -> BlockProvider:
    """The drafter in a folder.

    Args:
        min_confidence: the least confidence at every position; None never prunes.

    Raises:
        BadInput: another target, an unknown variant, or a folder that does not fit its config.
    """
    config = Config(folder, check_folder(folder))
    shape, layer = read_shape(config, target), read_layer(config)
    thresholds = None if min_confidence is None else [min_confidence] * shape.drafts
    return open_block("deepspec", SCHEMA, config, target, shape, lambda: Layer(layer), thresholds)


def read_shape(config: Config, target: Target) -> BlockShape:
    """What a config says, if it is known here and fits the target; refuses as `open_deepspec`."""
    for name, known in (
        ("attention_k_eq_v", True),
        ("hidden_activation", "gelu_pytorch_tanh"),
        ("enable_moe_block", False),
        ("hidden_size_per_layer_input", 0),
        ("num_kv_shared_layers", 0),
        ("tie_word_embeddings", False),
        ("attention_bias", False),
        ("is_causal", False),
    ):
        config.only(name, known)
    count, kinds = config.size("num_hidden_layers"), config.fields.get("layer_types")
    if kinds != [FULL] * count:
        raise config.refuse(f"layer_types must be {count} times {FULL!r}, got {kinds!r}")
    config.same("num_target_layers", target.ports.layer_count)
    shape = block_shape(config, target, drafts=config.size("block_size"), reads_anchor=True)
    if not shape.markov_rank:
        raise config.refuse("markov_rank must be at least 1, got 0")
    if "final_logit_softcapping" not in config.fields:
        raise config.refuse("final_logit_softcapping is missing; null is none")
    cap = config.fields["final_logit_softcapping"]
    return replace(
        shape,
        own_embedding=True,
        embed_scale=shape.hidden_size**0.5,
        own_head=True,
        softcap=None if cap is None else config.number("final_logit_softcapping"),
    )


def read_layer(config: Config) -> LayerShape:
    """The layers' sizes; refuses as `open_deepspec`."""
    rope = (config.fields.get("rope_parameters") or {}).get(FULL)
    if not isinstance(rope, dict) or rope.get("rope_type") != "proportional":
        raise config.refuse(f"rope_parameters must hold a proportional {FULL!r}, got {rope!r}")
    if rope.get("factor", 1.0) != 1.0:
        raise config.refuse(f"rope factor {rope['factor']!r} is unknown, only 1.0")
    return layer_shape(
        config,
        kv_heads="num_global_key_value_heads",
        head_size="global_head_dim",
        rope_theta=float(rope.get("rope_theta", 10_000.0)),
        turned=rope.get("partial_rotary_factor", 1.0),
    )
