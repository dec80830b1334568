"""Adapters on a target: mlx-lm's text, a base that never notices, and drafters that step aside."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm
import pytest
from mlx.nn.layers.activations import gelu
from mlx.nn.layers.linear import Linear
from mlx.utils import tree_flatten
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.tuner.utils import linear_to_lora_layers

import fixtures
from engine import (
    BadInput,
    DraftProvider,
    KVQuantization,
    Request,
    Sampling,
    Target,
    generate,
    open_live,
)
from engine.clone import detached
from engine.host import read

from .conftest import finish_of
from .families import CONFIGS, build, ids, target_on
from .puppet import Puppet, scripted
from .test_quantize import mlx_lm_tokens, quantized
from .test_replay import tree_of

BUDGET = 24
DENSE = fixtures.target_dir("dense")
PARAMETERS = {"rank": 4, "dropout": 0.4, "scale": 2.0}
Tensors = dict[str, mx.array]


def write_adapter(
    folder: Path,
    model: Any,
    *,
    seed: int = 0,
    kind: str = "lora",
    parameters: Mapping[str, Any] = PARAMETERS,
) -> Path:
    """An adapter of random weights, as mlx-lm's trainer saves one. `model` is used up."""
    layers = len(model.layers)
    model.freeze()
    if kind == "full":
        for layer in model.layers:
            layer.unfreeze()
    else:
        linear_to_lora_layers(model, layers, dict(parameters), use_dora=kind == "dora")
    named: Any = tree_flatten(model.trainable_parameters())
    keys = mx.random.split(mx.random.key(seed), len(named))
    tensors: Tensors = {}
    for (name, weight), key in zip(named, keys, strict=True):
        noise = mx.random.normal(weight.shape, key=key)
        tensors[name] = 0.2 * noise if "lora_" in name else weight * (1 + 0.4 * noise)
    config = {"fine_tune_type": kind, "num_layers": layers, "lora_parameters": dict(parameters)}
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps(config))
    mx.save_safetensors(str(folder / "adapters.safetensors"), tensors)
    return folder


def fresh(fixture: Path = DENSE) -> Any:
    return mlx_lm.load(str(fixture))[0]


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Adapters of the dense fixture: one of each kind, and a second LoRA."""
    root = tmp_path_factory.mktemp("adapters")
    made = {kind: write_adapter(root / kind, fresh(), kind=kind) for kind in KINDS}
    return {**made, "other": write_adapter(root / "other", fresh(), seed=1)}


KINDS = ("lora", "dora", "full")


def logits_of(model: Any, prompt: Sequence[int]) -> list[mx.array]:
    """Of a whole prompt, and of one token after it."""
    caches = make_prompt_cache(model)
    return [model(mx.array([tokens]), cache=caches) for tokens in (list(prompt), [prompt[0]])]


def same(ours: Sequence[mx.array], theirs: Sequence[mx.array]) -> bool:
    return all(bool(mx.array_equal(a, b)) for a, b in zip(ours, theirs, strict=True))


def require_mlx_lms_text(target: Target, folder: Path, prompt: Sequence[int]) -> None:
    """Bitwise: logits, ids and log-probabilities under the adapter; and that it is at work."""
    adapted = target.adapted(folder)
    model: Any = mlx_lm.load(str(target.path), adapter_path=str(folder))[0]
    assert same(logits_of(adapted.model, prompt), logits_of(model, prompt))
    tokens: list[int] = []
    logprobs: list[float] = []
    for token, scores in generate_step(mx.array(list(prompt)), model, max_tokens=BUDGET):
        if token in target.eos_ids:
            break
        tokens.append(int(token))
        logprobs.append(read(scores[token]))
    finish = finish_of(adapted, prompt, max_tokens=BUDGET)
    assert (list(finish.tokens), list(finish.logprobs)) == (tokens, logprobs)
    assert finish.tokens != finish_of(target, prompt, max_tokens=BUDGET).tokens


@pytest.mark.parametrize("kind", KINDS)
def test_text_under_an_adapter_is_mlx_lms(
    target: Target, adapters: dict[str, Path], prompt: tuple[int, ...], kind: str
) -> None:
    """`lossless`."""
    require_mlx_lms_text(target, adapters[kind], prompt)


def test_text_under_an_adapter_of_a_hybrid_model_is_mlx_lms(tmp_path: Path) -> None:
    """`lossless`: and its recurrent layers are replayed under the adapter."""
    path = fixtures.target_dir("hybrid")
    target = Target.load(path)
    folder = write_adapter(tmp_path / "a", fresh(path))
    prompt = target.encode("Name: Anna. Say it again: ")
    require_mlx_lms_text(target, folder, prompt)
    adapted = target.adapted(folder)
    plain = finish_of(adapted, prompt, max_tokens=BUDGET)
    puppet = Puppet(scripted(plain.tokens, [[True, True, False]]), supports_target_adapters=True)
    drafted = finish_of(adapted, prompt, puppet, max_tokens=BUDGET)
    assert drafted.tokens == plain.tokens
    assert drafted.statistics.accepted > 0 < drafted.statistics.rejected


@pytest.mark.parametrize("family", CONFIGS)
def test_a_clone_is_the_same_model_made_of_other_modules(family: str) -> None:
    """Every module, list and dict is the clone's own; every array is shared."""
    model = build(family)
    before = tree_of(model)
    clone: Any = detached(model)
    assert same(logits_of(clone, ids(9)), logits_of(model, ids(9)))
    ours, theirs = [{id(module) for module in each.modules()} for each in (clone, model)]
    assert len(ours) == len(theirs)
    assert not ours & theirs
    arrays = [[id(a) for _, a in flat(each)] for each in (clone, model)]
    assert arrays[0] == arrays[1]
    assert tree_of(model) == before


def test_changing_a_clone_changes_nothing_of_the_model() -> None:
    """Its mode, what is frozen in it, its modules, and lists and dicts without modules."""
    model: Any = detached(build("llama"))
    model.sizes, model.names = [1, [2]], {"a": 1}
    before, frozen = tree_of(model), [set(module._no_grad) for module in model.modules()]
    clone: Any = detached(model)
    clone.train()
    clone.freeze()
    clone.sizes[1].append(3)
    clone.names["b"] = 2
    clone.layers[0].mlp = clone.layers.pop()
    assert tree_of(model) == before
    assert [module._no_grad for module in model.modules()] == frozen
    assert (model.sizes, model.names) == ([1, [2]], {"a": 1})


def flat(model: Any) -> list[tuple[str, mx.array]]:
    named: Any = tree_flatten(model.parameters())
    return list(named)


def test_nobody_notices_an_adapter(adapters: dict[str, Path], prompt: tuple[int, ...]) -> None:
    """Neither the base nor another adapter, whichever is mounted, used or thrown away first."""
    target = Target.load(DENSE)
    target.model.train()  # so that leaving this mode would show
    before, base = tree_of(target.model), logits_of(target.model, prompt)
    alone = [logits_of(Target.load(DENSE).adapted(adapters[n]).model, prompt) for n in NAMES]
    beside = {name: target.adapted(adapters[name]) for name in NAMES}
    for _ in range(2):
        for name, expected in zip(NAMES, alone, strict=True):
            assert same(logits_of(beside[name].model, prompt), expected)
            assert same(logits_of(target.model, prompt), base)
    del beside["full"]
    assert tree_of(target.model) == before
    text = [
        int(t) for t, _ in generate_step(mx.array(list(prompt)), target.model, max_tokens=BUDGET)
    ]
    expected_text = generate_step(mx.array(list(prompt)), fresh(), max_tokens=BUDGET)
    assert text == [int(t) for t, _ in expected_text]


NAMES = ("lora", "full", "other", "dora")


def test_streams_under_two_adapters_and_none_interleave(
    target: Target, adapters: dict[str, Path], prompt: tuple[int, ...]
) -> None:
    targets = [target, target.adapted(adapters["lora"]), target.adapted(adapters["other"])]
    alone = [finish_of(each, prompt, max_tokens=BUDGET).tokens for each in targets]
    assert len(set(alone)) == 3
    streams = [generate(each, Request(prompt, BUDGET)) for each in targets]
    together: list[tuple[int, ...]] = [() for _ in streams]
    for _ in range(BUDGET + 1):
        for number, stream in enumerate(streams):
            event = next(stream, None)
            together[number] = getattr(event, "tokens", together[number])
    assert together == alone


def test_mounting_draws_no_random_numbers(target: Target, adapters: dict[str, Path]) -> None:
    """A caller's own draws from MLX's global key stay what they would have been."""
    draws = []
    for mounting in (False, True):
        mx.random.seed(5)
        if mounting:
            target.adapted(adapters["dora"])
        draws.append(mx.random.uniform(shape=(4,)).tolist())
    assert draws[0] == draws[1]


@pytest.mark.parametrize(
    "sampling", [Sampling(), Sampling(0.8, seed=3), Sampling(0.8, seed=3, rng="sequential")]
)
def test_only_a_drafter_that_supports_adapters_drafts_under_one(
    target: Target,
    adapters: dict[str, Path],
    ngram: DraftProvider,
    two_model: DraftProvider,
    prompt: tuple[int, ...],
    sampling: Sampling,
) -> None:
    """`lossless`, `lossless-sampled`: where it drafts not, the stream is plain decoding's."""
    adapted = target.adapted(adapters["lora"])
    plain = finish_of(adapted, prompt, max_tokens=48, sampling=sampling)
    looked_up = finish_of(adapted, prompt, ngram, max_tokens=48, sampling=sampling)
    stepped_aside = finish_of(adapted, prompt, two_model, max_tokens=48, sampling=sampling)
    assert looked_up.statistics.drafted > 0
    # A sequential stream depends on how many tokens each round draws.
    assert looked_up.tokens == plain.tokens or sampling.rng == "sequential"
    assert stepped_aside == plain
    assert finish_of(target, prompt, two_model, sampling=sampling).statistics.drafted > 0


@pytest.mark.parametrize("supports", [False, True])
def test_a_drafter_that_steps_aside_is_not_opened(
    target: Target, adapters: dict[str, Path], prompt: tuple[int, ...], supports: bool
) -> None:
    puppet = Puppet(lambda *_: [], supports_target_adapters=supports)
    live = open_live(adapted := target.adapted(adapters["lora"]))
    *_, _ = generate(adapted, Request(prompt, 4), puppet, live=live)
    assert len(puppet.opened) == supports
    assert (live.draft is not None) is supports


def test_state_of_one_adapter_is_refused_under_another(
    target: Target, adapters: dict[str, Path], prompt: tuple[int, ...]
) -> None:
    """`identity`: a state is its target's; the base's is none of an adapter's either."""
    targets = [target, target.adapted(adapters["lora"]), target.adapted(adapters["other"])]
    for owner in targets:
        live = open_live(owner)
        for other in targets:
            if other is not owner:
                with pytest.raises(BadInput, match="opened for another target"):
                    generate(other, Request(prompt, 1), live=live)
        assert not live.in_use


def test_identity_is_the_content_of_base_and_adapter(
    target: Target, adapters: dict[str, Path], tmp_path: Path
) -> None:
    """`identity`: a renamed folder is the same adapter, one changed weight or option another."""
    base = target.identity
    mounted = target.adapted(adapters["lora"])
    assert (target.adapter, target.identity) == (None, base)
    assert mounted.adapter is not None
    assert (mounted.adapter.base, mounted.adapter.folder) == (target, adapters["lora"])
    renamed = copied(adapters["lora"], tmp_path / "renamed")
    (renamed / "0000100_adapters.safetensors").write_bytes(b"a checkpoint of the training")
    assert target.adapted(renamed).identity == mounted.identity

    def nudged(tensors: Tensors) -> Tensors:
        name = min(tensors)
        tensors[name] = tensors[name].at[0, 0].add(1e-3)
        return tensors

    changed = [
        copied(adapters["lora"], tmp_path / "weight", tensors=nudged),
        copied(adapters["lora"], tmp_path / "scale", lora_parameters={**PARAMETERS, "scale": 2.5}),
    ]
    others = [target.adapted(folder).identity for folder in (*changed, adapters["other"])]
    assert len({base, mounted.identity, *others}) == 5
    elsewhere = Target(target.model, target.tokenizer, {"vocab_size": 1}, tmp_path)
    (tmp_path / "config.json").write_text("{}")
    assert elsewhere.adapted(adapters["lora"]).identity != mounted.identity


def test_an_adapter_stays_what_it_was_when_it_was_mounted(
    target: Target, adapters: dict[str, Path], prompt: tuple[int, ...], tmp_path: Path
) -> None:
    """Nothing is read later: its files may be overwritten or gone."""
    folder = copied(adapters["lora"], tmp_path / "a")
    kept, gone = target.adapted(folder), target.adapted(folder)
    (folder / "adapters.safetensors").write_bytes(b"overwritten")
    (folder / "adapter_config.json").unlink()
    expected = target.adapted(adapters["lora"])
    assert kept.identity == gone.identity == expected.identity
    assert same(logits_of(kept.model, prompt), logits_of(expected.model, prompt))


def test_arrays_that_no_forward_uses_are_read_when_mounted(target: Target, tmp_path: Path) -> None:
    """As those of a part for images would be."""
    given, model = fresh(), fresh()
    for each in (given, model):
        each.layers[0].unused = Linear(2, 2)
    folder = write_adapter(tmp_path / "a", given, kind="full")
    adapted = target_on(model, target).adapted(folder)
    name = "model.layers.0.unused.weight"
    expected = read(dict(flat(target_on(model, target).adapted(folder).model))[name])
    (folder / "adapters.safetensors").write_bytes(b"overwritten")
    assert read(dict(flat(adapted.model))[name]) == expected


def test_keys_and_values_stay_quantized_under_an_adapter(
    target: Target, adapters: dict[str, Path], prompt: tuple[int, ...]
) -> None:
    """`lossless`: and the text is mlx-lm's."""
    how = KVQuantization(2, 32, 0)
    adapted = quantized(target, how).adapted(adapters["lora"])
    tokens = finish_of(adapted, prompt, max_tokens=BUDGET).tokens
    assert list(tokens) == mlx_lm_tokens(adapted, list(prompt), 2048, how)
    unquantized = target.adapted(adapters["lora"])
    assert tokens != finish_of(unquantized, prompt, max_tokens=BUDGET).tokens


def copied(
    folder: Path, to: Path, tensors: Callable[[Tensors], Tensors] | None = None, **config: Any
) -> Path:
    """A copy of an adapter with other tensors or other fields in its config."""
    to.mkdir()
    was = json.loads((folder / "adapter_config.json").read_text())
    was = {key: value for key, value in {**was, **config}.items() if value is not ...}
    (to / "adapter_config.json").write_text(json.dumps(was))
    shutil.copy(folder / "adapters.safetensors", to)
    if tensors is not None:
        given: Any = mx.load(str(to / "adapters.safetensors"))
        mx.save_safetensors(str(to / "adapters.safetensors"), tensors(given))
    return to


def renamed(tensors: Tensors) -> Tensors:
    """As another model's: MLX itself would load such a file and use none of it."""
    return {f"language_model.{name}": tensor for name, tensor in tensors.items()}


def without(part: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {name: t for name, t in tensors.items() if part not in name}


def odd(tensors: Tensors) -> Tensors:
    return {**tensors, "model.norm.weight": mx.ones((3,))}


@pytest.mark.parametrize(
    ("tensors", "config", "message"),
    [
        (
            renamed,
            {},
            r"language_model\.\S+: not an adapter parameter in the model, and \d+ tensors more",
        ),
        (odd, {}, r"model\.norm\.weight: not an adapter parameter in the model"),
        (without("q_proj.lora_a"), {}, r"lacks 4 of the \d+ tensors .*q_proj\.lora_a among them"),
        (without("lora_b"), {}, r"lacks \d+ of the \d+ tensors"),
        (without(""), {}, "holds no tensors; at least 1 is needed"),
        (without(""), {"fine_tune_type": "full"}, "holds no tensors"),
        (None, {"fine_tune_type": "full"}, r"lora_\w: not an adapter parameter"),
        (None, {"fine_tune_type": "dora"}, r"lacks \d+ of the \d+ tensors .*\.m among them"),
        (None, {"num_layers": 1}, "not an adapter parameter in the model"),
        (None, {"num_layers": ...}, "AttributeError: .*num_layers"),
        (None, {"lora_parameters": ...}, "AttributeError: .*lora_parameters"),
        (
            None,
            {"lora_parameters": {**PARAMETERS, "rank": 5}},
            r"adapter shape .*, and \d+ tensors more",
        ),
        (None, {"lora_parameters": {**PARAMETERS, "rank": -1}}, "cannot mount adapter"),
        (None, {"lora_parameters": {**PARAMETERS, "keys": ["nope"]}}, "not an adapter parameter"),
        (None, {"lora_parameters": {"rank": 4, "dropout": 0.0}}, "missing required key 'scale'"),
        (None, {"lora_parameters": {**PARAMETERS, "dropout": 1.5}}, "dropout|probability"),
        (None, {"lora_parameters": {**PARAMETERS, "scale": "2"}}, "finite number, got '2'"),
        (
            None,
            {"lora_parameters": {**PARAMETERS, "scale": float("nan")}},
            "finite number, got nan",
        ),
        (None, {"lora_parameters": 4}, "cannot mount adapter"),
        (None, {"lora_parameters": {**PARAMETERS, "scale": 10**400}}, "cannot mount adapter"),
    ],
)
def test_an_adapter_that_does_not_fit_is_refused_in_one_line(
    target: Target,
    adapters: dict[str, Path],
    tmp_path: Path,
    tensors: Callable[[Tensors], Tensors] | None,
    config: dict[str, Any],
    message: str,
) -> None:
    """And the base is what it was."""
    folder = copied(adapters["lora"], tmp_path / "a", tensors, **config)
    before = tree_of(target.model)
    with pytest.raises(BadInput, match=message) as refused:
        target.adapted(folder)
    assert "\n" not in str(refused.value)
    assert len(str(refused.value)) < 400
    assert str(folder) in str(refused.value)
    assert tree_of(target.model) == before


def test_a_folder_that_holds_no_adapter_is_refused_in_one_line(
    target: Target, adapters: dict[str, Path], tmp_path: Path
) -> None:
    whole = adapters["lora"]
    config = (whole / "adapter_config.json").read_bytes()
    weights = (whole / "adapters.safetensors").read_bytes()
    cases: list[tuple[dict[str, bytes] | None, str]] = [
        (None, "does not exist"),
        ({}, "has no adapter_config.json"),
        ({"adapter_config.json": config}, "has no adapters.safetensors"),
        ({"adapters.safetensors": weights}, "has no adapter_config.json"),
        ({"adapter_config.json": b"{", "adapters.safetensors": weights}, "is not readable JSON"),
        ({"adapter_config.json": b"\xff", "adapters.safetensors": weights}, "not readable JSON"),
        ({"adapter_config.json": b"[]", "adapters.safetensors": weights}, "object, got list"),
        ({"adapter_config.json": config, "adapters.safetensors": b""}, "cannot mount adapter"),
        ({"adapter_config.json": config, "adapters.safetensors": weights[:99]}, "cannot mount"),
        ({"adapter_config.json": config, "adapters.safetensors": weights[:-9]}, "cannot mount"),
    ]
    for number, (files, message) in enumerate(cases):
        folder = tmp_path / str(number)
        if files is not None:
            folder.mkdir()
            for name, content in files.items():
                (folder / name).write_bytes(content)
        with pytest.raises(BadInput, match=message) as refused:
            target.adapted(folder)
        assert "\n" not in str(refused.value)
    with pytest.raises(BadInput, match="is not a folder"):
        target.adapted(whole / "adapter_config.json")
    with pytest.raises(BadInput, match="does not exist"):
        target.adapted("x" * 5000)


def test_a_second_adapter_on_top_is_refused(target: Target, adapters: dict[str, Path]) -> None:
    mounted = target.adapted(adapters["lora"])
    with pytest.raises(BadInput, match=r"lora is mounted already; mount .*other on its base"):
        mounted.adapted(adapters["other"])


def test_a_model_that_keeps_a_bound_function_is_refused(target: Target, tmp_path: Path) -> None:
    """A clone would call the base's modules through it, and the adapter would not be in use."""
    folder = write_adapter(tmp_path / "a", detached(build("llama")))
    model: Any = detached(build("llama"))
    layer = model.layers[0].mlp
    layer.step = None
    target_on(model, target).adapted(folder)
    for step in (layer.__call__, mx.compile(layer.__call__)):
        layer.step = step
        with pytest.raises(BadInput, match=r"MLP keeps a function bound to a module \(step\)"):
            target_on(model, target).adapted(folder)
    layer.step = gelu  # bound to nothing
    target_on(model, target).adapted(folder)
