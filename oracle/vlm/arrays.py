"""Arrays as JSON, and the one exception that is an answer."""

import base64
from typing import Any

import mlx.core as mx
import numpy as np

Json = dict[str, Any]


class Refused(Exception):
    """A request that has no answer; its text says why."""


def pack(value: Any) -> Any:
    """Replace arrays, at any depth, by what JSON can hold: a shape and float32 bytes."""
    if isinstance(value, mx.array):
        array = np.array(value.astype(mx.float32), order="C")
        return {"shape": list(array.shape), "float32": base64.b64encode(array.tobytes()).decode()}
    if isinstance(value, dict):
        return {name: pack(item) for name, item in value.items()}
    return [pack(item) for item in value] if isinstance(value, list | tuple) else value


def unpack(value: Json) -> mx.array:
    data = np.frombuffer(base64.b64decode(value["float32"]), dtype=np.float32)
    return mx.array(data.reshape(value["shape"]))
