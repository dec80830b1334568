"""The assistant: what it reads of its target, remembers, stores and refuses."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten

import fixtures
from engine import (
    BadInput,
    Engine,
    Finish,
    KVQuantization,
    LawError,
    Limits,
    Request,
    Sampling,
    Target,
    generate,
)
from engine.drafters.assistant import (
    ADVANCING,
    MLX_VLM,
    REFERENCE,
    AssistantProvider,
    AssistantRows,
    Convention,
)
from engine.drafters.assistant_model import FULL, SLIDING
from engine.drafters.registry import open_drafter
from engine.host import read
from engine.sampling import Greedy, RowSampling
from engine.state.checkpoint import Attachment, Checkpoint
from engine.state.donors import Donor
from engine.state.rows import Rows, Undo
from fixtures import assistant, random_drafters

from .conftest import last
from .pools import drafter_of, pool, same, target_of
from .puppet import NOBODY

GREEDY = RowSampling([Greedy()])
WINDOW = 32


@pytest.fixture(scope="module")
def target() -> Target:
    return target_of("sliding")


@pytest.fixture(scope="module")
def provider() -> AssistantProvider:
    drafter = drafter_of("sliding", "assistant")
    assert isinstance(drafter, AssistantProvider)
    return drafter


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Random assistants with each head."""
    root, of = tmp_path_factory.mktemp("assistants"), fixtures.target_dir("sliding")
    return {
        "tied": random_drafters.assistant(root / "tied", of, 1),
        "centroids": random_drafters.assistant(root / "centroids", of, 1, centroids=True),
    }


def ids(target: Target, number: int, length: int) -> list[int]:
    """A text of that many tokens, another for each number."""
    prompts = fixtures.prompts("sliding")
    long = max((target.encode(prompt.text) for prompt in prompts), key=len)
    return [long[(7 * number + i) % len(long)] for i in range(length)]


def prefilled(
    target: Target, provider: AssistantProvider, tokens: Sequence[int]
) -> tuple[Rows, AssistantRows]:
    """A row of the target and one of the assistant, both behind `tokens`."""
    rows, draft = target.new_rows(provider.taps), provider.open(GREEDY)
    chunk = mx.array([list(tokens)])
    rows.forward(chunk)
    draft.prefill(chunk, rows.tapped)
    return rows, draft


def drafts_of(draft: AssistantRows, pending: Sequence[int], lender: Rows) -> list[list[int]]:
    found: list[list[int]] = read(draft.draft(pending, 3, [0] * len(pending), lender).tokens)
    return found


def settle(
    rows: Rows, draft: AssistantRows, pending: Sequence[int], drafts: Any, kept: Sequence[int]
) -> None:
    """The rest of a round in which each row keeps so many drafts."""
    rows.begin(Undo.TOKENS)
    window = [[token, *own] for token, own in zip(pending, drafts, strict=True)]
    rows.forward(mx.array(window))
    rows.resolve([1 + n for n in kept])
    draft.commit(kept, rows.tapped)


@pytest.mark.parametrize("convention", [REFERENCE, MLX_VLM, ADVANCING])
def test_rows_draft_what_they_draft_alone(target: Target, convention: Convention) -> None:
    """`solitude`: rows of unequal lengths around the window, through ragged accepts."""
    own = AssistantProvider(fixtures.drafter_dir("sliding-assistant"), target, convention)
    draw = random.Random(0)
    pairs = [prefilled(target, own, ids(target, n, length)) for n, length in enumerate(LENGTHS)]
    rows, draft = pairs[0]
    for other, other_draft in pairs[1:]:
        rows, draft = rows.joined(other), draft.joined(other_draft)
    singles = [prefilled(target, own, ids(target, n, length)) for n, length in enumerate(LENGTHS)]
    for number in range(30):
        pending = [draw.randrange(5, 200) for _ in LENGTHS]
        together = drafts_of(draft, pending, rows)
        alone = [
            drafts_of(one_draft, [token], one)[0]
            for (one, one_draft), token in zip(singles, pending, strict=True)
        ]
        assert together == alone, number
        kept = [draw.randrange(4) for _ in LENGTHS]
        settle(rows, draft, pending, together, kept)
        for (one, one_draft), token, own_drafts, n in zip(
            singles, pending, together, kept, strict=True
        ):
            settle(one, one_draft, [token], [own_drafts], [n])
    assert min(rows.processed) > 2 * WINDOW


LENGTHS = (1, 5, 31, 32, 33, 70)


def test_conventions_differ(target: Target, folders: dict[str, Path]) -> None:
    """Where queries stand and how many keys a sliding layer shows is not lost on the drafts."""
    tokens = ids(target, 3, 200)
    places = []
    for convention in (REFERENCE, Convention(start=-1), MLX_VLM, ADVANCING):
        own = AssistantProvider(folders["tied"], target, convention)
        rows, _ = prefilled(target, own, tokens)
        lent = {kind: own.lent(rows.donor(kind == SLIDING)) for kind in own.kinds}
        assert lent[SLIDING].keys.shape[2] == WINDOW - convention.unseen
        assert lent[FULL].keys.shape[2] == len(tokens)
        ragged = own.position([7, 9], 1)
        assert isinstance(ragged, mx.array)
        places.append((own.position([200], 0), own.position([200], 2), read(ragged)))
    assert places == [
        (200, 200, [7, 9]),
        (199, 199, [6, 8]),
        (199, 199, [6, 8]),
        (200, 202, [8, 10]),
    ]


@pytest.mark.parametrize("head", ["tied", "centroids"])
def test_what_stands_behind_a_row_counts_for_nothing(
    target: Target, folders: dict[str, Path], head: str
) -> None:
    """`padding`: rejected tokens' keys and values in shared columns may be NaN."""
    own = AssistantProvider(folders[head], target)
    pairs = [prefilled(target, own, ids(target, n, length)) for n, length in enumerate((9, 40))]
    rows, draft = pairs[0][0].joined(pairs[1][0]), pairs[0][1].joined(pairs[1][1])
    clean = drafts_of(draft, [70, 80], rows)
    settle(rows, draft, [70, 80], clean, [0, 3])
    clean = drafts_of(draft, [71, 81], rows)

    class Poisoned:
        def donor(self, windowed: bool) -> Donor:
            lent = rows.donor(windowed)
            behind = mx.arange(lent.keys.shape[2]) >= mx.array(lent.held)[:, None]
            assert bool(mx.any(behind))
            nan = mx.array(float("nan"))
            keys, values = (
                mx.where(behind[:, None, :, None], nan, plane) for plane in (lent.keys, lent.values)
            )
            return Donor(keys, values, lent.held, lent.offsets, lent.window)

    assert read(draft.draft([71, 81], 3, [0, 0], Poisoned()).tokens) == clean


def test_it_covers_exactly_what_its_target_does(
    target: Target, provider: AssistantProvider
) -> None:
    """`companion`, `capture`: behind any accepts, depth 0 included, as made anew; also restored."""
    draw = random.Random(1)
    tokens = ids(target, 0, 20)
    rows, draft = prefilled(target, provider, tokens)
    for number in range(16):
        depth = draw.choice([0, 1, 3])
        pending = draw.randrange(5, 200)
        drafts = read(draft.draft([pending], depth, [0], rows).tokens)[0]
        kept = draw.randint(0, depth)
        settle(rows, draft, [pending], [drafts], [kept])
        tokens += [pending, *drafts[:kept]]
        stored = draft.capture(0)
        fresh_rows, fresh = prefilled(target, provider, tokens)
        anew = fresh.capture(0)
        assert stored.processed_tokens == anew.processed_tokens == len(tokens)
        (ours,), (theirs,) = stored.attachment.tensors, anew.attachment.tensors
        # Past the window a sliding target's states differ a little by the width of its forwards.
        assert mx.allclose(ours, theirs, atol=1e-3, rtol=1e-3), number
        restored = provider.open(GREEDY, stored)
        assert restored.row_count == 1
        wanted = drafts_of(draft, [7], rows)
        assert drafts_of(restored, [7], rows) == wanted
        assert drafts_of(fresh, [7], fresh_rows) == wanted
        assert restored.capture(0).processed_tokens == len(tokens)


def test_it_remembers_nothing_of_a_window_but_one_state(
    target: Target, provider: AssistantProvider
) -> None:
    """The state is the last kept token's, an array of its own."""
    rows, draft = prefilled(target, provider, ids(target, 0, 20))
    drafts = drafts_of(draft, [9], rows)
    rows.begin()
    rows.forward(mx.array([[9, *drafts[0]]]))
    rows.resolve([3])
    draft.commit([2], rows.tapped)
    (state,) = draft.capture(0).attachment.tensors
    assert mx.array_equal(state, rows.tapped[0][:, 2:3])
    assert provider.state_bytes(10**6) == state.nbytes


def test_cold_rows_stand_beside_warm_ones(target: Target, provider: AssistantProvider) -> None:
    """`membership`: a cold row beside a warm one is the row it would be alone, in any order."""
    rows, warm = prefilled(target, provider, ids(target, 1, 12))
    (state,) = warm.capture(0).attachment.tensors
    cold = provider.open(GREEDY)
    for mixed, at in ((warm.joined(cold), 0), (cold.joined(warm), 1)):
        for rows_of, place in ((mixed, at), (mixed.selected([1, 0]), 1 - at)):
            stored = [rows_of.capture(r) for r in range(2)]
            assert stored[place].processed_tokens == 12
            assert mx.array_equal(stored[place].attachment.tensors[0], state)
            assert stored[1 - place].processed_tokens == 0
            assert stored[1 - place].attachment.tensors == ()
    both_cold = provider.open(GREEDY).joined(provider.open(GREEDY))
    assert both_cold.selected([1]).capture(0).processed_tokens == 0
    with pytest.raises(LawError, match="behind a prompt"):
        both_cold.draft([1, 2], 3, [0, 0], rows)


def test_order_of_calls(target: Target, provider: AssistantProvider) -> None:
    with pytest.raises(LawError, match="commit without draft"):
        provider.open(GREEDY).commit([0], ())
    rows, draft = prefilled(target, provider, ids(target, 0, 3))
    assert draft.draft([5], 0, [0], NOBODY).lengths == (0,)
    with pytest.raises(LawError, match="are asked for"):
        rows.donor(True).last([4])


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=0.9, top_p=0.9, seed=3)])
def test_text_is_the_targets(
    target: Target, provider: AssistantProvider, sampling: Sampling
) -> None:
    """`lossless`, `lossless-sampled`: every prompt; greedy, some round accepts each number."""
    accepted: set[int] = set()
    for prompt in fixtures.prompts("sliding"):
        request = Request(tuple(target.encode(prompt.text)), 32, sampling)
        plain = last(list(generate(target, request)))
        drafted = last(list(generate(target, request, provider)))
        assert drafted.tokens == plain.tokens, prompt.name
        accepted |= {turn.accepted for turn in drafted.rounds[1:]}
    assert accepted == {0, 1, 2, 3}


@pytest.mark.parametrize("size", [2, 4, 8])
def test_groups_serve_each_row_as_if_alone(size: int) -> None:
    """`solitude`, `lossless-sampled`: greedy and sampled rows of all lengths, that many at once."""
    own = pool("sliding", "assistant")
    plain = pool("sliding", "off")
    assert own.drafter is not None
    with Engine(own.target, [own.drafter], limits=Limits(rows=size)) as engine:
        streams = [engine.submit(request) for request in own.requests]
        served = [stream.result() for stream in streams]
    for got, alone, undrafted in zip(served, own.alone, plain.alone, strict=True):
        assert same(got, alone)
        assert got.tokens == undrafted.tokens


def test_rounds_accept_what_the_definition_does(
    target: Target, provider: AssistantProvider
) -> None:
    """`draft-trace`: as the fixtures count, which forward each text once and roll back nothing."""
    network: Any = assistant.Assistant(assistant.RECIPE.config)
    network.load_weights(str(fixtures.drafter_dir("sliding-assistant") / "model.safetensors"))
    for prompt in fixtures.prompts("sliding"):
        text = tuple(target.encode(prompt.text))
        finish = last(list(generate(target, Request(text, 32), provider)))
        (eos,) = target.eos_ids
        wanted = assistant.rounds(target.model, network, text, finish.tokens, 3, eos)
        # Rounds that the end of the text cuts short are not counted there.
        ours = tuple(turn.accepted for turn in finish.rounds[1:])
        assert ours[: len(wanted)] == wanted, prompt.name
        assert len(ours) - len(wanted) <= 2


def test_what_a_checkpoint_must_be(target: Target, provider: AssistantProvider) -> None:
    """`identity-drafter`: another artifact, length or array is refused."""
    _, draft = prefilled(target, provider, ids(target, 0, 5))
    good = draft.capture(0)
    own = good.attachment
    for checkpoint, message in (
        (Checkpoint(5, Attachment("gemma-assistant-v1:0", own.metadata, own.tensors)), "schema"),
        (Checkpoint(6, own), "stands at 6 tokens, its attachment at 5"),
        (Checkpoint(5, Attachment(own.schema, own.metadata, ())), "holds arrays of"),
        (
            Checkpoint(5, Attachment(own.schema, own.metadata, (mx.zeros((1, 1, 9)),))),
            r"got \[\(1, 1, 9\)\]",
        ),
    ):
        with pytest.raises(BadInput, match=message):
            provider.open(GREEDY, checkpoint)


def changed(source: Path, folder: Path, change: Callable[[Any, Any], None]) -> Path:
    """A copy whose config and tensors a function has changed."""
    shutil.copytree(source, folder)
    config = json.loads((folder / "config.json").read_text())
    tensors: Any = mx.load(str(folder / "model.safetensors"))
    tensors = {name: mx.array(tensor) for name, tensor in tensors.items()}
    mx.eval(tensors)
    change(config, tensors)
    (folder / "config.json").write_text(json.dumps(config))
    mx.save_safetensors(str(folder / "model.safetensors"), tensors)
    return folder


def finish_with(target: Target, folder: Path) -> Finish:
    request = Request(tuple(ids(target, 0, 40)), 32)
    return last(list(generate(target, request, open_drafter(str(folder), target))))


def test_tensors_choose_the_head(target: Target, folders: dict[str, Path], tmp_path: Path) -> None:
    """Whatever the flag says."""

    def flag(value: bool) -> Callable[[Any, Any], None]:
        return lambda config, tensors: config.update(use_ordered_embeddings=value)

    seen = {head: finish_with(target, folder).rounds for head, folder in folders.items()}
    assert seen["tied"] != seen["centroids"]
    for head, folder in folders.items():
        for value in (False, True):
            copy = changed(folder, tmp_path / f"{head}-{value}", flag(value))
            assert finish_with(target, copy).rounds == seen[head]


def test_quantized_weights_load(target: Target, folders: dict[str, Path], tmp_path: Path) -> None:
    """Each matrix that has scales, the rest as it is; drafts are nearly the dense one's."""

    def quantize(config: Any, tensors: Any) -> None:
        config["quantization"] = {"group_size": 32, "bits": 8}
        for name in list(tensors):
            prefix = name.removesuffix(".weight")
            divides = tensors[name].shape[-1] % 32 == 0
            if tensors[name].ndim == 2 and divides and "o_proj" not in name:
                packed = mx.quantize(tensors[name], group_size=32, bits=8)
                parts = dict(zip(("weight", "scales", "biases"), packed, strict=True))
                tensors |= {f"{prefix}.{part}": array for part, array in parts.items()}

    for head, folder in folders.items():
        dense = AssistantProvider(folder, target)
        copy = changed(folder, tmp_path / head, quantize)
        small = AssistantProvider(copy, target)
        assert 0.25 < small.weights_bytes / dense.weights_bytes < 0.6
        assert small.namespace != dense.namespace
        names = dict(tree_flatten(small.model.parameters()))
        assert "model.layers.0.self_attn.q_proj.scales" in names
        assert "model.layers.0.self_attn.o_proj.scales" not in names
        ours, theirs = finish_with(target, copy), finish_with(target, folder)
        assert ours.tokens == theirs.tokens
        pairs = list(zip(ours.rounds, theirs.rounds, strict=False))
        assert sum(a.draft == b.draft for a, b in pairs) > len(pairs) // 2


def test_an_untied_head_is_no_variant(folders: dict[str, Path], tmp_path: Path) -> None:
    """A copy of the embedding is ignored where config says that they are one."""
    target = target_of("sliding")

    def untie(tied: bool) -> Callable[[Any, Any], None]:
        def change(config: Any, tensors: Any) -> None:
            config["tie_word_embeddings"] = tied
            tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]

        return change

    rounds = finish_with(target, folders["tied"]).rounds
    tied = changed(folders["tied"], tmp_path / "tied", untie(True))
    assert finish_with(target, tied).rounds == rounds
    untied = changed(folders["tied"], tmp_path / "untied", untie(False))
    with pytest.raises(BadInput, match=r"unknown tensors: lm_head\.weight"):
        open_drafter(str(untied), target)


def test_quantized_keys_are_not_lent(folders: dict[str, Path]) -> None:
    target = Target.load(fixtures.target_dir("dense"), quantization=KVQuantization(8, 64, start=0))
    with pytest.raises(BadInput, match=r"reads keys and values, which .* quantizes"):
        open_drafter(str(folders["tied"]), target)
