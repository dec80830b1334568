"""A drafter's tensors: found in safetensors files by name, and put into a module whole.

Every drafter that has weights of its own gets them here, a two-model drafter's but for it: that is
a target of its own, which evaluates in the same way.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.nn.layers.quantized import quantize
from mlx.utils import tree_flatten

from ..errors import BadInput, one_line
from ..host import settle


@dataclass(frozen=True, slots=True)
class Quantization:
    """How those layers are packed that have `.scales`; `own` names layers packed in another way."""

    group_size: int
    bits: int
    mode: str
    own: Mapping[str, Any]

    @classmethod
    def read(
        cls, config: Mapping[str, Any], where: str, *, only_affine: bool = True
    ) -> Quantization | None:
        """What config.json says under `quantization`, as mlx-lm writes it; None if it says nothing.

        Raises:
            BadInput: another mode, or sizes that are none.
        """
        how = config.get("quantization")
        if how is None:
            return None
        if not isinstance(how, dict):
            raise BadInput(f"{where}: quantization must be an object, got {how!r}")
        mode = how.get("mode", "affine")
        if only_affine and mode != "affine":
            raise BadInput(f"{where}: quantization mode must be 'affine', got {mode!r}")
        for name in ("group_size", "bits"):
            value = how.get(name)
            if type(value) is not int or value < 1:
                raise BadInput(
                    f"{where}: quantization {name} must be a whole number of at least 1, "
                    f"got {value!r}"
                )
        return cls(how["group_size"], how["bits"], mode, how)


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
    module: Module,
    tensors: Mapping[str, mx.array],
    quantization: Quantization | None,
    where: str,
) -> None:
    """Give a module its arrays, all evaluated; those with `.scales` beside them stay packed.

    Nothing is read if anything is refused.

    Raises:
        BadInput: a tensor is missing, unknown or of another shape, or packed and nothing says how.
    """
    _pack(module, tensors, quantization, where)
    wanted: Any = dict(tree_flatten(module.parameters()))
    for what, names in (
        ("lacks", wanted.keys() - tensors.keys()),
        ("has unknown", tensors.keys() - wanted.keys()),
    ):
        if names:
            listed = sorted(names)
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            raise BadInput(f"{where} {what} tensors: {', '.join(listed[:3])}{more}")
    for name, array in tensors.items():
        if array.shape != wanted[name].shape:
            raise BadInput(f"{where}: {name} is {array.shape}, expected {wanted[name].shape}")
    module.load_weights(list(tensors.items()))
    module.eval()
    settle(module)


def _pack(
    module: Module,
    tensors: Mapping[str, mx.array],
    how: Quantization | None,
    where: str,
) -> None:
    """Make those layers quantized whose tensors are."""
    packed = {n.removesuffix(".scales") for n in tensors if n.endswith(".scales")}
    if not packed:
        return
    if how is None:
        raise BadInput(f"{where} is quantized, but its config.json has no quantization")

    def settings(path: str, layer: Module) -> bool | dict[str, Any]:
        if path not in packed or not hasattr(layer, "to_quantized"):
            return False
        own = how.own.get(path)
        return own if isinstance(own, dict) else True

    try:
        quantize(module, how.group_size, how.bits, mode=how.mode, class_predicate=settings)
    except ValueError as error:
        raise BadInput(
            f"{where}: {how.bits} bits in groups of {how.group_size}: {one_line(error)}"
        ) from error
