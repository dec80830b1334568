"""Tiny random models, one per way in which mlx-lm keeps tokens, sharp enough to betray each."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.models.cache import CacheList, ConcatenateKVCache, QuantizedKVCache, make_prompt_cache

from engine.state.layouts import Cache, leaves
from engine.state.probe import prove
from engine.state.rows import Forward, Replayer

VOCAB = 64
WINDOW = 8
"""Tokens that a ring or a chunk holds."""

BITS, GROUP_SIZE = 8, 32

TOLERANCE = 1e-4
"""Largest difference of two logit arrays, as a share of the largest logit.

CPU float32 rounds differently at other widths and paddings: up to 6e-7 was measured on these
models. One wrong token moves at least 1e-2.
"""


@dataclass(frozen=True, slots=True)
class World:
    """A model and the caches it runs on here.

    `by_chunks`: what the caches hold depends on how the tokens were cut into forwards, by mlx-lm's
    own definition. `quantizable`: `to_quantized` is there for every layer that is asked for it.
    `batched`: mlx-lm merges rows on these caches.
    """

    name: str
    model: Forward
    fresh: Callable[[], list[Cache]]
    replayer: Replayer
    by_chunks: bool = False
    quantizable: bool = True
    batched: bool = True


def build_worlds() -> tuple[World, ...]:
    """Every world; takes about a second. Random weights with fixed seeds."""
    llama = _model("llama")
    layers = len(llama.layers)
    return (
        _world("llama", llama),
        _world(
            "concatenated",
            llama,
            lambda: [ConcatenateKVCache() for _ in range(layers)],
            batched=False,
        ),
        _world(
            "quantized",
            llama,
            lambda: [QuantizedKVCache(GROUP_SIZE, BITS) for _ in range(layers)],
            batched=False,
        ),
        _world("sliding", _model("gemma4_text"), quantizable=False),
        _limited(_model("qwen3")),
        _world("chunked", _model("llama4"), batched=False),
        _world("recurrent", _model("qwen3_5")),
        _world("pairs", _model("glm_moe_dsa")),
        _world("hybrid", _model("falcon_h1")),
    )


def kinds(caches: Sequence[Cache]) -> tuple[str, ...]:
    """Names of all classes among `caches` and inside them, sorted."""
    every = [*leaves(caches), *(cache for cache in caches if type(cache) is CacheList)]
    return tuple(sorted({type(cache).__name__ for cache in every}))


def _world(
    name: str, model: Any, fresh: Callable[[], list[Cache]] | None = None, **flags: bool
) -> World:
    make = fresh or (lambda: make_prompt_cache(model))
    return World(name, model, make, cache(lambda: prove(model, make)), **flags)


def _limited(model: Any) -> World:
    """Rings that protect their first four tokens, as `max_kv_size` makes them."""
    return _world(
        "limited",
        model,
        lambda: make_prompt_cache(model, max_kv_size=WINDOW),
        by_chunks=True,
        quantizable=False,
    )


def _model(family: str) -> Any:
    mx.random.seed(0)
    config = {**BASE, "model_type": family, **FAMILIES[family]}
    module = importlib.import_module(f"mlx_lm.models.{family}")
    model = module.Model(module.ModelArgs.from_dict(config))
    named: Any = tree_flatten(model.parameters())
    sharp = [
        (name, next((f for part, f in SHARP.items() if part in name), 1) * w) for name, w in named
    ]
    model.update(tree_unflatten(sharp))
    mx.eval(model.parameters())
    model.eval()
    return model


SHARP = {"o_proj": 8, "down_proj": 8, "q_proj": 4, "k_proj": 4, "out_proj": 8}
"""Factors on weights whose name holds the key, so that the context decides the next token."""

BASE: Mapping[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "rms_norm_eps": 1e-5,
    "vocab_size": VOCAB,
    "head_dim": 32,
    "max_position_embeddings": 4096,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
}

# Without experts: to choose one is discrete, and a tie would look like a lost token.
FAMILIES: Mapping[str, Mapping[str, Any]] = {
    "llama": {},
    "qwen3": {},
    "gemma4_text": {
        "num_hidden_layers": 3,
        "head_dim": 16,
        "global_head_dim": 32,
        "vocab_size_per_layer_input": VOCAB,
        "num_kv_shared_layers": 0,
        "hidden_size_per_layer_input": 8,
        "sliding_window": WINDOW,
        "sliding_window_pattern": 3,
    },
    "llama4": {
        "text_config": {
            **BASE,
            "model_type": "llama4_text",
            "num_hidden_layers": 4,
            "attention_bias": False,
            "attention_chunk_size": WINDOW,
            "interleave_moe_layer_step": 5,
            "intermediate_size_mlp": 48,
            "num_experts_per_tok": 1,
            "num_local_experts": 2,
            "rope_scaling": None,
            "use_qk_norm": True,
        },
    },
    "qwen3_5": {
        "full_attention_interval": 2,
        "linear_num_value_heads": 2,
        "linear_num_key_heads": 1,
        "linear_key_head_dim": 32,
        "linear_value_head_dim": 32,
        "linear_conv_kernel_dim": 4,
        "rope_parameters": {
            "type": "default",
            "rope_theta": 100000.0,
            "partial_rotary_factor": 0.25,
            "mrope_section": [1, 1, 0],
        },
    },
    "glm_moe_dsa": {
        "num_key_value_heads": 2,
        "index_head_dim": 16,
        "index_n_heads": 2,
        "index_topk": WINDOW,
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
        "first_k_dense_replace": 2,
        "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
        "attention_bias": False,
    },
    "falcon_h1": {
        "mamba_d_ssm": 64,
        "mamba_d_state": 16,
        "mamba_d_head": 16,
        "mamba_n_heads": 4,
    },
}
