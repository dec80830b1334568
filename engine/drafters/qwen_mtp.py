"""The MTP head of Qwen 3.5: a gated full-attention layer in a folder of its own.

Released names: `fc`, `pre_fc_norm_embedding`, `pre_fc_norm_hidden`, `layers.0.*` as in the target,
`norm`. With the prefix `mtp.` they are those of the original checkpoint, whose norms are stored
less 1. What stands behind `norm` is read by the target's head and chained as the next hidden state.

Which of the target's states it is fed is a property of the weights, which config.json states as
`target_hidden`: `before-norm`, the last layer's output, if it says nothing; or `behind-norm`, as
mlx-vlm and vLLM feed it. The head norms its input again, so the two differ by the target's final
norm weight alone.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.nn.layers.linear import Linear
from mlx.nn.layers.normalization import RMSNorm
from mlx_lm.models.base import create_attention_mask
from mlx_lm.models.cache import KVCache
from mlx_lm.models.qwen3_5 import DecoderLayer, TextModelArgs

from ..cache.identity import digest_of
from ..errors import BadInput
from ..folders import check_folder
from ..ports import NORM
from ..state.layouts import Cache
from ..target import Target
from .mtp_provider import MtpProvider
from .mtp_rows import Convention, Mtp
from .weights import Quantization, fill, tensors_of

SCHEMA = "qwen-mtp-v1"
MODEL_TYPE = "qwen3_5_mtp"
CONVENTION = Convention(whole_text=True, keeps_drafted=True)
HIDDEN = ("before-norm", "behind-norm")


class QwenMtpHead(Module):
    """The module, its parameters named as released. See `mtp_rows.Head`."""

    def __init__(self, args: TextModelArgs) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # mlx annotates no constructor
        size, eps = args.hidden_size, args.rms_norm_eps
        self.fc = Linear(2 * size, size, bias=False)
        self.pre_fc_norm_embedding = RMSNorm(size, eps=eps)
        self.pre_fc_norm_hidden = RMSNorm(size, eps=eps)
        # As the target's layer of that number, which has full attention.
        self.layers = [DecoderLayer(args, args.full_attention_interval - 1)]
        self.norm = RMSNorm(size, eps=eps)

    def mix(self, embeddings: mx.array, hidden: mx.array) -> mx.array:
        parts = [self.pre_fc_norm_embedding(embeddings), self.pre_fc_norm_hidden(hidden)]
        mixed: mx.array = self.fc(mx.concatenate(parts, axis=-1))
        return mixed

    def __call__(self, mixed: mx.array, cache: list[Cache]) -> mx.array:
        mask = create_attention_mask(mixed, cache[0])
        out: mx.array = self.norm(self.layers[0](mixed, mask, cache[0]))
        return out

    def make_cache(self) -> list[Cache]:
        return [KVCache()]


def open_qwen_mtp(folder: Path, target: Target) -> MtpProvider:
    """The head in a folder, beside the target whose text it was trained on.

    Raises:
        BadInput: another variant, or a head for another target, before weights are read; tensors
            that are not the head's.
    """
    config = check_folder(folder)
    text = config.get("text_config", config)
    for key, found, expected in _facts(config, text, target):
        if found != expected:
            raise BadInput(f"mtp drafter {folder}: {key} is {found!r}, expected {expected!r}")
    hidden = config.get("target_hidden", HIDDEN[0])
    if hidden not in HIDDEN:
        raise BadInput(
            f"mtp drafter {folder}: target_hidden is {hidden!r}, expected one of {HIDDEN}"
        )
    block = config.get("block_size", 3)
    if not isinstance(block, int) or block < 2:
        raise BadInput(f"mtp drafter {folder}: block_size must be at least 2, got {block!r}")
    ports, where = target.ports, f"mtp drafter {folder}"
    quantization = Quantization.read(config, where)
    head = QwenMtpHead(TextModelArgs.from_dict(copy.deepcopy(text)))
    fill(head, _unprefixed(tensors_of(folder)), quantization, where)
    files = [folder / "config.json", *sorted(folder.glob("model*.safetensors"))]
    identity = cache(lambda: digest_of(files))
    return MtpProvider(
        Mtp("mtp", head, ports, CONVENTION, SCHEMA, identity),
        target,
        tap=NORM if hidden == "behind-norm" else ports.last_layer,
        depth=block - 1,
        # How far a row drafts then depends on its own length, and what it keeps on how far.
        cannot_share=("rows of quantized keys and values draft each to its own depth",)
        if target.quantizes
        else (),
    )


def _facts(
    config: Mapping[str, Any], text: Mapping[str, Any], target: Target
) -> list[tuple[str, object, object]]:
    """What config.json says and must say, in the order in which it is looked at."""
    ports = target.ports
    width = ports.embed(mx.array([[0]])).shape[-1]
    return [
        ("model_type", config["model_type"], MODEL_TYPE),
        ("mtp_num_hidden_layers", text.get("mtp_num_hidden_layers", 1), 1),
        ("num_experts", text.get("num_experts") or 0, 0),
        ("mtp_use_dedicated_embeddings", text.get("mtp_use_dedicated_embeddings", False), False),
        ("hidden_size", text.get("hidden_size"), width),
        ("vocab_size", text.get("vocab_size"), target.vocab_size),
        ("num_hidden_layers", text.get("num_hidden_layers"), ports.layer_count),
    ]


def _unprefixed(tensors: Mapping[str, mx.array]) -> dict[str, mx.array]:
    """The tensors as the module names them."""
    prefix = "mtp."
    if not any(name.startswith(prefix) for name in tensors):
        return dict(tensors)
    return {
        name.removeprefix(prefix): array + 1.0 if "norm" in name else array
        for name, array in tensors.items()
    }
