"""The machine of one row: every operation is done by the list, by our rows and by mlx-lm.

A participant that declines, or that broke a promise in a known way, goes on with a state built anew
from the list.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, ClassVar

import mlx.core as mx
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, precondition, rule

from . import contracts
from .contracts import Key, Promise, Violation, cause
from .history import History, Reference, difference
from .participants import Participant, Refused, Theirs, Windows, rebuild
from .setup import Difference, Setup
from .worlds import TOLERANCE, VOCAB, WINDOW, kinds

LONGEST = 5 * WINDOW
MOST = 12
"""Tokens that one operation appends at most: more than a ring holds."""

TOKEN = st.integers(0, VOCAB - 1)
CHUNK = st.lists(TOKEN, min_size=1, max_size=MOST)
METADATA = st.dictionaries(
    st.sampled_from(("model", "model.name", "tokens")),
    st.sampled_from(("", "llama", "1.5")),
    max_size=2,
)


class Role(Enum):
    TRUTH = "list"
    OURS = "our rows"
    THEIRS = "mlx-lm"


@dataclass(frozen=True, slots=True)
class Did:
    """What an operation gave: who goes on, logits [N, V] if any, tokens gone, metadata read."""

    who: Any
    logits: mx.array | None = None
    gone: int = 0
    metadata: Mapping[str, str] = field(default_factory=dict)


Act = Callable[[Any, Role], Did]


class RowMachine(RuleBasedStateMachine):
    """Made for a setup by `row_machine`."""

    setup: ClassVar[Setup]
    saves = Bundle("saves")

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[str] = []
        self.may_quantize = True
        self._folder = TemporaryDirectory()
        self._files = 0

    def teardown(self) -> None:
        self._folder.cleanup()

    @initialize(
        reference=st.runner().flatmap(lambda machine: st.sampled_from(machine.setup.references)),
        chunk=CHUNK,
    )
    def start(self, reference: Reference, chunk: list[int]) -> None:
        """Empty states take their first tokens; the comparer must see one that is another."""
        self.world = reference.world
        self.setup.tally.sequences += 1
        self.steps.append(f"world {self.world.name}")
        self.truth = self.setup.truth(reference)
        self.ours = self.setup.ours(self.world)
        self.theirs = Theirs(self.world, self._new_file)
        self._append("prefill", chunk)
        tokens = list(self.truth.history.tokens)
        tokens[-1] = (tokens[-1] + 1) % VOCAB
        altered = type(self.truth)(reference, History((tuple(tokens),)))
        if self.setup.compare(self.truth, altered) is None:
            raise Difference("the comparer does not see that a token is another one", self.steps)

    @precondition(lambda self: self._room(2 * MOST))
    @rule(chunks=st.lists(CHUNK, min_size=1, max_size=2))
    def prefill(self, chunks: list[list[int]]) -> None:
        for chunk in chunks:
            self._append("prefill", chunk)

    @precondition(lambda self: self._room(4))
    @rule(tokens=st.lists(TOKEN, min_size=1, max_size=4))
    def decode(self, tokens: list[int]) -> None:
        for token in tokens:
            self._append("decode", [token])

    @precondition(lambda self: self._room(3))
    @rule(count=st.integers(1, 3))
    def carry_on(self, count: int) -> None:
        """Each token is the greedy one after the last."""
        token = 0
        for _ in range(count):
            best: Any = mx.argmax(self._append("continue", [token])[-1]).item()
            token = best

    @precondition(lambda self: self._room(MOST))
    @rule(
        windows=st.lists(st.lists(TOKEN, min_size=1, max_size=6), min_size=1, max_size=2),
        rejected=st.integers(0, MOST),
    )
    def draft(self, windows: list[list[int]], rejected: int) -> None:
        rejected = min(rejected, sum(map(len, windows)))
        self.steps.append(f"draft {windows}, reject the last {rejected}")
        instead = partial(_draft, windows)
        self._take("draft", Promise.TRIM, instead(rejected), instead=instead)

    @rule(n=st.integers(0, LONGEST))
    def trim(self, n: int) -> None:
        n = min(n, len(self.truth.history))
        self.steps.append(f"trim {n}")
        if found := contracts.refused_trim_does_nothing(self.theirs.caches, n):
            self.setup.violated(found, self.steps)
        self._take("trim", Promise.TRIM, _trim(n), instead=_trim)

    @rule(target=saves, metadata=METADATA)
    def save(self, metadata: dict[str, str]) -> Mapping[Role, Any]:
        self.steps.append(f"save with metadata {metadata}")
        saved: dict[Role, Any] = {}

        def act(who: Any, role: Role) -> Did:
            saved[role] = who.save(metadata)
            return Did(who)

        self._take("save", Promise.LOAD, act)
        return saved

    @rule(saved=saves, overwritten=st.booleans())
    def restore(self, saved: Mapping[Role, Any], overwritten: bool) -> None:
        over = ", then write over the file" if overwritten else ""
        history, metadata = saved[Role.TRUTH]
        self.may_quantize = True
        self.steps.append(f"restore what was saved with metadata {metadata}{over}")

        def act(who: Any, role: Role) -> Did:
            if role not in saved:
                raise Refused("it could not be saved")
            return Did(who, metadata=who.restore(saved[role], overwritten))

        blame = contracts.load_cause(self.world.fresh(), not len(history), overwritten)
        self._take("restore", Promise.LOAD, act, blame=blame)

    @rule(junk=CHUNK, original=st.booleans())
    def copy(self, junk: list[int], original: bool) -> None:
        one, other = ("original", "copy") if original else ("copy", "original")
        self.steps.append(f"copy, go on with the {one}, append {junk} to the {other}")

        def act(who: Any, _: Role) -> Did:
            twin = who.copy()
            stays, goes = (who, twin) if original else (twin, who)
            goes.append(junk)
            return Did(stays)

        self._take("copy", Promise.COPY, act)

    @rule(metadata=METADATA, overwritten=st.booleans())
    def reload(self, metadata: dict[str, str], overwritten: bool) -> None:
        """Save and restore at once."""
        self.restore(self.save(metadata), overwritten)

    @precondition(lambda self: self.may_quantize)
    @rule()
    def quantize(self) -> None:
        """Once, unless a state from before is restored."""
        self.steps.append("quantize")
        self.may_quantize = False
        before = copy.deepcopy(self.theirs.caches)

        def act(who: Any, role: Role) -> Did:
            who.quantize()
            if role is Role.THEIRS:
                found = contracts.quantized_is_close(before, who.caches)
                if found:
                    self.setup.violated(found, self.steps)
            return Did(who)

        self._take("quantize", Promise.QUANTIZE, act)

    def _append(self, kind: str, tokens: list[int]) -> mx.array:
        self.steps.append(f"{kind} {tokens}")
        act: Act = lambda who, _: Did(who, who.append(tokens))  # noqa: E731
        logits = self._take(kind, Promise.HOLDS, act).logits
        assert logits is not None
        return logits

    def _take(
        self,
        kind: str,
        promise: Promise,
        act: Act,
        *,
        blame: tuple[str, str] | None = None,
        instead: Callable[[int], Act] | None = None,
    ) -> Did:
        """One operation, by everyone; then everyone is asked what it holds.

        `instead(m)` is the operation had only m tokens been taken back: mlx-lm may say so.
        """
        key = Key(promise, *(blame or cause(promise, self.theirs.caches)))
        self.setup.tally.operation(kind, kinds(self.theirs.caches))
        before = self.truth.copy()
        wanted: Did | None = None
        with suppress(Refused):
            wanted = act(self.truth, Role.TRUTH)
        if wanted:
            self.truth = wanted.who
        ours = self._ours(kind, act, wanted)
        theirs = self._theirs(kind, key, act, wanted, before, instead)
        if ours and theirs and (found := _apart(theirs, ours)):
            raise Difference(f"our rows and mlx-lm: {kind}: {found}", self.steps)
        return wanted or Did(self.truth)

    def _ours(self, kind: str, act: Act, wanted: Did | None) -> Did | None:
        did, found = None, None
        try:
            did = act(self.ours, Role.OURS)
        except Refused as error:
            self.setup.tally.refused[f"our rows: {kind}: {error}"] += 1
            self.ours = self.setup.ours(self.world)
            rebuild(self.ours, self.truth.history)
        except Exception as error:
            found = f"raised {error!r}"
        else:
            self.ours = did.who
            found = _outcome(wanted, did)
        if found := found or self._differs(self.truth, self.ours):
            raise Difference(f"our rows: {kind}: {found}", self.steps)
        return did

    def _theirs(
        self,
        kind: str,
        key: Key,
        act: Act,
        wanted: Did | None,
        before: Participant,
        instead: Callable[[int], Act] | None,
    ) -> Did | None:
        did = None
        try:
            did = act(self.theirs, Role.THEIRS)
            self.theirs, expected = did.who, self.truth
            if wanted and instead and did.gone != wanted.gone:
                expected = instead(did.gone)(before, Role.TRUTH).who
            found = _outcome(wanted, did) or self._differs(expected, self.theirs)
        except Refused as error:
            self._decline(f"mlx-lm: {kind}: {error}")
            return None
        except Difference:
            raise
        except Exception as error:
            found = f"raised {error!r}"
        if found:
            if not key.condition:  # what is to blame may have come up in mid-operation
                key = Key(key.promise, *cause(key.promise, self.theirs.caches))
            self.setup.violated(Violation(key, found), self.steps)
            self._new_theirs()
            return None
        if did and wanted and did.metadata != wanted.metadata:
            changed = contracts.metadata_changed(wanted.metadata, did.metadata)
            self.setup.violated(changed, self.steps)
        if did and wanted and did.gone != wanted.gone:
            self._decline(f"mlx-lm: {kind}: it takes back fewer tokens")
            return None
        return did

    def _differs(self, expected: Participant, actual: Participant) -> str | None:
        self.setup.tally.compared += 1
        return self.setup.compare(expected, actual)

    def _decline(self, what: str) -> None:
        self.setup.tally.refused[what] += 1
        self._new_theirs()

    def _new_theirs(self) -> None:
        self.theirs = Theirs(self.world, self._new_file)
        rebuild(self.theirs, self.truth.history)

    def _room(self, tokens: int) -> bool:
        return len(self.truth.history) + tokens <= LONGEST

    def _new_file(self) -> Path:
        self._files += 1
        return Path(self._folder.name, f"{self._files}.safetensors")


def row_machine(setup: Setup) -> type[RowMachine]:
    return type("RowMachine", (RowMachine,), {"setup": setup})


def _draft(windows: Windows, rejected: int) -> Act:
    def act(who: Any, _: Role) -> Did:
        logits, gone = who.draft(windows, sum(map(len, windows)) - rejected)
        return Did(who, logits, gone)

    return act


def _trim(n: int) -> Act:
    return lambda who, _: Did(who, gone=who.trim(n))


def _outcome(wanted: Did | None, did: Did) -> str | None:
    return _apart(wanted, did) if wanted else "was done though it cannot be"


def _apart(expected: Did, actual: Did) -> str | None:
    """How the logits of two outcomes differ, in words."""
    if expected.logits is None or actual.logits is None:
        return None
    return difference(expected.logits, actual.logits, TOLERANCE)
