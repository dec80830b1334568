"""Which drafter a `--drafter` argument means."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ..errors import BadInput
from ..folders import check_folder
from ..target import Target
from .assistant import AssistantProvider
from .deepspec import open_deepspec
from .dspark import CALIBRATION, open_dspark
from .glm_mtp import MODEL_TYPE as GLM
from .glm_mtp import has_glm_mtp, open_glm_mtp
from .ngram import NgramProvider
from .qwen_mtp import open_qwen_mtp
from .source import DraftProvider
from .two_model import TwoModelProvider

BLOCK_ARCHITECTURES = ("Qwen3DSparkModel", "DSparkDraftModel", "DFlashDraftModel")
"""Released block drafters, which call themselves `qwen3` like the models they draft for."""

Opener = Callable[[Path, Target, float | None], DraftProvider]
"""The provider for a drafter's folder beside a target; refuses before it reads weights.

The number is the least confidence at every position, of kinds that have a head for it.
"""

OPENERS: Mapping[str, Opener] = {
    "two-model": lambda folder, target, _: TwoModelProvider(Target.load(folder), target),
    "mtp": lambda folder, target, _: open_qwen_mtp(folder, target),
    "assistant": lambda folder, target, _: AssistantProvider(folder, target),
    "dspark": lambda folder, target, least: open_dspark(folder, target, min_confidence=least),
    "deepspec": lambda folder, target, least: open_deepspec(folder, target, min_confidence=least),
}
"""By kind, as in KIND:DIR."""

KINDS = tuple(OPENERS)
CONFIDENT = ("dspark", "deepspec")
"""Kinds that may have a confidence head."""


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


def default_drafter(target: Target) -> DraftProvider | None:
    """The target's own next-token layer, if its files hold one; it is the base model's.

    Raises:
        BadInput: there is more than one, or it is incomplete.
    """
    if target.adapter is not None or not has_glm_mtp(target):
        return None
    return open_glm_mtp(target)


def open_drafter(
    spec: str, target: Target, *, min_confidence: float | None = None
) -> DraftProvider | None:
    """The provider for `off | ngram | mtp | KIND:DIR | DIR`; None for off.

    A bare folder is detected; a stated kind that the files contradict is refused. `mtp` alone is
    what came with the target: the folder `mtp` in its own, else its own next-token layer.

    Args:
        min_confidence: cut a draft before its first token that is less sure than that, 0 to 1, in
            place of calibrated thresholds.

    Raises:
        BadInput: unknown or incomplete spec, a folder that does not fit, a pairing that cannot
            work, or a `min_confidence` for a drafter without a confidence head.
    """
    kind, folder = _located(spec, target)
    if min_confidence is not None and kind not in CONFIDENT:
        raise BadInput(
            f"drafter {kind} has no confidence head that min_confidence {min_confidence} could "
            f"be held against (only {', '.join(CONFIDENT)} can have one)"
        )
    if kind == "off":
        return None
    if kind == "ngram":
        return NgramProvider()
    if folder is None:
        return _own_layer(target)
    return OPENERS[kind](folder, target, min_confidence)


def _located(spec: str, target: Target) -> tuple[str, Path | None]:
    """The kind that a spec means and its folder, which off, ngram and an own layer have not."""
    kind, _, path = spec.partition(":")
    if spec == "off":
        return spec, None
    if kind == "ngram":
        if path:
            raise BadInput(f"drafter ngram takes no model path, got {path!r}")
        return kind, None
    if spec == "mtp":
        bundled = target.path / "mtp"
        if not bundled.exists():
            return kind, None
        path = str(bundled)
    elif kind not in KINDS:
        kind, path = "", spec
    if not path:
        raise BadInput(f"drafter {spec!r} needs a folder: {kind or 'KIND'}:DIR")
    folder = Path(path)
    if not os.path.exists(folder):
        kinds = ", ".join(f"{known}:DIR" for known in KINDS)
        raise BadInput(
            f"drafter folder {path} does not exist (drafters: off, ngram, mtp, {kinds}, DIR)"
        )
    found = detect_kind(folder)
    if kind and kind != found:
        raise BadInput(f"drafter folder {path} holds a {found} drafter, not {kind}")
    return found, folder


def _own_layer(target: Target) -> DraftProvider:
    if target.model.model_type != GLM:
        raise BadInput(
            f"drafter mtp: target {target.path} has neither a folder mtp nor a layer of its own "
            "to draft with (mtp:DIR names a folder)"
        )
    return open_glm_mtp(target)
