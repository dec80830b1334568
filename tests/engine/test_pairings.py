"""Every kind of drafter beside every target that it does not fit: one line, and no draft weights.

A further kind is a line in `WRONG` for each such target.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

import fixtures
from engine import BadInput, Engine, Request, Target, generate, open_drafter
from fixtures import random_drafters

from .conftest import finish_of
from .pools import PAIRS, drafter_of, target_of

READERS = [pair for pair in PAIRS if pair[1] not in ("off", "ngram", "two-model")]


@dataclass(frozen=True, slots=True)
class Wrong:
    """A drafter of a kind and a target that must refuse it, in which words.

    `told_by_config`: what is wrong can be seen without the drafter's weights.
    """

    kind: str
    make: Callable[[Path], Path]
    target: str
    says: str
    told_by_config: bool = True


def assistant(folder: Path) -> Path:
    """One made for `sliding`."""
    return random_drafters.assistant(folder, fixtures.target_dir("sliding"), 1)


def foreign_tokenizer(folder: Path) -> Path:
    """A draft model that reads a text as other ids than any target of ours."""
    shutil.copytree(fixtures.drafter_dir("dense-draft"), folder)
    file = folder / "tokenizer.json"
    tokenizer = json.loads(file.read_text(encoding="utf-8"))
    vocab = tokenizer["model"]["vocab"]
    vocab["a"], vocab["b"] = vocab["b"], vocab["a"]
    file.write_text(json.dumps(tokenizer), encoding="utf-8")
    return folder


WRONG = (
    Wrong("assistant", assistant, "dense", r"hidden states of 96, target .*dense-v1 has 128"),
    Wrong("assistant", assistant, "hybrid", r"hidden states of 96, target .*hybrid-v1 has 64"),
    Wrong("assistant", assistant, "mla", r"target .*mla-v1: no sliding attention layer"),
    Wrong("assistant", assistant, "qwen3", r"target .*qwen3-v1: no sliding attention layer"),
    *(
        Wrong("two-model", foreign_tokenizer, family, "another tokenizer than target", False)
        for family in ("dense", "sliding", "hybrid", "mla", "qwen3")
    ),
)


@pytest.mark.parametrize("wrong", WRONG, ids=lambda wrong: f"{wrong.kind}-{wrong.target}")
def test_a_wrong_pairing_is_refused(wrong: Wrong, tmp_path: Path) -> None:
    """In one line that names the drafter, and before its weights are read where config tells."""
    folder = wrong.make(tmp_path / "drafter")
    if wrong.told_by_config:
        for file in folder.glob("*.safetensors"):
            file.write_bytes(b"not to be read")
    with pytest.raises(BadInput, match=wrong.says) as refusal:
        open_drafter(f"{wrong.kind}:{folder}", target_of(wrong.target))
    assert str(folder) in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_weights_that_are_needed_must_be_readable(tmp_path: Path) -> None:
    """Beside the right target the same broken file is what is refused."""
    folder = assistant(tmp_path / "drafter")
    (folder / "model.safetensors").write_bytes(b"not to be read")
    with pytest.raises(BadInput, match=r"model\.safetensors is not readable") as refusal:
        open_drafter(f"assistant:{folder}", target_of("sliding"))
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(("family", "kind"), READERS)
def test_a_drafter_that_reads_a_target_serves_no_other(family: str, kind: str) -> None:
    """`identity-drafter`: not even one loaded again from the same folder."""
    drafter, own = drafter_of(family, kind), target_of(family)
    assert drafter is not None
    assert drafter.target is own
    again = Target.load(own.path)
    same_model = Target(own.model, own.tokenizer, own._config, own.path)
    request = Request((5, 6, 7), 4)
    for target in (again, same_model, target_of("qwen3")):
        for serve in (
            lambda target=target: generate(target, request, drafter),
            lambda target=target: Engine(target, [drafter]),
        ):
            with pytest.raises(BadInput, match=f"drafter {drafter.id} reads the target") as refusal:
                serve()
            assert str(target.path) in str(refusal.value)
            assert "\n" not in str(refusal.value)
    assert list(generate(own, request, drafter))


@pytest.mark.parametrize("kind", ["ngram", "two-model"])
def test_a_drafter_that_reads_no_target_serves_any(kind: str) -> None:
    """`lossless`: opened beside one target, it drafts for another of the same tokenizer."""
    drafter = drafter_of("dense", kind)
    assert drafter is not None
    assert drafter.target is None
    other = target_of("qwen3")
    prompt = other.encode("Name: Anna. Say it again: ")
    assert finish_of(other, prompt, drafter).tokens == finish_of(other, prompt).tokens


@pytest.mark.parametrize("kind", ["two-model", "mtp", "assistant", "dspark", "deepspec"])
def test_a_kind_needs_a_folder_that_holds_it(kind: str, tmp_path: Path) -> None:
    """An n-gram lookup is the only one without a folder; a target may bring a head along."""
    for spec, says in (
        (kind, "neither a folder mtp nor a layer" if kind == "mtp" else "needs a folder"),
        (f"{kind}:{tmp_path / 'none'}", "does not exist"),
        (f"{kind}:{tmp_path}", "has no config.json"),
    ):
        with pytest.raises(BadInput, match=says):
            open_drafter(spec, target_of("dense"))
    with pytest.raises(BadInput, match="takes no model path"):
        open_drafter(f"ngram:{tmp_path}", target_of("dense"))
