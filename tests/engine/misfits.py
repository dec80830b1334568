"""Drafters that do not fit, as data: what is changed in a good one, and what the refusal says."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import mlx.core as mx

import fixtures
from engine.drafters.assistant_model import CENTROIDS, ORDERING
from fixtures import random_drafters

Change = Callable[[dict[str, Any], dict[str, mx.array]], object]
"""What is done to the fields of config.json and to the tensors."""

ROOT = Path(tempfile.mkdtemp(prefix="misfits-"))

FAMILIES = ("dense", "sliding", "hybrid", "mla", "qwen3")

MAKERS: dict[str, tuple[str, Callable[..., Path]]] = {
    "mtp": ("mtp", random_drafters.qwen_mtp),
    "assistant": ("assistant", random_drafters.assistant),
    "centroids": ("assistant", partial(random_drafters.assistant, centroids=True)),
    "dspark": ("dspark", random_drafters.dspark),
    "dflash": ("dspark", random_drafters.dflash),
    "deepspec": ("deepspec", random_drafters.deepspec),
}
"""By name: the kind as on the command line, and who makes a random one for a target's folder."""


def top(**values: Any) -> Change:
    """Other fields in config.json."""
    return lambda config, tensors: config.update(values)


def inside(part: str, **values: Any) -> Change:
    """Other fields in an object of config.json."""
    return lambda config, tensors: config[part].update(values)


def drop(*path: str) -> Change:
    """A field less."""

    def change(config: dict[str, Any], _tensors: dict[str, mx.array]) -> None:
        for name in path[:-1]:
            config = config[name]
        del config[path[-1]]

    return change


def without(*names: str) -> Change:
    """Tensors less."""

    def change(_config: dict[str, Any], tensors: dict[str, mx.array]) -> None:
        for name in names:
            del tensors[name]

    return change


def put(name: str, *shape: int) -> Change:
    """A tensor of zeros."""
    return lambda config, tensors: tensors.update({name: mx.zeros(shape)})


def packed(name: str) -> Change:
    """A matrix in 8 bits, of which config.json says nothing."""

    def change(_config: dict[str, Any], tensors: dict[str, mx.array]) -> None:
        parts = mx.quantize(tensors.pop(f"{name}.weight"), 32, 8)
        tensors |= dict(
            zip((f"{name}.{p}" for p in ("weight", "scales", "biases")), parts, strict=True)
        )

    return change


def nothing(config: dict[str, Any], tensors: dict[str, mx.array]) -> None:
    """It is good as it is."""


@dataclass(frozen=True, slots=True)
class Misfit:
    """A drafter of MAKERS for one family, what is changed in it, and the target that refuses it.

    `in_config`: what is wrong can be seen in config.json; the weights may be anything.
    """

    maker: str
    made_for: str
    target: str
    says: str
    change: Change = nothing
    in_config: bool = True

    def __str__(self) -> str:
        return f"{self.maker}-{self.made_for}-{self.target}-{self.says}"

    @property
    def kind(self) -> str:
        return MAKERS[self.maker][0]


@cache
def made(maker: str, family: str) -> Path:
    """A good one."""
    _, make = MAKERS[maker]
    return make(ROOT / f"{maker}-{family}", fixtures.target_dir(family), 1)


def changed(source: Path, folder: Path, change: Change) -> Path:
    """A copy in which something is different."""
    shutil.copytree(source, folder)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    loaded: Any = mx.load(str(source / "model.safetensors"))
    tensors = dict(loaded)
    change(config, tensors)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    mx.save_safetensors(str(folder / "model.safetensors"), tensors)
    return folder


MADE_FOR = (
    ("mtp", "hybrid"),
    ("assistant", "sliding"),
    ("dspark", "dense"),
    ("dspark", "hybrid"),
    ("dspark", "qwen3"),
    ("dflash", "sliding"),
    ("dflash", "mla"),
    ("deepspec", "sliding"),
)

SIZE = r"(hidden_size is \d+, (expected|the target's is) \d+|num_target_layers is \d, the target's)"

FAMILY_SAYS = {
    ("assistant", "dense"): r"hidden states of 96, target .*dense-v1 has 128",
    ("assistant", "hybrid"): r"hidden states of 96, target .*hybrid-v1 has 64",
    ("assistant", "mla"): r"target .*mla-v1: no sliding attention layer",
    ("assistant", "qwen3"): r"target .*qwen3-v1: no sliding attention layer",
}

OTHER_FAMILY = [
    Misfit(maker, own, target, FAMILY_SAYS.get((maker, target), SIZE))
    for maker, own in MADE_FOR
    for target in FAMILIES
    if target != own
]
"""Each drafter beside each target that it was not made for."""

TEXT = partial(inside, "text_config")
BLOCK = partial(inside, "dflash_config")

MTP = [
    Misfit("mtp", "hybrid", "hybrid", says, change)
    for says, change in (
        ("model_type is 'qwen4_mtp', expected 'qwen3_5_mtp'", top(model_type="qwen4_mtp")),
        ("mtp_num_hidden_layers is 2, expected 1", TEXT(mtp_num_hidden_layers=2)),
        ("num_experts is 8, expected 0", TEXT(num_experts=8)),
        ("dedicated_embeddings is True, expected", TEXT(mtp_use_dedicated_embeddings=True)),
        ("hidden_size is 96, expected 64", TEXT(hidden_size=96)),
        ("vocab_size is 300, expected 288", TEXT(vocab_size=300)),
        ("num_hidden_layers is 5, expected 4", TEXT(num_hidden_layers=5)),
        ("block_size must be at least 2, got 1", top(block_size=1)),
        ("target_hidden is 'raw', expected one of", top(target_hidden="raw")),
        ("mode must be 'affine', got 'mxfp4'", top(quantization={"mode": "mxfp4"})),
    )
]
MTP += [
    Misfit("mtp", "hybrid", "hybrid", says, change, in_config=False)
    for says, change in (
        (
            r"lacks tensors: fc.weight, norm.weight$",
            without("fc.weight", "norm.weight"),
        ),
        (r"has unknown tensors: lm_head.weight$", put("lm_head.weight", 1)),
        (r"fc.weight is \(64, 64\), expected \(64, 128\)", put("fc.weight", 64, 64)),
        ("is quantized, but its config.json has no quantization", packed("fc")),
    )
]

ASSISTANT = [
    Misfit("centroids", "sliding", "sliding", says, change)
    for says, change in (
        ("text_config names no hidden_size", drop("text_config")),
        ("names no sliding_window", drop("text_config", "sliding_window")),
        ("names no backbone_hidden_size", drop("backbone_hidden_size")),
        ("enable_moe_block must be False, got True", TEXT(enable_moe_block=True)),
        ("must be 0, got 8", TEXT(hidden_size_per_layer_input=8)),
        ("num_kv_shared_layers must be 4, got 2", TEXT(num_kv_shared_layers=2)),
        ("must be gelu_pytorch_tanh, got silu", TEXT(hidden_activation="silu")),
        ("layer_types must be 4 of", TEXT(layer_types=["linear_attention"] * 4)),
        ("mode must be 'affine', got 'mxfp4'", top(quantization={"mode": "mxfp4"})),
        ("vocabulary of 300, target .* of 288", TEXT(vocab_size=300)),
        ("states of 128, .* has 96", top(backbone_hidden_size=128)),
        ("2 heads of 48 in sliding_attention layers", TEXT(head_dim=48)),
        ("2 heads of 32 in full_attention layers", TEXT(global_head_dim=32)),
        ("looks back 64 tokens, target .* holds 32", TEXT(sliding_window=64)),
    )
]
ASSISTANT += [
    Misfit("centroids", "sliding", "sliding", says, change, in_config=False)
    for says, change in (
        ("lacks tensors: pre_projection.weight", without("pre_projection.weight")),
        (
            "lacks tensors: model.layers.3.layer_scalar",
            without("model.layers.3.layer_scalar"),
        ),
        (f"lacks tensors: {CENTROIDS}", without(CENTROIDS)),
        (f"lacks tensors: {ORDERING}", without(ORDERING)),
        ("does not hold every token once", put(ORDERING, 288)),
        ("7 centroids do not divide 288 tokens", put(CENTROIDS, 7, 64)),
        ("has unknown tensors: .*k_proj", put("model.layers.0.self_attn.k_proj.weight", 32, 64)),
        (
            r"post_projection.weight is \(96, 32\), expected \(96, 64\)",
            put("post_projection.weight", 96, 32),
        ),
    )
]

DSPARK = [
    Misfit("dspark", "dense", "dense", says, change)
    for says, change in (
        ("hidden_size is 96, the target's is 128", top(hidden_size=96)),
        ("vocab_size is 300, the target's is 288", top(vocab_size=300)),
        ("num_target_layers is 5, the target's is 4", BLOCK(num_target_layers=5)),
        (r"layers between 0 and 3, got \[0, 4\]", BLOCK(target_layer_ids=[0, 4])),
        (r"layers between 0 and 3, got \[-1\]", BLOCK(target_layer_ids=[-1])),
        ("mask_token_id must be between 0 and 287, got 288", BLOCK(mask_token_id=288)),
        ("markov_head_type 'gated' is unknown, only", BLOCK(markov_head_type="gated")),
        ("markov_rank must be a whole number of at least 0, got -1", BLOCK(markov_rank=-1)),
        ("hidden_act 'gelu' is unknown", top(hidden_act="gelu")),
        ("model_type 'llama' is unknown, only 'qwen3'", top(model_type="llama")),
        ("'sliding_attention'", top(layer_types=["sliding_attention"])),
        ("rope_scaling", top(rope_scaling={"type": "yarn"})),
        ("rope_type 'yarn' is unknown", top(rope_parameters={"rope_type": "yarn"})),
        ("num_attention_heads 4 is no multiple of 3", top(num_key_value_heads=3)),
        ("block_size must be a whole number of at least 1, got 0", top(block_size=0)),
        ("block_size must be a whole number of at least 1, got None", drop("block_size")),
        ("rms_norm_eps must be a number above 0, got None", top(rms_norm_eps=None)),
        ("num_hidden_layers must be a whole number", top(num_hidden_layers=0)),
        ("mode must be 'affine', got 'mxfp4'", top(quantization={"mode": "mxfp4"})),
        ("bits must be a whole number", top(quantization={"group_size": 32, "bits": None})),
    )
]
DSPARK += [
    Misfit("dflash", "sliding", "sliding", "must be at least 2, got 1", top(block_size=1)),
]
DSPARK += [
    Misfit("dspark", "dense", "dense", says, change, in_config=False)
    for says, change in (
        (r"lacks tensors: (layers.2\.\S+, ){2}layers.2\.\S+ and 8 more$", top(num_hidden_layers=3)),
        ("has unknown tensors: layers.1", top(num_hidden_layers=1)),
        (r"is \(112, 128\), expected \(96, 128\)", top(intermediate_size=96)),
        ("lacks tensors: markov_head.markov_w2.weight", without("markov_head.markov_w2.weight")),
        ("is quantized, but its config.json has no quantization", packed("fc")),
    )
]

DEEPSPEC = [
    Misfit("deepspec", "sliding", "sliding", says, change)
    for says, change in (
        ("num_target_layers is 4, the target's is 5", top(num_target_layers=4)),
        ("num_target_layers is None", top(num_target_layers=None)),
        ("vocab_size is 300, the target's is 288", top(vocab_size=300)),
        ("attention_k_eq_v False is unknown, only True", top(attention_k_eq_v=False)),
        ("hidden_activation 'silu' is unknown", top(hidden_activation="silu")),
        ("layer_types must be 2 times 'full_attention'", top(layer_types=["full_attention"])),
        ("markov_head_type 'rnn' is unknown", top(markov_head_type="rnn")),
        ("markov_rank must be at least 1", top(markov_rank=0, enable_confidence_head=False)),
        ("reads the Markov head needs a markov_rank", top(markov_rank=0)),
        ("must hold a proportional 'full_attention', got None", top(rope_parameters={})),
        ("tie_word_embeddings True is unknown", top(tie_word_embeddings=True)),
        ("enable_moe_block True is unknown", top(enable_moe_block=True)),
        ("hidden_size is 128, the target's is 96", top(hidden_size=128)),
        ("is no multiple of 2", top(num_attention_heads=3, num_global_key_value_heads=2)),
        ("block_size must be a whole number of at least 1, got 0", top(block_size=0)),
        # Left out it would be 30 for some readers and none for others.
        ("final_logit_softcapping is missing", drop("final_logit_softcapping")),
    )
]
DEEPSPEC += [
    Misfit("deepspec", "sliding", "sliding", says, change, in_config=False)
    for says, change in (
        ("lacks tensors: lm_head.weight", without("lm_head.weight")),
        (
            "has unknown tensors: layers.0.self_attn.v_proj.weight",
            put("layers.0.self_attn.v_proj.weight", 48, 96),
        ),
    )
]

MISFITS = (*OTHER_FAMILY, *MTP, *ASSISTANT, *DSPARK, *DEEPSPEC)
