"""The RAM tier against lists, with a colder tier behind it that may fail in every way."""

from __future__ import annotations

import random
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from engine import BadInput
from engine.cache.codecs import CODEC
from engine.cache.entry import Reuse, Tokens
from engine.cache.prompt_cache import ColderTier, Hit, Kept, PromptCache, served_by
from engine.cache.ssd import SSD
from engine.cache.store import Store
from engine.cache.stored import Stored
from engine.state.checkpoint import Attachment, Checkpoint
from engine.state.forms import Held
from tests.engine.company import ids

from .entries import IDENTITY
from .kinds import fed, feed, held_by, restored, same_held, stored, target_for
from .test_prefixes import common

SALT = {"": 0, "adapter": 1000}
"""What makes the same tokens another state in another namespace."""


def as_tokens(tokens: Sequence[int]) -> Tokens:
    return np.array(tokens, np.int32)


def columns(namespace: str, tokens: Sequence[int]) -> mx.array:
    return mx.array([SALT[namespace] + t for t in tokens], mx.float32).reshape(1, 1, -1, 1)


def memory(namespace: str, tokens: Sequence[int]) -> mx.array:
    """A recurrent state: no part of it is that of fewer tokens."""
    return mx.array([[SALT[namespace] + hash(tuple(tokens)) % 997]], mx.float32)


def state(namespace: str, tokens: Sequence[int], kind: str) -> Stored:
    """A state that tells which tokens it was made from. `from4` is to be cut back to 4 at least."""
    both = columns(namespace, tokens), columns(namespace, tokens)
    caches = [Held("plain", (len(tokens),), both)]
    if kind == "whole":
        caches.append(Held("recurrent", (1,), (memory(namespace, tokens),)))
    minimum = 4 if kind == "from4" and len(tokens) >= 4 else 1
    return Stored(len(tokens), tuple(caches), minimum)


def drafter(tokens: Sequence[int]) -> Checkpoint:
    attachment = Attachment("draft-v1:a", {}, (mx.array(list(tokens), mx.int32),))
    return Checkpoint(len(tokens), attachment)


def kept(namespace: str, tokens: Sequence[int], kind: str) -> Kept:
    checkpoints = (drafter(tokens),) if kind == "drafted" else ()
    return Kept(namespace, as_tokens(tokens), state(namespace, tokens, kind), checkpoints)


def check_hit(hit: Hit, namespace: str, tokens: Sequence[int]) -> None:
    """What was handed out is the state of the first `count` tokens and of nothing else."""
    seen = list(tokens[: hit.count])
    assert hit.stored.num_tokens == hit.count
    for held in hit.stored.leaves:
        truth = memory if held.kind == "recurrent" else columns
        for array in held.arrays:
            assert mx.array_equal(array, truth(namespace, seen))
    for checkpoint in hit.checkpoints:
        assert checkpoint.processed_tokens == hit.count
        assert checkpoint.attachment.tensors[0].tolist() == seen


@dataclass(eq=False)
class Row:
    """An entry of the list model."""

    namespace: str
    tokens: tuple[int, ...]
    kind: str
    used_s: float = 0.0

    @property
    def reuse(self) -> Reuse:
        count = len(self.tokens)
        if self.kind in ("whole", "drafted"):
            return Reuse(trimmable=False)
        minimum = 4 if self.kind == "from4" and count >= 4 else 1
        return Reuse(minimum < count, minimum)

    @property
    def nbytes(self) -> int:
        extra = {"whole": 4, "drafted": 4 * len(self.tokens)}.get(self.kind, 0)
        return (8 + 8) * len(self.tokens) + extra

    def serves(self, namespace: str, tokens: Sequence[int]) -> int:
        count = 0
        while count < min(len(self.tokens), len(tokens) - 1) and (
            self.tokens[count] == tokens[count]
        ):
            count += 1
        usable = self.namespace == namespace and self.reuse.serves(count, len(self.tokens))
        return count if usable else 0


def best_of(rows: Sequence[Row], namespace: str, tokens: Sequence[int]) -> tuple[Row | None, int]:
    """The first of those that serve most."""
    found: tuple[Row | None, int] = None, 0
    for row in rows:
        if (count := row.serves(namespace, tokens)) > found[1]:
            found = row, count
    return found


class ColdLists:
    """A colder tier of lists. `mood` is how it does: one way to be well, many not to be."""

    def __init__(self) -> None:
        self.rows: list[Row] = []
        self.mood = "well"

    def promises(self, tokens: Tokens, namespace: str) -> int:
        if self.mood == "promise raises":
            raise OSError("the folder is gone")
        return best_of(self.rows, namespace, tokens.tolist())[1]

    def fetch(self, tokens: Tokens, namespace: str) -> Kept | None:
        if self.mood == "fetch raises":
            raise MemoryError("no room")
        row = self.fetched(namespace, tokens.tolist())
        return None if row is None else kept(row.namespace, row.tokens, row.kind)

    def fetched(self, namespace: str, tokens: list[int]) -> Row | None:
        row, _ = best_of(self.rows, namespace, tokens)
        match self.mood:
            case "promise raises" | "fetch raises" | "fetch misses":
                return None
            case _ if row is None:
                return None
            case "fetch is short":
                return Row(namespace, row.tokens[:1], "any")
            case "fetch is another's":
                return Row(namespace, (9, *row.tokens[1:]), "any")
            case "fetch is foreign":
                return Row("adapter" if namespace == "" else "", row.tokens, "any")
        return Row(row.namespace, row.tokens, row.kind)

    def spill(self, kept: Kept) -> bool:
        if self.mood == "spill raises":
            raise OSError("the disk is full")
        if self.mood == "spill refuses":
            return False
        kind = "drafted" if kept.checkpoints else "any"
        kind = "whole" if len(kept.stored.caches) > 1 else kind
        kind = "from4" if kept.stored.minimum > 1 else kind
        self.rows.append(Row(kept.namespace, tuple(kept.tokens.tolist()), kind))
        return True


MOODS = (
    "promise raises",
    "fetch raises",
    "fetch misses",
    "fetch is short",
    "fetch is another's",
    "fetch is foreign",
    "spill raises",
    "spill refuses",
)

namespaces = st.sampled_from(sorted(SALT))
token_lists = st.one_of(
    st.lists(st.integers(0, 1), min_size=1, max_size=4),
    st.tuples(st.integers(1, 9), st.integers(0, 4)).map(lambda t: [*[0] * t[0], *[t[1]] * t[1]]),
)
kinds = st.sampled_from(["any", "any", "whole", "from4", "drafted"])


class AgainstLists(RuleBasedStateMachine):
    """Laws `longest-prefix`, `tier-agree`, `cap`, `supersede`; the colder tier may be none."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0
        self.added: list[Row] = []  # in the order of addition
        self.used: list[Row] = []  # the same ones, the latest used last

    @initialize(cap=st.sampled_from([0, 40, 200, 400, 2_000]), cold=st.booleans())
    def open(self, cap: int, cold: bool) -> None:
        self.cap = cap
        self.cold = ColdLists() if cold else None
        self.cache = PromptCache(cap, self.cold, clock=lambda: self.now_s)

    @property
    def mood(self) -> str:
        return "spill refuses" if self.cold is None else self.cold.mood

    @rule(mood=st.sampled_from(["well"] * 4 + [*MOODS]))
    def fall_ill_or_recover(self, mood: str) -> None:
        if self.cold is not None:
            self.cold.mood = mood

    @rule(seconds=st.integers(0, 10))
    def wait(self, seconds: int) -> None:
        self.now_s += seconds

    @rule(namespace=namespaces, tokens=token_lists, kind=kinds)
    def put(self, namespace: str, tokens: list[int], kind: str) -> None:
        entry = kept(namespace, tokens, kind)
        mine = as_tokens(tokens)
        self.cache.put(mine, namespace, entry.stored, entry.checkpoints)
        mine[:] = 77  # the caller's array is the caller's
        row = Row(namespace, tuple(tokens), kind)
        assert row.nbytes == entry.nbytes
        if row.nbytes <= self.cap:
            self.adopt(row)

    @rule(namespace=namespaces, tokens=token_lists)
    def take(self, namespace: str, tokens: list[int]) -> None:
        row, count = best_of(self.added, namespace, tokens)
        copy, cold_count = None, 0
        if self.cold and best_of(self.cold.rows, namespace, tokens)[1] > count:
            copy = self.cold.fetched(namespace, tokens)
            cold_count = 0 if copy is None else copy.serves(namespace, tokens)
        hit = self.cache.take(as_tokens(tokens), namespace)
        if hit is not None:
            check_hit(hit, namespace, tokens)
        assert (0 if hit is None else hit.count) == max(count, cold_count)
        if cold_count > count:
            assert copy is not None
            assert hit is not None
            assert bool(hit.checkpoints) == (copy.kind == "drafted")
            if copy.nbytes <= self.cap:
                self.adopt(copy)
        elif row is not None:
            assert hit is not None
            assert bool(hit.checkpoints) == (row.kind == "drafted")
            self.use(row)

    @rule(idle_s=st.integers(0, 12))
    def demote(self, idle_s: int) -> None:
        idle = [row for row in self.used if row.used_s <= self.now_s - idle_s]
        spilled = not self.mood.startswith("spill")
        assert self.cache.demote(idle_s) == (len(idle) if spilled else 0)
        for row in idle if spilled else []:
            self.forget(row)

    def adopt(self, row: Row) -> None:
        """What the laws say of an entry that fits."""
        for other in list(self.added):
            if other.namespace != row.namespace:
                continue
            shorter = len(other.tokens) < len(row.tokens)
            begins = row.tokens[: len(other.tokens)] == other.tokens
            needless = shorter and row.reuse.serves(len(other.tokens), len(row.tokens))
            if begins and (needless or other.tokens == row.tokens):
                self.forget(other)
        while sum(other.nbytes for other in self.added) + row.nbytes > self.cap:
            self.forget(self.used[0])
        self.added.append(row)
        self.use(row)

    def use(self, row: Row) -> None:
        row.used_s = self.now_s
        self.used = [other for other in self.used if other is not row] + [row]

    def forget(self, row: Row) -> None:
        self.added.remove(row)
        self.used.remove(row)

    @invariant()
    def holds_the_rows(self) -> None:
        if not hasattr(self, "cache"):
            return
        assert self.cache.nbytes == sum(row.nbytes for row in self.added) <= self.cap
        assert len(self.cache) == len(self.added)
        in_order = [(i.namespace, tuple(i.entry.tokens.tolist())) for i in self.cache._uses]
        assert in_order == [(row.namespace, row.tokens) for row in self.used]
        for row in self.added:
            found = self.cache.exactly(as_tokens(row.tokens), row.namespace)
            assert found is not None
            assert same_held(found.stored.leaves, state(row.namespace, row.tokens, row.kind).leaves)
            assert found.reuse == row.reuse


TestAgainstLists = AgainstLists.TestCase


def small(cap: int, cold: ColderTier | None = None) -> PromptCache:
    return PromptCache(cap, cold)


def test_the_least_recently_used_goes_first_and_is_spilled_before() -> None:
    """`cap`: a hit counts as a use, which mlx-lm's cache does not count (D14)."""
    cold = ColdLists()
    cache = small(2 * 16 * 4, cold)
    for first in (1, 2):
        cache.put(as_tokens([first, 0, 0, 0]), "", state("", [first, 0, 0, 0], "any"))
    assert cache.take(as_tokens([1, 0, 0, 0, 5]), "") is not None
    cache.put(as_tokens([3, 0, 0, 0]), "", state("", [3, 0, 0, 0], "any"))
    assert [row.tokens for row in cold.rows] == [(2, 0, 0, 0)]
    assert cache.exactly(as_tokens([1, 0, 0, 0]), "") is not None
    assert cache.counts.evicted == 1


def test_an_entry_above_the_cap_is_spilled_and_changes_nothing_here() -> None:
    """`cap`: also on the way back, when it is handed out and not kept."""
    cold = ColdLists()
    cache = small(16 * 4, cold)
    cache.put(as_tokens([1, 2]), "", state("", [1, 2], "any"))
    cache.put(as_tokens([1, 2, 3, 4, 5]), "", state("", [1, 2, 3, 4, 5], "any"))
    assert [row.tokens for row in cold.rows] == [(1, 2, 3, 4, 5)]
    assert (len(cache), cache.nbytes) == (1, 16 * 2)
    hit = cache.take(as_tokens([1, 2, 3, 4, 5, 6]), "")
    assert hit is not None
    check_hit(hit, "", [1, 2, 3, 4, 5])
    assert (hit.count, len(cache), len(cold.rows)) == (5, 1, 1)
    assert (cache.counts.hits, cache.counts.cold_hits) == (1, 1)


def test_the_colder_tier_is_not_read_for_as_much_as_is_here() -> None:
    """It wins only if it has strictly more."""
    cold = ColdLists()
    cold.rows.append(Row("", (1, 2, 3), "any"))
    cold.mood = "fetch raises"
    cache = small(1_000, cold)
    cache.put(as_tokens([1, 2, 3]), "", state("", [1, 2, 3], "any"))
    hit = cache.take(as_tokens([1, 2, 3, 4]), "")
    assert hit is not None
    assert (hit.count, cache.counts.cold_failures) == (3, 0)


def test_failures_of_the_colder_tier_are_counted_and_go_no_further() -> None:
    cold = ColdLists()
    cold.rows.append(Row("", (1, 2, 3), "any"))
    cache = small(1_000, cold)
    for failures, mood in enumerate(("promise raises", "fetch raises", "spill raises"), start=1):
        cold.mood = mood
        if mood.startswith("spill"):
            cache.put(as_tokens([5]), "", state("", [5], "any"))
            assert cache.demote(0) == 0
            assert len(cache) == 1
        else:
            assert cache.take(as_tokens([1, 2, 3, 4]), "") is None
        assert cache.counts.cold_failures == failures
    assert cache.counts.misses == 2


@pytest.mark.parametrize("mood", MOODS[:6])
def test_what_is_here_is_served_if_the_colder_tier_does_not_hold_its_promise(mood: str) -> None:
    cold = ColdLists()
    cold.rows.append(Row("", (1, 2, 3), "any"))
    cold.mood = mood
    cache = small(1_000, cold)
    cache.put(as_tokens([1, 2]), "", state("", [1, 2], "any"))
    hit = cache.take(as_tokens([1, 2, 3, 4]), "")
    assert hit is not None
    check_hit(hit, "", [1, 2])
    assert (hit.count, len(cache), cache.counts.cold_hits) == (2, 1, 0)


def test_what_was_not_used_for_long_is_demoted_and_found_again() -> None:
    """Its bytes are freed here; a hit counts as a use, a look does not."""
    now_s, cold = [0.0], ColdLists()
    cache = PromptCache(1_000, cold, clock=lambda: now_s[0])
    for first in (1, 2, 3):
        cache.put(as_tokens([first, 0]), "", state("", [first, 0], "any"))
    now_s[0] = 5.0
    assert cache.take(as_tokens([1, 0, 5]), "") is not None
    assert cache.exactly(as_tokens([2, 0]), "") is not None
    assert cache.holding(as_tokens([2, 0]), "") is not None
    assert cache.demote(6) == 0
    assert cache.demote(5) == 2
    assert (len(cache), cache.nbytes) == (1, 32)
    assert [row.tokens for row in cold.rows] == [(2, 0), (3, 0)]
    hit = cache.take(as_tokens([3, 0, 5]), "")
    assert hit is not None
    check_hit(hit, "", [3, 0])
    assert (len(cache), small(100).demote(0)) == (2, 0)
    alone = small(1_000)
    alone.put(as_tokens([1]), "", state("", [1], "any"))
    assert (alone.demote(0), len(alone)) == (0, 1)  # without a colder tier nothing is lost


def test_states_of_other_lengths_are_refused_and_nothing_changes() -> None:
    """`position`: mlx-lm's cache takes one whose length is not its key's (D14)."""
    cache = small(1_000)
    cache.put(as_tokens([1, 2]), "", state("", [1, 2], "any"))
    before = cache.nbytes
    for tokens, value, checkpoints in (
        ([1, 2, 3], state("", [1, 2], "any"), ()),
        ([1], state("", [1, 2], "any"), ()),
        ([1, 2], state("", [1, 2], "any"), (drafter([1]),)),
        ([], state("", [], "any"), ()),
    ):
        with pytest.raises(BadInput, match=r"cannot stand for|is not kept"):
            cache.put(as_tokens(tokens), "", value, checkpoints)
    assert (cache.nbytes, len(cache)) == (before, 1)
    with pytest.raises(BadInput, match="at least 0, got -1"):
        small(-1)


@pytest.mark.parametrize("kind", ["dense", "sliding", "hybrid", "quantized", "llama4"])
def test_a_prompt_equal_to_a_cached_key_leaves_one_token(kind: str) -> None:
    """The next request works, whether the entry can be cut back to that or not."""
    tokens = ids(7, 1)
    cache = small(1 << 30)
    cache.put(as_tokens(tokens), "", stored(kind, fed(kind, tokens)))
    hit = cache.take(as_tokens(tokens), "")
    cold = fed(kind, tokens[:-1])
    if kind == "hybrid":
        assert hit is None
        boundary = stored(kind, cold)  # the snapshot at the prompt's boundary is for this
        cache.put(as_tokens(tokens[:-1]), "", boundary)
        hit = cache.take(as_tokens(tokens), "")
    assert hit is not None
    assert hit.count == 6
    ours, theirs = feed(restored(kind, hit.stored), tokens[-1:]), feed(cold, tokens[-1:])
    assert mx.allclose(ours, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["dense", "sliding", "hybrid", "mla", "quantized", "llama4"])
def test_neither_donors_nor_hand_outs_change_each_other(kind: str) -> None:
    """A stored snapshot once shared the live recurrent list; hand-outs are used side by side."""
    tokens = ids(7, 1)
    live = fed(kind, tokens)
    cache = small(1 << 30)
    cache.put(as_tokens(tokens), "", stored(kind, live))
    truth = held_by(live)
    feed(live, [3]), feed(live, [4, 5])  # the donor goes on
    hits = [cache.take(as_tokens([*tokens, 9]), "") for _ in range(2)]
    rows = []
    for hit in hits:
        assert hit is not None
        rows.append(restored(kind, hit.stored))
    feed(rows[0], [5]), feed(rows[0], [6, 7])
    assert same_held(held_by(rows[1]), truth)
    entry = cache.exactly(as_tokens(tokens), "")
    assert entry is not None
    assert same_held(entry.stored.leaves, truth)
    again = cache.take(as_tokens([*tokens, 9]), "")
    assert again is not None
    assert mx.array_equal(feed(restored(kind, again.stored), [8]), feed(rows[1], [8]))


def test_a_wrapped_window_is_served_by_the_snapshot_at_the_prompts_boundary() -> None:
    """Turn 2 of a chat whose answer ran past the window; no ring is sliced by its tokens."""
    kind, prompt, answer = "gemma4_text", ids(7, 1), ids(12, 2)
    cache = small(1 << 30)
    live = fed(kind, prompt[:-1])
    cache.put(as_tokens(prompt[:-1]), "", stored(kind, live))
    for token in [prompt[-1], *answer]:
        feed(live, [token])
    cache.put(as_tokens([*prompt, *answer]), "", stored(kind, live))
    assert len(cache) == 2  # the longer one cannot serve the shorter
    other = [*prompt, *answer[:3], 1, 2]
    hit = cache.take(as_tokens(other), "")
    assert hit is not None
    assert hit.count == len(prompt) - 1
    whole = cache.take(as_tokens([*prompt, *answer, 1]), "")
    assert whole is not None
    assert whole.count == len(prompt) + len(answer)
    rows, own = restored(kind, hit.stored), fed(kind, other[: hit.count])
    tail = other[hit.count :]
    assert mx.allclose(feed(rows, tail), feed(own, tail), rtol=1e-4, atol=1e-4)


def test_two_adapters_never_meet_over_one_prompt() -> None:
    """`identity`: not even where a namespace is called as the other's content."""
    target = target_for("dense")
    first, second = target.namespace(), target.namespace("a")
    cache = small(1_000)
    cache.put(as_tokens([1, 2, 3]), first, state("", [1, 2, 3], "any"))
    assert cache.take(as_tokens([1, 2, 3, 4]), second) is None
    assert cache.take(as_tokens([1, 2, 3, 4]), first) is not None
    assert cache.holding(as_tokens([1, 2]), second) is None
    assert cache.holding(as_tokens([1, 2]), first) is not None


def test_a_fetched_state_is_measured_by_its_own_tokens() -> None:
    """`tier-agree`: whatever a colder tier claims, the tokens decide."""
    entry = kept("", [1, 2, 3], "any")
    for tokens, expected in (([1, 2, 3], 2), ([1, 2, 3, 4], 3), ([1, 5], 1), ([5, 2], 0), ([], 0)):
        assert served_by(entry, as_tokens(tokens), "") == expected
    assert served_by(entry, as_tokens([1, 2, 3, 4]), "adapter") == 0
    whole: Any = kept("", [1, 2, 3], "drafted")
    assert served_by(whole, as_tokens([1, 2, 3]), "") == 0
    assert served_by(whole, as_tokens([1, 2, 3, 4]), "") == 3


def test_what_the_disk_does_not_take_stays(tmp_path: Path) -> None:
    """`tier-agree`: demoted, it would be nowhere."""
    store = Store(tmp_path, IDENTITY, cap_bytes=1, codec=CODEC)
    cache = PromptCache(1000, SSD(store), clock=lambda: 0.0)
    cache.put(as_tokens([1, 2]), "", state("", [1, 2], "any"))
    assert cache.demote(0) == 0
    hit = cache.take(as_tokens([1, 2, 3]), "")
    assert hit is not None
    check_hit(hit, "", [1, 2, 3])


@pytest.mark.parametrize("seed", range(8))
def test_what_waits_for_the_disk_is_found(seed: int, tmp_path: Path) -> None:
    """`tier-agree`: out of the memory and not yet in a file, at whatever step its writing is."""
    draw = random.Random(seed)
    ssd, asked = SSD(Store(tmp_path, IDENTITY, cap_bytes=1 << 30, codec=CODEC)), threading.Event()
    writer = ssd.start(asked.set)
    cache = PromptCache(draw.choice([0, 1000, 1 << 20]), ssd)
    put: list[list[int]] = []
    while_waiting = 0
    for _ in range(150):
        act, tokens = draw.randrange(4), [draw.randrange(2) for _ in range(draw.randint(2, 9))]
        if act == 0:
            cache.put(as_tokens(tokens), "", state("", tokens, "any"))
            put.append(tokens)
        elif act == 1:
            cache.demote(0)
        elif act == 2 and asked.wait(0.01):
            asked.clear()
            writer.serve()
        else:
            found, cold = ssd.store.find(as_tokens(tokens), ""), cache.counts.cold_hits
            hit = cache.take(as_tokens(tokens), "")
            longest = max((common(tokens[:-1], other) for other in put), default=0)
            assert (0 if hit is None else hit.count) == longest
            if hit is not None:
                check_hit(hit, "", tokens)
                durable = 0 if found is None else found.count
                while_waiting += durable < hit.count and cache.counts.cold_hits > cold
    assert while_waiting
    report = ssd.flush()
    assert report is not None
    assert report.durable
