"""The tiers' machine finds what is broken, in mlx-lm's prompt cache and in wrong tiers of ours."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial, partialmethod
from pathlib import Path
from typing import Any

import pytest

from engine.cache import durability, prefixes, prompt_cache, store, stored
from engine.cache.entry import Reuse
from engine.state import forms, kinds
from parity.fuzz.contracts import EXPLANATIONS, Key, Promise, Violation
from parity.fuzz.entries import cut
from parity.fuzz.history import History, Reference
from parity.fuzz.lru import TheirTier
from parity.fuzz.namespaces import START, Namespace, namespaces_of
from parity.fuzz.run import run
from parity.fuzz.setup import Difference, Setup
from parity.fuzz.tier_list import MISS, Line, TierList, best_of
from parity.fuzz.tiers import tier_machine
from parity.fuzz.worlds import build_worlds

Patch = pytest.MonkeyPatch


@pytest.fixture(scope="module")
def world() -> Mapping[str, Reference]:
    return {built.name: Reference(built) for built in build_worlds()}


def first_difference(
    setup: Setup, wanted: Callable[[Difference], bool] = lambda _: True, seeds: int = 40
) -> Difference | None:
    for seed in range(seeds):
        found = run(tier_machine(setup), seed, shrink=False).difference
        if found is not None and wanted(found):
            return found
    return None


def test_what_is_handed_out_comes_from_both_tiers_and_from_mlx_lm(
    world: Mapping[str, Reference],
) -> None:
    setup = Setup([world["llama"]])
    for seed in range(5):
        found = run(tier_machine(setup), seed).difference
        assert found is None, "\n".join([found.text, *found.steps])
        if {"RAM", "SSD", "miss", "mlx-lm: hit", "mlx-lm: miss"} <= set(setup.tally.takes):
            break
    else:
        pytest.fail(str(setup.tally.takes))
    assert "takes from tiers:" in setup.tally.lines()
    assert setup.tally.document()["takes"]["SSD"] == setup.tally.takes["SSD"]


def test_namespaces_pack_where_mlx_lm_does(world: Mapping[str, Reference]) -> None:
    packing = {
        name for name, reference in world.items() if len(namespaces_of(reference.world)) == 3
    }
    assert packing == {"llama", "chunked", "recurrent"}


KINDS = [
    ("recurrent", Key(Promise.NEAREST, "LRUPromptCache", "prefix of one token"), "D14"),
    ("llama", Key(Promise.RECENT, "LRUPromptCache", "fetched meanwhile"), "D14"),
    ("llama", Key(Promise.FETCH, "QuantizedKVCache", "cut to less than its start"), "D12"),
    ("concatenated", Key(Promise.FETCH, "ConcatenateKVCache", "tokens trimmed"), "D15"),
]


@pytest.mark.parametrize(("name", "key", "claim"), KINDS)
def test_what_is_known_of_the_prompt_cache_is_found_without_its_explanation(
    world: Mapping[str, Reference], name: str, key: Key, claim: str
) -> None:
    others = {known: claim for known, claim in EXPLANATIONS.items() if known != key}
    found = first_difference(Setup([world[name]], others))
    assert found is not None
    assert found.key == key
    assert EXPLANATIONS[key] == claim


@pytest.mark.parametrize("hidden", [True, False])
def test_a_longer_entry_that_cannot_be_cut_hides_others_in_mlx_lm(
    world: Mapping[str, Reference], tmp_path: Path, hidden: bool
) -> None:
    """A ring that has dropped a token, and a shorter prefix beside it."""
    found: list[Violation] = []
    reference = world["limited"]
    (space, *_) = namespaces_of(reference.world)
    tier = TheirTier(reference, found.append, lambda: tmp_path / "file")
    for tokens in (((0,) * 10 if hidden else (1,) * 10), (0, 0, 1)):
        tier.put(space, tier.feed(space, None, [tokens]))
    tier.fetch(space, (0,) * 9)
    key = Key(Promise.NEAREST, "LRUPromptCache", "hidden by a longer one")
    assert [one.key for one in found] == ([key] if hidden else [])
    assert EXPLANATIONS[key] == "D14"


def one_off(patch: Patch) -> None:
    """A cut drops the first token instead of one more at the end."""
    patch.setattr(kinds, "_first_columns", lambda arrays, n: tuple(a[:, :, -n:] for a in arrays))


def one_namespace(patch: Patch) -> None:
    for name in ("add", "longest", "same", "superseded"):
        right = getattr(prefixes.PrefixIndex, name)
        wrong = partial(lambda right, self, _, *rest: right(self, "", *rest), right)
        patch.setattr(prefixes.PrefixIndex, name, Method(wrong))


class Method:
    """A callable as a method."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function

    def __get__(self, instance: Any, _: type) -> Callable[..., Any]:
        return partial(self.function, instance)


def aliased(patch: Patch) -> None:
    """What is handed out is the entry's own arrays."""
    patch.setattr(forms, "handle", lambda array: array)


def no_minimum(patch: Patch) -> None:
    right = stored.Stored.of
    patch.setattr(stored.Stored, "of", lambda caches, tokens, _: right(caches, tokens))


def drafts_trimmed(patch: Patch) -> None:
    patch.setattr(prompt_cache.Kept, "reuse", property(lambda kept: kept.stored.reuse))


def unverified(patch: Patch) -> None:
    right = store.Store.__init__
    patch.setattr(store.Store, "__init__", partialmethod(right, verify=False))


def always_durable(patch: Patch) -> None:
    right = durability.Durability.flush

    def wrong(self: Any, timeout_s: float | None = None) -> Any:
        return replace(right(self, timeout_s), durable=True)

    patch.setattr(durability.Durability, "flush", wrong)


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("llama", one_off),
        ("llama", one_namespace),
        ("limited", aliased),
        ("llama", no_minimum),
        ("llama", drafts_trimmed),
        ("llama", unverified),
        ("llama", always_durable),
    ],
)
def test_a_wrong_tier_fails_the_machine(
    world: Mapping[str, Reference], monkeypatch: Patch, name: str, wrong: Callable[[Patch], None]
) -> None:
    """`mutants`: no explanation helps ours."""
    wrong(monkeypatch)
    found = first_difference(Setup([world[name]]))
    assert found is not None
    assert found.key is None
    assert found.text.startswith("our tiers: ")


def line(tokens: tuple[int, ...], reuse: Reuse, where: Namespace = Namespace("")) -> Line:  # noqa: B008
    return Line(where, History((tokens,)), reuse, 8 * len(tokens), 100, False, ())


def test_the_list_of_tiers_is_a_linear_scan() -> None:
    lines = [
        line((1, 2, 3, 4), Reuse(True, 3)),
        line((1, 2), Reuse(False)),
        line((1, 2, 3, 4, 5), Reuse(True), Namespace("adapter")),
    ]
    plain = Namespace("")
    assert best_of(lines, plain, (1, 2, 3, 9)) == (lines[0], 3)
    assert best_of(lines, plain, (1, 2, 9)) == (lines[1], 2)
    assert best_of(lines, plain, (1, 2)) == (None, 0)
    assert best_of(lines, plain, (1, 2), at_most=2) == (lines[1], 2)
    tiers = TierList(cap=64, cold_cap=None)
    for one in lines[:2]:
        tiers.put(one)
    assert tiers.outcomes(plain, (1, 2, 9)) == {("RAM", 2)}
    tiers.put(line((1, 2, 3, 4, 5), Reuse(True, 2)))  # which serves both
    assert [one.tokens for one in tiers.ram] == [(1, 2, 3, 4, 5)]
    assert tiers.outcomes(plain, (1, 9)) == {MISS}


def test_a_damaged_file_may_be_tried_or_not() -> None:
    plain = Namespace("")
    tiers = TierList(cap=0, cold_cap=1000)
    for one in (line((1, 2, 3), Reuse(False)), line((1, 2, 3, 4), Reuse(False))):
        tiers.put(one)
    assert tiers.outcomes(plain, (1, 2, 3, 4, 5)) == {("SSD", 4)}
    tiers.cold[1].harmed = True
    assert tiers.outcomes(plain, (1, 2, 3, 4, 5)) == {("SSD", 3), MISS}
    assert tiers.outcomes(plain, (1, 2, 3, 5)) == {("SSD", 3)}


def test_chunks_and_namespaces_keep_every_token() -> None:
    assert cut((1, 2, 3, 4), [1, 2, 5]) == [(1,), (2, 3), (4,)]
    packed, tokens = Namespace("kv8", shift=1, start=START), tuple(range(START + 2))
    history = packed.append(packed.append(History(), tokens[:-3]), tokens[-3:])
    assert history.tokens == tokens
    assert history.exact == len(tokens)
    assert packed.seen(history).tokens == tuple(t + 1 for t in tokens)
    assert packed.first(history, START).exact == START
    assert packed.first(history, START - 1).exact is None


def test_what_is_too_large_for_the_colder_tier_stays() -> None:
    plain = Namespace("")
    tiers = TierList(cap=1000, cold_cap=10)
    tiers.put(line((1, 2, 3), Reuse(trimmable=False)))
    tiers.demote(0)
    assert tiers.outcomes(plain, (1, 2, 3, 4)) == {("RAM", 3)}
    assert not tiers.flush()
    assert tiers.flush()  # what failed is said once
