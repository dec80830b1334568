"""Every kind of drafter beside every target that it does not fit: one line, and no draft weights.

What is changed in a drafter, and what is said then, is the table in `misfits`.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

import fixtures
from engine import (
    BadInput,
    DraftProvider,
    Engine,
    Finish,
    Request,
    Target,
    generate,
    open_drafter,
)
from engine.drafters.glm_mtp import open_glm_mtp
from engine.drafters.registry import KINDS

from .conftest import finish_of
from .misfits import (
    FAMILIES,
    MADE_FOR,
    MAKERS,
    MISFITS,
    Misfit,
    changed,
    drop,
    made,
    nothing,
)
from .pools import PAIRS, drafter_of, target_of

READERS = [pair for pair in PAIRS if pair[1] not in ("off", "ngram", "two-model")]


@pytest.mark.parametrize("misfit", MISFITS, ids=str)
def test_a_misfit_is_refused(misfit: Misfit, tmp_path: Path) -> None:
    """In one line that names the drafter, and before its weights are read where config tells."""
    folder = changed(made(misfit.maker, misfit.made_for), tmp_path / "drafter", misfit.change)
    if misfit.in_config:
        (folder / "model.safetensors").write_bytes(b"not to be read")
    with pytest.raises(BadInput, match=misfit.says) as refusal:
        open_drafter(f"{misfit.kind}:{folder}", target_of(misfit.target))
    assert str(folder) in str(refusal.value)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(("maker", "family"), MADE_FOR)
def test_weights_that_are_needed_must_be_readable(maker: str, family: str, tmp_path: Path) -> None:
    """Beside the right target the same broken file is what is refused."""
    folder = changed(made(maker, family), tmp_path / "drafter", nothing)
    (folder / "model.safetensors").write_bytes(b"not to be read")
    with pytest.raises(BadInput, match=r"drafter/model\.safetensors is not readable") as refusal:
        open_drafter(str(folder), target_of(family))
    assert "\n" not in str(refusal.value)


def test_misfits_are_of_every_kind_beside_every_target() -> None:
    """None is forgotten; a two-model drafter and a layer of the target's own are below."""
    for maker in ("mtp", "assistant", "dspark", "dflash", "deepspec"):
        beside = {misfit.target for misfit in MISFITS if misfit.maker == maker}
        right = {family for own, family in MADE_FOR if own == maker}
        assert beside >= set(FAMILIES) - (right if len(right) == 1 else set())


@pytest.mark.parametrize("family", FAMILIES)
def test_a_foreign_tokenizer_is_refused(family: str, tmp_path: Path) -> None:
    """A draft model that reads a text as other ids; its vocabulary's size is the target's."""
    folder = foreign_tokenizer(tmp_path / "draft")
    with pytest.raises(BadInput, match="another tokenizer than target") as refusal:
        open_drafter(f"two-model:{folder}", target_of(family))
    assert str(folder) in str(refusal.value)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("family", [family for family in FAMILIES if family != "mla"])
def test_a_target_without_a_layer_of_its_own_has_none_to_draft_with(family: str) -> None:
    for mount in (lambda t: open_drafter("mtp", t), open_glm_mtp):
        with pytest.raises(BadInput, match=r"neither a folder mtp|only glm_moe_dsa has") as refusal:
            mount(target_of(family))
        assert str(target_of(family).path) in str(refusal.value)
        assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_draft_model_of_another_family_is_legal(family: str) -> None:
    """`lossless`: its states are its own, and ids are the same."""
    other = FAMILIES[FAMILIES.index(family) - 1]
    drafter = open_drafter(f"two-model:{fixtures.drafter_dir(f'{other}-draft')}", target_of(family))
    same_text(family, drafter)


def test_a_block_drafter_that_says_no_layer_count_is_legal(tmp_path: Path) -> None:
    """`lossless`: the target has the sizes and the layers that it names; its drafts are bad."""
    unsaid = drop("dflash_config", "num_target_layers")
    folder = changed(made("dflash", "sliding"), tmp_path / "drafter", unsaid)
    same_text("qwen3", open_drafter(f"dspark:{folder}", target_of("qwen3")))
    with pytest.raises(BadInput, match=r"layers between 0 and 2, got \[0, 3\]"):
        open_drafter(f"dspark:{folder}", target_of("mla"))


@pytest.mark.parametrize(("maker", "family"), [("dspark", "dense"), ("deepspec", "sliding")])
def test_no_more_is_drafted_than_was_trained(maker: str, family: str) -> None:
    """`lossless`: a deeper request gets the trained length, as many tokens a round."""
    drafter = open_drafter(str(made(maker, family)), target_of(family))
    assert drafter is not None
    rounds = same_text(family, drafter, depth=9).rounds
    assert max(len(turn.draft) for turn in rounds) == drafter.default_depth


def same_text(family: str, drafter: DraftProvider | None, depth: int | None = None) -> Finish:
    target = target_of(family)
    prompt = target.encode(fixtures.prompts(family)[0].text)
    drafted = finish_of(target, prompt, drafter, depth=depth)
    assert drafted.tokens == finish_of(target, prompt).tokens
    assert drafted.statistics.drafted > 0
    return drafted


def test_a_folder_is_of_the_kind_that_is_stated(tmp_path: Path) -> None:
    """Each kind's folder under each other kind's name; weights are not read for that."""
    folders = {"two-model": fixtures.drafter_dir("dense-draft")}
    for maker, family in MADE_FOR:
        folder = tmp_path / f"{maker}-{family}"
        folders[MAKERS[maker][0]] = changed(made(maker, family), folder, nothing)
        (folder / "model.safetensors").write_bytes(b"not to be read")
    assert set(folders) == set(KINDS)
    for kind, folder in folders.items():
        for stated in KINDS:
            if stated != kind:
                with pytest.raises(BadInput, match=f"holds a {kind} drafter, not {stated}"):
                    open_drafter(f"{stated}:{folder}", target_of("dense"))


def foreign_tokenizer(folder: Path) -> Path:
    """A draft model that reads a text as other ids than any target of ours."""
    shutil.copytree(fixtures.drafter_dir("dense-draft"), folder)
    file = folder / "tokenizer.json"
    tokenizer = json.loads(file.read_text(encoding="utf-8"))
    vocab = tokenizer["model"]["vocab"]
    vocab["a"], vocab["b"] = vocab["b"], vocab["a"]
    file.write_text(json.dumps(tokenizer), encoding="utf-8")
    return folder


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
