"""The fuzz finds what is broken, in mlx-lm and in wrong participants, and nothing in ours."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import mlx.core as mx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlx_lm.models import cache as theirs
from mlx_lm.models.cache import RotatingKVCache

from engine.state.layouts import leaves
from oracle.known import read_claims
from parity.fuzz import cli
from parity.fuzz.contracts import EXPLANATIONS, Key, Promise
from parity.fuzz.history import History, Reference, difference
from parity.fuzz.participants import ListModel, Ours, Participant, Windows, compare
from parity.fuzz.run import machines, run
from parity.fuzz.setup import Difference, Setup
from parity.fuzz.tally import Tally
from parity.fuzz.worlds import TOLERANCE, VOCAB, WINDOW, build_worlds

SEED = 7
SEQUENCES = 4

CLASSES = {
    name
    for name, kind in inspect.getmembers(theirs, inspect.isclass)
    if issubclass(kind, theirs._BaseCache) and kind is not theirs._BaseCache
}

ALONE = {"prefill", "decode", "continue", "draft", "trim", "save", "restore", "copy", "quantize"}
BATCHED = {"merge", "decode", "window", "prompt", "extend", "filter", "reload", "copy", "trim"}
TIERS = {"put", "take", "put extracts", "demote", "flush", "restart", "damage"}
OPERATIONS = ALONE | {f"batch: {kind}" for kind in BATCHED} | {f"tiers: {kind}" for kind in TIERS}

TOKENS = st.lists(st.integers(0, VOCAB - 1), max_size=6)


@pytest.fixture(scope="module")
def references() -> tuple[Reference, ...]:
    return tuple(Reference(world) for world in build_worlds())


@pytest.fixture(scope="module")
def world(references: Sequence[Reference]) -> Mapping[str, Reference]:
    return {reference.world.name: reference for reference in references}


@pytest.fixture(scope="module")
def tally(references: Sequence[Reference]) -> Tally:
    """What a seed on every world did; further ones only while an operation has not come up.

    What a seed draws is not the same everywhere: Hypothesis tries constants of the modules that
    happen to be imported.
    """
    setup = Setup(references)
    for seed in range(SEED, SEED + 5):
        for machine in machines(setup):
            batch = run(machine, seed, SEQUENCES)
            found = batch.difference
            assert found is None, "\n".join([found.text, *found.steps])
        if set(setup.tally.operations) >= OPERATIONS and set(setup.tally.classes) >= CLASSES:
            break
    return setup.tally


def first_difference(
    setup: Setup,
    wanted: Callable[[Difference], bool] = lambda _: True,
    *,
    batch: bool = False,
    seeds: int = 60,
    shrink: bool = False,
) -> Difference | None:
    """The first of some seeds' differences on the setup's one world that is as wanted."""
    machine = list(machines(setup))[batch]
    for seed in range(seeds):
        found = run(machine, seed, shrink=shrink).difference
        if found is not None and wanted(found):
            return found
    return None


def test_a_few_sequences_on_every_world_show_no_unexplained_difference(tally: Tally) -> None:
    assert tally.sequences >= 24 * SEQUENCES
    assert tally.compared > sum(tally.operations.values())


def test_every_cache_class_of_mlx_lm_takes_part(tally: Tally) -> None:
    """A class that a later mlx-lm adds fails here until it has a world."""
    assert set(tally.classes) == CLASSES


def test_every_operation_is_done(tally: Tally) -> None:
    assert set(tally.operations) == OPERATIONS


def test_our_rows_decline_only_to_trim_and_to_quantize_rings(tally: Tally) -> None:
    ours = {what for what in tally.refused if what.startswith("our rows")}
    assert {what.split(": ")[1] for what in ours} == {"trim", "quantize"}
    assert all("ring caches" in what for what in ours if "quantize" in what)


def test_every_explanation_names_a_known_deviation() -> None:
    assert set(EXPLANATIONS.values()) <= {claim.id for claim in read_claims().deviations}


def test_every_world_betrays_any_token_that_is_another(references: Sequence[Reference]) -> None:
    """By ten times the tolerance at least, so that what is let through is not a token."""
    tokens = [(7 * i * i + 3 * i) % VOCAB for i in range(WINDOW)]
    for reference in references:
        expected = reference.answer(History((tuple(tokens),)))
        for place in range(len(tokens)):
            other = [(t + (i == place)) % VOCAB for i, t in enumerate(tokens)]
            actual = reference.answer(History((tuple(other),)))
            assert difference(expected, actual, 10 * TOLERANCE), (reference.world.name, place)


def test_nan_is_a_difference() -> None:
    right = mx.ones((2, 3))
    assert difference(right, right, TOLERANCE) is None
    assert difference(right, mx.where(mx.arange(3) == 1, float("nan"), right), TOLERANCE)


@given(st.lists(TOKENS, max_size=4), st.integers(0, 24), st.integers(0, 24), TOKENS)
def test_a_history_is_a_list(chunks: list[list[int]], q: int, n: int, more: list[int]) -> None:
    """Append and cut are the list's; quantization stays between the same two tokens."""
    history, tokens = History(), [t for chunk in chunks for t in chunk]
    for chunk in chunks:
        history = history.append(chunk)
    n, q = min(n, len(tokens)), min(q, len(tokens))
    cut = history.first(q).quantize().append(more).first(min(n, q + len(more)))
    expected = [*tokens[:q], *more][:n]
    assert list(cut.tokens) == expected
    early, late = cut.before_quantization()
    assert [t for chunk in early for t in chunk] == expected[:q]
    assert [t for chunk in late for t in chunk] == expected[q:]


KINDS = [
    ("concatenated", False, Key(Promise.TRIM, "ConcatenateKVCache", "tokens trimmed")),
    ("chunked", False, Key(Promise.TRIM, "ChunkedKVCache", "front dropped")),
    ("sliding", False, Key(Promise.NO_TRIM, "RotatingKVCache", "ring is full")),
    ("llama", False, Key(Promise.LOAD, "every class", "file written over")),
    ("llama", False, Key(Promise.METADATA, "every class", "key with a dot")),
    ("llama", True, Key(Promise.LOAD, "BatchKVCache", "attribute lost")),
]
"""What D15 and D16 claim, on worlds that show it."""


@pytest.mark.parametrize(("name", "batch", "key"), KINDS)
def test_the_claimed_kinds_of_d15_and_d16_are_found_without_their_explanation(
    world: Mapping[str, Reference], name: str, batch: bool, key: Key
) -> None:
    """Within 48 sequences."""
    others = {known: claim for known, claim in EXPLANATIONS.items() if known != key}
    found = first_difference(Setup([world[name]], others), batch=batch)
    assert found is not None
    assert found.key == key
    assert EXPLANATIONS[key] in ("D15", "D16")


class CutsOneTooFew(Ours):
    """A ring keeps one rejected token more, and counts as if it did not."""

    def draft(self, windows: Windows, keep: int) -> tuple[mx.array, int]:
        appended = sum(map(len, windows))
        twin = Ours(self.world)
        twin.restore(self.save({}), False)
        logits, gone = super().draft(windows, keep)
        if keep < appended:
            twin.draft(windows, keep + 1)
            for leaf, other in zip(leaves(self.rows.caches), leaves(twin.rows.caches), strict=True):
                if isinstance(leaf, RotatingKVCache):
                    leaf.keys, leaf.values, leaf._idx = other.keys, other.values, other._idx
        return logits, gone


class KeepsSharing(Ours):
    """A checkpoint that is the live caches."""

    def save(self, metadata: Mapping[str, str]) -> Any:
        return self.rows.caches, self.rows.processed[0], self.quantized, dict(metadata)

    def restore(self, saved: Any, overwritten: bool) -> Mapping[str, str]:
        caches, processed, self.quantized, metadata = saved
        self.rows = self._rows(caches, processed)
        return dict(metadata)


class Forgets(ListModel):
    """Does not note the first of several tokens that it is given."""

    def append(self, tokens: Sequence[int]) -> mx.array:
        logits = super().append(tokens)
        chunks = (*self.history.chunks[:-1], tuple(tokens[1:] or tokens))
        self.history = replace(self.history, chunks=chunks)
        return logits


def counts_only(expected: Participant, actual: Participant) -> str | None:
    """A comparer that never asks what the states answer."""
    return None if expected.counts() == actual.counts() else "other counts"


@pytest.mark.parametrize(
    ("name", "wrong", "says"),
    [
        ("sliding", {"ours": CutsOneTooFew}, "our rows: draft: logits"),
        ("limited", {"ours": CutsOneTooFew}, "our rows: draft: logits"),
        ("llama", {"ours": KeepsSharing}, "our rows: "),
        ("llama", {"truth": Forgets}, "our rows: prefill: layers count"),
        ("llama", {"compare": counts_only}, "the comparer does not see"),
    ],
)
def test_a_wrong_participant_fails_the_machine(
    world: Mapping[str, Reference], name: str, wrong: dict[str, Any], says: str
) -> None:
    """`mutants`: the table of explanations is no help to any of them."""
    found = first_difference(Setup([world[name]], **wrong), lambda d: d.text.startswith(says))
    assert found is not None
    assert found.key is None


def test_the_doubles_are_right_where_they_are_not_wrong(world: Mapping[str, Reference]) -> None:
    """So that a mutant dies of its fault."""
    right, wrong = Ours(world["sliding"].world), CutsOneTooFew(world["sliding"].world)
    for rows in (right, wrong):
        rows.append(range(11))
        rows.draft([[1, 2], [3]], 3)
    assert compare(right, wrong) is None


def test_the_command_knows_every_world(references: Sequence[Reference]) -> None:
    assert tuple(reference.world.name for reference in references) == cli.ALL_WORLDS


def test_a_seed_replays(world: Mapping[str, Reference]) -> None:
    tallies = []
    for _ in range(2):
        setup = Setup([world["concatenated"]])
        machine, _ = machines(setup)
        run(machine, 3, sequences=4)
        tallies.append(setup.tally.document())
    assert tallies[0] == tallies[1]


def test_a_difference_is_reported_by_a_short_sequence(world: Mapping[str, Reference]) -> None:
    """What Hypothesis's shrinking leaves of dozens of operations, two of them needed."""
    found = first_difference(
        Setup([world["concatenated"]], {}), lambda d: len(d.steps) <= 4, seeds=20, shrink=True
    )
    assert found is not None
    assert found.steps[:2] == ("world concatenated", "prefill [0]")


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--minutes", "-1"], "--minutes must be between 0 and 1440, got -1"),
        (["--minutes", "nan"], "--minutes must be between 0 and 1440, got nan"),
        (["--seed", "-1"], "--seed must be between 0 and 4294967295, got -1"),
        (["--world", "nowhere"], "--world nowhere: the worlds are llama, "),
        (["--json", "/nowhere/file"], "--json /nowhere/file: its folder does not exist"),
        (["--progress", "/nowhere/file"], "--progress /nowhere/file: its folder does not exist"),
        (["--part", "all"], "--part all: the parts are caches, tier"),
    ],
)
def test_bad_options_are_one_line(
    options: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as left:
        cli.main(options)
    assert left.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith(f"parity: {says}")
    assert error.count("\n") == 1
