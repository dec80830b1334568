"""GLM's own next-token layer, which lies in the target's files behind its last layer.

Released names are those of one more layer, `model.layers.<num_hidden_layers>.*`: a decoder layer
with experts and an indexer of its own, and beside it `enorm`, `hnorm`, `eh_proj` and
`shared_head.norm`. mlx-lm drops it when it loads the target. An `embed_tokens` or
`shared_head.head` there repeats the target's and is not read.

It is fed the target's state behind the final norm. Its rows begin where drafting does, at position
0, whatever the length of the prompt. mlx-vlm makes rows of the whole prompt instead and keeps
accepted rows as drafted: `open_glm_mtp(target, WHOLE_TEXT)`.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.nn.layers.linear import Linear
from mlx.nn.layers.normalization import RMSNorm
from mlx_lm.models.base import create_attention_mask
from mlx_lm.models.cache import CacheList, KVCache
from mlx_lm.models.deepseek_v32 import DeepseekV32DecoderLayer

from ..errors import BadInput
from ..folders import check_folder
from ..ports import NORM
from ..state.layouts import Cache
from ..target import Target
from .mtp_provider import MtpProvider
from .mtp_rows import Convention, Mtp
from .weights import Quantization, fill, tensors_of

SCHEMA = "glm52-native-mtp-v1"
MODEL_TYPE = "glm_moe_dsa"
DRAFTED = Convention(whole_text=False, keeps_drafted=False)
WHOLE_TEXT = Convention(whole_text=True, keeps_drafted=True)
DEPTH = 3
"""The release names none. mlx-vlm drafts 1 unless told."""
SHARED = ("embed_tokens.", "shared_head.head.")
"""Copies of the target's own."""


class SharedHead(Module):
    """What is the layer's own of the head that it shares with the target."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # mlx annotates no constructor
        self.norm = RMSNorm(size, eps=eps)


class GlmMtpHead(Module):
    """The module, its parameters named as released but for the `decoder`'s. See `mtp_rows.Head`."""

    def __init__(self, args: Any) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # mlx annotates no constructor
        size, eps = args.hidden_size, args.rms_norm_eps
        self.enorm = RMSNorm(size, eps=eps)
        self.hnorm = RMSNorm(size, eps=eps)
        self.eh_proj = Linear(2 * size, size, bias=False)
        self.decoder = DeepseekV32DecoderLayer(args, args.num_hidden_layers)
        self.shared_head = SharedHead(size, eps)

    def mix(self, embeddings: mx.array, hidden: mx.array) -> mx.array:
        both = mx.concatenate([self.enorm(embeddings), self.hnorm(hidden)], axis=-1)
        mixed: mx.array = self.eh_proj(both)
        return mixed

    def __call__(self, mixed: mx.array, cache: list[Cache]) -> mx.array:
        # The mask is an array also where all is seen: the indexer narrows it.
        mask = create_attention_mask(mixed, cache[0][0], return_array=True)
        out: mx.array = self.shared_head.norm(self.decoder(mixed, mask, cache[0]))
        return out

    def make_cache(self) -> list[Cache]:
        return [CacheList(KVCache(), KVCache())]


def has_glm_mtp(target: Target) -> bool:
    """Whether the target's files hold a layer behind its last."""
    return target.model.model_type == MODEL_TYPE and bool(_behind(target, 0))


def open_glm_mtp(target: Target, convention: Convention = DRAFTED) -> MtpProvider:
    """The next-token layer of a target's own files.

    Checkpoints are valid under one convention.

    Raises:
        BadInput: there is none, or more than one, or its tensors are not the layer's.
    """
    kind, args = target.model.model_type, target.model.args
    if kind != MODEL_TYPE:
        raise BadInput(
            f"target {target.path} is a {kind}, only {MODEL_TYPE} has a next-token layer"
        )
    config = check_folder(target.path)
    found = _behind(target, 0)
    if not found:
        raise BadInput(
            f"target {target.path} has no next-token layer model.layers.{args.num_hidden_layers}"
        )
    stated = config.get("num_nextn_predict_layers", 1)
    if stated != 1 or _behind(target, 1):
        count = max(2, stated) if _behind(target, 1) else stated
        raise BadInput(f"target {target.path} has {count} next-token layers, expected 1")
    # As layer 0, its experts and heads get mlx-lm's names.
    first = "model.layers.0."
    own = {f"{first}{n}": a for n, a in found.items() if not n.startswith(SHARED)}
    head = GlmMtpHead(args)
    named = {
        name if name.split(".")[0] in head else f"decoder.{name}": array
        for name, array in (
            (long.removeprefix(first), array) for long, array in target.model.sanitize(own).items()
        )
    }
    where = f"the next-token layer of {target.path}"
    # However the target is packed, mlx-lm has read it.
    fill(head, named, Quantization.read(config, where, only_affine=False), where)
    schema = SCHEMA if convention == DRAFTED else f"{SCHEMA}-whole-text"
    mtp = Mtp("native-mtp", head, target.ports, convention, schema, lambda: target.identity)
    return MtpProvider(mtp, target, tap=NORM, depth=DEPTH)


def _behind(target: Target, number: int) -> dict[str, mx.array]:
    """The tensors of the layer that is `number` behind the one behind the target's last."""
    layer = target.model.args.num_hidden_layers + number
    return tensors_of(target.path, f"model.layers.{layer}.")
