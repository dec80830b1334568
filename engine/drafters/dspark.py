"""DSpark and DFlash block drafters with Qwen 3 layers, ours and the released ones.

The folder is the released form: `config.json` (model_type `qwen3`, with a `dflash_config` object or
the same fields beside the others) and tensors under released names. Ours has a `dspark.json` too,
which holds what calibration found: `thresholds`, the least confidence of each draft position.

A DFlash drafter has no Markov head and reads its drafts from the masks. Embedding and head are the
target's unless the folder has its own.
"""

from __future__ import annotations

import json
from pathlib import Path

import mlx.core as mx
from mlx.nn.layers.activations import silu
from mlx.nn.layers.base import Module
from mlx.nn.layers.normalization import RMSNorm
from mlx.nn.layers.positional_encoding import RoPE

from ..errors import BadInput, one_line
from ..folders import check_folder
from ..target import Target
from .block_config import Config, block_shape, layer_shape
from .block_layers import Attention, FeedForward, LayerShape, Pair
from .context_rows import BlockProvider, open_block
from .projected_context import BlockShape

SCHEMA = "dflash-context-v1"
CALIBRATION = "dspark.json"


class Layer(Module):
    """One layer; see `BlockModel`."""

    def __init__(self, shape: LayerShape) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # mlx annotates no constructor
        rope = RoPE(shape.head_size, base=shape.rope_theta)
        scale = shape.head_size**-0.5
        self.self_attn = Attention(shape, rope, scale=scale, keys_are_values=False)
        self.mlp = FeedForward(shape, silu)
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
    if min_confidence is not None:
        thresholds = [min_confidence] * shape.drafts
    return open_block("dspark", SCHEMA, config, target, shape, lambda: Layer(layer), thresholds)


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
    return layer_shape(
        config, kv_heads="num_key_value_heads", head_size="head_dim", rope_theta=float(theta)
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
