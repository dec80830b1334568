"""Block drafters at the seam: what they hold, draft, store and refuse, alone and in groups."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx.nn.layers.quantized import quantize

import fixtures
from engine import BadInput, Engine, LawError, Limits, Request, Sampling, Target, generate
from engine.drafters.block_heads import lengths_kept
from engine.drafters.context_rows import BlockProvider, ContextRows
from engine.drafters.deepspec import open_deepspec
from engine.drafters.dspark import open_dspark
from engine.drafters.projected_context import Context
from engine.drafters.registry import detect_kind, open_drafter
from engine.host import read
from engine.ports import layer_tap
from engine.sampling import Greedy, RowSampling
from engine.state.checkpoint import Attachment, Checkpoint

from .blocks import PAIRS, Pair, context_of, folder_of, near, provider_of, taps_of
from .conftest import last
from .pools import same, target_of
from .puppet import NOBODY

GREEDY = RowSampling([Greedy()])
DSPARK = PAIRS[0]
DEEPSPEC = PAIRS[-1]
EVERY = pytest.mark.parametrize("pair", PAIRS, ids=str)


def prompt_of(pair: Pair, number: int = 0, most: int = 60) -> list[int]:
    return target_of(pair.family).encode(fixtures.prompts(pair.family)[number].text)[:most]


def warm(pair: Pair, tokens: Sequence[int]) -> ContextRows:
    """One row that has processed these tokens."""
    provider = provider_of(pair)
    rows = provider.open(GREEDY)
    if tokens:
        taps = taps_of(target_of(pair.family), provider, tokens)
        rows.prefill(mx.array([list(tokens)]), taps)
    return rows


class Text:
    """A row as the rounds see it: its tokens are given, its taps are the target's."""

    def __init__(self, pair: Pair, tokens: list[int], start: int) -> None:
        self.taps = taps_of(target_of(pair.family), provider_of(pair), tokens)
        self.tokens, self.held = tokens, start

    def window(self, width: int) -> list[mx.array]:
        """The taps [1, width, H] of the next verify window."""
        return [tap[:, self.held : self.held + width] for tap in self.taps]


@EVERY
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=0.8, seed=3)])
def test_text_is_the_targets_own(pair: Pair, sampling: Sampling) -> None:
    """`lossless`, `lossless-sampled`: for each prompt of the target, at full depth and at 1."""
    target = target_of(pair.family)
    for number in range(0, len(fixtures.prompts(pair.family)), 2):
        request = Request(tuple(prompt_of(pair, number)), 20, sampling)
        plain = last(list(generate(target, request)))
        for depth in (None, 1):
            got = last(list(generate(target, request, provider_of(pair), depth=depth)))
            assert (got.tokens, got.text, got.reason) == (plain.tokens, plain.text, plain.reason)


@EVERY
@settings(max_examples=12)
@given(
    rounds=st.lists(st.tuples(st.integers(0, 5), st.integers(0, 4)), min_size=1, max_size=5),
    start=st.sampled_from([0, 1, 7]),
    capture_at=st.integers(0, 4),
)
def test_the_context_is_that_of_the_committed_tokens(
    pair: Pair, rounds: list[tuple[int, int]], start: int, capture_at: int
) -> None:
    """`companion`, `capture`: after any schedule of accepts, equal to a fresh one's; so are drafts.

    A copy captured at some boundary drafts the same and holds the same from there on.
    """
    text = Text(pair, prompt_of(pair, 1, 40), start)
    provider = provider_of(pair)
    rows, twin = warm(pair, text.tokens[:start]), None
    for number, (depth, kept) in enumerate(rounds):
        if number == capture_at:
            twin = provider.open(GREEDY, rows.capture(0))
        pending = text.tokens[text.held]
        draft = rows.draft([pending], depth, [0], NOBODY)
        assert draft.lengths == (min(depth, provider.model.shape.drafts),)
        fresh = warm(pair, text.tokens[: text.held])
        assert read(fresh.draft([pending], depth, [0], NOBODY).tokens) == read(draft.tokens)
        kept = min(kept, draft.lengths[0])
        window = text.window(draft.lengths[0] + 1)
        rows.commit([kept], tuple(window))
        if twin is not None:
            assert read(twin.draft([pending], depth, [0], NOBODY).tokens) == read(draft.tokens)
            twin.commit([kept], tuple(window))
            assert near(context_of(twin, 0), context_of(rows, 0), 0)
        text.held += kept + 1
        assert rows.capture(0).processed_tokens == text.held
    assert near(context_of(rows, 0), context_of(warm(pair, text.tokens[: text.held]), 0))


@EVERY
@settings(max_examples=12)
@given(data=st.data())
def test_rows_of_a_group_are_rows_alone(pair: Pair, data: st.DataObject) -> None:
    """`solitude`, `membership`: cold and warm rows, ragged commits, joins, reorders, leavers."""
    starts = data.draw(st.lists(st.integers(0, 9), min_size=2, max_size=4))
    texts = [Text(pair, prompt_of(pair, n, 40), start) for n, start in enumerate(starts)]
    alone = [warm(pair, text.tokens[: text.held]) for text in texts]
    group = warm(pair, texts[0].tokens[: starts[0]])
    for text in texts[1:]:
        group = group.joined(warm(pair, text.tokens[: text.held]))
    order = list(range(len(texts)))
    for _ in range(3):
        keep = data.draw(st.permutations(range(len(order))))[: data.draw(st.integers(1, 4))]
        order, group = [order[r] for r in keep], group.selected(keep)
        pending = [texts[n].tokens[texts[n].held] for n in order]
        draft = group.draft(pending, 4, [0] * len(order), NOBODY)
        width = max(draft.lengths) + 1
        kept = [data.draw(st.integers(0, length)) for length in draft.lengths]
        windows = [texts[n].window(width) for n in order]
        for r, n in enumerate(order):
            own = alone[n].draft([pending[r]], 4, [0], NOBODY)
            assert own.lengths == (draft.lengths[r],)
            assert read(own.tokens)[0] == read(draft.tokens)[r]
            alone[n].commit([kept[r]], tuple(windows[r]))
            texts[n].held += kept[r] + 1
        joint = [mx.concatenate(list(taps)) for taps in zip(*windows, strict=True)]
        group.commit(kept, tuple(joint))
        for r, n in enumerate(order):
            assert near(context_of(group, r), context_of(alone[n], 0))


def test_what_is_rejected_or_padding_never_enters_a_sum() -> None:
    """`padding`: taps of rejected tokens are NaN, and so are those behind a shorter row's."""
    texts = [Text(DSPARK, prompt_of(DSPARK, n, 40), start) for n, start in enumerate((0, 9))]
    rows = [warm(DSPARK, text.tokens[: text.held]) for text in texts]
    group = rows[0].joined(rows[1])
    for kept in ([0, 3], [2, 1], [0, 0]):
        group.draft([text.tokens[text.held] for text in texts], 4, [0, 0], NOBODY)
        assert group.proposal is not None
        assert not bool(mx.isnan(group.proposal.logits).any())
        windows = []
        for text, count in zip(texts, kept, strict=True):
            own = mx.arange(5)[:, None] <= count
            windows.append([mx.where(own, tap, mx.nan) for tap in text.window(5)])
            text.held += count + 1
        joint = [mx.concatenate(list(taps)) for taps in zip(*windows, strict=True)]
        group.commit(kept, tuple(joint))


@EVERY
@pytest.mark.parametrize("size", [2, 4, 8])
def test_requests_in_groups_are_served_as_if_alone(pair: Pair, size: int) -> None:
    """`solitude`: greedy and sampled requests of every length, arriving one after the other."""
    target, provider = target_of(pair.family), provider_of(pair)
    requests = [
        Request(
            tuple(prompt_of(pair, n % 5, (1, 9, 33, 60)[n % 4])),
            (5, 12, 20)[n % 3],
            Sampling() if n % 2 else Sampling(temperature=0.8, seed=n),
        )
        for n in range(size)
    ]
    alone = [last(list(generate(target, request, provider))) for request in requests]
    engine = Engine(target, [provider], limits=Limits(rows=size))
    streams = []
    for request in requests:
        streams.append(engine.submit(request))
        engine.turn()
    while engine.turn():
        pass
    for stream, one in zip(streams, alone, strict=True):
        assert same(last(list(stream)), one)


@EVERY
def test_a_foreign_checkpoint_is_refused(pair: Pair) -> None:
    """`identity-drafter`: schema, artifact, length, form; and the provider is as it was."""
    provider = provider_of(pair)
    good = warm(pair, prompt_of(pair, 0, 6)).capture(0)
    schema, metadata, tensors = (
        good.attachment.schema,
        good.attachment.metadata,
        good.attachment.tensors,
    )
    assert schema.startswith(("dflash-context-v1:", "deepspec-context-v1:"))
    narrow = tuple(tensor[..., :8] for tensor in tensors)
    half = tuple(tensor.astype(mx.float16) for tensor in tensors)
    cut = tuple(tensor[:, :, :5] for tensor in tensors)
    empty = {**metadata, "layers": " ".join(["plain:0"] * len(provider.model.layers))}
    for checkpoint, message in (
        (Checkpoint(6, Attachment("ngram-history-v1", metadata, tensors)), "checkpoint schema"),
        (Checkpoint(6, Attachment(schema[:-1], metadata, tensors)), "checkpoint schema"),
        (Checkpoint(7, good.attachment), "stands at 7 tokens, its attachment at 6"),
        (Checkpoint(6, Attachment(schema, metadata, tensors[:1])), "too few"),
        (Checkpoint(6, Attachment(schema, metadata, (*tensors, tensors[0]))), "too many"),
        (Checkpoint(6, Attachment(schema, metadata, cut)), "does not hold 6 tokens"),
        (Checkpoint(6, Attachment(schema, metadata, narrow)), "a checkpoint array is"),
        (Checkpoint(6, Attachment(schema, metadata, half)), "float16"),
        (Checkpoint(6, Attachment(schema, empty, ())), "holds 0 arrays, expected 4"),
    ):
        with pytest.raises(BadInput, match=message):
            provider.open(GREEDY, checkpoint)
    assert near(context_of(provider.open(GREEDY, good), 0), tensors, 0)
    assert provider.open(GREEDY, warm(pair, []).capture(0)).capture(0).processed_tokens == 0


def test_another_target_has_another_namespace(tmp_path: Path) -> None:
    """`identity`: the context is made of the target's states."""
    target = target_of("dense")
    folder = tmp_path / "target"
    shutil.copytree(target.path, folder)
    weights: Any = mx.load(str(folder / "model.safetensors"))
    weights["model.norm.weight"] = weights["model.norm.weight"] * 1.01
    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "mlx"})
    provider = open_dspark(folder_of(DSPARK), Target.load(folder))
    with pytest.raises(BadInput, match="checkpoint schema"):
        provider.open(GREEDY, warm(DSPARK, [5, 6]).capture(0))


def test_a_commit_needs_a_draft() -> None:
    with pytest.raises(LawError, match="commit without draft"):
        warm(DSPARK, []).commit([0], ())


@pytest.mark.parametrize("count", [1, 3])
def test_a_block_always_has_its_trained_length(count: int) -> None:
    """`slices`: what is asked for cuts the drafts and does not change them."""
    rows = warm(DEEPSPEC, prompt_of(DEEPSPEC, 0, 9))
    full = read(rows.draft([40], 9, [0], NOBODY).tokens)[0]
    assert len(full) == provider_of(DEEPSPEC).model.shape.drafts
    assert read(rows.draft([40], count, [0], NOBODY).tokens)[0] == full[:count]


def test_an_untrained_head_is_pure_dflash(tmp_path: Path) -> None:
    """With zero W2 and confidence drafts are the backbone's own; a threshold of 1/2 prunes none."""
    weights: Any = mx.load(str(folder_of(DSPARK) / "model.safetensors"))
    zeroed = {
        name: mx.zeros_like(array) if "w2" in name or "confidence" in name else array
        for name, array in weights.items()
    }
    bare = {n: a for n, a in weights.items() if not n.startswith(("markov", "confidence"))}
    config = json.loads((folder_of(DSPARK) / "config.json").read_text())
    settings = config["dflash_config"]
    plain = {k: settings[k] for k in ("mask_token_id", "target_layer_ids", "num_target_layers")}
    flat = {**config, "dflash_config": {**plain, "projector_type": "dspark"}}
    untrained = write(tmp_path / "untrained", config, zeroed)
    backbone = write(tmp_path / "backbone", flat, bare)
    target = target_of("dense")
    drafters = [
        open_dspark(untrained, target),
        open_dspark(untrained, target, min_confidence=0.5),
        open_dspark(backbone, target),
    ]
    for number in range(4):
        request = Request(tuple(prompt_of(DSPARK, number)), 20)
        runs = [last(list(generate(target, request, drafter))) for drafter in drafters]
        assert runs[0].rounds == runs[1].rounds == runs[2].rounds
    trained = last(list(generate(target, request, provider_of(DSPARK))))
    assert trained.rounds != runs[0].rounds


def write(folder: Path, config: object, weights: dict[str, mx.array]) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    mx.save_safetensors(str(folder / "model.safetensors"), weights)
    return folder


@given(
    confidence=st.lists(st.lists(st.floats(0, 1), min_size=4, max_size=4), min_size=1, max_size=3),
    thresholds=st.lists(st.floats(0, 1), max_size=4),
)
def test_pruning_keeps_the_sure_ones_before_the_first_unsure(
    confidence: list[list[float]], thresholds: list[float]
) -> None:
    for row, kept in zip(confidence, lengths_kept(confidence, thresholds), strict=True):
        assert all(row[k] >= thresholds[k] for k in range(kept))
        assert kept == len(thresholds) or row[kept] < thresholds[kept]


@pytest.mark.parametrize("pair", [DSPARK, DEEPSPEC], ids=str)
def test_pruning_shortens_windows_and_leaves_the_text(pair: Pair) -> None:
    """At any threshold: the same text, and each draft is a beginning of the unpruned one.

    At thresholds between the confidences of a block some windows are shorter; at 1 nothing is
    drafted.
    """
    target, folder = target_of(pair.family), folder_of(pair)
    opener = open_dspark if pair.maker == "dspark" else open_deepspec
    prompt = tuple(prompt_of(pair, 1))
    request = Request(prompt, 24)
    plain = last(list(generate(target, request)))
    rows = warm(pair, prompt[:-1])
    rows.draft([prompt[-1]], 4, [0], NOBODY)
    assert rows.proposal is not None
    assert rows.proposal.confidence is not None
    sure: list[float] = sorted(read(rows.proposal.confidence)[0])
    drafted: list[int] = []
    known: dict[int, tuple[int, ...]] = {}
    for threshold in (0.0, *sure, 1.0):
        provider = opener(folder, target, min_confidence=threshold)
        got = last(list(generate(target, request, provider)))
        assert (got.tokens, got.text, got.reason) == (plain.tokens, plain.text, plain.reason)
        drafted.append(got.statistics.drafted)
        place = 0
        for turn in got.rounds:
            full = known.setdefault(place, turn.draft) if threshold == 0 else known.get(place)
            if full is not None:
                assert turn.draft == full[: len(turn.draft)]
            place += len(turn.emitted)
    assert drafted[-1] == 0
    assert any(0 < count < drafted[0] for count in drafted)


def copied(pair: Pair, folder: Path, **changes: Any) -> Path:
    """A copy with other fields in its config, where they stand."""
    shutil.copytree(folder_of(pair), folder)
    config = json.loads((folder / "config.json").read_text())
    for name, value in changes.items():
        nested = config.get("dflash_config", {})
        (nested if name in nested else config)[name] = value
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_released_forms_are_detected(tmp_path: Path) -> None:
    """Flat fields of the Qwen3 release, a `dflash_config`, our own file, DeepSpec's class."""
    assert detect_kind(folder_of(PAIRS[2])) == "dspark"
    assert detect_kind(folder_of(DEEPSPEC)) == "deepspec"
    folder = copied(DSPARK, tmp_path / "drafter")
    config = json.loads((folder / "config.json").read_text())
    nested = config.pop("dflash_config")
    flat = {**config, **nested, "architectures": ["Qwen3DSparkModel"]}
    (folder / "config.json").write_text(json.dumps(flat))
    assert detect_kind(folder) == "dspark"
    target = target_of("dense")
    request = Request(tuple(prompt_of(DSPARK, 1)), 20)
    both = [open_drafter(str(folder), target), provider_of(DSPARK)]
    first, second = (last(list(generate(target, request, drafter))) for drafter in both)
    assert first.rounds == second.rounds


def test_quantized_weights_are_read_by_their_scales(tmp_path: Path) -> None:
    """Affine, as `mlx_lm.convert` writes them: near the dense drafter, with fewer bytes."""
    target, dense = target_of("dense"), provider_of(DSPARK)
    model: Any = open_dspark(folder_of(DSPARK), target).model
    quantize(model, group_size=32, bits=8, class_predicate=quantizable)
    folder = copied(DSPARK, tmp_path / "drafter", quantization={"group_size": 32, "bits": 8})
    model.save_weights(str(folder / "model.safetensors"))
    provider = open_dspark(folder, target)
    assert provider.weights_bytes < dense.weights_bytes / 2
    context = Context.of(warm(DSPARK, prompt_of(DSPARK, 0, 9))._state)
    ours, theirs = (p.model.propose(mx.array([40]), context, 4).base for p in (provider, dense))
    assert 0 < float(mx.abs(ours - theirs).max()) < 0.5


def quantizable(path: str, module: Any) -> bool:
    size = module["weight"].shape[-1] if hasattr(module, "to_quantized") else 1
    return size % 32 == 0 and not path.startswith("confidence")


def test_an_embedding_and_a_head_of_its_own_are_used(tmp_path: Path) -> None:
    """By tensor presence: the target's own, given twice, changes nothing; another does."""
    target = target_of("dense")
    embedding = target.model.model.embed_tokens.weight
    weights: Any = mx.load(str(folder_of(DSPARK) / "model.safetensors"))
    rows = warm(DSPARK, prompt_of(DSPARK, 0, 9))
    context, bases = Context.of(rows._state), []
    for number, scale in enumerate((1.0, 2.0)):
        folder = copied(DSPARK, tmp_path / f"drafter-{number}")
        own = {"embed_tokens.weight": embedding * scale, "lm_head.weight": embedding}
        mx.save_safetensors(str(folder / "model.safetensors"), {**weights, **own})
        model = open_dspark(folder, target).model
        bases.append(model.propose(mx.array([40]), context, 4).base)
    theirs = provider_of(DSPARK).model.propose(mx.array([40]), context, 4).base
    assert near([bases[0]], [theirs])
    assert not near([bases[1]], [theirs], 0.1)


def test_thresholds_are_read_and_checked(tmp_path: Path) -> None:
    """`dspark.json`: each fault in one line."""
    target = target_of("dense")
    folder = copied(DSPARK, tmp_path / "drafter")
    file = folder / "dspark.json"
    namespaces = {open_dspark(folder, target).namespace}
    for text, stored in (("{}", None), ('{"thresholds": [0.5, 0.75]}', (0.5, 0.75))):
        file.write_text(text)
        provider = open_drafter(str(folder), target)
        assert isinstance(provider, BlockProvider)
        assert provider.thresholds == stored
        namespaces.add(provider.namespace)
    assert len(namespaces) == 1  # thresholds do not enter the context
    for text, message in (
        ("[", "is not readable JSON"),
        ('{"thresholds": [true]}', "must be a list of numbers"),
        ('{"thresholds": 0.5}', "must be a list of numbers, got 0.5"),
        ('{"thresholds": [0.5, 1.5]}', "must be between 0 and 1, got 1.5"),
        ('{"thresholds": [0, 0, 0, 0, 0]}', "there are 5 confidence thresholds, at most 4"),
    ):
        file.write_text(text)
        with pytest.raises(BadInput, match=message):
            open_drafter(str(folder), target)
    with pytest.raises(BadInput, match="no confidence head, which thresholds need"):
        open_dspark(folder_of(PAIRS[2]), target_of("sliding"), min_confidence=0.5)


@EVERY
def test_the_provider_knows_its_sizes(pair: Pair) -> None:
    """Bytes of the weights and of a row's state, taps by name, depth as trained."""
    provider = provider_of(pair)
    size = (folder_of(pair) / "model.safetensors").stat().st_size
    assert 0 < size - provider.weights_bytes < 8000
    rows = warm(pair, prompt_of(pair, 0, 9))
    held = sum(tensor.nbytes for tensor in context_of(rows, 0))
    tokens = rows.capture(0).processed_tokens
    assert provider.state_bytes(256) == held // tokens * 256 == provider.state_bytes(1)
    assert provider.taps == tuple(map(layer_tap, provider.model.shape.tap_layers))
    assert provider.default_depth == 4
    assert not provider.supports_target_adapters
