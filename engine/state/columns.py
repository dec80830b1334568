"""Keys and values of many rows: left-aligned, ragged, in place of mlx-lm's cache objects.

Row r's tokens stand in columns 0 .. starts[r]-1, in order, whatever the other rows hold. Taking
tokens back is arithmetic on `starts`; a row that joins is padded with columns behind its end.
What stands behind a row's end is hidden by the mask and is zero, but for rejected tokens, which
the row's next write covers: no number from there, NaN included, ever enters a sum.

`Place` is the bookkeeping, shared by all layers that remember equally much; `Columns` is one
layer's arrays. With equal `starts` there is no mask array and a write is one slice, as for one row.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
from mlx_lm.models.base import create_causal_mask
from mlx_lm.models.cache import create_attention_mask

from ..errors import LawError

STEP = 256
"""Columns are allocated in steps of this, as in mlx-lm."""

Mask = mx.array | str | None


@dataclass(slots=True)
class Place:
    """Where the tokens of B rows stand, and where the forward under way puts its own.

    `offsets[r]` counts row r's tokens. All of them stand in columns, but with a `window` the
    oldest may have been dropped: `starts[r]` counts the columns. From column `dirty[r]` on, row r
    holds zeros.
    """

    window: int | None
    offsets: list[int]
    starts: list[int]
    dirty: list[int]
    width: int = 0
    reach: int = 0
    low: int = 0
    high: int = 0
    position: int | mx.array = 0
    columns: mx.array | None = None
    masks: dict[tuple[int | None, bool], Mask] = field(default_factory=dict)

    @classmethod
    def empty(cls, window: int | None, rows: int = 1) -> Place:
        return cls(window, [0] * rows, [0] * rows, [0] * rows)

    def prepare(self, width: int) -> None:
        """Lay out a forward of `width` tokens per row: [low, high) are the columns it sees."""
        aligned = len(set(self.starts)) == 1
        self.width = self.reach = width
        self.high = max(self.starts) + width
        self.low = 0
        if self.window is not None:
            self.low = max(0, min(self.starts) - (self.window - 1))
        if len(set(self.offsets)) == 1:
            self.position = self.offsets[0]
        else:
            self.position = mx.array(self.offsets)
        self.columns = None
        if not aligned:
            # Wide enough to cover what was rejected with zeros.
            stale = (d - s for d, s in zip(self.dirty, self.starts, strict=True))
            self.reach = max(width, *stale)
            starts = mx.array(self.starts)[:, None, None, None]
            self.columns = starts + mx.arange(self.reach)[:, None]
        self.masks = {}

    def advance(self) -> None:
        """The prepared forward has been built."""
        ends = [start + self.width for start in self.starts]
        if self.columns is None:
            self.dirty = [max(pair) for pair in zip(self.dirty, ends, strict=True)]
        else:
            self.dirty = list(ends)
        self.starts = ends
        self.offsets = [offset + self.width for offset in self.offsets]

    def drop(self, counts: Sequence[int]) -> None:
        """Forget each row's last `counts[r]` tokens."""
        self.offsets = [n - dropped for n, dropped in zip(self.offsets, counts, strict=True)]
        self.starts = [n - dropped for n, dropped in zip(self.starts, counts, strict=True)]

    def outgrown(self) -> list[int] | None:
        """Columns to drop at each row's front, once a window holds many more than it needs."""
        if self.window is None or max(self.starts) <= self.window + max(64, self.window // 8):
            return None
        return [max(0, start - self.window) for start in self.starts]

    def shifted(self, shift: Sequence[int]) -> None:
        """`shift[r]` columns are gone; what moved in behind the rows' ends is anything."""
        self.starts = [start - s for start, s in zip(self.starts, shift, strict=True)]
        self.dirty = [max(self.starts)] * len(self.starts)

    def mask(self, width: int, window: int | None, as_array: bool) -> Mask:
        """Which of the visible columns each of the forward's tokens attends to.

        Where rows agree, what mlx-lm's own caches answer; else bool [B, 1, N, columns].
        """
        if width != self.width:
            raise LawError(f"a mask for {width} tokens in a forward of {self.width}")
        key = (window, as_array)
        if key not in self.masks:
            self.masks[key] = self._mask(window, as_array)
        return self.masks[key]

    def _mask(self, window: int | None, as_array: bool) -> Mask:
        if self.columns is not None:
            return self._ragged_mask(window or self.window)
        seen = self.starts[0] - self.low
        if self.window is None:
            mask: Mask = create_attention_mask(self.width, seen, as_array, window)
            return mask
        shown = window or self.window
        if seen + self.width <= shown and not (as_array and self.width > 1):
            return None if self.width == 1 else "causal"
        causal: mx.array = create_causal_mask(self.width, seen, window_size=shown)
        return causal

    def _ragged_mask(self, window: int | None) -> mx.array:
        columns = mx.arange(self.low, self.high)
        own = mx.array(self.starts)[:, None, None, None] + mx.arange(self.width)[:, None]
        mask = columns <= own
        return mask if window is None else mask & (columns > own - window)

    def selected(self, keep: Sequence[int]) -> Place:
        offsets, starts, dirty = (
            [numbers[r] for r in keep] for numbers in (self.offsets, self.starts, self.dirty)
        )
        return Place(self.window, offsets, starts, dirty)

    def joined(self, other: Place) -> Place:
        return Place(
            self.window,
            self.offsets + other.offsets,
            self.starts + other.starts,
            self.dirty + other.dirty,
        )


class Columns:
    """One layer's keys and values of B rows: planes [B, heads, columns, dim], None when cold.

    It answers what mlx-lm's attention layers ask of a cache: `offset`, `make_mask`,
    `update_and_fetch`, and `keys` and `values` to read and to replace.
    """

    def __init__(self, place: Place, planes: list[mx.array] | None = None) -> None:
        self.place = place
        self.planes = planes

    @property
    def offset(self) -> int | mx.array:
        """Each row's next position: one number, or [B] where rows differ."""
        return self.place.position

    @property
    def keys(self) -> Any:
        return None if self.planes is None else self.planes[0]

    @keys.setter
    def keys(self, plane: mx.array) -> None:
        assert self.planes is not None
        self.planes[0] = plane

    @property
    def values(self) -> Any:
        return None if self.planes is None else self.planes[1]

    @values.setter
    def values(self, plane: mx.array) -> None:
        assert self.planes is not None
        self.planes[1] = plane

    @property
    def state(self) -> Any:
        """What there is to evaluate."""
        return self.planes

    def make_mask(
        self, width: int, window_size: int | None = None, return_array: bool = False
    ) -> Mask:
        return self.place.mask(width, window_size, return_array)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Any, Any]:
        """Append [B, heads, N, dim] each; the visible columns of keys and of values."""
        shown_keys, shown_values = self.write([keys, values])
        return shown_keys, shown_values

    def write(self, news: Sequence[mx.array]) -> list[mx.array]:
        place = self.place
        if self.planes is None:
            self.planes = [mx.zeros((*n.shape[:2], 0, n.shape[3]), n.dtype) for n in news]
        self.reserve(max(place.starts) + place.reach)
        for number, new in enumerate(news):
            plane = self.planes[number]
            if place.columns is None:
                plane[:, :, place.starts[0] : place.high] = new
                continue
            if place.reach > place.width:
                new = widened(new, place.reach)
            index = mx.broadcast_to(place.columns, new.shape)
            self.planes[number] = mx.put_along_axis(plane, index, new, axis=2)
        return [plane[:, :, place.low : place.high] for plane in self.planes]

    def reserve(self, columns: int) -> None:
        """Make room for at least that many columns; new ones are zero."""
        if self.planes is not None and self.planes[0].shape[2] < columns:
            columns = -(-columns // STEP) * STEP
            self.planes = [widened(plane, columns) for plane in self.planes]

    def drop_front(self, shift: Sequence[int], columns: int) -> None:
        """Move row r's columns `shift[r]` to the left and keep the first `columns` of them."""
        if self.planes is None:
            return
        if len(set(shift)) == 1:
            kept = slice(shift[0], shift[0] + columns)
            self.planes = [mx.contiguous(plane[:, :, kept]) for plane in self.planes]
            return
        index = mx.array(list(shift))[:, None, None, None] + mx.arange(columns)[:, None]
        index = mx.minimum(index, self.planes[0].shape[2] - 1)
        self.planes = [
            mx.take_along_axis(
                plane, mx.broadcast_to(index, (*plane.shape[:2], columns, 1)), axis=2
            )
            for plane in self.planes
        ]

    def row(self, row: int) -> list[mx.array]:
        """One row's own columns, compact: arrays [1, heads, columns, dim]."""
        assert self.planes is not None
        end = self.place.starts[row]
        return [mx.contiguous(plane[row : row + 1, :, :end]) for plane in self.planes]

    def like(self, place: Place, planes: list[mx.array] | None) -> Columns:
        return Columns(place, planes)

    def selected(self, place: Place, keep: Sequence[int]) -> Columns:
        if self.planes is None:
            return self.like(place, None)
        return self.like(place, [plane[mx.array(list(keep))] for plane in self.planes])

    def joined(self, place: Place, other: Columns) -> Columns:
        if self.planes is None and other.planes is None:
            return self.like(place, None)
        ours, theirs = self._warm(other), other._warm(self)
        columns = max(ours[0].shape[2], theirs[0].shape[2])
        return self.like(
            place,
            [
                mx.concatenate([widened(a, columns), widened(b, columns)])
                for a, b in zip(ours, theirs, strict=True)
            ],
        )

    def _warm(self, other: Columns) -> list[mx.array]:
        """The planes; where nothing has been written, planes without columns like `other`'s."""
        if self.planes is not None:
            return self.planes
        assert other.planes is not None
        rows = len(self.place.offsets)
        return [mx.zeros((rows, p.shape[1], 0, p.shape[3]), p.dtype) for p in other.planes]


class QuantizedColumns(Columns):
    """Columns whose keys and values are three planes each: packed integers, scales and biases."""

    def __init__(
        self, place: Place, planes: list[mx.array] | None, group_size: int, bits: int
    ) -> None:
        super().__init__(place, planes)
        self.group_size = group_size
        self.bits = bits

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Any, Any]:
        shown = self.write([*self._packed(keys), *self._packed(values)])
        return shown[:3], shown[3:]

    def like(self, place: Place, planes: list[mx.array] | None) -> Columns:
        return QuantizedColumns(place, planes, self.group_size, self.bits)

    def _packed(self, array: mx.array) -> Sequence[mx.array]:
        return mx.quantize(array, group_size=self.group_size, bits=self.bits)


def quantized(columns: Columns, group_size: int, bits: int) -> QuantizedColumns:
    """The same tokens in `bits` bits, as mlx-lm converts a cache."""
    packed = None
    if columns.planes is not None:
        packed = [
            part
            for plane in columns.planes
            for part in mx.quantize(plane, group_size=group_size, bits=bits)
        ]
    return QuantizedColumns(columns.place, packed, group_size, bits)


def widened(plane: mx.array, columns: int) -> mx.array:
    """The plane with zero columns up to that many; an array object of its own."""
    missing = columns - plane.shape[2]
    if missing <= 0:
        return copy.copy(plane)
    shape = (*plane.shape[:2], missing, plane.shape[3])
    return mx.concatenate([plane, mx.zeros(shape, plane.dtype)], axis=2)
