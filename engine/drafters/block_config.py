"""The config.json of a block drafter, read field by field and held against its target.

What does not fit is refused in one line, before any weights are read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx

from ..errors import BadInput
from ..target import Target
from .block_layers import LayerShape
from .projected_context import BlockShape


class Config:
    """A config.json. `nested` names an object in it whose fields go first."""

    def __init__(self, folder: Path, fields: Mapping[str, Any], nested: str | None = None) -> None:
        self.folder = folder
        inner = fields.get(nested) if nested else None
        self.fields = {**fields, **(inner if isinstance(inner, Mapping) else {})}

    def refuse(self, what: str) -> BadInput:
        return BadInput(f"drafter {self.folder}: {what}")

    def size(self, name: str, default: int | None = None) -> int:
        """A whole number of at least 1; required without a default."""
        value = self.fields.get(name, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise self.refuse(f"{name} must be a whole number of at least 1, got {value!r}")
        return value

    def number(self, name: str) -> float:
        value = self.fields.get(name)
        if not isinstance(value, int | float) or isinstance(value, bool) or value <= 0:
            raise self.refuse(f"{name} must be a number above 0, got {value!r}")
        return float(value)

    def only(self, name: str, *known: object) -> None:
        """Refuse a field that says anything but what this engine computes; the first is default."""
        value = self.fields.get(name, known[0])
        if value not in known:
            raise self.refuse(f"{name} {value!r} is unknown, only {known[0]!r}")

    def same(self, name: str, wanted: int, required: bool = True) -> None:
        """Refuse a drafter that was made for a target of another size."""
        value = self.fields.get(name)
        if value != wanted and (required or value is not None):
            raise self.refuse(f"{name} is {value!r}, the target's is {wanted}")


def block_shape(config: Config, target: Target, *, drafts: int, reads_anchor: bool) -> BlockShape:
    """The part of a config that all block drafters share.

    Raises:
        BadInput: a field is missing or unknown, or the drafter was made for another target.
    """
    ports = target.ports
    hidden_size = ports.embed(mx.array([[0]])).shape[-1]
    config.same("hidden_size", hidden_size)
    config.same("vocab_size", target.vocab_size)
    config.same("num_target_layers", ports.layer_count, required=False)
    config.only("markov_head_type", "vanilla")
    fields = config.fields
    mask_id: Any = fields.get("mask_token_id")
    if not _is_index(mask_id, target.vocab_size):
        raise config.refuse(
            f"mask_token_id must be between 0 and {target.vocab_size - 1}, got {mask_id!r}"
        )
    rank = fields.get("markov_rank") or 0
    has_confidence = bool(fields.get("enable_confidence_head"))
    reads_markov = bool(fields.get("confidence_head_with_markov", True))
    if not isinstance(rank, int) or rank < 0:
        raise config.refuse(f"markov_rank must be a whole number of at least 0, got {rank!r}")
    if has_confidence and reads_markov and not rank:
        raise config.refuse("a confidence head that reads the Markov head needs a markov_rank")
    return BlockShape(
        hidden_size=hidden_size,
        vocab_size=target.vocab_size,
        eps=config.number("rms_norm_eps"),
        drafts=drafts,
        reads_anchor=reads_anchor,
        mask_id=mask_id,
        tap_layers=_tap_layers(config, ports.layer_count),
        markov_rank=rank,
        has_confidence=has_confidence,
        confidence_reads_markov=has_confidence and reads_markov,
    )


def layer_shape(
    config: Config, *, kv_heads: str, head_size: str, rope_theta: float, turned: float = 1.0
) -> LayerShape:
    """A layer's sizes. The first two are names of fields, `turned` is a share.

    Raises:
        BadInput: a size is missing, or is none.
    """
    heads, shared = config.size("num_attention_heads"), config.size(kv_heads)
    if heads % shared:
        raise config.refuse(f"num_attention_heads {heads} is no multiple of {shared}")
    width = config.size(head_size)
    return LayerShape(
        hidden_size=config.size("hidden_size"),
        inner_size=config.size("intermediate_size"),
        heads=heads,
        kv_heads=shared,
        head_size=width,
        turned=int(turned * width),
        rope_theta=rope_theta,
        eps=config.number("rms_norm_eps"),
    )


def thresholds_of(
    config: Config, shape: BlockShape, thresholds: Sequence[float] | None
) -> tuple[float, ...] | None:
    """Least confidences by draft position, if the drafter has what they are held against.

    Raises:
        BadInput: there is no confidence head, or too many thresholds, or one not from 0 to 1.
    """
    if thresholds is None:
        return None
    if not shape.has_confidence:
        raise config.refuse("there is no confidence head, which thresholds need")
    if len(thresholds) > shape.drafts:
        raise config.refuse(
            f"there are {len(thresholds)} confidence thresholds, at most {shape.drafts} positions "
            "are drafted"
        )
    for threshold in thresholds:
        if not 0 <= threshold <= 1:
            raise config.refuse(f"a confidence must be between 0 and 1, got {threshold}")
    return tuple(thresholds)


def _tap_layers(config: Config, layer_count: int) -> tuple[int, ...]:
    """Layers counted from 0; DeepSpec's -1, the embedding, is no port of the target."""
    taps = config.fields.get("target_layer_ids")
    if not isinstance(taps, list) or not taps or not all(_is_index(t, layer_count) for t in taps):
        raise config.refuse(
            f"target_layer_ids must be layers between 0 and {layer_count - 1}, got {taps!r}"
        )
    return tuple(taps)


def _is_index(value: object, limit: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < limit
