"""mlx arrays as bytes, and bytes as mlx arrays, without a copy in between."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import mlx.core as mx

from .entry import Buffer, TensorSpec
from .format import LENGTH_BYTES
from .strict import dump
from .tensors import tensor_fields

DTYPES: Mapping[str, mx.Dtype] = {
    "BOOL": mx.bool_,
    "U8": mx.uint8,
    "I8": mx.int8,
    "U16": mx.uint16,
    "I16": mx.int16,
    "F16": mx.float16,
    "BF16": mx.bfloat16,
    "U32": mx.uint32,
    "I32": mx.int32,
    "F32": mx.float32,
    "U64": mx.uint64,
    "I64": mx.int64,
    "F64": mx.float64,
    "C64": mx.complex64,
}
NAMES: Mapping[mx.Dtype, str] = {dtype: name for name, dtype in DTYPES.items()}


def spec_of(name: str, array: mx.array) -> TensorSpec:
    return TensorSpec(name, NAMES[array.dtype], tuple(array.shape))


def bytes_of(array: mx.array) -> Buffer:
    """An array's bytes: its own memory if it is evaluated and contiguous, else a copy."""
    if not array.size:
        return memoryview(bytearray())
    # As bytes, since NumPy has no bfloat16.
    return memoryview(mx.contiguous(array).reshape(-1).view(mx.uint8))  # type: ignore[arg-type]


def empty(tensors: Sequence[TensorSpec]) -> tuple[list[mx.array], list[memoryview]]:
    """Arrays that hold anything, and their own memory, to be filled before they are used.

    mlx has no such function, but its loader makes such arrays, and asks whatever reads like a file
    to fill them. The memory is good for as long as its array is there.
    """
    sources = [_Reveal(spec) for spec in tensors]
    arrays = [source.array() for source in sources]
    mx.eval(arrays)
    return arrays, [source.memory for source in sources]


class _Reveal:
    """A safetensors file of one tensor, which leaves the tensor's memory as it is.

    mlx reads the file's end in a thread of its own, which no error would leave.
    """

    closed = False

    def __init__(self, spec: TensorSpec) -> None:
        self._spec = spec
        # mlx's loader knows no F64.
        dtype = "U64" if spec.dtype == "F64" else spec.dtype
        header = dump(tensor_fields([TensorSpec("0", dtype, spec.shape)])).encode("ascii")
        self._head = len(header).to_bytes(LENGTH_BYTES, "little") + header
        self._at = 0
        self._memory: memoryview | None = None

    def array(self) -> mx.array:
        """Its memory is known once it is evaluated."""
        source: Any = self
        loaded: Any = mx.load(source, format="safetensors")
        array: mx.array = loaded["0"]
        return array.view(mx.float64) if self._spec.dtype == "F64" else array

    @property
    def memory(self) -> memoryview:
        if not self._spec.nbytes:
            return memoryview(bytearray())
        if self._memory is None:
            raise RuntimeError(f"mlx did not read {self._spec.nbytes} bytes at once")
        return self._memory

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = 0) -> int:
        self._at = offset + (0, self._at, len(self._head) + self._spec.nbytes)[whence]
        return self._at

    def read(self, count: int) -> bytes:
        data = bytearray(count)
        self.readinto(memoryview(data))
        return bytes(data)

    def readinto(self, into: memoryview) -> int:
        begin, count = self._at, len(into)
        self._at += count
        if begin < len(self._head):
            into[:] = self._head[begin : self._at].ljust(count, b"\0")
        elif count == self._spec.nbytes:
            self._memory = into.cast("B")
        return count
