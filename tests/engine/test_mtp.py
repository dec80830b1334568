"""Next-token heads, Qwen's folder and GLM's layer: what they remember, propose and refuse."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

import fixtures
from engine import (
    BadInput,
    Engine,
    KVQuantization,
    LawError,
    Limits,
    Request,
    Sampling,
    Target,
    generate,
    open_drafter,
)
from engine.drafters.glm_mtp import WHOLE_TEXT, has_glm_mtp, open_glm_mtp
from engine.drafters.mtp_provider import MtpProvider
from engine.drafters.mtp_rows import MtpRows
from engine.drafters.qwen_mtp import open_qwen_mtp
from engine.drafters.registry import default_drafter
from engine.host import read
from engine.ports import NORM
from engine.sampling import Greedy, RowSampling, log_softmax, make_row_sampler
from engine.state.checkpoint import Attachment, Checkpoint
from fixtures import native, random_drafters
from fixtures.model import load

from .conftest import finish_of, last
from .mtp_model import Slow, same_numbers
from .pools import pool, target_of
from .puppet import NOBODY
from .test_adapters import fresh, write_adapter

GREEDY = RowSampling([Greedy()])
PAIRS = (("hybrid", "mtp"), ("mla", "mtp"))
HEAD = fixtures.drafter_dir("hybrid-mtp")
PROMPTS = fixtures.prompts("hybrid")


@cache
def provider_of(name: str) -> MtpProvider:
    if name == "qwen":
        return open_qwen_mtp(HEAD, target_of("hybrid"))
    if name == "glm":
        return open_glm_mtp(target_of("mla"))
    return open_glm_mtp(target_of("mla"), WHOLE_TEXT)


class Machine(RuleBasedStateMachine):
    """`companion`, `membership`, `capture`: rows in company against lists of rows."""

    name = "qwen"

    def __init__(self) -> None:
        super().__init__()
        self.provider = provider_of(self.name)
        self.draw = np.random.default_rng(0)
        self.rows: MtpRows = self.provider.open(GREEDY)
        self.model: list[Slow] = [Slow(self.provider.mtp)]

    def hidden(self, width: int) -> mx.array:
        """Hidden states [B, width, H] that no target ever had."""
        size = self.provider._cold.shape[-1]
        shape = (len(self.model), width, size)
        return mx.array(self.draw.standard_normal(shape).astype(np.float32))

    @initialize(width=st.integers(1, 5))
    def begin(self, width: int) -> None:
        self.prefill(width)

    @rule()
    @precondition(lambda self: len(self.model) < 4)
    def join_cold(self) -> None:
        self.rows = self.rows.joined(self.provider.open(GREEDY))
        self.model.append(Slow(self.provider.mtp))

    @rule(width=st.integers(1, 5))
    def prefill(self, width: int) -> None:
        ids = self.draw.integers(5, 200, (len(self.model), width))
        hidden = self.hidden(width)
        self.rows.prefill(mx.array(ids, dtype=mx.uint32), (hidden,))
        for r, slow in enumerate(self.model):
            slow.prefill(ids[r].tolist(), hidden[r])

    @rule(depth=st.integers(0, 4), data=st.data())
    @precondition(lambda self: all(slow.processed for slow in self.model))
    def round(self, depth: int, data: st.DataObject) -> None:
        pending = [data.draw(st.integers(5, 200)) for _ in self.model]
        draft = self.rows.draft(pending, depth, [0] * len(pending), NOBODY)
        expected = [s.draft(p, depth) for s, p in zip(self.model, pending, strict=True)]
        assert read(draft.tokens) == expected
        assert draft.lengths == (depth,) * len(pending)
        kept = [data.draw(st.integers(0, depth)) for _ in self.model]
        hidden = self.hidden(depth + 1)
        self.rows.commit(kept, (hidden,))
        for r, slow in enumerate(self.model):
            slow.commit(kept[r], hidden[r])

    @rule(data=st.data())
    def reorder(self, data: st.DataObject) -> None:
        rows = st.integers(0, len(self.model) - 1)
        keep = data.draw(st.lists(rows, min_size=1, unique=True))
        self.rows = self.rows.selected(keep)
        self.model = [self.model[r] for r in keep]

    @rule(data=st.data())
    @precondition(lambda self: len(self.model) < 4)
    def capture_and_rejoin(self, data: st.DataObject) -> None:
        row = data.draw(st.integers(0, len(self.model) - 1))
        self.rows = self.rows.joined(self.provider.open(GREEDY, self.rows.capture(row)))
        old = self.model[row]
        self.model.append(Slow(self.provider.mtp, list(old.rows), old.hidden, old.processed))

    @invariant()
    def rows_agree(self) -> None:
        assert self.rows.row_count == len(self.model)
        for r, slow in enumerate(self.model):
            stored = self.rows.capture(r)
            metadata = stored.attachment.metadata
            assert stored.processed_tokens == metadata["processed_tokens"] == slow.processed
            assert metadata["draft_offset"] == len(slow.rows)
            if slow.processed:
                assert same_numbers(stored.attachment.tensors, slow.tensors())


@pytest.mark.parametrize("name", ["qwen", "glm", "glm-whole-text"])
def test_rows_are_lists_of_tokens_and_hidden_states(name: str) -> None:
    run_state_machine_as_test(
        type("Machine", (Machine,), {"name": name}),
        settings=settings(max_examples=40, stateful_step_count=15),
    )


def test_glms_layer_is_the_one_that_was_trained() -> None:
    """The numbers of the fixtures' own reading of it, which knows no cache."""
    target = target_of("mla")
    folder = fixtures.target_dir("mla")
    model: Any = load(folder)
    layer = native.read(folder, model)
    ids = mx.array([target.encode("Name: Anna. Say it again: Anna. Name: Bo")])
    hidden, embeddings = model.model(ids[:, :-1]), model.model.embed_tokens(ids[:, 1:])
    width = hidden.shape[1]
    expected = layer(layer.mix(embeddings, hidden), mx.tril(mx.ones((width, width), mx.bool_)))
    head = provider_of("glm").mtp.head
    caches = head.make_cache()
    mixed = head.mix(target.ports.embed(ids[:, 1:]), hidden)
    got = mx.concatenate([head(mixed[:, :20], caches), head(mixed[:, 20:], caches)], axis=1)
    assert mx.allclose(got, expected, atol=1e-5)
    taps = target.new_rows((NORM,))
    taps.forward(ids[:, :-1])
    assert mx.array_equal(taps.tapped[0], hidden)


@pytest.mark.parametrize(("family", "kind"), PAIRS)
def test_text_is_that_of_plain_decoding(family: str, kind: str) -> None:
    """`lossless`, `lossless-sampled`: alone and in groups of 2, 4 and 8; all ways to sample."""
    own = pool(family, kind)
    assert own.drafter is not None
    plain = [last(list(generate(own.target, request))) for request in own.requests]
    assert [one.tokens for one in own.alone] == [one.tokens for one in plain]
    for rows in (2, 4, 8):
        engine = Engine(own.target, [own.drafter], limits=Limits(rows=rows))
        streams = [engine.submit(request) for request in own.requests]
        while engine.turn():
            pass
        for stream, expected in zip(streams, plain, strict=True):
            got = stream.result()
            assert (got.text, got.reason) == (expected.text, expected.reason)


@pytest.mark.parametrize(("family", "kind"), PAIRS)
def test_drafts_are_accepted_sometimes_partly_and_sometimes_not(family: str, kind: str) -> None:
    """30 to 90 % on the target's prompts; the statistics say at which position."""
    own = pool(family, kind)
    assert own.drafter is not None
    depth = own.drafter.default_depth
    accepted = drafted = 0
    seen: set[int] = set()
    for prompt in fixtures.prompts(family):
        finish = finish_of(own.target, own.target.encode(prompt.text), own.drafter, max_tokens=40)
        seen |= {one.accepted for one in finish.rounds if len(one.draft) == depth}
        accepted += finish.statistics.accepted
        drafted += finish.statistics.drafted
    assert seen == set(range(depth + 1))
    assert 0.3 <= accepted / drafted <= 0.9


@pytest.mark.parametrize("name", ["qwen", "glm"])
@pytest.mark.parametrize("depth", [0, 1, 5])
def test_any_depth_gives_the_same_text(name: str, depth: int) -> None:
    """`lossless` at depth 0, where the head is told of every token all the same."""
    family = {"qwen": "hybrid", "glm": "mla"}[name]
    target = target_of(family)
    prompt = target.encode(fixtures.prompts(family)[0].text)
    drafted = finish_of(target, prompt, provider_of(name), depth=depth)
    assert drafted.tokens == finish_of(target, prompt).tokens
    assert (drafted.statistics.drafted > 0) is (depth > 0)


@pytest.mark.parametrize("name", ["qwen", "glm"])
def test_sampled_drafts_have_the_noise_of_their_own_steps(name: str) -> None:
    """The target draws with the same: a draft of its very distribution is always accepted."""
    provider = provider_of(name)
    sampling = RowSampling([make_row_sampler(Sampling(temperature=1.5, seed=7), ())])
    rows, slow = provider.open(sampling), Slow(provider.mtp)
    hidden = mx.random.normal((1, 1, provider._cold.shape[-1]), key=mx.random.key(1))
    rows.prefill(mx.array([[5]], dtype=mx.uint32), (hidden,))
    slow.prefill([5], hidden[0])
    fed, drafts = [(9, hidden[0, 0])], []
    for step in (11, 12, 13):
        out = slow.forward(fed)[0][-1]
        logprobs = log_softmax(provider.mtp.ports.logits(out[None, None]))
        drafts.append(int(sampling.sample(logprobs, [step])))
        fed.append((drafts[-1], out))
    assert read(rows.draft([9], 3, [11], NOBODY).tokens) == [drafts]


@pytest.mark.parametrize("name", ["qwen", "glm"])
def test_foreign_checkpoints_are_refused(name: str) -> None:
    """`identity-drafter`: schema, artifact, length, policy; nothing is published."""
    provider = provider_of(name)
    rows = provider.open(GREEDY)
    size = provider._cold.shape[-1]
    rows.prefill(mx.array([[5, 6, 7]], dtype=mx.uint32), (mx.ones((1, 3, size)),))
    rows.draft([8], 2, [0], NOBODY)
    rows.commit([1], (mx.ones((1, 3, size)),))
    good = rows.capture(0)
    made = 4 if name == "qwen" else 2
    assert good.attachment.metadata["draft_offset"] == made
    hidden = good.attachment.tensors[-1]
    for checkpoint, message in (
        (changed(good, schema=f"{provider.mtp.namespace}0"), "checkpoint schema is"),
        (Checkpoint(6, good.attachment), "stands at 6 tokens, its attachment at 5"),
        (changed(good, draft_offset=7), "draft_offset is 7 after 5 tokens, expected"),
        (changed(good, draft_offset=True), "draft_offset is True after 5 tokens, expected"),
        (changed(good, draft_offset=made - 1), "expected 4|stands at 2 tokens, expected 1"),
        (changed(good, tensors=()), "hidden state is"),
        (changed(good, tensors=(hidden[..., 1:],)), r"hidden state is \(1, 1, "),
        (changed(good, tensors=(hidden.astype(mx.int32),)), "x mlx.core.int32, expected"),
        (changed(good, tensors=(hidden,)), "arrays, too few"),
        (changed(good, tensors=(hidden, *good.attachment.tensors)), "does not hold|too many"),
        (changed(good, layers="ring:1"), "ring cache|holds 1 caches"),
    ):
        with pytest.raises(BadInput, match=message):
            provider.open(GREEDY, checkpoint)


def changed(
    good: Checkpoint,
    *,
    schema: str | None = None,
    tensors: Sequence[mx.array] | None = None,
    **metadata: str | int | bool,
) -> Checkpoint:
    attachment = good.attachment
    return Checkpoint(
        good.processed_tokens,
        Attachment(
            attachment.schema if schema is None else schema,
            {**attachment.metadata, **metadata},
            attachment.tensors if tensors is None else tuple(tensors),
        ),
    )


def test_a_checkpoint_without_rows_holds_the_hidden_state_alone() -> None:
    """Of a text of one token; and GLM's of any prompt."""
    for name, prompt in (("qwen", [[5]]), ("glm", [[5, 6, 7]])):
        provider = provider_of(name)
        rows = provider.open(GREEDY)
        hidden = mx.ones((1, len(prompt[0]), provider._cold.shape[-1]))
        rows.prefill(mx.array(prompt, dtype=mx.uint32), (hidden,))
        stored = rows.capture(0)
        assert len(stored.attachment.tensors) == 1
        again = provider.open(GREEDY, stored)
        ours, theirs = (one.draft([9], 3, [0], NOBODY).tokens for one in (rows, again))
        assert mx.array_equal(ours, theirs)
        more = changed(stored, tensors=(hidden, *stored.attachment.tensors))
        with pytest.raises(BadInput, match="holds 1 arrays of 0 rows"):
            provider.open(GREEDY, more)


def test_conventions_do_not_share_checkpoints() -> None:
    ours, theirs = provider_of("glm"), provider_of("glm-whole-text")
    assert ours.mtp.namespace != theirs.mtp.namespace
    assert target_of("mla").identity in ours.mtp.namespace


@pytest.mark.parametrize("name", ["qwen", "glm"])
def test_calls_out_of_order_are_broken_laws(name: str) -> None:
    rows = provider_of(name).open(GREEDY)
    with pytest.raises(LawError, match="draft before the prompt"):
        rows.draft([5], 1, [0], NOBODY)
    with pytest.raises(LawError, match="commit without draft"):
        rows.commit([0], ())


def head_with(folder: Path, **changes: object) -> Path:
    """A copy of the head with another config, the changed fields of `text_config` for that one."""
    shutil.copytree(HEAD, folder)
    config = json.loads((HEAD / "config.json").read_text())
    changes["text_config"] = config["text_config"] | changes.get("text_config", {})
    (folder / "config.json").write_text(json.dumps(config | changes))
    return folder


def with_tensors(folder: Path, tensors: dict[str, mx.array], **changes: object) -> Path:
    head_with(folder, **changes)
    mx.save_safetensors(str(folder / "model.safetensors"), tensors)
    return folder


def tensors_of_head() -> dict[str, mx.array]:
    loaded: Any = mx.load(str(HEAD / "model.safetensors"))
    return dict(loaded)


def first_logits(provider: MtpProvider) -> mx.array:
    """Logits of one row made of ones."""
    mixed = provider.mtp.head.mix(provider.mtp.ports.embed(mx.array([[40]])), mx.ones((1, 1, 64)))
    return provider.mtp.ports.logits(provider.mtp.head(mixed, provider.mtp.head.make_cache()))


def test_original_names_hold_norms_less_one(tmp_path: Path) -> None:
    """With the prefix `mtp.` the folder is the same head."""
    original = {
        f"mtp.{name}": array - 1.0 if "norm" in name else array
        for name, array in tensors_of_head().items()
    }
    provider = open_qwen_mtp(with_tensors(tmp_path / "head", original), target_of("hybrid"))
    assert mx.allclose(first_logits(provider), first_logits(provider_of("qwen")), atol=1e-5)


def test_quantized_weights_are_read_as_such(tmp_path: Path) -> None:
    """8 bits are near the dense head, not equal to it, and smaller; the text is the same."""
    tensors: dict[str, mx.array] = {}
    for name, array in tensors_of_head().items():
        tensors[name] = array
        if array.ndim == 2:
            stem = name.removesuffix(".weight")
            tensors[name], tensors[f"{stem}.scales"], tensors[f"{stem}.biases"] = mx.quantize(
                array, 32, 8
            )
    folder = with_tensors(tmp_path / "q", tensors, quantization={"group_size": 32, "bits": 8})
    target, dense = target_of("hybrid"), provider_of("qwen")
    provider = open_qwen_mtp(folder, target)
    difference = float(mx.max(mx.abs(first_logits(provider) - first_logits(dense))))
    assert 0.0 < difference < 0.5
    assert provider.weights_bytes < dense.weights_bytes
    assert provider.mtp.namespace != dense.mtp.namespace
    prompt = target.encode("Name: Anna. Say it again: ")
    assert finish_of(target, prompt, provider).tokens == finish_of(target, prompt).tokens


def test_the_hidden_state_is_the_one_that_the_config_names(tmp_path: Path) -> None:
    """Before the final norm, or behind it; and a random head as mlx-vlm's folders are."""
    target = target_of("hybrid")
    assert provider_of("qwen").taps == ("layers.3",)
    behind = open_qwen_mtp(head_with(tmp_path / "h", target_hidden="behind-norm"), target)
    random = random_drafters.qwen_mtp(tmp_path / "r", fixtures.target_dir("hybrid"), 1)
    assert behind.taps == (NORM,)
    prompt = target.encode("Name: Anna. Say it again: ")
    for provider in (behind, open_qwen_mtp(random, target)):
        drafted = finish_of(target, prompt, provider)
        assert drafted.tokens == finish_of(target, prompt).tokens
        assert drafted.statistics.drafted > 0


def test_rows_over_quantized_keys_stay_alone() -> None:
    """`solitude`: they draft each to its own depth before they are converted; text as plain."""
    how = KVQuantization(8, 32, 40)
    target = Target.load(fixtures.target_dir("hybrid"), quantization=how)
    provider = open_qwen_mtp(HEAD, target)
    assert len(provider.cannot_share) == 1
    assert provider_of("qwen").cannot_share == ()
    prompts = [target.encode(prompt.text)[: 30 + 4 * i] for i, prompt in enumerate(PROMPTS[:3])]
    alone = [finish_of(target, prompt, provider) for prompt in prompts]
    assert [a.tokens for a in alone] == [finish_of(target, p).tokens for p in prompts]
    engine = Engine(target, [provider])
    streams = [engine.submit(Request(tuple(prompt), 24)) for prompt in prompts]
    while engine.turn():
        pass
    assert [stream.result().rounds for stream in streams] == [a.rounds for a in alone]


def copy_of(name: str, folder: Path, **tensors: mx.array | None) -> Target:
    """A target's folder with other tensors, None for one left out."""
    source = fixtures.target_dir(name)
    shutil.copytree(source, folder)
    loaded: Any = mx.load(str(source / "model.safetensors"))
    kept = {n: a for n, a in {**loaded, **tensors}.items() if a is not None}
    mx.save_safetensors(str(folder / "model.safetensors"), kept)
    return Target.load(folder)


def test_a_bundled_head_is_found_by_its_kind_alone(tmp_path: Path) -> None:
    folder = tmp_path / "hybrid"
    shutil.copytree(fixtures.target_dir("hybrid"), folder)
    target = Target.load(folder)
    with pytest.raises(BadInput, match="has neither a folder mtp nor a layer of its own"):
        open_drafter("mtp", target)
    shutil.copytree(HEAD, folder / "mtp")
    provider = open_drafter("mtp", target)
    assert provider is not None
    assert provider.id == "mtp"
    assert default_drafter(target) is None
    with pytest.raises(BadInput, match="needs a folder"):
        open_drafter("mtp:", target)


def test_glms_layer_must_be_there_once_and_whole(tmp_path: Path) -> None:
    """What else is refused by name; the target decodes without."""
    norm = "model.layers.3.shared_head.norm.weight"
    loaded: Any = mx.load(str(fixtures.target_dir("mla") / "model.safetensors"))
    without = copy_of(
        "mla", tmp_path / "a", **{n: None for n in loaded if n.startswith("model.layers.3.")}
    )
    assert not has_glm_mtp(without)
    assert default_drafter(without) is None
    two = copy_of("mla", tmp_path / "b", **{norm.replace(".3.", ".4."): loaded[norm]})
    part = copy_of("mla", tmp_path / "c", **{norm: None})
    for target, message in (
        (without, "has no next-token layer model.layers.3"),
        (two, "has 2 next-token layers, expected 1"),
        (part, "lacks tensors: shared_head.norm.weight"),
        (target_of("dense"), "is a llama, only glm_moe_dsa has"),
    ):
        with pytest.raises(BadInput, match=message):
            open_glm_mtp(target)
    copies = {
        "model.layers.3.embed_tokens.weight": loaded["model.embed_tokens.weight"],
        "model.layers.3.shared_head.head.weight": loaded["lm_head.weight"],
    }
    target = copy_of("mla", tmp_path / "d", **copies)
    assert open_glm_mtp(target).weights_bytes == provider_of("glm").weights_bytes


def test_an_adapters_target_has_no_layer_of_its_own(tmp_path: Path) -> None:
    """It was made for the base model."""
    base = target_of("mla")
    adapted = base.adapted(write_adapter(tmp_path / "a", fresh(fixtures.target_dir("mla"))))
    assert default_drafter(base) is not None
    assert default_drafter(adapted) is None
