"""The second oracle holds: mlx-vlm's drafters, asked through the worker, mean what we think."""

from __future__ import annotations

import functools
import json
import os
import shutil
import signal
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

import fixtures
from fixtures import random_drafters
from oracle.drafters import (
    VARIABLE,
    Array,
    Block,
    Borrowed,
    Chain,
    Drafters,
    FirstRound,
    Kind,
    ModuleOutput,
    Pair,
    python_in_environment,
)
from oracle.inprocess import Loaded, load, plain
from oracle.vlm_process import WorkerFailed

from .deepspec import block_hidden

DEPTH = 3
NUM_TOKENS = 40
# Sums of some hundred float32 products in another order.
NEAR = 2e-4

Maker = Callable[[Path, Path, int], Path]


@dataclass(frozen=True, slots=True)
class Case:
    """A drafter, who makes it (None: the target holds it), and the target it is for."""

    name: str
    kind: Kind
    target: str
    maker: Maker | None


CASES = (
    Case("assistant", "assistant", "sliding", random_drafters.assistant),
    Case(
        "centroids",
        "assistant",
        "sliding",
        functools.partial(random_drafters.assistant, centroids=True),
    ),
    Case("qwen_mtp", "qwen_mtp", "hybrid", random_drafters.qwen_mtp),
    Case("glm_mtp", "glm_mtp", "mla", None),
    Case("dspark", "dspark", "hybrid", random_drafters.dspark),
    Case("dspark-sliding", "dspark", "sliding", random_drafters.dspark),
    Case("dflash", "dflash", "hybrid", random_drafters.dflash),
    Case("dflash-sliding", "dflash", "sliding", random_drafters.dflash),
    Case("deepspec", "deepspec", "sliding", random_drafters.deepspec),
)
CLASSES = {
    "assistant": "Gemma4AssistantDraftModel",
    "qwen_mtp": "Qwen3_5MTPDraftModel",
    "glm_mtp": "GlmMoeDsaMTPDraftModel",
    "dspark": "DSparkDraftModel",
    "dflash": "DFlashDraftModel",
    "deepspec": "Gemma4DSparkDraftModel",
}


def vlm_python() -> Path:
    python = python_in_environment()
    if python is None:
        pytest.fail(f"{VARIABLE} must name the Python of mlx-vlm: run nox -s oracle_drafters")
    return python


@pytest.fixture(scope="module")
def drafters() -> Iterator[Drafters]:
    with Drafters(vlm_python()) as running:
        yield running


class Folders(dict[str, Path]):
    """The drafter folder of each case, made when it is first asked for."""

    def __init__(self, root: Path) -> None:
        super().__init__()
        self._root = root

    def __missing__(self, name: str) -> Path:
        case = next(case for case in CASES if case.name == name)
        target = fixtures.target_dir(case.target)
        self[name] = case.maker(self._root / name, target, 1) if case.maker else target
        return self[name]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    return Folders(tmp_path_factory.mktemp("drafters"))


@pytest.fixture(scope="module", params=CASES, ids=lambda case: case.name)
def case(request: pytest.FixtureRequest) -> Case:
    chosen: Case = request.param
    return chosen


@pytest.fixture(scope="module")
def target(case: Case) -> Loaded:
    return load(fixtures.target_dir(case.target))


@pytest.fixture
def pair(case: Case, drafters: Drafters, folders: Folders) -> Pair:
    return drafters.pair(case.kind, fixtures.target_dir(case.target), folders[case.name])


def prompt_ids(target: Loaded, name: str, most: int = 60) -> list[int]:
    """The start of the longest prompt of a target."""
    return max((target.encode(p.text) for p in fixtures.prompts(name)), key=len)[:most]


def inputs_of(pair: Pair, prompt: Sequence[int], first: FirstRound) -> Chain | Borrowed | Block:
    """The first round's inputs as those of the module."""
    if pair.kind in ("qwen_mtp", "glm_mtp"):
        return Chain([*prompt[1:], first.first_token], first.hidden)
    if pair.kind == "assistant":
        assert first.position is not None
        assert first.num_valid is not None
        return Borrowed(
            [first.first_token], first.hidden, first.keys_values, first.position, first.num_valid
        )
    return Block(first.first_token, first.hidden, len(first.drafts))


def one_after_the_other(pair: Pair, inputs: Chain | Borrowed, depth: int) -> list[Array]:
    """Logits [V] of each draft, the module asked anew for each: its output is the next input."""
    rows: list[Array] = []
    for _ in range(depth):
        output = pair.module(inputs)
        rows.append(output.logits[-1])
        token = int(rows[-1].argmax())
        if isinstance(inputs, Borrowed):
            inputs = replace(inputs, ids=[token], hidden=output.hidden[-1:])
        else:
            hidden = np.concatenate([inputs.hidden, output.hidden[-1:]])
            inputs = replace(inputs, ids=[*inputs.ids, token], hidden=hidden)
    return rows


def test_a_folder_is_read_as_its_kind(case: Case, pair: Pair, folders: Folders) -> None:
    """`released names`: the class is the kind's, and each tensor of the folder is in it."""
    described = pair.describe()
    assert described.drafter_class == CLASSES[case.kind]
    if case.maker is None:
        assert len(described.tensors) == 27
        return
    written: Any = mx.load(str(folders[case.name] / "model.safetensors"))
    assert described.tensors == {name: value.shape for name, value in written.items()}
    config = json.loads((folders[case.name] / "config.json").read_text(encoding="utf-8"))
    counts_drafts = case.kind in ("dspark", "deepspec")
    assert described.block_size == config["block_size"] + counts_drafts


def test_text_is_that_of_the_target_alone(case: Case, target: Loaded, pair: Pair) -> None:
    """`lossless`: every prompt of the target, EOS included, by mlx-lm's plain greedy text."""
    accepted: list[int] = []
    for prompt in fixtures.prompts(case.target):
        ids = target.encode(prompt.text)
        trace = pair.trace(ids, NUM_TOKENS, DEPTH, eos_ids=target.eos_ids)
        assert trace.generated == plain(target, ids, NUM_TOKENS).generated, prompt.name
        accepted += [turn.accepted for turn in trace.rounds]
    if case.kind != "dflash":  # whose drafts are all made of masks, and never right
        assert 0 in accepted
        assert max(accepted) >= 2


def test_a_trace_is_made_of_its_rounds(case: Case, target: Loaded, pair: Pair) -> None:
    """`trace`: drafts win their logits, accepted ones are the text, and the next token is not."""
    prompt = prompt_ids(target, case.target)
    trace = pair.trace(prompt, NUM_TOKENS, DEPTH, with_logits=True)
    text = list(trace.generated)
    assert len(text) == NUM_TOKENS
    place = 0
    for turn in trace.rounds:
        assert turn.logits is not None
        assert len(turn.drafts) == min(DEPTH, NUM_TOKENS - 1 - place)
        assert turn.drafts == tuple(turn.logits.argmax(1).tolist())
        assert turn.pending == text[place]
        follows = text[place + 1 : place + 1 + len(turn.drafts)]
        matches = [draft == token for draft, token in zip(turn.drafts, follows, strict=True)]
        assert turn.accepted == ([*matches, False]).index(False)
        place += turn.accepted + 1
    assert place >= NUM_TOKENS - 1


def test_answers_are_the_same_again(case: Case, target: Loaded, pair: Pair) -> None:
    """`deterministic`: bit by bit, also with other requests in between and in another process."""
    prompt = prompt_ids(target, case.target)
    first = pair.first_round(prompt, DEPTH)
    pair.trace(prompt[:9], 12, DEPTH)
    again = pair.first_round(prompt, DEPTH)
    np.testing.assert_array_equal(first.logits, again.logits)
    inputs = inputs_of(pair, prompt, first)
    np.testing.assert_array_equal(pair.module(inputs).logits, pair.module(inputs).logits)


def test_the_loop_drafts_what_the_module_computes(case: Case, target: Loaded, pair: Pair) -> None:
    """`module`: given the first round's inputs it gives the first round's logits, row by row."""
    prompt = prompt_ids(target, case.target)
    first = pair.first_round(prompt, DEPTH)
    inputs = inputs_of(pair, prompt, first)
    if isinstance(inputs, Block):
        output = pair.module(inputs)
        assert output.drafts == first.drafts
        logits = output.logits
    else:
        logits = np.stack(one_after_the_other(pair, inputs, DEPTH))
    np.testing.assert_allclose(logits, first.logits, atol=NEAR)


class Recorded:
    """A layer that keeps what it gives."""

    def __init__(self, layer: Any) -> None:
        self._layer = layer
        self.given: Any = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._layer, name)

    def __call__(self, *args: Any, **options: Any) -> Any:
        self.given = self._layer(*args, **options)
        return self.given


def test_hidden_states_are_the_targets(case: Case, target: Loaded, pair: Pair) -> None:
    """`convention`: behind the final norm (MTP, assistant), or what layers give, from layer 0."""
    prompt = prompt_ids(target, case.target)
    loaded: Any = load(fixtures.target_dir(case.target)).model
    text = getattr(loaded, "language_model", loaded).model
    text.layers = [Recorded(layer) for layer in text.layers]
    final = np.array(text(mx.array([prompt])))[0]
    first = pair.first_round(prompt, DEPTH)
    hidden = first.hidden
    if case.kind in ("dspark", "dflash", "deepspec"):
        given = [text.layers[number].given for number in pair.describe().tap_layers]
        taps = [value[0] if isinstance(value, tuple) else value for value in given]
        expected = np.concatenate([np.array(tap)[0] for tap in taps], axis=-1)
    else:
        expected = final[-1:] if case.kind == "assistant" else final
    np.testing.assert_allclose(hidden, expected, atol=NEAR)
    if case.kind == "assistant":
        assert (first.position, first.num_valid) == (len(prompt) - 1, len(prompt))


def parts(output: ModuleOutput) -> list[Array]:
    return [a for a in (output.logits, output.hidden, output.confidence) if a is not None]


# A bias of expert scores this small flips no choice.
SILENT = {"glm_mtp": {"mlp.gate.e_score_correction_bias"}}


def test_every_tensor_is_read(
    case: Case,
    target: Loaded,
    pair: Pair,
    drafters: Drafters,
    folders: Folders,
    tmp_path: Path,
) -> None:
    """`weights`: elements scaled by what is drawn between 1/2 and 3/2 change what comes out."""
    prompt = prompt_ids(target, case.target, 40)
    inputs = inputs_of(pair, prompt, pair.first_round(prompt, DEPTH))
    before = parts(pair.module(inputs))
    source = folders[case.name]
    weights: Any = mx.load(str(source / "model.safetensors"))
    own = {n for n in weights if case.maker or n.startswith("model.layers.3.")}
    changed = tmp_path / "changed"
    shutil.copytree(source, changed)
    draw = np.random.default_rng(3)
    silent = set()
    for name in sorted(own):
        value = np.array(weights[name])
        other = (
            draw.permutation(value)
            if value.dtype.kind == "i"
            else value * draw.uniform(0.5, 1.5, value.shape).astype(np.float32)
        )
        mx.save_safetensors(str(changed / "model.safetensors"), {**weights, name: mx.array(other)})
        after = parts(drafters.pair(case.kind, pair.target, changed).module(inputs))
        if all(np.array_equal(a, b) for a, b in zip(before, after, strict=True)):
            silent.add(name.removeprefix("model.layers.3."))
    assert silent == SILENT.get(case.kind, set())


def test_a_kill_is_one_line(folders: Folders) -> None:
    """`one line`: a worker that is gone says at which request, and by which signal."""
    with Drafters(vlm_python()) as drafters:
        pair = drafters.pair("dspark", fixtures.target_dir("hybrid"), folders["dspark"])
        os.kill(drafters.process.pid, signal.SIGKILL)
        with pytest.raises(WorkerFailed, match=r"worker died at trace \(exit -9\): .*$"):
            pair.trace([5, 6, 7], 8, DEPTH)


@pytest.mark.parametrize(
    ("kind", "target", "drafter", "why"),
    [
        ("dspark", "dense", "dspark-dense", r"does not expose speculative cache rollback"),
        ("dflash", "dense", "dflash-dense", r"^dflash needs taps, mlx-vlm's llama has none$"),
        ("dflash", "qwen3", "dflash-qwen3", r"^dflash needs taps, mlx-vlm's qwen3 has none$"),
        ("dflash", "mla", "dflash-mla", r"^dflash needs taps, mlx-vlm's glm_moe_dsa has none$"),
        ("qwen_mtp", "hybrid", "dspark", r"is DSparkDraftModel, not of kind qwen_mtp$"),
        ("assistant", "hybrid", "assistant", r"^Drafter is incompatible with the target model"),
    ],
)
def test_a_pair_that_mlx_vlm_cannot_run_is_refused(
    kind: Kind,
    target: str,
    drafter: str,
    why: str,
    drafters: Drafters,
    folders: Folders,
    tmp_path: Path,
) -> None:
    """`unsupported`: before anything runs, with the reason."""
    of = fixtures.target_dir(target)
    made = drafter in {case.name for case in CASES}
    make = getattr(random_drafters, kind)
    folder = folders[drafter] if made else make(tmp_path / drafter, of, 1)
    with pytest.raises(ValueError, match=why):
        drafters.pair(kind, of, folder)


def test_a_folder_with_a_tensor_too_many_is_refused(
    drafters: Drafters, folders: Folders, tmp_path: Path
) -> None:
    """`strict`: and the tensor is named, so is a config that mlx-vlm knows nothing to do with."""
    of = fixtures.target_dir("hybrid")
    shutil.copytree(folders["dspark"], tmp_path / "more")
    weights: Any = mx.load(str(folders["dspark"] / "model.safetensors"))
    weights["lm_head.weight"] = mx.zeros((288, 64))
    mx.save_safetensors(str(tmp_path / "more" / "model.safetensors"), weights)
    with pytest.raises(ValueError, match=r"cannot load .*more: ValueError: .*: lm_head.weight"):
        drafters.pair("dspark", of, tmp_path / "more")
    (tmp_path / "more" / "config.json").write_text("{}", encoding="utf-8")
    with pytest.raises(ValueError, match=r"cannot load .*more: "):
        drafters.pair("dspark", of, tmp_path / "more")


@pytest.mark.parametrize("norm_values", [True, False])
def test_the_norm_of_values_is_an_option(
    norm_values: bool, drafters: Drafters, folders: Folders
) -> None:
    """`deviation`: mlx-vlm 0.7.10 leaves out the norm that DeepSpec puts on values."""
    folder = folders["deepspec"]
    taps = np.random.default_rng(5).standard_normal((12, 192)).astype(np.float32)
    of = fixtures.target_dir("sliding")
    pair = drafters.pair("deepspec", of, folder, norm_values=norm_values)
    loaded: Any = mx.load(str(folder / "model.safetensors"))
    weights = {name: np.array(value, np.float64) for name, value in loaded.items()}
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    slow = {
        normed: block_hidden(weights, config, 40, taps.astype(float), 4, norm_values=normed)
        for normed in (True, False)
    }
    np.testing.assert_allclose(pair.module(Block(40, taps, 4)).hidden, slow[norm_values], atol=NEAR)
    assert np.abs(slow[True] - slow[False]).max() > 0.01


def test_the_norm_of_values_is_for_one_kind(drafters: Drafters, folders: Folders) -> None:
    """`bad input`: other kinds have no such norm."""
    of = fixtures.target_dir("hybrid")
    with pytest.raises(ValueError, match=r"norm_values is for deepspec, got kind dspark"):
        drafters.pair("dspark", of, folders["dspark"], norm_values=True)


def test_a_shorter_block_is_another_block(drafters: Drafters, folders: Folders) -> None:
    """`convention`: mlx-vlm masks only what it drafts, and each position sees all of the block."""
    draw = np.random.default_rng(5)
    taps = draw.standard_normal((12, 128)).astype(np.float32)
    pair = drafters.pair("dspark", fixtures.target_dir("hybrid"), folders["dspark"])
    long, short = (pair.module(Block(40, taps, depth)).hidden for depth in (4, 2))
    assert np.abs(long[:2] - short).max() > 0.01


@pytest.mark.parametrize("name", ["dspark", "dflash", "deepspec"])
def test_a_block_is_read_by_its_heads(name: str, drafters: Drafters, folders: Folders) -> None:
    """`heads`: logits of `hidden`, plus a bias by the draft before; confidence reads both."""
    case = next(case for case in CASES if case.name == name)
    draw = np.random.default_rng(5)
    size = {"hybrid": 64, "sliding": 96}[case.target]
    taps = draw.standard_normal((12, 2 * size)).astype(np.float32)
    pair = drafters.pair(case.kind, fixtures.target_dir(case.target), folders[name])
    output = pair.module(Block(40, taps, 4))
    loaded: Any = mx.load(str(folders[name] / "model.safetensors"))
    weights = {key: np.array(value) for key, value in loaded.items()}
    target: Any = load(fixtures.target_dir(case.target)).model
    text = getattr(target, "language_model", target).model
    head = weights.get("lm_head.weight", np.array(text.embed_tokens.weight))
    base = output.hidden @ head.T
    if name == "deepspec":
        base = np.tanh(base / 30) * 30
    assert output.base_logits is not None
    np.testing.assert_allclose(output.base_logits, base, atol=NEAR)
    if name == "dflash":
        np.testing.assert_allclose(output.logits, base, atol=NEAR)
        return
    before = weights["markov_head.markov_w1.weight"][[40, *output.drafts[:-1]]]
    bias = before @ weights["markov_head.markov_w2.weight"].T
    np.testing.assert_allclose(output.logits, base + bias, atol=NEAR)
    features = np.concatenate([output.hidden, before], axis=1)
    score = features @ weights["confidence_head.proj.weight"][0]
    score += weights["confidence_head.proj.bias"]
    assert output.confidence is not None
    np.testing.assert_allclose(output.confidence, 1 / (1 + np.exp(-score)), atol=NEAR)
