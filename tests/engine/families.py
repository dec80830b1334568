"""Tiny random models of mlx-lm's families, sharp enough that the context decides the next token.

And rows on them, with what a test needs to fill, read and compare these.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.models.cache import ArraysCache, make_prompt_cache

from engine import Target
from engine.state.layouts import leaves
from engine.state.probe import prove
from engine.state.replay import Recorder
from engine.state.rows import Rows

VOCAB = 96
WINDOW = 8
"""Tokens that a sliding layer sees, or that a chunk holds."""

BASE: Mapping[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "rms_norm_eps": 1e-5,
    "vocab_size": VOCAB,
    "head_dim": 16,
    "max_position_embeddings": 4096,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
}
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
DELTA = {
    "linear_num_value_heads": 2,
    "linear_num_key_heads": 1,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "linear_conv_kernel_dim": 4,
}

CONFIGS: Mapping[str, Mapping[str, Any]] = {
    "llama": {"num_hidden_layers": 2, "num_key_value_heads": 2},
    "gemma4_text": {
        "num_hidden_layers": 4,
        "global_head_dim": 32,
        "vocab_size_per_layer_input": VOCAB,
        "num_kv_shared_layers": 1,
        "hidden_size_per_layer_input": 8,
        "sliding_window": WINDOW,
        "sliding_window_pattern": 3,
    },
    "glm_moe_dsa": {
        "num_hidden_layers": 2,
        "num_key_value_heads": 2,
        "index_head_dim": 16,
        "index_n_heads": 2,
        "index_topk": 16,
        "moe_intermediate_size": 16,
        "n_shared_experts": 1,
        "n_routed_experts": 4,
        "routed_scaling_factor": 1.0,
        "kv_lora_rank": 16,
        "q_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 16,
        "qk_nope_head_dim": 8,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "norm_topk_prob": True,
        "n_group": 1,
        "topk_group": 1,
        "num_experts_per_tok": 2,
        "moe_layer_freq": 1,
        "first_k_dense_replace": 1,
        "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
        "attention_bias": False,
    },
    "llama4": {
        "text_config": {
            **BASE,
            "model_type": "llama4_text",
            "num_hidden_layers": 4,
            "num_key_value_heads": 1,
            "attention_bias": False,
            "attention_chunk_size": WINDOW,
            "interleave_moe_layer_step": 2,
            "intermediate_size_mlp": 48,
            "num_experts_per_tok": 1,
            "num_local_experts": 2,
            "rope_scaling": None,
            "use_qk_norm": True,
        },
    },
    "qwen3_5": {
        **DELTA,
        "num_hidden_layers": 4,
        "full_attention_interval": 2,
        "rope_parameters": {
            "type": "default",
            "rope_theta": 100000.0,
            "partial_rotary_factor": 0.25,
            "mrope_section": [1, 1, 0],
        },
    },
    "qwen3_5_wide": {
        **DELTA,
        "model_type": "qwen3_5",
        "head_dim": 32,
        "num_hidden_layers": 2,
        "full_attention_interval": 2,
        "rope_parameters": {
            "type": "default",
            "rope_theta": 100000.0,
            "partial_rotary_factor": 0.25,
            "mrope_section": [1, 1, 0],
        },
    },
    "qwen3_next": {
        **DELTA,
        **MOE,
        "num_hidden_layers": 2,
        "full_attention_interval": 2,
        "decoder_sparse_step": 1,
        "shared_expert_intermediate_size": 16,
        "mlp_only_layers": [],
        "partial_rotary_factor": 0.25,
    },
    "olmo_hybrid": {
        **DELTA,
        "num_hidden_layers": 2,
        "linear_num_key_heads": 2,
        "linear_allow_neg_eigval": True,
        "attention_bias": False,
        "layer_types": ["linear_attention", "full_attention"],
    },
    "mamba": {
        "num_hidden_layers": 2,
        "intermediate_size": 64,
        "state_size": 8,
        "conv_kernel": 4,
        "use_bias": False,
        "use_conv_bias": True,
        "time_step_rank": 4,
    },
    "mamba2": {
        "num_hidden_layers": 2,
        "num_heads": 4,
        "state_size": 16,
        "layer_norm_epsilon": 1e-5,
        "conv_kernel": 4,
        "n_groups": 1,
        "use_bias": False,
        "use_conv_bias": True,
        "time_step_limit": (0.0, float("inf")),
        "time_step_rank": 4,
    },
    "falcon_h1": {
        "num_hidden_layers": 2,
        "mamba_d_ssm": 64,
        "mamba_d_state": 16,
        "mamba_d_head": 16,
        "mamba_n_heads": 4,
    },
    "nemotron_h": {
        "num_hidden_layers": 3,
        "attention_bias": False,
        "mamba_num_heads": 4,
        "mamba_head_dim": 16,
        "mamba_proj_bias": False,
        "ssm_state_size": 16,
        "conv_kernel": 4,
        "n_groups": 1,
        "mlp_bias": False,
        "layer_norm_epsilon": 1e-5,
        "use_bias": False,
        "use_conv_bias": True,
        "hybrid_override_pattern": ["M", "*", "-"],
    },
    "granitemoehybrid": {
        "num_hidden_layers": 2,
        "attention_bias": False,
        "embedding_multiplier": 1.0,
        "attention_multiplier": 0.25,
        "logits_scaling": 1.0,
        "residual_multiplier": 1.0,
        "layer_types": ["mamba", "attention"],
        "num_local_experts": 2,
        "num_experts_per_tok": 1,
        "shared_intermediate_size": 16,
        "mamba_n_heads": 4,
        "mamba_d_head": 16,
        "mamba_proj_bias": False,
        "mamba_d_state": 16,
        "mamba_d_conv": 4,
        "mamba_n_groups": 1,
        "mamba_conv_bias": True,
    },
    "jamba": {
        **MOE,
        "num_hidden_layers": 2,
        "attn_layer_offset": 1,
        "attn_layer_period": 2,
        "expert_layer_offset": 1,
        "expert_layer_period": 2,
        "mamba_d_conv": 4,
        "mamba_d_state": 8,
        "mamba_expand": 2,
    },
    "plamo2": {
        "num_hidden_layers": 2,
        "hidden_size_per_head": 16,
        "attention_window_size": WINDOW,
        "mamba_d_state": 8,
        "mamba_num_heads": 2,
    },
    "lfm2": {
        "num_hidden_layers": 2,
        "norm_eps": 1e-5,
        "conv_bias": False,
        "conv_L_cache": 3,
        "block_dim": 32,
        "block_multiple_of": 8,
        "block_ffn_dim_multiplier": 1.0,
        "block_auto_adjust_ff_dim": False,
        "full_attn_idxs": [1],
    },
    "lfm2_moe": {
        **MOE,
        "num_hidden_layers": 2,
        "norm_topk_prob": True,
        "use_expert_bias": True,
        "num_dense_layers": 1,
        "norm_eps": 1e-5,
        "conv_bias": False,
        "conv_L_cache": 3,
        "full_attn_idxs": [1],
    },
    "gear": {
        "num_hidden_layers": 3,
        "layer_types": ["conv_mixer", "sliding_attention", "full_attention"],
        "sliding_window": WINDOW,
    },
    "bailing_hybrid": {
        **MOE,
        "num_hidden_layers": 2,
        "num_key_value_heads": 2,
        "num_shared_experts": 1,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "layer_group_size": 2,
        "group_norm_size": 1,
        "routed_scaling_factor": 1.0,
        "kv_lora_rank": 16,
        "q_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 16,
    },
    "bailing_moe_v3": {
        **MOE,
        "num_hidden_layers": 2,
        "moe_shared_expert_intermediate_size": 16,
        "n_group": 1,
        "topk_group": 1,
        "layer_group_size": 2,
        "head_dim": 32,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 8,
        "v_head_dim": 16,
    },
    "kimi_linear": {
        **MOE,
        "num_hidden_layers": 2,
        "linear_attn_config": {
            "kda_layers": [1],
            "full_attn_layers": [2],
            "num_heads": 2,
            "head_dim": 32,
            "short_conv_kernel_size": 4,
        },
        "model_max_length": 4096,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 8,
        "v_head_dim": 16,
        "num_experts_per_token": 1,
        "first_k_dense_replace": 1,
        "num_shared_experts": 1,
        "mla_use_nope": True,
    },
    "bailing_moe_linear": {
        **MOE,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "num_shared_experts": 1,
        "norm_topk_prob": True,
        "first_k_dense_replace": 1,
        "layer_group_size": 2,
        "group_norm_size": 1,
        "topk_group": 1,
        "use_qk_norm": True,
    },
    "rwkv7": {
        "num_hidden_layers": 2,
        "norm_eps": 1e-5,
        "head_dim": 16,
        "a_low_rank_dim": 8,
        "v_low_rank_dim": 8,
        "gate_low_rank_dim": 8,
        "decay_low_rank_dim": 8,
    },
    "recurrent_gemma": {
        "num_hidden_layers": 2,
        "attention_bias": False,
        "conv1d_width": 4,
        "logits_soft_cap": 30.0,
        "attention_window_size": WINDOW,
        "block_types": ["recurrent", "attention"],
    },
    "baichuan_m1": {
        "num_hidden_layers": 2,
        "sliding_window": WINDOW,
        "sliding_window_layers": [0],
        "conv_window": 2,
        "tie_word_embeddings": False,
    },
    "longcat_flash_ngram": {
        "num_layers": 1,
        "ffn_hidden_size": 48,
        "moe_topk": 1,
        "expert_ffn_hidden_size": 16,
        "n_routed_experts": 2,
        "zero_expert_num": 1,
        "kv_lora_rank": 16,
        "q_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 16,
        "routed_scaling_factor": 1.0,
        "mla_scale_q_lora": True,
        "mla_scale_kv_lora": True,
        "ngram_vocab_size_ratio": 2,
    },
}

ROLLED = ("llama", "gemma4_text", "glm_moe_dsa", "llama4", "qwen3_5", "falcon_h1", "baichuan_m1")
"""One family for each cache kind and for each mixture that is its own case."""

RECURRENT = tuple(name for name in CONFIGS if name not in ROLLED[:4])

ROUNDED = (
    "gemma4_text",
    "glm_moe_dsa",
    "longcat_flash_ngram",
    "baichuan_m1",
    "gear",
    "bailing_hybrid",
)
"""Families in which a window and single tokens round differently: compared within 1e-5."""

PROMPTS = (1, WINDOW - 1, WINDOW, WINDOW + 1, 3 * WINDOW, 31, 33)

SHARP = {"o_proj": 8, "down_proj": 8, "q_proj": 4, "k_proj": 4, "out_proj": 8}
"""Factors on weights whose name holds the key: attention that looks, and blocks that speak up."""


@cache
def build(family: str) -> Any:
    """The family's model in evaluation mode, the same one at every call."""
    mx.random.seed(0)
    config = {**BASE, "model_type": family, **CONFIGS[family]}
    module = importlib.import_module(f"mlx_lm.models.{config['model_type']}")
    model = module.Model(module.ModelArgs.from_dict(config))
    named: Any = tree_flatten(model.parameters())
    model.update(tree_unflatten([(name, _sharp(name, weight)) for name, weight in named]))
    mx.eval(model.parameters())
    model.eval()
    return model


def _sharp(name: str, weight: mx.array) -> mx.array:
    if not mx.any(weight):
        return 0.3 * mx.random.normal(weight.shape)  # zeros would switch a part of a mixer off
    return next((factor for part, factor in SHARP.items() if part in name), 1) * weight


def rows_of(family: str) -> Rows:
    model = build(family)
    caches = make_prompt_cache(model)
    return Rows(model, caches, replayer=lambda: recorder(family))


@cache
def recorder(family: str) -> Recorder | str:
    """What the probe says of a family, asked once."""
    model = build(family)
    return prove(model, lambda: make_prompt_cache(model))


def ids(count: int, seed: int = 0) -> list[int]:
    return [(seed * 31 + 7 * i * i + 3 * i) % VOCAB for i in range(count)]


def feed(rows: Rows, tokens: Sequence[int]) -> mx.array:
    return rows.forward(mx.array([tokens]))


def arrays_of(rows: Rows) -> list[mx.array]:
    """What the caches show: live columns and recurrent arrays."""
    found: list[mx.array] = []
    for leaf in leaves(rows.caches):
        if isinstance(leaf, ArraysCache):
            slots: list[Any] = leaf.cache
            found += [slot for slot in slots if slot is not None]
        elif leaf.keys is not None:
            found += leaf.keys_and_values()
    return found


def equal(family: str, ours: mx.array, theirs: mx.array) -> bool:
    """Bitwise, but for the families that round."""
    if family not in ROUNDED:
        return bool(mx.array_equal(ours, theirs))
    return ours.shape == theirs.shape and bool(mx.allclose(ours, theirs, rtol=1e-5, atol=1e-5))


def target_on(model: Any, near: Target, **options: Any) -> Target:
    """A model that was built here as a target, with the tokenizer of a loaded one."""
    return Target(model, near.tokenizer, {"vocab_size": VOCAB}, Path("built-here"), **options)
