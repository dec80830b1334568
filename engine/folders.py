"""A model's folder before it is loaded: whether mlx-lm can, and which files it is made of."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

from .cache.identity import Artifact
from .errors import BadInput, one_line


def artifact_of(folder: Path) -> Artifact:
    """The files that decide the numbers of the model in that folder, as they lie there now."""
    weights = [*folder.glob("*.safetensors"), *folder.glob("*.py")]
    return Artifact.noted([folder / "config.json", *weights])


def check_folder(folder: Path) -> dict[str, Any]:
    """A model folder's config, after the checks whose failure mlx-lm words badly.

    Raises:
        BadInput: naming what is missing or unreadable.
    """
    if not folder.is_dir():
        raise BadInput(f"model folder {folder} is not a folder")
    config_file = folder / "config.json"
    if not config_file.is_file():
        raise BadInput(f"model folder {folder} has no config.json")
    try:
        config = json.loads(config_file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise BadInput(f"{config_file} is not readable JSON: {one_line(error)}") from error
    if not isinstance(config, dict) or "model_type" not in config:
        raise BadInput(f"{config_file} names no model_type")
    if not any(folder.glob("model*.safetensors")):
        raise BadInput(f"model folder {folder} has no weights (model*.safetensors)")
    return config


def require_compiler() -> None:
    """Refuse a machine without `g++`, where MLX's CPU backend on Linux compiles fused kernels.

    Raises:
        BadInput: there is none.
    """
    if sys.platform == "linux" and shutil.which("g++") is None:
        raise BadInput("no C++ compiler: mlx on Linux needs `g++` on PATH at run time")


def looks_like_hub_id(name: str) -> bool:
    """Whether it has the form `owner/name`, and is no path such as `./name` or `~/name`."""
    owner, slash, repo = name.partition("/")
    return bool(slash and owner.strip(".~") and repo and "/" not in repo)
