"""What a file says about its tensors, in safetensors' own words, and what it may say."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from ..errors import BadInput
from .entry import ITEM_BYTES, TensorSpec
from .strict import Damaged

MAX_DIMENSIONS = 32
MAX_LENGTH = 2**31 - 1
"""Of a dimension: mlx counts in int32."""

_TENSOR = ("dtype", "shape", "data_offsets")
_INT = frozenset({int})


def check_tensors(tensors: Sequence[TensorSpec]) -> None:
    """What holds for every entry's tensors.

    Raises:
        BadInput: it does not.
    """
    names = {tensor.name for tensor in tensors}
    if len(names) < len(tensors):
        raise BadInput("two tensors of one name")
    if names & {"", "__metadata__"}:
        raise BadInput("a tensor must have a name, and not __metadata__")
    for tensor in tensors:
        if tensor.dtype not in ITEM_BYTES:
            raise BadInput(
                f"{tensor.name}: dtype {tensor.dtype} is none of {', '.join(ITEM_BYTES)}"
            )
        if not _is_shape(tensor.shape):
            raise BadInput(
                f"{tensor.name}: a shape has at most {MAX_DIMENSIONS} dimensions "
                f"within 0..{MAX_LENGTH}, got {list(tensor.shape[: MAX_DIMENSIONS + 1])}"
            )


def _is_shape(lengths: Sequence[int]) -> bool:
    bounded = not lengths or 0 <= min(lengths) <= max(lengths) <= MAX_LENGTH
    return bounded and len(lengths) <= MAX_DIMENSIONS


def tensor_fields(tensors: Sequence[TensorSpec]) -> dict[str, Any]:
    """The tensors as safetensors lists them: their bytes follow each other, in order."""
    fields, end = {}, 0
    for tensor in tensors:
        begin, end = end, end + tensor.nbytes
        fields[tensor.name] = {
            "dtype": tensor.dtype,
            "shape": tensor.shape,
            "data_offsets": [begin, end],
        }
    return fields


def tensors_of(fields: Mapping[str, Any], nbytes: int) -> tuple[TensorSpec, ...]:
    """What `tensor_fields` was given; all of them are `nbytes`.

    Raises:
        Damaged: it was given something else.
    """
    tensors, end = [], 0
    # Written out: a scan reads thousands of these.
    for name, value in fields.items():
        try:
            dtype, shape, (begin, stop) = value["dtype"], value["shape"], value["data_offsets"]
            item_bytes = ITEM_BYTES[dtype]
        except (KeyError, TypeError, ValueError):
            raise Damaged(f"{name[:80]}: no dtype, shape and data_offsets") from None
        if type(shape) is not list or not _INT.issuperset(map(type, (begin, stop, *shape))):
            raise Damaged(f"{name[:80]}: lengths that are no whole numbers")
        if not name or len(value) != len(_TENSOR) or not _is_shape(shape):
            raise Damaged(f"{name[:80]!r}: {len(value)} fields, shape {str(shape)[:80]}")
        tensors.append(TensorSpec(name, dtype, tuple(shape)))
        start, end = end, end + math.prod(shape) * item_bytes
        if begin != start or stop != end:
            raise Damaged(f"{name[:80]}: its bytes are not at {start}..{end}")
    if end != nbytes:
        raise Damaged(f"{nbytes} bytes of tensors, where they are {end}")
    return tuple(tensors)
