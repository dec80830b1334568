"""Which models a run compares on: the fixtures, or folders named on the command line."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import fixtures
from parity.cases import DRAFTERS, Case
from parity.errors import BadInput

TARGET = "dense"
DRAFT = "dense-draft"


@dataclass(frozen=True, slots=True)
class Models:
    """A target and, if there is one, a draft model. `options` name them on the command line."""

    target: Path
    draft: Path | None
    options: tuple[str, ...] = ()

    @property
    def are_fixtures(self) -> bool:
        return not self.options

    def leaves_out(self, case: Case) -> bool:
        """Whether there is no draft model for this case."""
        return self.draft is None and case.cell.drafter == "two-model"


def fixture_models() -> Models:
    """The tiny target and its draft model."""
    return Models(fixtures.target_dir(TARGET), fixtures.drafter_dir(DRAFT))


def choose(target: str | None, drafter: str | None) -> Models:
    """The models for `--target` and `--drafter`.

    Raises:
        BadInput: a missing folder, an unknown drafter, or a target without a draft model for it.

    """
    kind, _, folder = (drafter or "").partition(":")
    if drafter is not None and kind not in DRAFTERS:
        raise BadInput(f"drafter {drafter!r} is not one of {', '.join(DRAFTERS)}, two-model:DIR")
    if folder and kind != "two-model":
        raise BadInput(f"drafter {kind} takes no folder, got {folder!r}")
    if target is None and not folder:
        return fixture_models()
    if target is not None and kind == "two-model" and not folder:
        raise BadInput("drafter two-model needs a folder with this target: two-model:DIR")
    options: list[str] = []
    target_dir = fixtures.target_dir(TARGET)
    if target is not None:
        target_dir = _folder("target", target)
        options += ["--target", target]
    draft_dir = None
    if folder:
        draft_dir = _folder("drafter", folder)
        options += ["--drafter", f"two-model:{folder}"]
    return Models(target_dir, draft_dir, tuple(options))


def _folder(what: str, name: str) -> Path:
    folder = Path(name)
    if not os.path.isdir(folder):  # unlike Path.is_dir, False for a name that is too long
        raise BadInput(f"{what} folder {name} does not exist")
    return folder
