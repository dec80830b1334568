"""The machine of one to three rows in mlx-lm's batch caches; each row is held to its own list.

The engine has no batches of its own here: mlx-lm's merge, extend, filter and extract, ragged
prefill as `PromptProcessingBatch.prompt` does it (mlx_lm/generate.py), files, copies and trims.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, ClassVar

import mlx.core as mx
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from mlx_lm.models.cache import load_prompt_cache, save_prompt_cache, trim_prompt_cache

from engine.state.layouts import Cache

from .contracts import Key, Promise, Violation, batch_key, padded_prompt_key
from .history import PROBE, Chunk, History, Reference, ask, difference
from .participants import counts
from .setup import Setup
from .worlds import TOLERANCE, VOCAB, WINDOW, kinds

BATCH_PROBE: tuple[Chunk, ...] = (PROBE[1], PROBE[0])
"""The wide part first: alone, it would always come behind a token that may turn a ring."""

MOST_ROWS = 3
LONGEST = 4 * WINDOW
MOST = 10

TOKEN = st.integers(0, VOCAB - 1)
TOKENS = st.lists(TOKEN, min_size=MOST_ROWS, max_size=MOST_ROWS)
CHUNK = st.lists(TOKEN, min_size=0, max_size=MOST)
RAGGED = st.lists(
    st.lists(TOKEN, min_size=1, max_size=MOST), min_size=MOST_ROWS, max_size=MOST_ROWS
)


class BatchMachine(RuleBasedStateMachine):
    """Made for a setup by `batch_machine`."""

    setup: ClassVar[Setup]

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[str] = []
        self._folder = TemporaryDirectory()
        self._from_file = False

    def teardown(self) -> None:
        self._folder.cleanup()

    @initialize(
        reference=st.runner().flatmap(lambda machine: st.sampled_from(machine.setup.references)),
        chunks=st.lists(CHUNK, min_size=1, max_size=2),
    )
    def start(self, reference: Reference, chunks: list[list[int]]) -> None:
        self.reference, self.world = reference, reference.world
        self.setup.tally.sequences += 1
        self.steps.append(f"world {self.world.name}, rows {chunks}")
        self.rows = [History().append(chunk) if chunk else History() for chunk in chunks]
        self.caches: list[Cache] = []
        self._take("merge", Promise.MERGE, self._merge_anew, self.rows)

    @precondition(lambda self: self._room(1))
    @rule(tokens=TOKENS)
    def decode(self, tokens: list[int]) -> None:
        self._forward("decode", [[token] for token in tokens])

    @precondition(lambda self: self._room(4))
    @rule(tokens=TOKENS, width=st.integers(2, 4))
    def window(self, tokens: list[int], width: int) -> None:
        self._forward("window", [[(t + i) % VOCAB for i in range(width)] for t in tokens])

    @precondition(lambda self: self._room(MOST))
    @rule(chunks=RAGGED, step=st.sampled_from((2048, 3)))
    def prompt(self, chunks: list[list[int]], step: int) -> None:
        """Rows of different length, padded on the right, at most `step` tokens a forward."""
        chunks = chunks[: len(self.rows)]
        self.steps.append(f"prompt {chunks}, {step} at a time")
        lengths = [len(chunk) for chunk in chunks]
        longest = max(lengths)
        padding = [longest - length for length in lengths]
        tokens = mx.array([c + [0] * pad for c, pad in zip(chunks, padding, strict=True)])

        def act() -> None:
            if any(padding):
                for cache in self.caches:
                    cache.prepare(lengths=lengths, right_padding=padding)
            for start in range(0, longest, step):
                self.world.model(tokens[:, start : start + step], cache=self.caches)
            for cache in self.caches:
                cache.finalize()  # without padding it has nothing to do

        known = padded_prompt_key(self.caches, longest, step) if any(padding) else None
        self._take("prompt", Promise.MERGE, act, self._longer(chunks), known)

    @precondition(lambda self: len(self.rows) < MOST_ROWS)
    @rule(chunk=CHUNK)
    def extend(self, chunk: list[int]) -> None:
        self.steps.append(f"extend by a row {chunk}")
        row = History().append(chunk) if chunk else History()

        def act() -> None:
            for cache, other in zip(self.caches, self._merged([row]), strict=True):
                cache.extend(other)

        self._take("extend", Promise.MERGE, act, [*self.rows, row])

    @precondition(lambda self: len(self.rows) > 1)
    @rule(gone=st.integers(0, MOST_ROWS - 1))
    def filter(self, gone: int) -> None:
        keep = [row for row in range(len(self.rows)) if row != gone % len(self.rows)]
        self.steps.append(f"filter, keep rows {keep}")

        def act() -> None:
            for cache in self.caches:
                cache.filter(keep)

        self._take("filter", Promise.MERGE, act, [self.rows[row] for row in keep])

    @rule()
    def reload(self) -> None:
        self.steps.append("save and load")
        file = str(Path(self._folder.name, f"{len(self.steps)}.safetensors"))

        def act() -> None:
            save_prompt_cache(file, self.caches)
            self.caches = load_prompt_cache(file)
            mx.eval([cache.state for cache in self.caches])
            self._from_file = True

        self._take("reload", Promise.LOAD, act, self.rows)

    @rule(tokens=TOKENS, original=st.booleans())
    def copy(self, tokens: list[int], original: bool) -> None:
        one, other = ("original", "copy") if original else ("copy", "original")
        self.steps.append(f"copy, go on with the {one}, append {tokens} to the {other}")
        columns = mx.array(tokens[: len(self.rows)])[:, None]

        def act() -> None:
            twin = copy.deepcopy(self.caches)
            stays, goes = (self.caches, twin) if original else (twin, self.caches)
            mx.eval(self.world.model(columns, cache=goes))
            self.caches = stays

        self._take("copy", Promise.COPY, act, self.rows)

    @rule(n=st.integers(1, MOST))
    def trim(self, n: int) -> None:
        """No row is asked for more than it holds."""
        n = min(n, *map(len, self.rows))
        self.steps.append(f"trim {n}")
        gone = 0

        def act() -> None:
            nonlocal gone
            said: Any = trim_prompt_cache(self.caches, n)  # annotated as a list, returns a count
            gone = said

        self._take("trim", Promise.TRIM, act, lambda: self._shorter(gone))
        if gone != n:
            self.setup.tally.refused["mlx-lm: trim of a batch: it takes back fewer tokens"] += 1

    def _forward(self, kind: str, chunks: list[list[int]]) -> None:
        chunks = chunks[: len(self.rows)]
        self.steps.append(f"{kind} {chunks}")

        def act() -> None:
            self.world.model(mx.array(chunks), cache=self.caches)

        self._take(kind, Promise.MERGE, act, self._longer(chunks))

    def _take(
        self,
        kind: str,
        promise: Promise,
        act: Callable[[], None],
        rows: list[History] | Callable[[], list[History]],
        known: Key | None = None,
    ) -> None:
        """One operation; `rows` are the lists after it. Then every row is asked what it holds."""
        key = known or batch_key(promise, self.caches, self.world.by_chunks)
        self.setup.tally.operation(f"batch: {kind}", kinds(self.caches))
        error: Exception | None = None
        try:
            act()
        except Exception as raised:
            error = raised
        self.rows = rows() if callable(rows) else rows
        if not key.condition:
            key = batch_key(promise, self.caches, self.world.by_chunks)
        try:
            found = f"raised {error!r}" if error else self._differs()
        except Exception as raised:
            error, found = raised, f"then raised {raised!r}"
        if self._from_file and isinstance(error, AttributeError):
            key = Key(Promise.LOAD, type(error.obj).__name__, "attribute lost")
        if found:
            self.setup.violated(Violation(key, f"{kind}: {found}"), self.steps)
            self._merge_anew()

    def _differs(self) -> str | None:
        """Together in the batch, then each alone as `extract` gives it; all on copies."""
        self.setup.tally.compared += 2 * len(self.rows)
        together = self._together()
        for number, row in enumerate(self.rows):
            expected = self.reference.logits(row, BATCH_PROBE)
            if found := difference(expected, together[number], TOLERANCE):
                return f"row {number} in the batch: {found}"
            if not any(map(len, self.rows)):
                continue  # nothing was stored yet, and there is nothing to extract from
            alone = [cache.extract(number) for cache in copy.deepcopy(self.caches)]
            self.setup.tally.classes.update(kinds(alone))
            if counts(alone) - {len(row)}:
                return f"row {number}, extracted, counts {sorted(counts(alone))} of {len(row)}"
            if found := difference(self.reference.answer(row), ask(self.world, alone), TOLERANCE):
                return f"row {number}, extracted: {found}"
        return None

    def _together(self) -> mx.array:
        """The logits [B, P, V] of the probe, the same for every row."""
        caches, count = copy.deepcopy(self.caches), len(self.rows)
        asked: Any = [
            self.world.model(mx.array([list(tokens)] * count), cache=caches)
            for tokens in BATCH_PROBE
        ]
        return mx.concatenate(asked, axis=1)

    def _merge_anew(self) -> None:
        self.caches = self._merged(self.rows)
        self._from_file = False

    def _merged(self, rows: Sequence[History]) -> list[Cache]:
        alone = [self.reference.fill(row) for row in rows]
        return [layer[0].merge(list(layer)) for layer in zip(*alone, strict=True)]

    def _longer(self, chunks: Sequence[Sequence[int]]) -> list[History]:
        return [row.append(chunk) for row, chunk in zip(self.rows, chunks, strict=True)]

    def _shorter(self, n: int) -> list[History]:
        return [row.first(len(row) - n) for row in self.rows]

    def _room(self, tokens: int) -> bool:
        return max(map(len, self.rows)) + tokens <= LONGEST


def batch_machine(setup: Setup) -> type[BatchMachine]:
    return type("BatchMachine", (BatchMachine,), {"setup": setup})
