"""The engine's two tiers beside the list of what they hold: each operation is done to both."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

import mlx.core as mx

from engine.cache.codecs import CODEC
from engine.cache.prompt_cache import Hit, PromptCache
from engine.cache.ssd import SSD
from engine.cache.store import Store
from engine.cache.stored import Stored
from engine.kept import as_tokens
from engine.state.rows import Rows

from .disk.faults import Unsynced
from .entries import (
    IDENTITY,
    companion,
    differing_reuse,
    drafting,
    key_of,
    line_of,
    same,
    says_otherwise,
)
from .history import Chunk, History, Reference, difference
from .namespaces import Namespace
from .setup import Difference
from .tally import Tally
from .tier_list import MISS, Key, Line, TierList
from .worlds import TOLERANCE


class OurTiers:
    """`PromptCache` before `SSD`, or before nothing, and `model`, the list of both.

    Every method raises `Difference` at the end of `steps` where they part, or where a tier raises.
    """

    def __init__(
        self,
        reference: Reference,
        caps: tuple[int, int | None],
        folder: Path,
        tally: Tally,
        steps: Sequence[str],
    ) -> None:
        self._reference, self._caps, self._folder = reference, caps, folder
        self._tally, self._steps = tally, steps
        self._begin()

    def put(
        self, namespace: Namespace, rows: Rows, row: int, history: History, drafted: bool
    ) -> None:
        """One row's state, which is that of the history."""
        count = len(history)
        with self._whole():
            caches = rows.lowered(row)
            stored = Stored.of(caches, count, namespace.packing)
        if found := differing_reuse(stored, namespace):
            self._wrong(f"a state of {count} tokens: {found}")
        drafts = (companion(caches, count),) if drafted else ()
        line = line_of(namespace, history, stored, drafts)
        with self._whole():
            self.cache.put(as_tokens(history.tokens), namespace.name, stored, drafts)
        self._look()
        self.model.put(line)

    def take(self, namespace: Namespace, tokens: Chunk) -> tuple[Rows, History] | None:
        """A row that holds the first of the tokens: as many as may be."""
        allowed = self.model.outcomes(namespace, tokens)
        before, outcome = self.cache.counts, MISS
        with self._whole():
            hit = self.cache.take(as_tokens(tokens), namespace.name)
        if hit is not None:
            cold = self.cache.counts.cold_hits > before.cold_hits
            outcome = ("SSD" if cold else "RAM", hit.count)
        self._tally.takes[outcome[0]] += 1
        if outcome not in allowed:
            self._wrong(f"{outcome}, expected {' or '.join(map(str, sorted(allowed)))}")
        self._look()
        line = self.model.took(namespace, tokens, outcome)
        if hit is None or line is None:
            return None
        return self._handed_out(namespace, hit, line)

    def _handed_out(self, namespace: Namespace, hit: Hit, line: Line) -> tuple[Rows, History]:
        history = namespace.first(line.history, hit.count)
        if len(hit.checkpoints) != line.drafted:
            self._wrong(f"{len(hit.checkpoints)} drafter states, expected {line.drafted:d}")
        for checkpoint in hit.checkpoints:
            if checkpoint.processed_tokens != hit.count:
                at = checkpoint.processed_tokens
                self._wrong(f"a drafter's state of {at} tokens with one of {hit.count}")
            with self._whole():
                caches = drafting(self._reference.world, namespace, checkpoint)
            if found := says_otherwise(self._reference, namespace, caches, history):
                self._wrong(f"a drafter's state: {found}")
        with self._whole():
            return namespace.rows(self._reference.world, hit.stored.leaves, hit.count), history

    def go_on(
        self, namespace: Namespace, rows: Rows, history: History, chunks: Sequence[Chunk]
    ) -> History:
        """Some more forwards of a row, each of which must say what it should."""
        for chunk in chunks:
            ids = namespace.ids(chunk)
            expected = self._reference.logits(namespace.seen(history), (ids,))
            with self._whole():
                logits = append(rows, ids)
            if found := difference(expected, logits, TOLERANCE):
                self._wrong(f"what goes on behind {len(history)} tokens: {found}")
            history = namespace.append(history, chunk)
        if found := says_otherwise(self._reference, namespace, rows.caches, history):
            self._wrong(f"what has gone on to {len(history)} tokens: {found}")
        return history

    def demote(self, idle: int) -> None:
        with self._whole():
            self.cache.demote(idle)
        self._look()
        self.model.demote(idle)

    def flush(self, namespace: Namespace, tokens: Chunk) -> None:
        """Make those durable, with what was to be before and is not yet."""
        assert self.ssd is not None
        with self._whole():
            self.ssd.schedule(as_tokens(tokens), namespace.name)
            report = self.ssd.flush()
        self._look()
        self.model.schedule(namespace, tokens)
        durable = self.model.flush()
        if report is None or (report.durable != durable and not self.model.doubtful):
            self._wrong(f"durable is {durable}, the report says {report}")
        if report is not None and report.durable:
            self.model.dirty = {}

    def restart(self) -> None:
        self._open()
        self._look()
        self.model.restart()

    def damage(self, line: Line, how: str, place: float, bit: int) -> None:
        """Flip a bit of an entry's file at that share of it, cut it there, or remove it."""
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

    def check(self) -> None:
        """Both tiers are what the list says, and every entry is still what was put."""
        self._tally.compared += 1
        if found := self.model.agree():
            self._wrong(found)
        if self.model.lost:
            self._tally.refused["the list of tiers: what became of a damaged file"] += 1
            self._begin()
            return
        lines, cap = self.model.ram, self._caps[0]
        nbytes = sum(line.nbytes for line in lines)
        if (len(self.cache), self.cache.nbytes) != (len(lines), nbytes) or nbytes > cap:
            here = f"{len(self.cache)} entries of {self.cache.nbytes} bytes in RAM"
            self._wrong(f"{here}, expected {len(lines)} of {nbytes}, cap {cap}")
        for line in lines:
            kept = self.cache.exactly(as_tokens(line.tokens), line.namespace.name)
            if kept is None:
                self._wrong(f"the entry of {list(line.tokens)} is not in RAM any more")
            if kept.reuse != line.reuse:
                self._wrong(f"{list(line.tokens)}: {kept.reuse}, expected {line.reuse}")
            drafts = [array for c in kept.checkpoints for array in c.attachment.tensors]
            now = [*kept.stored.arrays, *drafts]
            if len(now) != len(line.arrays) or not all(map(same, now, line.arrays)):
                self._wrong(f"the entry of {list(line.tokens)} has changed")
        on_disk = sum(file.stat().st_size for file in self.keys)
        if self._caps[1] is not None and on_disk > self._caps[1]:
            self._wrong(f"{on_disk} bytes of files, cap {self._caps[1]}")

    def _begin(self) -> None:
        """Both tiers are empty, and so is the list."""
        shutil.rmtree(self._folder, ignore_errors=True)
        self.keys: dict[Path, Key] = {}
        self.model = TierList(*self._caps)
        self._open()

    def _open(self) -> None:
        """A RAM tier that is empty, before whatever is in the folder."""
        cap, cold_cap = self._caps
        self.ssd = None
        with self._whole():
            if cold_cap is not None:
                files = Unsynced()
                store = Store(self._folder, IDENTITY, cap_bytes=cold_cap, codec=CODEC, files=files)
                self.ssd = SSD(store)
            self.cache = PromptCache(cap, self.ssd, clock=lambda: self.model.now_s)
        if self.ssd is not None:
            self.ssd.serve_from(self.cache.holding)

    def _look(self) -> None:
        """Which entry is in which file, as it was before anybody damaged it."""
        files = sorted(self._folder.rglob("*.safetensors"))
        self.keys = {file: self.keys.get(file) or key_of(file) for file in files}
        self.model.note({key: file for file, key in self.keys.items()})

    @contextmanager
    def _whole(self) -> Iterator[None]:
        """Nothing in here may raise."""
        try:
            yield
        except Exception as error:
            raise Difference(f"our tiers: raised {error!r}", self._steps) from error

    def _wrong(self, what: str) -> NoReturn:
        raise Difference(f"our tiers: {what}", self._steps)


def append(rows: Rows, *ids: Chunk) -> mx.array:
    """One forward of as many ids for each row; the first one's logits [N, V]."""
    logits = rows.forward(mx.array(list(map(list, ids))))
    mx.eval(logits, rows.arrays())
    return logits[0]
