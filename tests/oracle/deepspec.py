"""DeepSpec's Gemma 4 block drafter in numpy, slow and obvious, with or without the norm of values.

Written from its reference, deepseek-ai/DeepSpec, deepspec/modeling/dspark/gemma4/modeling.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]


def block_hidden(
    weights: Mapping[str, Array],
    config: Mapping[str, Any],
    anchor: int,
    taps: Array,
    depth: int,
    *,
    norm_values: bool,
) -> Array:
    """[K, H] that the head reads, for an anchor behind a context of ``taps`` [S, layers * H]."""

    def norm(x: Array, name: str | None = None) -> Array:
        scaled: Array = x / np.sqrt((x**2).mean(-1, keepdims=True) + config["rms_norm_eps"])
        return scaled if name is None else scaled * weights[f"{name}.weight"]

    def linear(x: Array, name: str) -> Array:
        return x @ weights[f"{name}.weight"].T

    size, heads = config["global_head_dim"], config["num_attention_heads"]
    num_context = len(taps)
    positions = np.arange(num_context + depth)
    context = norm(linear(taps, "fc"), "hidden_norm")
    ids = [anchor] + [config["mask_token_id"]] * (depth - 1)
    h = weights["embed_tokens.weight"][ids] * config["hidden_size"] ** 0.5
    for number in range(config["num_hidden_layers"]):
        layer = f"layers.{number}"
        x = norm(h, f"{layer}.input_layernorm")
        queries = linear(x, f"{layer}.self_attn.q_proj").reshape(depth, heads, size)
        queries = turned(
            norm(queries, f"{layer}.self_attn.q_norm"), positions[num_context:], config
        )
        shared = linear(np.concatenate([context, x]), f"{layer}.self_attn.k_proj")
        keys = norm(shared, f"{layer}.self_attn.k_norm")[:, None]
        keys = turned(keys, positions, config)[:, 0]
        values = norm(shared) if norm_values else shared
        scores = np.exp(queries @ keys.T)  # no scale, no mask
        seen = (scores / scores.sum(-1, keepdims=True)) @ values
        out = linear(seen.reshape(depth, -1), f"{layer}.self_attn.o_proj")
        h = h + norm(out, f"{layer}.post_attention_layernorm")
        x = norm(h, f"{layer}.pre_feedforward_layernorm")
        gate = linear(x, f"{layer}.mlp.gate_proj")
        gate = gate / 2 * (1 + np.tanh((2 / np.pi) ** 0.5 * (gate + 0.044715 * gate**3)))
        out = linear(gate * linear(x, f"{layer}.mlp.up_proj"), f"{layer}.mlp.down_proj")
        h = (h + norm(out, f"{layer}.post_feedforward_layernorm")) * weights[
            f"{layer}.layer_scalar"
        ]
    return norm(h, "norm")


def turned(x: Array, positions: npt.NDArray[np.int64], config: Mapping[str, Any]) -> Array:
    """RoPE of [N, heads, D], proportional: of the pairs (i, i + D/2) only the first few turn."""
    rope = config["rope_parameters"]["full_attention"]
    half = x.shape[-1] // 2
    frequencies = rope["rope_theta"] ** (-np.arange(half) / half)
    frequencies[int(rope["partial_rotary_factor"] * half) :] = 0
    angles = positions[:, None, None] * frequencies
    left, right = x[..., :half], x[..., half:]
    return np.concatenate(
        [
            left * np.cos(angles) - right * np.sin(angles),
            right * np.cos(angles) + left * np.sin(angles),
        ],
        axis=-1,
    )
