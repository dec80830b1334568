"""Low-rank adapters and fine-tuned layers, mounted on a clone of a model by mlx-lm's own loader."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Set
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.tuner.utils import load_adapters

from .clone import detached
from .errors import BadInput, one_line
from .host import read

CONFIG, WEIGHTS = "adapter_config.json", "adapters.safetensors"
FILES = (CONFIG, WEIGHTS)
"""What mlx-lm reads of an adapter's folder; checkpoints of its training may lie beside them."""

LEAVES = frozenset({"lora_a", "lora_b", "m"})
"""Names of the arrays that LoRA and DoRA layers add to those of the model."""


def mount(model: Module, folder: Path) -> Module:
    """A clone of `model` with the adapter in `folder`, in evaluation mode.

    The arrays of `model` are shared and nothing of it is changed. One token is tried on the clone,
    and all of its arrays are read from disk: what returns can be used.

    Raises:
        BadInput: a file is missing or unreadable, the options cannot be used, a tensor fits
            nowhere, or one that the options call for is missing: mlx-lm would leave random
            numbers in its place.
    """
    config = check_folder(folder)
    clone = detached(model)
    # New layers draw their first numbers, which the file's replace, from MLX's global key. A key
    # is the two halves of its seed.
    state: Any = mx.random.state
    high, low = read(state[0])
    try:
        if not mx.load(str(folder / WEIGHTS)):
            raise BadInput(f"{folder / WEIGHTS} holds no tensors; at least 1 is needed")
        load_adapters(clone, str(folder))
        clone.eval()
        if config.get("fine_tune_type") != "full":
            require_complete(folder, added=_names(clone) - _names(model))
        mx.eval(clone.parameters(), _first_logits(clone))
    except BadInput:
        raise
    except Exception as error:
        # mlx-lm, its layers and MLX's reader of files raise whatever they like.
        raise BadInput(f"cannot mount adapter {folder}: {_shortened(error)}") from error
    finally:
        mx.random.seed(high << 32 | low)
    return clone


def check_folder(folder: Path) -> dict[str, Any]:
    """The adapter's config, after the checks whose failure mlx-lm words badly or not at all.

    Raises:
        BadInput: naming what is missing, unreadable or unusable.
    """
    if not os.path.exists(folder):  # unlike Path.exists, False for a name that is too long
        raise BadInput(f"adapter folder {folder} does not exist")
    if not folder.is_dir():
        raise BadInput(f"adapter folder {folder} is not a folder")
    for name in FILES:
        if not (folder / name).is_file():
            raise BadInput(f"adapter folder {folder} has no {name}")
    try:
        config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise BadInput(f"{folder / CONFIG} is not readable JSON: {one_line(error)}") from error
    if not isinstance(config, dict):
        raise BadInput(f"{folder / CONFIG} must hold an object, got {type(config).__name__}")
    options = config.get("lora_parameters")
    if isinstance(options, dict) and "scale" in options:
        scale = options["scale"]
        if type(scale) not in (int, float) or not abs(scale) < math.inf:
            raise BadInput(f"{folder / CONFIG}: scale must be a finite number, got {scale!r}")
    return config


def require_complete(folder: Path, added: Set[str]) -> None:
    """Refuse a file that lacks tensors of the layers which the config calls for.

    `added` are the names of arrays in the clone that the model does not have: those of adapters,
    and its own, where a layer around them made their names longer.
    """
    wanted = {name for name in added if name.rsplit(".", 1)[-1] in LEAVES}
    if missing := sorted(wanted - set(mx.load(str(folder / WEIGHTS)))):
        raise BadInput(
            f"{folder / WEIGHTS} lacks {len(missing)} of the {len(wanted)} tensors that {CONFIG} "
            f"calls for, {missing[0]} among them"
        )


def _first_logits(model: Any) -> mx.array:
    logits: mx.array = model(mx.array([[0]]), cache=make_prompt_cache(model))
    return logits


def _names(model: Module) -> set[str]:
    named: Any = tree_flatten(model.parameters())
    return {name for name, _ in named}


def _shortened(error: Exception) -> str:
    """A message in one line. mlx-lm lists each tensor that does not fit: the first will do."""
    _, *listed = str(error).splitlines() or [""]
    if not (isinstance(error, ValueError) and listed):
        return one_line(error)
    more = f", and {len(listed) - 1} tensors more do not fit" if len(listed) > 1 else ""
    return listed[0].strip() + more
