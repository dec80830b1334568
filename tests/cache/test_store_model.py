"""The SSD tier against lists: whatever is done to it, it answers as a linear scan would."""

from __future__ import annotations

import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from engine.cache.entry import Entry, Reuse, TensorSpec
from engine.cache.format import plan
from engine.cache.store import Store
from parity.fuzz.disk.faults import Unsynced

from .entries import CODEC, IDENTITY, ORIGIN, Memory, an_entry, content, ids

CAP = 3600
"""Four of the smallest files, one of the largest."""

tokens = st.lists(st.integers(0, 1), min_size=1, max_size=5)
lengths = st.sampled_from([0, 9, 400, 900])
namespaces = st.sampled_from(["a", "b"])
reuses = st.builds(Reuse, st.booleans(), st.integers(0, 4))


@dataclass(eq=False)
class Kept:
    """An entry that must be there. The list holds the least recently used first."""

    entry: Entry
    size: int

    def serves(self, prompt: list[int], at_most: int) -> int:
        own = self.entry.tokens.tolist()
        differing = [n for n, (a, b) in enumerate(zip(own, prompt, strict=False)) if a != b]
        common = min([*differing, len(own), len(prompt), at_most])
        return common if self.entry.reuse.serves(common, len(own)) else 0


class StoreMachine(RuleBasedStateMachine):
    """Laws `longest-prefix`, `supersede`, `cap`, `roundtrip`, `damage`."""

    def __init__(self) -> None:
        super().__init__()
        self.path = Path(tempfile.mkdtemp())
        self.kept: list[Kept] = []
        self.now = 10**18
        self.restart()

    def teardown(self) -> None:
        shutil.rmtree(self.path)

    def clock(self) -> int:
        self.now += 1
        return self.now

    @rule()
    def restart(self) -> None:
        self.store = Store(
            self.path, IDENTITY, cap_bytes=CAP, codec=CODEC, files=Unsynced(), clock=self.clock
        )

    @rule(tokens=tokens, namespace=namespaces, reuse=reuses, floats=lengths)
    def put(self, tokens: list[int], namespace: str, reuse: Reuse, floats: int) -> None:
        tensor = TensorSpec("0.0", "F32", (floats,))
        entry = an_entry(tokens, namespace, tensors=[tensor], reuse=reuse)
        size = plan(entry, ORIGIN).size
        stored = self.store.put(entry, lambda t: content(entry, t))
        assert stored == (size <= CAP)
        if not stored:
            return
        for old in list(self.kept):
            theirs = old.entry.tokens.tolist()
            if old.entry.namespace == namespace and (
                theirs == tokens
                or (
                    len(theirs) < len(tokens)
                    and theirs == tokens[: len(theirs)]
                    and reuse.serves(len(theirs), len(tokens))
                )
            ):
                self.kept.remove(old)
        self.kept.append(Kept(entry, size))
        while sum(kept.size for kept in self.kept) > CAP:
            del self.kept[0]

    @rule(prompt=tokens, namespace=namespaces)
    def take(self, prompt: list[int], namespace: str) -> None:
        found = self.store.find(ids(prompt), namespace)
        counts = {
            kept: kept.serves(prompt, len(prompt) - 1)
            for kept in self.kept
            if kept.entry.namespace == namespace
        }
        best = max(counts.values(), default=0)
        assert (found.count if found else 0) == best
        if found is None:
            return
        assert counts[self.known(found.entry)] == best
        assert self.restored(found.entry)

    @rule(asked=tokens, namespace=namespaces)
    def ask(self, asked: list[int], namespace: str) -> None:
        expected = any(
            kept.serves(asked, len(asked)) == len(asked)
            for kept in self.kept
            if kept.entry.namespace == namespace
        )
        assert self.store.has_durable_prefix(ids(asked), namespace) == expected

    @precondition(lambda self: self.kept)
    @rule(data=st.data(), damage=st.sampled_from(["delete", "flip", "cut", "zero"]))
    def harm(self, data: st.DataObject, damage: str) -> None:
        """Someone deletes or breaks a file: known at the latest when it is asked for."""
        chosen = data.draw(st.integers(0, len(self.kept) - 1))
        (file,) = [
            self.path / IDENTITY.fingerprint / record.folder / record.name
            for record in self.store._catalog
            if self.age(record.entry) == chosen
        ]
        image = bytearray(file.read_bytes())
        if damage == "delete":
            file.unlink()
        elif damage == "flip":
            image[data.draw(st.integers(0, len(image) - 1))] ^= 1 << data.draw(st.integers(0, 7))
            file.write_bytes(image)
        else:
            cut = data.draw(st.integers(0, len(image) - 1))
            file.write_bytes(image[:cut] + bytes(len(image) - cut) * (damage == "zero"))
        restored = [self.restored(entry) for entry in sorted(self.entries(), key=self.age)]
        assert restored.count(False) == (not file.exists())
        # Zeros may be what was there.
        assert not file.exists() or (damage == "zero" and image == file.read_bytes())

    def entries(self) -> list[Entry]:
        """All that the store knows, as it hands them out."""
        return [self.store._catalog.entry_of(record) for record in self.store._catalog]

    def age(self, entry: Entry) -> int:
        return self.kept.index(self.known(entry))

    def known(self, entry: Entry) -> Kept:
        key = (entry.namespace, entry.tokens.tolist())
        (kept,) = [k for k in self.kept if (k.entry.namespace, k.entry.tokens.tolist()) == key]
        return kept

    def restored(self, entry: Entry) -> bool:
        """Restore; then the entry was used, or is gone."""
        kept = self.known(entry)
        self.kept.remove(kept)
        memory = Memory()
        if not self.store.restore(entry, memory):
            return False
        assert memory.found == {t.name: bytes(content(kept.entry, t)) for t in kept.entry.tensors}
        self.kept.append(kept)
        return True

    @invariant()
    def all_bytes_are_counted(self) -> None:
        files = list(self.path.rglob("*.safetensors*"))
        counts = self.store.counts
        assert counts.entries == len(self.kept) == len(files)
        assert len(self.store._catalog._by_entry) <= len(self.kept)
        assert counts.nbytes == sum(kept.size for kept in self.kept) <= CAP
        assert counts.nbytes == sum(file.stat().st_size for file in files)


TestAgainstLists = StoreMachine.TestCase
