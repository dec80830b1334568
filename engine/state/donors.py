"""A target layer's keys and values, lent to a drafter that has none of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx
from mlx_lm.models.cache import KVCache, RotatingKVCache

from ..errors import BadInput
from .columns import Columns
from .layouts import Cache, leaves


@dataclass(frozen=True, slots=True)
class Donor:
    """Keys and values [B, heads, columns, dim] in the order of their tokens.

    Row r's are in columns 0 .. held[r]-1: those of its last `held[r]` tokens of `offsets[r]`.
    They are lent until the target's next forward.
    """

    keys: mx.array
    values: mx.array
    held: tuple[int, ...]
    offsets: tuple[int, ...]


def donor_of(caches: Sequence[Cache], windowed: bool) -> Donor:
    """The last layer with a window, or the last one without.

    Raises:
        BadInput: there is none, or it holds nothing yet, or in another form.
    """
    kind = RotatingKVCache if windowed else KVCache
    found = [
        leaf
        for leaf in leaves(caches)
        if type(leaf) is kind
        or (type(leaf) is Columns and (leaf.place.window is not None) is windowed)
    ]
    if not found or found[-1].keys is None:
        raise BadInput(f"no {'sliding' if windowed else 'full'} attention layer holds keys")
    last: Cache = found[-1]
    if isinstance(last, Columns):
        ends, offsets = tuple(last.place.starts), tuple(last.place.offsets)
        keys, values = (plane[:, :, : max(ends)] for plane in (last.keys, last.values))
        return Donor(keys, values, ends, offsets)
    if windowed:
        keys, values = (last._temporal_order(plane) for plane in (last.keys, last.values))
    else:
        keys, values = last.keys_and_values()
    held = min(last.offset, keys.shape[2])
    return Donor(keys[:, :, :held], values[:, :, :held], (held,), (last.offset,))
