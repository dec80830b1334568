"""mlx arrays as bytes, and bytes as mlx arrays, without a copy in between."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Mapping, Sequence
from itertools import accumulate
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
    source, released = _Reveal(tensors), threading.Event()
    arrays, memory = source.arrays(), source.memory()
    # One of mlx's threads drops the source a moment later: not when the interpreter is gone.
    weakref.finalize(source, released.set)
    del source
    released.wait()
    return arrays, memory


class _Reveal:
    """A safetensors file, which leaves its tensors' memory as it is.

    mlx reads them in threads of its own, which no error would leave.
    """

    closed = False

    def __init__(self, tensors: Sequence[TensorSpec]) -> None:
        self._tensors = tensors
        # By numbers, and mlx's loader knows no F64.
        named = [
            TensorSpec(str(number), "U64" if spec.dtype == "F64" else spec.dtype, spec.shape)
            for number, spec in enumerate(tensors)
        ]
        header = dump(tensor_fields(named)).encode("ascii")
        self._head = len(header).to_bytes(LENGTH_BYTES, "little") + header
        self._size = len(self._head) + sum(spec.nbytes for spec in tensors)
        self._at = 0
        self._read: list[tuple[int, memoryview]] = []

    def arrays(self) -> list[mx.array]:
        """Of each tensor one, whose memory is known then."""
        source: Any = self
        loaded: Any = mx.load(source, format="safetensors")
        arrays: list[mx.array] = [loaded[str(number)] for number in range(len(self._tensors))]
        mx.eval(arrays)
        return [
            array.view(mx.float64) if spec.dtype == "F64" else array
            for array, spec in zip(arrays, self._tensors, strict=True)
        ]

    def memory(self) -> list[memoryview]:
        """Of each tensor the memory that mlx wanted to have read into."""
        ends = accumulate((spec.nbytes for spec in self._tensors), initial=len(self._head))
        wanted = [(at, spec.nbytes) for at, spec in zip(ends, self._tensors, strict=False)]
        if sorted((at, len(into)) for at, into in self._read) != [w for w in wanted if w[1]]:
            raise RuntimeError("mlx did not read each tensor once, in one piece")
        found = dict(self._read)
        return [found[at] if count else memoryview(bytearray()) for at, count in wanted]

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = 0) -> int:
        self._at = offset + (0, self._at, self._size)[whence]
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
        elif count:
            self._read.append((begin, into.cast("B")))
        return count
