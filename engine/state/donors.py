"""A target layer's keys and values, lent to a drafter that has none of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx
from mlx_lm.models.cache import KVCache, RotatingKVCache

from ..errors import BadInput, LawError
from .columns import Columns
from .layouts import Cache, leaves


@dataclass(frozen=True, slots=True)
class Donor:
    """Keys and values [B, heads, columns, dim] in the order of their tokens.

    Row r's are in columns 0 .. held[r]-1: those of its last `held[r]` tokens of `offsets[r]`; of
    a layer with a `window`, at least that many if there are. They are lent until the target's next
    forward.
    """

    keys: mx.array
    values: mx.array
    held: tuple[int, ...]
    offsets: tuple[int, ...]
    window: int | None = None

    def last(self, counts: Sequence[int]) -> Lent:
        """Of each row, the keys and values of its last `counts[r]` tokens.

        Raises:
            LawError: a row holds fewer.
        """
        starts = [end - count for end, count in zip(self.held, counts, strict=True)]
        if min(starts) < 0:
            raise LawError(f"{list(counts)} tokens' keys are asked for, {self.held} are held")
        low, high = min(starts), max(self.held)
        keys, values = (plane[:, :, low:high] for plane in (self.keys, self.values))
        if len(set(starts)) == len(set(self.held)) == 1:
            return Lent(keys, values, None)
        columns = mx.arange(low, high)
        shown = columns >= mx.array(starts)[:, None]
        shown &= columns < mx.array(self.held)[:, None]
        # Rejected tokens may still stand behind a row's end, and a weight of 0 does not hide NaN.
        hidden = ~shown[:, None, :, None]
        keys, values = (mx.where(hidden, mx.array(0, p.dtype), p) for p in (keys, values))
        return Lent(keys, values, shown[:, None, None])


@dataclass(frozen=True, slots=True)
class Lent:
    """Keys and values [B, heads, columns, dim], and which columns count: bool [B, 1, 1, columns].

    No mask: all of them do.
    """

    keys: mx.array
    values: mx.array
    mask: mx.array | None


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
        return Donor(keys, values, ends, offsets, last.place.window)
    if windowed:
        keys, values = (last._temporal_order(plane) for plane in (last.keys, last.values))
    else:
        keys, values = last.keys_and_values()
    held = min(last.offset, keys.shape[2])
    window = last.max_size if windowed else None
    return Donor(keys[:, :, :held], values[:, :, :held], (held,), (last.offset,), window)
