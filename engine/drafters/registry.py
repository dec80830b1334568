"""Which drafter a `--drafter` argument means."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ..errors import BadInput
from ..target import Target, check_folder
from .deepspec import open_deepspec
from .dspark import CALIBRATION, open_dspark
from .ngram import NgramProvider
from .source import DraftProvider
from .two_model import TwoModelProvider

KINDS = ("two-model", "mtp", "assistant", "dspark", "deepspec")

BLOCK_ARCHITECTURES = ("Qwen3DSparkModel", "DSparkDraftModel", "DFlashDraftModel")
"""Released block drafters, which call themselves `qwen3` like the models they draft for."""

Opener = Callable[[Path, Target], DraftProvider]
"""The provider for a drafter's folder beside a target; refuses before it reads weights."""

OPENERS: Mapping[str, Opener] = {
    "two-model": lambda folder, target: TwoModelProvider(Target.load(folder), target),
    "dspark": open_dspark,
    "deepspec": open_deepspec,
}


def detect_kind(folder: Path) -> str:
    """The kind of drafter that a folder's files hold.

    Raises:
        BadInput: there is no folder or no config in it.
    """
    if (folder / CALIBRATION).is_file():
        return "dspark"
    config: dict[str, Any] = check_folder(folder)
    model_type = str(config["model_type"])
    architecture = (config.get("architectures") or [None])[0]
    if architecture == "Gemma4DSparkModel":
        return "deepspec"
    if "dflash_config" in config or architecture in BLOCK_ARCHITECTURES:
        return "dspark"
    if "assistant" in model_type:
        return "assistant"
    return "mtp" if model_type.endswith("_mtp") else "two-model"


def open_drafter(spec: str, target: Target) -> DraftProvider | None:
    """The provider for `off | ngram | KIND:DIR | DIR`; None for off.

    A bare folder is detected; a stated kind that the files contradict is refused.

    Raises:
        BadInput: unknown or incomplete spec, a folder that does not fit, or a pairing that cannot
            work.
    """
    kind, _, path = spec.partition(":")
    if spec == "off":
        return None
    if kind == "ngram":
        if path:
            raise BadInput(f"drafter ngram takes no model path, got {path!r}")
        return NgramProvider()
    if kind not in KINDS:
        kind, path = "", spec
    if not path:
        raise BadInput(f"drafter {spec!r} needs a folder: {kind or 'KIND'}:DIR")
    folder = Path(path)
    if not os.path.exists(folder):
        raise BadInput(
            f"drafter folder {path} does not exist (drafters: off, ngram, two-model:DIR, DIR)"
        )
    found = detect_kind(folder)
    if kind and kind != found:
        raise BadInput(f"drafter folder {path} holds a {found} drafter, not {kind}")
    if found not in OPENERS:
        known = ", ".join(OPENERS)
        raise BadInput(f"drafter folder {path} holds a {found} drafter; only {known} can be run")
    return OPENERS[found](folder, target)
