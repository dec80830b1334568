"""A drafter's tensors: found in safetensors files by name, and put into a module whole."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.nn.layers.quantized import quantize
from mlx.utils import tree_flatten

from ..errors import BadInput, one_line


def tensors_of(folder: Path, prefix: str = "") -> dict[str, mx.array]:
    """The folder's tensors whose names begin so, without the prefix. Only headers are read.

    Raises:
        BadInput: a file is not safetensors.
    """
    found: dict[str, mx.array] = {}
    for file in sorted(folder.glob("model*.safetensors")):
        try:
            arrays: Any = mx.load(str(file))
        except (OSError, RuntimeError, ValueError) as error:
            raise BadInput(f"{file} is not readable: {one_line(error)}") from error
        found |= {n.removeprefix(prefix): a for n, a in arrays.items() if n.startswith(prefix)}
    return found


def fill(
    module: Module, tensors: Mapping[str, mx.array], config: Mapping[str, Any], where: str
) -> None:
    """Give a module its arrays; linear layers with `.scales` beside their weight are quantized.

    `config["quantization"]` says how, as mlx-lm writes it. Nothing is read if anything is refused.

    Raises:
        BadInput: a tensor is missing, unknown or of another shape, and nothing says how it was
            quantized.
    """
    packed = {n.removesuffix(".scales") for n in tensors if n.endswith(".scales")}
    if packed:
        how = config.get("quantization")
        if not isinstance(how, dict) or not {"group_size", "bits"} <= how.keys():
            raise BadInput(f"{where} is quantized, but its config has no quantization sizes")
        quantize(
            module,
            how["group_size"],
            how["bits"],
            mode=how.get("mode", "affine"),
            class_predicate=lambda path, m: (
                path in packed and hasattr(m, "to_quantized") and how.get(path, True)
            ),
        )
    wanted: Any = dict(tree_flatten(module.parameters()))
    for what, names in (
        ("lacks", wanted.keys() - tensors.keys()),
        ("has unknown", tensors.keys() - wanted.keys()),
    ):
        if names:
            raise BadInput(f"{where} {what} tensors: {', '.join(sorted(names))}")
    for name, array in tensors.items():
        if array.shape != wanted[name].shape:
            raise BadInput(f"{where}: {name} is {array.shape}, expected {wanted[name].shape}")
    module.load_weights(list(tensors.items()))
    module.eval()
    # Here, because an array that is not evaluated belongs to the thread that made it.
    mx.eval(module.parameters())
