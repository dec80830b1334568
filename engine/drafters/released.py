"""A released drafter's weights, dense or affine-quantized, put into modules by their names."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.nn.layers.quantized import quantize
from mlx.utils import tree_flatten

from ..errors import BadInput, one_line
from .block_config import Config


def read_weights(folder: Path) -> dict[str, mx.array]:
    """All tensors of the folder, not evaluated, without the prefix `model.`.

    Raises:
        BadInput: a file cannot be read.
    """
    weights: dict[str, mx.array] = {}
    for file in sorted(folder.glob("model*.safetensors")):
        try:
            loaded: Any = mx.load(str(file))
        except Exception as error:
            raise BadInput(
                f"drafter {folder}: cannot read {file.name}: {one_line(error)}"
            ) from error
        weights |= {name.removeprefix("model."): array for name, array in loaded.items()}
    return weights


def fill(model: Module, weights: Mapping[str, mx.array], config: Config) -> None:
    """Put the tensors into a module, whose layers become affine-quantized where `.scales` say so.

    Raises:
        BadInput: a tensor is missing, unknown or of another shape.
    """
    scaled = {name.removesuffix(".scales") for name in weights if name.endswith(".scales")}
    if scaled:
        stated = Config(config.folder, config.fields.get("quantization") or {})
        stated.only("mode", "affine")
        group_size, bits = stated.size("group_size"), stated.size("bits")
        try:
            quantize(model, group_size, bits, class_predicate=lambda path, _module: path in scaled)
        except ValueError as error:
            raise config.refuse(
                f"{bits} bits in groups of {group_size}: {one_line(error)}"
            ) from error
    flat: Any = tree_flatten(model.parameters())
    wanted = dict(flat)
    for what, names in (
        ("lacks", wanted.keys() - weights.keys()),
        ("has unknown", weights.keys() - wanted.keys()),
    ):
        if names:
            listed = ", ".join(sorted(names)[:3])
            raise config.refuse(f"{what} tensors: {listed} ({len(names)} in all)")
    for name, array in wanted.items():
        if weights[name].shape != array.shape:
            raise config.refuse(f"{name} is {weights[name].shape}, expected {array.shape}")
    model.load_weights(list(weights.items()))
    model.eval()
    mx.eval(model.parameters())
