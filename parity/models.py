"""Which models a run compares on: those this project brings along, or those it is given."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Literal

import fixtures
from parity.cases import DRAFTERS, READERS, Case, Drafter
from parity.errors import BadInput
from parity.plans import DENSE, FAMILIES, GIVEN, KV_BITS, READERS_OF, SMOLLM2, SMOLLM2_F32


@dataclass(frozen=True, slots=True)
class Models:
    """A target and, if there is one, a draft model.

    `readers` are the folders of drafters that read this target; None is the target's own layer.
    `name` is how case ids call them; `options` name them on the command line. `kv_bits` quantizes
    keys and values from the first token on, in groups of 64.
    """

    name: str
    target: Path
    draft: Path | None
    options: tuple[str, ...] = ()
    kv_bits: int | None = None
    readers: Mapping[Drafter, Path | None] = field(default_factory=dict)

    @property
    def brought_along(self) -> bool:
        return self.name != GIVEN

    def leaves_out(self, case: Case) -> bool:
        """Whether there is no draft model for this case."""
        return self.draft is None and case.cell.drafter == "two-model"


def _fixture(name: str) -> Models:
    readers = {
        # The mla target has its own layer for that, among its own files.
        kind: None if name == "mla" else fixtures.drafter_dir(f"{name}-{kind}")
        for kind in READERS_OF[name]
    }
    draft = fixtures.drafter_dir(f"{name}-draft")
    return Models(name, fixtures.target_dir(name), draft, readers=readers)


def _quantized(name: str, bits: int) -> Models:
    return replace(_fixture(DENSE), name=name, kv_bits=bits, readers={})


def _smollm2(name: str, form: Literal["q4", "f32"]) -> Models:
    # Its converter loads MLX, which listing cases need not wait for.
    from fixtures.smollm2 import smollm2

    try:
        return Models(name, smollm2(form), smollm2("draft"))
    except ValueError as error:
        raise BadInput(f"{name}: {error}") from error


_KNOWN: Mapping[str, Callable[[], Models]] = {
    **{name: partial(_fixture, name) for name in (DENSE, *FAMILIES)},
    **{name: partial(_quantized, name, bits) for name, bits in KV_BITS.items()},
    SMOLLM2: partial(_smollm2, SMOLLM2, "q4"),
    SMOLLM2_F32: partial(_smollm2, SMOLLM2_F32, "f32"),
}


def known_models(name: str) -> Models:
    """The models of one plan, ready on disk.

    Raises:
        BadInput: they are made on this machine, and cannot be.

    """
    return _KNOWN[name]()


def given_models(target: str, drafter: str | None, further: tuple[str, ...] = ()) -> Models:
    """The models for `--target` and `--drafter`; `further` options belong to the command as well.

    Raises:
        BadInput: a missing folder, a hub model that cannot be had, an unknown drafter.

    """
    kind, folder = split_drafter(drafter, with_target=True)
    if kind == "two-model" and not folder:
        raise BadInput("drafter two-model needs a folder with this target: two-model:DIR")
    options = ["--target", target]
    draft = None
    if folder:
        draft = _folder("drafter", folder)
        options += ["--drafter", f"two-model:{folder}"]
    return Models(GIVEN, local(target), draft, (*options, *further))


def split_drafter(drafter: str | None, *, with_target: bool) -> tuple[str | None, str]:
    """Kind and folder of a `--drafter` argument, which may be a bare folder.

    Raises:
        BadInput: an unknown kind, one not run `with_target`, or a folder where none belongs.

    """
    if drafter is not None and os.path.isdir(drafter):
        return "two-model", drafter  # what the folder really holds is found out when it is opened
    kind, _, folder = (drafter or "").partition(":")
    if drafter is not None and kind not in (*DRAFTERS, *READERS):
        raise BadInput(
            f"drafter {drafter!r} is not one of {', '.join(DRAFTERS)}, two-model:DIR, DIR"
        )
    if with_target and kind in READERS:
        raise BadInput(
            f"drafter {drafter}: with --target only off, ngram and two-model:DIR are run"
        )
    if folder and kind != "two-model":
        raise BadInput(f"drafter {kind} takes no folder, got {folder!r}")
    return kind or None, folder


def local(target: str) -> Path:
    """The folder of a model folder or of a hub id `owner/name`, which is downloaded if need be.

    Raises:
        BadInput: neither.

    """
    if os.path.isdir(target):  # unlike Path.is_dir, False for a name that is too long
        return Path(target)
    owner, slash, name = target.partition("/")
    if not slash or not owner.strip(".~") or not name or "/" in name:
        wrong = "is not a folder" if os.path.exists(target) else "does not exist"
        raise BadInput(f"target folder {target} {wrong}")
    from mlx_lm.utils import _download

    try:
        return Path(_download(target))
    except Exception as error:  # the hub client raises whatever it likes
        said = " ".join(str(error).split()) or type(error).__name__
        raise BadInput(
            f"target {target}: there is no such folder, and as a hub id: {said}"
        ) from error


def _folder(what: str, name: str) -> Path:
    folder = Path(name)
    if not os.path.isdir(folder):
        raise BadInput(f"{what} folder {name} does not exist")
    return folder
