"""The n-gram and two-model drafters: what they propose, remember, store and refuse."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import mlx.core as mx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    rule,
    run_state_machine_as_test,
)

import fixtures
from engine import BadInput, DraftProvider, LawError, Target, open_drafter
from engine.drafters.ngram import History, NgramProvider, NgramRows
from engine.drafters.registry import detect_kind
from engine.drafters.two_model import TwoModelProvider, TwoModelRows
from engine.host import read
from engine.sampling import Greedy, RowSampling
from engine.state.checkpoint import Attachment, Checkpoint
from oracle import models

from .puppet import NOBODY

TOKENS = st.lists(st.integers(0, 3), min_size=1, max_size=40)
GREEDY = RowSampling([Greedy()])


@given(TOKENS, st.integers(0, 12), st.integers(-1, 5), st.integers(-1, 5))
def test_ngram_proposes_what_the_scan_defines(
    tokens: list[int], n: int, max_n: int, min_n: int
) -> None:
    """The index returns exactly what a linear scan of the whole history returns."""
    rows = NgramProvider(max_n, min_n).open(GREEDY)
    rows.prefill(mx.array([tokens[:-1]], dtype=mx.uint32).reshape(1, -1), ())
    draft = rows.draft([tokens[-1]], n, [0], NOBODY)
    expected = models.ngram_scan(tokens, n, max_n, min_n)
    assert draft.tokens[0].tolist() == list(expected)
    assert draft.lengths == (len(expected),)


class NgramMachine(RuleBasedStateMachine):
    """`companion`, `membership`, `capture`: rows of histories against lists of lists."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: NgramRows = NgramProvider().open(GREEDY)
        self.model: list[list[int]] = [[]]

    @rule()
    def join(self) -> None:
        self.rows = self.rows.joined(NgramProvider().open(GREEDY))
        self.model.append([])

    @rule(chunk=st.lists(st.integers(0, 3), max_size=5))
    def prefill(self, chunk: list[int]) -> None:
        tokens = mx.array([chunk] * len(self.model), dtype=mx.uint32)
        self.rows.prefill(tokens.reshape(len(self.model), len(chunk)), ())
        for history in self.model:
            history += chunk

    @rule(depth=st.integers(0, 4), data=st.data())
    def round(self, depth: int, data: st.DataObject) -> None:
        pending = [data.draw(st.integers(0, 3)) for _ in self.model]
        draft = self.rows.draft(pending, depth, [0] * len(pending), NOBODY)
        kept = [data.draw(st.integers(0, n)) for n in draft.lengths]
        self.rows.commit(kept, ())
        for r, history in enumerate(self.model):
            history.append(pending[r])
            expected = models.ngram_scan(history, depth)
            assert read(draft.tokens)[r][: draft.lengths[r]] == list(expected)
            history += expected[: kept[r]]

    @rule(data=st.data())
    def reorder(self, data: st.DataObject) -> None:
        rows = st.integers(0, len(self.model) - 1)
        keep = data.draw(st.lists(rows, min_size=1, unique=True))
        self.rows = self.rows.selected(keep)
        self.model = [self.model[r] for r in keep]

    @rule(data=st.data())
    def capture_and_rejoin(self, data: st.DataObject) -> None:
        row = data.draw(st.integers(0, len(self.model) - 1))
        self.rows = self.rows.joined(NgramProvider().open(GREEDY, self.rows.capture(row)))
        self.model.append(list(self.model[row]))

    @invariant()
    def histories_agree(self) -> None:
        assert self.rows.row_count == len(self.model)
        for r, history in enumerate(self.model):
            stored = self.rows.capture(r)
            assert stored.processed_tokens == len(history)
            assert stored.attachment.tensors[0].tolist() == history


def test_ngram_rows_are_lists_of_tokens() -> None:
    run_state_machine_as_test(NgramMachine)


@pytest.mark.parametrize(
    ("checkpoint", "message"),
    [
        (Checkpoint(1, Attachment("other", {}, ())), "schema is 'other'"),
        (
            Checkpoint(1, Attachment("ngram-history-v1", {"max": 4, "min": 1}, ())),
            r"policy is \(4, 1\), expected \(3, 1\)",
        ),
        (Checkpoint(1, Attachment("ngram-history-v1", {"max": 3, "min": 1}, ())), "1 vector"),
        (
            Checkpoint(
                2,
                Attachment(
                    "ngram-history-v1", {"max": 3, "min": 1}, (mx.array([1], dtype=mx.int32),)
                ),
            ),
            "history is 1 x .*expected 2 x int32",
        ),
    ],
)
def test_ngram_refuses_foreign_checkpoints(checkpoint: Checkpoint, message: str) -> None:
    """`identity-drafter`: schema, policy, form and length."""
    with pytest.raises(BadInput, match=message):
        NgramProvider().open(GREEDY, checkpoint)


def test_ngram_index_is_fast_at_a_long_history() -> None:
    """One proposal at 100,000 tokens looks at a handful of runs, not at the history."""
    history = History(3, 1)
    history.push([i * i % 257 for i in range(100_000)])
    assert sum(map(len, history.first.values())) < 3 * 100_000
    assert history.propose(10) == list(models.ngram_scan(history.tokens, 10))


@given(
    rounds=st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), min_size=1, max_size=6),
    capture_at=st.integers(0, 5),
)
def test_two_model_state_covers_its_contract(
    two_model: TwoModelProvider,
    prompt: tuple[int, ...],
    rounds: list[tuple[int, int]],
    capture_at: int,
) -> None:
    """`companion`, `capture`: after zero, partial and full accepts and after depth 0.

    A group that was captured and rejoined at some boundary drafts the same from there on.
    """
    rows = two_model.open(GREEDY)
    rows.prefill(mx.array([prompt[:-1]], dtype=mx.uint32), ())
    held, pending = list(prompt[:-1]), prompt[-1]
    twin: TwoModelRows | None = None
    for number, (depth, kept) in enumerate(rounds):
        if number == capture_at:
            twin = two_model.open(GREEDY, rows.capture(0))
        draft = rows.draft([pending], depth, [0], NOBODY)
        ids: list[int] = read(draft.tokens)[0]
        assert len(ids) == depth == draft.lengths[0]
        assert ids == draft_greedily(two_model, [*held, pending], depth)
        kept = min(kept, depth)
        rows.commit([kept], ())
        if twin is not None:
            assert twin.draft([pending], depth, [0], NOBODY).tokens[0].tolist() == ids
            twin.commit([kept], ())
        held += [pending, *ids[:kept]]
        assert rows.capture(0).processed_tokens == len(held)
        pending = 65 + number


def draft_greedily(provider: TwoModelProvider, tokens: list[int], depth: int) -> list[int]:
    return list(models.no_cache_greedy(provider._draft.model, tokens, depth))


def test_two_model_refuses_foreign_checkpoints(two_model: TwoModelProvider) -> None:
    """`identity-drafter`: another draft model's weights, or a misaligned attachment."""
    rows = two_model.open(GREEDY)
    rows.prefill(mx.array([[5, 6, 7]], dtype=mx.uint32), ())
    good = rows.capture(0)
    attachment = good.attachment
    foreign = Checkpoint(3, Attachment("standalone-draft-v1:0", attachment.metadata, ()))
    shifted = Checkpoint(4, attachment)
    short = Checkpoint(3, Attachment(attachment.schema, attachment.metadata, ()))
    cut = tuple(t[:, :, :2] for t in attachment.tensors)
    truncated = Checkpoint(3, Attachment(attachment.schema, attachment.metadata, cut))
    for checkpoint, message in (
        (foreign, "checkpoint schema"),
        (shifted, "stands at 4 tokens"),
        (short, "holds 0 arrays"),
        (truncated, "does not hold 3 tokens"),
    ):
        with pytest.raises(BadInput, match=message):
            two_model.open(GREEDY, checkpoint)


def test_a_commit_needs_a_draft(two_model: TwoModelProvider) -> None:
    with pytest.raises(LawError, match="without draft"):
        two_model.open(GREEDY).commit([0], ())


def copy_with_config(source: Path, folder: Path, **changes: object) -> Path:
    shutil.copytree(source, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))
    return folder


def test_a_drafter_is_detected_by_its_files(tmp_path: Path) -> None:
    """The order of SPEC 2.8: dspark.json, architecture, `assistant`, `_mtp`, else two-model."""
    draft = fixtures.drafter_dir("dense-draft")
    assert detect_kind(draft) == "two-model"
    make = copy_with_config
    assert detect_kind(make(draft, tmp_path / "a", model_type="gemma4_assistant")) == "assistant"
    assert detect_kind(make(draft, tmp_path / "b", model_type="qwen3_5_mtp")) == "mtp"
    deepspec = make(draft, tmp_path / "c", architectures=["Gemma4DSparkModel"])
    assert detect_kind(deepspec) == "deepspec"
    (deepspec / "dspark.json").write_text("{}")
    assert detect_kind(deepspec) == "dspark"


def test_drafter_specs(target: Target, tmp_path: Path) -> None:
    """Every refusal names the value and what would be accepted."""
    draft = fixtures.drafter_dir("dense-draft")
    mtp = copy_with_config(draft, tmp_path / "mtp", model_type="qwen3_5_mtp")
    assert open_drafter("off", target) is None
    for spec in (str(draft), f"two-model:{draft}"):
        provider = open_drafter(spec, target)
        assert provider is not None
        assert provider.id == "two-model"
        assert provider.weights_bytes > 100_000
    for spec, message in (
        ("ngram:x", "takes no model path, got 'x'"),
        ("two-model", "needs a folder"),
        ("two-model:", "needs a folder"),
        (f"mtp:{draft}", "holds a two-model drafter, not mtp"),
        (f"two-model:{mtp}", "holds a mtp drafter, not two-model"),
        (str(mtp), "holds a mtp drafter; only two-model, .* can be run"),
        ("eagle", r"does not exist \(drafters: off, ngram, two-model:DIR"),
        (str(tmp_path), "has no config.json"),
    ):
        with pytest.raises(BadInput, match=message):
            open_drafter(spec, target)


def test_a_foreign_tokenizer_is_refused(target: Target, tmp_path: Path) -> None:
    """Both models must read a text as the same ids."""
    folder = copy_with_config(fixtures.drafter_dir("dense-draft"), tmp_path / "draft")
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    vocab = tokenizer["model"]["vocab"]
    vocab["a"], vocab["b"] = vocab["b"], vocab["a"]
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(BadInput, match="another tokenizer than target"):
        open_drafter(str(folder), target)


def test_a_larger_draft_vocabulary_is_harmless(target: Target, prompt: tuple[int, ...]) -> None:
    """A warning, and drafts beyond the target's vocabulary are never accepted."""
    from .conftest import finish_of

    draft = Target.load(fixtures.drafter_dir("dense-draft"))
    draft.vocab_size += 32
    with pytest.warns(UserWarning, match="draft vocabulary .* differs"):
        provider: DraftProvider = TwoModelProvider(draft, target)
    assert finish_of(target, prompt, provider).tokens == finish_of(target, prompt).tokens
