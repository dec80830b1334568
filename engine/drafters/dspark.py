"""DSpark and DFlash block drafters with Qwen 3 layers, ours and the released ones.

The folder is the released form: `config.json` (model_type `qwen3`, with a `dflash_config` object or
the same fields beside the others) and tensors under released names. Ours has a `dspark.json` too,
which holds what calibration found: `thresholds`, the least confidence of each draft position.

A DFlash drafter has no Markov head and reads its drafts from the masks. Embedding and head are the
target's unless the folder has its own.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.nn.layers.activations import silu
from mlx.nn.layers.base import Module
from mlx.nn.layers.linear import Linear
from mlx.nn.layers.normalization import RMSNorm
from mlx.nn.layers.positional_encoding import RoPE

from ..cache.identity import digest_of
from ..errors import BadInput, one_line
from ..ports import Ports
from ..target import Target, check_folder
from .block_config import Config, block_shape
from .context_rows import BlockProvider
from .projected_context import BlockModel, BlockShape, Pair, attend, by_head
from .released import fill, read_weights

SCHEMA = "dflash-context-v1"
CALIBRATION = "dspark.json"


@dataclass(frozen=True, slots=True)
class LayerShape:
    """One layer's sizes."""

    hidden_size: int
    inner_size: int
    heads: int
    kv_heads: int
    head_size: int
    eps: float
    rope_theta: float


class Attention(Module):
    """Qwen 3's attention from a block over [context ++ block], with no causal mask."""

    def __init__(self, shape: LayerShape) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # mlx annotates no constructor
        size, width = shape.hidden_size, shape.head_size
        self.heads, self.kv_heads, self.scale = shape.heads, shape.kv_heads, width**-0.5
        self.q_proj = Linear(size, shape.heads * width, bias=False)
        self.k_proj = Linear(size, shape.kv_heads * width, bias=False)
        self.v_proj = Linear(size, shape.kv_heads * width, bias=False)
        self.o_proj = Linear(shape.heads * width, size, bias=False)
        self.q_norm = RMSNorm(width, eps=shape.eps)
        self.k_norm = RMSNorm(width, eps=shape.eps)
        self.rope: Any = RoPE(width, base=shape.rope_theta)

    def columns(self, hidden: mx.array, position: int | mx.array) -> Pair:
        keys = self.k_norm(by_head(self.k_proj(hidden), self.kv_heads))
        return self.rope(keys, offset=position), by_head(self.v_proj(hidden), self.kv_heads)

    def __call__(
        self,
        hidden: mx.array,
        position: int | mx.array,
        lent: Pair | None,
        mask: mx.array | None,
    ) -> mx.array:
        queries = self.q_norm(by_head(self.q_proj(hidden), self.heads))
        own, turned = self.columns(hidden, position), self.rope(queries, offset=position)
        out: mx.array = self.o_proj(attend(turned, own, lent, mask, self.scale))
        return out


class FeedForward(Module):
    """SwiGLU."""

    def __init__(self, shape: LayerShape) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # mlx annotates no constructor
        self.gate_proj = Linear(shape.hidden_size, shape.inner_size, bias=False)
        self.up_proj = Linear(shape.hidden_size, shape.inner_size, bias=False)
        self.down_proj = Linear(shape.inner_size, shape.hidden_size, bias=False)

    def __call__(self, hidden: mx.array) -> mx.array:
        out: mx.array = self.down_proj(silu(self.gate_proj(hidden)) * self.up_proj(hidden))
        return out


class Layer(Module):
    """One layer; see `BlockModel`."""

    def __init__(self, shape: LayerShape) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # mlx annotates no constructor
        self.self_attn = Attention(shape)
        self.mlp = FeedForward(shape)
        self.input_layernorm = RMSNorm(shape.hidden_size, eps=shape.eps)
        self.post_attention_layernorm = RMSNorm(shape.hidden_size, eps=shape.eps)

    def columns(self, hidden: mx.array, position: int | mx.array) -> Pair:
        return self.self_attn.columns(hidden, position)

    def __call__(
        self,
        hidden: mx.array,
        position: int | mx.array,
        lent: Pair | None,
        mask: mx.array | None,
    ) -> mx.array:
        hidden = hidden + self.self_attn(self.input_layernorm(hidden), position, lent, mask)
        out: mx.array = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return out


def open_dspark(
    folder: Path, target: Target, *, min_confidence: float | None = None
) -> BlockProvider:
    """The drafter in a folder.

    Args:
        min_confidence: the least confidence at every position, in place of calibrated thresholds.

    Raises:
        BadInput: another target, an unknown variant, or a folder that does not fit its config.
    """
    config = Config(folder, check_folder(folder), "dflash_config")
    shape, layer = read_shape(config, target), read_layer(config)
    thresholds = read_thresholds(folder)
    weights = read_weights(folder)
    model = build(shape, layer, config.size("num_hidden_layers"), target.ports, weights.keys())
    fill(model, weights, config)
    if min_confidence is not None:
        thresholds = [min_confidence] * shape.drafts
    files = [folder / "config.json", *sorted(folder.glob("model*.safetensors"))]
    return BlockProvider("dspark", SCHEMA, model, digest_of(files), target, thresholds)


def build(
    shape: BlockShape, layer: LayerShape, count: int, ports: Ports, names: Collection[str] = ()
) -> BlockModel:
    """The module of a config; it has an embedding or a head of its own if `names` say so."""
    shape = replace(
        shape,
        own_embedding="embed_tokens.weight" in names,
        own_head="lm_head.weight" in names,
    )
    return BlockModel(shape, [Layer(layer) for _ in range(count)], ports)


def read_shape(config: Config, target: Target) -> BlockShape:
    """What a config says, if it is known here and fits the target; refuses as `open_dspark`."""
    for name, known in (
        ("model_type", ("qwen3",)),
        ("projector_type", (None, "dspark", "dflash")),
        ("hidden_act", ("silu",)),
        ("attention_bias", (False,)),
        ("causal", (False,)),
        ("is_causal", (False,)),
        ("dflash_query_causal", (False,)),
        ("attention_sink_bias", (False,)),
        ("rope_is_neox_style", (True,)),
        ("rope_scaling", (None,)),
        ("draft_window_size", (None,)),
        ("dspark_bonus_anchor", (False,)),
    ):
        config.only(name, *known)
    if "sliding_attention" in (config.fields.get("layer_types") or ()):
        raise config.refuse("layer_types hold 'sliding_attention', only 'full_attention' is known")
    # DFlash counts the anchor, DSpark the drafts.
    is_dspark = config.fields.get("projector_type") == "dspark" or config.fields.get("markov_rank")
    drafts = config.size("block_size") - (not is_dspark)
    if drafts < 1:
        raise config.refuse("block_size counts the anchor and must be at least 2, got 1")
    reads_anchor = bool(config.fields.get("sample_from_anchor", is_dspark))
    return block_shape(config, target, drafts=drafts, reads_anchor=reads_anchor)


def read_layer(config: Config) -> LayerShape:
    """The layers' sizes; refuses as `open_dspark`."""
    rope = config.fields.get("rope_parameters") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind != "default":
        raise config.refuse(f"rope_type {kind!r} is unknown, only 'default'")
    theta = rope.get("rope_theta", config.fields.get("rope_theta", 10_000_000.0))
    heads, kv_heads = config.size("num_attention_heads"), config.size("num_key_value_heads")
    if heads % kv_heads:
        raise config.refuse(f"num_attention_heads {heads} is no multiple of {kv_heads}")
    return LayerShape(
        hidden_size=config.size("hidden_size"),
        inner_size=config.size("intermediate_size"),
        heads=heads,
        kv_heads=kv_heads,
        head_size=config.size("head_dim"),
        eps=config.number("rms_norm_eps"),
        rope_theta=float(theta),
    )


def read_thresholds(folder: Path) -> list[float] | None:
    """What calibration stored, or None: nothing is pruned.

    Raises:
        BadInput: the file is not a JSON object, or its thresholds are not a list of numbers.
    """
    file = folder / CALIBRATION
    if not file.is_file():
        return None
    try:
        stored = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise BadInput(f"{file} is not readable JSON: {one_line(error)}") from error
    thresholds = stored.get("thresholds") if isinstance(stored, dict) else stored
    if thresholds is None:
        return None
    if not isinstance(thresholds, list) or not all(type(t) in (int, float) for t in thresholds):
        raise BadInput(f"{file}: thresholds must be a list of numbers, got {thresholds!r}")
    return thresholds
