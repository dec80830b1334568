"""The machine of two tiers: prefixes are put, taken, evicted, demoted, damaged, found by a restart.

Beside them stand the list model of `tier_list.py` and mlx-lm's prompt cache, see `lru.py`. What is
handed out goes on as a request would, and must say what a state says that never was in a tier; the
entries must stay what they were, bit by bit.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, ClassVar

import mlx.core as mx
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from engine.cache.codecs import CODEC
from engine.cache.files import Descriptor, Files
from engine.cache.prompt_cache import Hit, PromptCache
from engine.cache.ssd import SSD
from engine.cache.store import Store
from engine.cache.stored import Stored
from engine.state.checkpoint import Checkpoint
from engine.state.membership import no_row_form
from engine.state.rows import Rows

from .entries import (
    IDENTITY,
    LONGEST,
    as_tokens,
    companion,
    cut,
    differing_reuse,
    drafting,
    key_of,
    line_of,
    same,
    says_otherwise,
    sizes_of,
)
from .history import Chunk, History, Reference, difference
from .lru import TheirTier
from .namespaces import Namespace, namespaces_of
from .setup import Difference, Setup
from .tier_list import MISS, Line, Outcome, TierList
from .worlds import TOLERANCE, VOCAB, kinds

TOKEN = st.integers(0, VOCAB - 1)
TAIL = st.lists(TOKEN, max_size=9)
WIDTHS = st.lists(st.sampled_from((1, 1, 2, 5, 12)), max_size=4)
PROMPT = st.tuples(
    st.integers(0, 5),
    st.sampled_from((LONGEST, LONGEST, 0)) | st.integers(1, LONGEST),
    TAIL,
    st.sampled_from((None, None, None, 0, 1, 2)),
)
"""Which of the latest texts that were put, how much of its front, and what follows; its namespace
or that one."""


class Unsynced(Files):
    """No power is lost here."""

    def sync(self, file: Descriptor) -> None:
        pass

    def sync_folder(self, folder: Descriptor) -> None:
        pass


class TierMachine(RuleBasedStateMachine):
    """Made for a setup by `tier_machine`.

    Laws `longest-prefix`, `tier-agree`, `roundtrip`, `identity`, `cap`, `supersede`, `damage`.
    """

    setup: ClassVar[Setup]

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[str] = []
        self.texts: list[tuple[Namespace, Chunk]] = []
        self._folder = TemporaryDirectory()
        self._files = 0

    def teardown(self) -> None:
        self._folder.cleanup()

    @initialize(
        reference=st.runner().flatmap(lambda machine: st.sampled_from(machine.setup.references)),
        ram=st.sampled_from((3, 2, 2, 1, 0)),
        cold=st.sampled_from((1, 1, 0, 0, None)),
    )
    def start(self, reference: Reference, ram: int, cold: int | None) -> None:
        self.reference, self.world = reference, reference.world
        self.setup.tally.sequences += 1
        self.namespaces = namespaces_of(self.world)
        self.caps = sizes_of(reference).caps(ram, cold)
        names = [n.name or "plain" for n in self.namespaces]
        self.steps.append(f"world {self.world.name}, caps {self.caps}, namespaces {names}")
        self.texts = [(self.namespaces[0], ())]
        self.theirs = TheirTier(reference, self._violated, self._new_file)
        self._begin()

    @rule(prompt=PROMPT, widths=WIDTHS, drafted=st.booleans())
    def put(self, prompt: Any, widths: list[int], drafted: bool) -> None:
        namespace, tokens = self._asked(prompt)
        chunks = cut(tokens, widths)
        self._step("put", f"{chunks} in {namespace.name!r}" + drafted * " with a drafter's")
        rows, history = self._filled(namespace, chunks)
        self._keep(namespace, rows, 0, history, drafted)
        append(rows, (7,))  # the donor goes on
        self.theirs.put(namespace, self.theirs.feed(namespace, None, chunks))
        self._settled()

    @rule(
        prompt=PROMPT,
        widths=WIDTHS,
        more=st.lists(TOKEN, min_size=1, max_size=3),
        keep=st.booleans(),
        drafted=st.booleans(),
    )
    def take(
        self,
        prompt: Any,
        widths: list[int],
        more: list[int],
        keep: bool,
        drafted: bool,
    ) -> None:
        """Go on from what is found; with `keep` the state then is put, as a row's that retires."""
        namespace, tokens = self._asked(prompt)
        kept = keep * (", keep it" + drafted * " with a drafter's")
        self._step("take", f"{list(tokens)} of {namespace.name!r}, then {widths} and {more}{kept}")
        hit, line = self._taken(namespace, tokens)
        count = 0 if hit is None else hit.count
        history = History() if line is None else namespace.first(line.history, count)
        chunks = [*cut(tokens[count:], widths), *((token,) for token in more)]
        if hit is not None or keep:
            held = () if hit is None else hit.stored.leaves
            rows = namespace.rows(self.world, held, count)
            history = self._goes_on(namespace, rows, history, chunks)
            if keep and len(history) <= LONGEST:
                self._keep(namespace, rows, 0, history, drafted)
        fetched = self.theirs.fetch(namespace, tokens)
        had = 0 if fetched is None else len(fetched.history)
        self.setup.tally.takes["mlx-lm: hit" if had else "mlx-lm: miss"] += 1
        if keep and len(history) <= LONGEST:
            rest = [*cut(tokens[had:], widths), *((token,) for token in more)]
            self.theirs.put(namespace, self.theirs.feed(namespace, fetched, rest))
        self._settled()

    @precondition(lambda self: not no_row_form(self.world.fresh()))
    @rule(prompts=st.lists(PROMPT, min_size=2, max_size=3), width=st.integers(1, 10))
    def put_extracts(self, prompts: list[Any], width: int) -> None:
        """Rows that went on together for a window of tokens are put one by one."""
        asked = [self._asked(prompt) for prompt in prompts]
        namespace, texts = asked[0][0], [tokens for _, tokens in asked]
        windows = [tuple((row + i) % VOCAB for i in range(width)) for row in range(len(texts))]
        if any(len({namespace.due(len(text) + n) for text in texts}) > 1 for n in (0, width)):
            namespace = self.namespaces[0]  # rows that are packed stand beside none that are not
        self._step("put extracts", f"of {texts} after {windows} in {namespace.name!r}")
        alone = [self._filled(namespace, [text]) for text in texts]
        rows, histories = alone[0][0], [history for _, history in alone]
        for other, _ in alone[1:]:
            rows = rows.joined(other)
        append(rows, *map(namespace.ids, windows))
        histories = [namespace.append(*h) for h in zip(histories, windows, strict=True)]
        for row, history in enumerate(histories):
            self._keep(namespace, rows, row, history, False)
        append(rows, *[(7,)] * len(texts))  # the donors go on
        self.theirs.put(namespace, self.theirs.feed(namespace, None, histories[-1].chunks))
        self._settled()

    @precondition(lambda self: self.model.ram)
    @rule(idle=st.sampled_from((0, 0, 1, 3)), entries=st.integers(0, 2))
    def demote(self, idle: int, entries: int) -> None:
        """mlx-lm has no colder tier, and evicts."""
        self._step("demote", f"what is idle for {idle} operations; mlx-lm keeps {entries}")
        self.cache.demote(idle)
        self._now_on_disk()
        self.model.demote(idle)
        self.theirs.shrink(entries)
        self._settled()

    @precondition(lambda self: self.ssd is not None and self.model.ram)
    @rule(which=st.integers(0, 5), front=st.sampled_from((LONGEST, LONGEST, 5)))
    def make_durable(self, which: int, front: int) -> None:
        """A text that was put, or its front; with it what was asked for before and is not yet."""
        namespace, tokens = self._asked((which, front, [], None))
        self._step("flush", f"{list(tokens)} of {namespace.name!r}")
        assert self.ssd is not None
        self.ssd.schedule(as_tokens(tokens), namespace.name)
        report = self.ssd.flush()
        self._now_on_disk()
        self.model.schedule(namespace, tokens)
        durable = self.model.flush()
        if report is None or (report.durable != durable and not self.model.doubtful):
            self._wrong(f"durable is {durable}, the report says {report}")
        if report is not None and report.durable:
            self.model.dirty = {}
        self._settled()

    @precondition(lambda self: self.model.ram and self.model.cold)
    @rule()
    def restart(self) -> None:
        self._step("restart", "")
        self._open()
        self._now_on_disk()
        self.model.restart()
        self.theirs.restart()
        self._settled()

    @precondition(lambda self: self.model.sound)
    @rule(
        number=st.integers(0, 5),
        how=st.sampled_from(("flip", "flip", "cut", "remove")),
        place=st.floats(0, 1, exclude_max=True),
        bit=st.integers(0, 7),
    )
    def damage(self, number: int, how: str, place: float, bit: int) -> None:
        line = self.model.sound[number % len(self.model.sound)]
        self._step("damage", f"{how} the file of {list(line.tokens)} at {place:.3f}, bit {bit}")
        assert line.file is not None
        data = bytearray(line.file.read_bytes())
        at = int(place * len(data))
        if how == "flip":
            data[at] ^= 1 << bit
        elif how == "cut":
            del data[at:]
        if how == "remove":
            line.file.unlink()
        else:
            status = line.file.stat()
            line.file.write_bytes(data)
            os.utime(line.file, ns=(status.st_atime_ns, status.st_mtime_ns))  # not a use
        line.harmed = True

    def _begin(self) -> None:
        """Both tiers are empty, and so is the list."""
        shutil.rmtree(self._tier_folder, ignore_errors=True)
        self.keys: dict[Path, tuple[str, Chunk]] = {}
        self.model = TierList(*self.caps)
        self._open()

    def _open(self) -> None:
        """A RAM tier that is empty, before whatever is in the folder."""
        _, cold_cap = self.caps
        self.ssd = None
        if cold_cap is not None:
            self.store = Store(
                self._tier_folder, IDENTITY, cap_bytes=cold_cap, codec=CODEC, files=Unsynced()
            )
            self.ssd = SSD(self.store)
        self.cache = PromptCache(self.caps[0], self.ssd, clock=lambda: self.model.now_s)
        if self.ssd is not None:
            self.ssd.serve_from(self.cache.holding)

    def _taken(self, namespace: Namespace, tokens: Chunk) -> tuple[Hit | None, Line | None]:
        """What ours hand out, which must be as long as it may be, and the entry it is from."""
        allowed = self.model.outcomes(namespace, tokens)
        before = self.cache.counts
        hit = self.cache.take(as_tokens(tokens), namespace.name)
        outcome: Outcome = MISS
        if hit is not None:
            cold = self.cache.counts.cold_hits > before.cold_hits
            outcome = ("SSD" if cold else "RAM", hit.count)
        self.setup.tally.takes[outcome[0]] += 1
        if outcome not in allowed:
            self._wrong(f"{outcome}, expected {' or '.join(map(str, sorted(allowed)))}")
        self._now_on_disk()
        line = self.model.took(namespace, tokens, outcome)
        if hit is None or line is None:
            return hit, None
        if len(hit.checkpoints) != line.drafted:
            self._wrong(f"{len(hit.checkpoints)} drafter states of {line.drafted:d}")
        for checkpoint in hit.checkpoints:
            history = namespace.first(line.history, hit.count)
            if found := self._companion_differs(namespace, checkpoint, history):
                self._wrong(f"the drafter's state: {found}")
        return hit, line

    def _companion_differs(
        self, namespace: Namespace, checkpoint: Checkpoint, history: History
    ) -> str | None:
        if checkpoint.processed_tokens != len(history):
            return f"stands behind {checkpoint.processed_tokens} tokens, not {len(history)}"
        caches = drafting(self.world, namespace, checkpoint)
        return says_otherwise(self.reference, namespace, caches, history)

    def _keep(
        self, namespace: Namespace, rows: Rows, row: int, history: History, drafted: bool
    ) -> None:
        """Put one row's state."""
        count = len(history)
        caches = rows.lowered(row)
        stored = Stored.of(caches, count, namespace.packing)
        if found := differing_reuse(stored, namespace):
            self._wrong(f"a state of {count} tokens: {found}")
        drafts = (companion(caches, count),) if drafted else ()
        line = line_of(namespace, history, stored, drafts)
        self.cache.put(as_tokens(history.tokens), namespace.name, stored, drafts)
        self._now_on_disk()
        self.model.put(line)
        self.texts.append((namespace, history.tokens))

    def _goes_on(
        self, namespace: Namespace, rows: Rows, history: History, chunks: Sequence[Chunk]
    ) -> History:
        """Some more forwards, each of which must say what it should."""
        for chunk in chunks:
            ids = namespace.ids(chunk)
            expected = self.reference.logits(namespace.seen(history), (ids,))
            if found := difference(expected, append(rows, ids), TOLERANCE):
                self._wrong(f"what goes on behind {len(history)} tokens: {found}")
            history = namespace.append(history, chunk)
        if found := says_otherwise(self.reference, namespace, rows.caches, history):
            self._wrong(f"what has gone on to {len(history)} tokens: {found}")
        return history

    def _filled(self, namespace: Namespace, chunks: Sequence[Chunk]) -> tuple[Rows, History]:
        """A row that was given the chunks."""
        rows, history = namespace.rows(self.world), History()
        for chunk in chunks:
            append(rows, namespace.ids(chunk))
            history = namespace.append(history, chunk)
        return rows, history

    def _now_on_disk(self) -> None:
        """Which entry is in which file, as it was before anybody damaged it."""
        files = set(self._tier_folder.rglob("*.safetensors"))
        self.keys = {file: self.keys.get(file) or key_of(file) for file in sorted(files)}
        self.model.note({key: file for file, key in self.keys.items()})

    def _settled(self) -> None:
        """Both tiers are what the list says, and every entry is still what was put."""
        self.setup.tally.compared += 1
        if found := self.model.agree():
            self._wrong(found)
        if self.model.lost:
            self.setup.tally.refused["the list model: what became of a damaged file"] += 1
            self._begin()
            return
        lines = self.model.ram
        nbytes = sum(line.nbytes for line in lines)
        if (len(self.cache), self.cache.nbytes) != (len(lines), nbytes) or nbytes > self.caps[0]:
            self._wrong(
                f"{len(self.cache)} entries of {self.cache.nbytes} bytes in RAM, "
                f"expected {len(lines)} of {nbytes}, cap {self.caps[0]}"
            )
        for line in lines:
            kept = self.cache.exactly(as_tokens(line.tokens), line.namespace.name)
            if kept is None:
                self._wrong(f"the entry of {list(line.tokens)} is not in RAM any more")
                return
            drafts = [array for c in kept.checkpoints for array in c.attachment.tensors]
            now = [*kept.stored.arrays, *drafts]
            if len(now) != len(line.arrays) or not all(map(same, now, line.arrays)):
                self._wrong(f"the entry of {list(line.tokens)} has changed")
        on_disk = sum(file.stat().st_size for file in self.keys if file.exists())
        if self.caps[1] is not None and on_disk > self.caps[1]:
            self._wrong(f"{on_disk} bytes of files, cap {self.caps[1]}")
        self.theirs.check()

    def _step(self, kind: str, what: str) -> None:
        self.steps.append(f"{kind} {what}".strip())
        self.model.now_s += 1
        self.setup.tally.operation(f"tiers: {kind}", kinds(self.world.fresh()))

    def _wrong(self, what: str) -> None:
        raise Difference(f"our tiers: {what}", self.steps)

    def _violated(self, violation: Any) -> None:
        self.setup.violated(violation, self.steps)

    def _asked(self, prompt: Any) -> tuple[Namespace, Chunk]:
        which, front, tail, other = prompt
        namespace, text = self.texts[-1 - which % len(self.texts)]
        if other is not None:
            namespace = self.namespaces[other % len(self.namespaces)]
        return namespace, (*text[:front], *tail)[:LONGEST] or (0,)

    @property
    def _tier_folder(self) -> Path:
        return Path(self._folder.name, "ssd")

    def _new_file(self) -> Path:
        self._files += 1
        return Path(self._folder.name, f"{self._files}.safetensors")


def append(rows: Rows, *ids: Chunk) -> mx.array:
    """One forward of as many ids for each row; the first one's logits [N, V]."""
    logits = rows.forward(mx.array(list(map(list, ids))))
    mx.eval(logits, rows.arrays())
    return logits[0]


def tier_machine(setup: Setup) -> type[TierMachine]:
    return type("TierMachine", (TierMachine,), {"setup": setup})
