"""What is scheduled is durable when a flush says so, and only then."""

from __future__ import annotations

import itertools
import shutil
import tempfile
import threading
import time
from pathlib import Path

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule

from engine.cache.durability import Durability, FlushReport
from engine.cache.entry import Buffer, Entry, RunStep, TensorSpec, Tokens
from engine.cache.spill import SpillQueue
from engine.cache.store import Store
from parity.fuzz.disk.faults import Unsynced

from .entries import CODEC, IDENTITY, an_entry, content, ids
from .test_store import SIZE, a_store


class Memory:
    """Entries in memory, a store that can be made to fail, and a clock that stands still."""

    def __init__(self, path: Path, cap_bytes: int = 1 << 40, max_records: int = 99) -> None:
        self.store = a_store(path, cap_bytes=cap_bytes, files=Unsynced())
        self.entries: dict[tuple[str, tuple[int, ...]], Entry] = {}
        self.now = 0.0
        self.broken = False
        self.seconds_a_read = 0.0
        self.writes: list[list[int]] = []
        self.spill: SpillQueue[Entry] = SpillQueue(2 * SIZE, self.put)
        self.durability = Durability(
            self.store.has_durable_prefix,
            self.write,
            spill=self.spill,
            debounce_s=2.0,
            clock=lambda: self.now,
            max_records=max_records,
        )

    def put(self, entry: Entry, run_step: RunStep) -> bool:
        def read(tensor: TensorSpec) -> Buffer:
            self.now += self.seconds_a_read
            if self.broken:
                raise OSError("no disk")
            return content(entry, tensor)

        self.writes.append(entry.tokens.tolist())
        return self.store.put(entry, read, run_step)

    def write(self, tokens: Tokens, namespace: str, run_step: RunStep) -> bool | None:
        entry = self.entries.get((namespace, tuple(tokens.tolist())))
        return None if entry is None else self.put(entry, run_step)

    def keep(self, *tokens: int, namespace: str = "plain") -> None:
        self.entries[namespace, tokens] = an_entry(tokens, namespace)
        self.durability.schedule(ids(tokens), namespace)

    def evict(self, *tokens: int, namespace: str = "plain") -> None:
        self.spill.offer(self.entries.pop((namespace, tokens)), SIZE)


def report(durable: bool, flushed: int = 0, **more: int) -> FlushReport:
    counts = {"missing": 0, "pending": 0, "dropped": 0, "failed": 0} | more
    return FlushReport(durable, flushed, **counts, elapsed_s=0.0)


def test_a_record_is_written_when_it_was_left_alone_for_a_while(tmp_path: Path) -> None:
    memory = Memory(tmp_path)
    durability = memory.durability
    memory.keep(1, 2)
    assert durability.due_in_s == 2
    memory.now = 1.5
    memory.keep(1, 2)
    memory.keep(5)
    memory.now = 3.4
    assert not durability.step()
    memory.now = 3.5
    assert durability.step()
    assert memory.writes == [[1, 2]]
    assert durability.step()
    assert not durability.step()
    assert durability.dirty == 0
    assert memory.durability.due_in_s is None
    assert memory.writes == [[1, 2], [5]]


def test_a_missing_record_that_a_later_one_serves_is_durable(tmp_path: Path) -> None:
    memory = Memory(tmp_path)
    memory.keep(1)
    del memory.entries["plain", (1,)]
    memory.keep(1, 2)
    assert memory.durability.flush() == report(True, 2)


def test_what_is_durable_already_is_not_written_again(tmp_path: Path) -> None:
    memory = Memory(tmp_path)
    memory.keep(1, 2)
    memory.keep(1, 2, 3)
    memory.keep(1, 2, namespace="other")
    assert memory.durability.flush() == report(True, 3)
    memory.keep(1)
    assert memory.durability.flush() == report(True, 1)
    assert memory.writes == [[1, 2], [1, 2, 3], [1, 2]]
    assert memory.durability.flush() == report(True)


def test_a_failed_record_stays_dirty_and_waits_for_a_flush(tmp_path: Path) -> None:
    """A broken disk is not asked again and again in the background."""
    memory = Memory(tmp_path)
    memory.keep(1, 2)
    memory.broken = True
    memory.now = 9
    assert memory.durability.step()
    assert not memory.durability.step()
    assert memory.durability.due_in_s is None
    assert memory.durability.flush() == report(False, failed=1)
    assert memory.durability.dirty == 1
    memory.broken = False
    assert memory.durability.flush() == report(True, 1)


def test_a_missing_record_stays_dirty(tmp_path: Path) -> None:
    memory = Memory(tmp_path)
    memory.keep(1, 2)
    memory.keep(3)
    del memory.entries["plain", (1, 2)]
    assert memory.durability.flush() == report(False, 1, missing=1)
    assert memory.durability.flush() == report(False, missing=1)
    memory.keep(1, 2)
    assert memory.durability.flush() == report(True, 1)


def test_what_was_evicted_is_written_before_it_is_called_missing(tmp_path: Path) -> None:
    memory = Memory(tmp_path)
    memory.keep(1, 2)
    memory.evict(1, 2)
    assert memory.durability.flush() == report(True, 1)
    for number in range(3):
        memory.keep(3, number)
        memory.evict(3, number)
    assert memory.durability.flush() == report(False, 2, missing=1, dropped=1)
    assert memory.durability.flush() == report(False, missing=1)


def test_a_spill_that_fails_is_reported_once(tmp_path: Path) -> None:
    memory = Memory(tmp_path)
    memory.keep(1, 2)
    memory.evict(1, 2)
    memory.broken = True
    assert memory.durability.flush() == report(False, missing=1, failed=1)
    memory.keep(1, 2)
    memory.broken = False
    assert memory.durability.flush() == report(True, 1)


def test_records_that_push_each_other_out_are_not_durable(tmp_path: Path) -> None:
    memory = Memory(tmp_path, cap_bytes=SIZE)
    memory.keep(1, 2)
    memory.keep(3)
    assert memory.durability.flush() == report(False, 1, missing=1)
    assert memory.durability.dirty == 1


def test_a_flush_ends_in_time_and_says_what_is_pending(tmp_path: Path) -> None:
    """R20: no step begins too late; what was begun is cleaned up and stays dirty."""
    memory = Memory(tmp_path)
    for number in range(4):
        memory.keep(number, number)
    memory.seconds_a_read = 1.0
    assert memory.durability.flush(timeout_s=5) == FlushReport(False, 2, 0, 2, 0, 0, 5.0)
    assert sorted(p.suffix for p in tmp_path.rglob("*") if p.is_file()) == [".safetensors"] * 2
    assert memory.writes == [[0, 0], [1, 1], [2, 2]]
    assert memory.durability.flush(timeout_s=0) == report(False, pending=2)
    memory.evict(3, 3)
    assert memory.durability.flush(timeout_s=0) == report(False, pending=3)
    memory.seconds_a_read = 0
    memory.now = 100
    assert memory.durability.flush(timeout_s=5) == report(True, 2)


def test_a_flush_does_not_wait_for_ever_for_a_writer_that_hangs() -> None:
    begun, go_on = threading.Event(), threading.Event()

    def hang(*_: object) -> bool:
        begun.set()
        return go_on.wait(10)

    durability = Durability(lambda *_: False, hang, debounce_s=0)
    durability.schedule(ids([1]), "plain")
    writer = threading.Thread(target=durability.step)
    writer.start()
    assert begun.wait(10)
    asked = time.monotonic()
    assert not durability.step()
    assert time.monotonic() - asked < 5
    late = durability.flush(timeout_s=0.05)
    assert (late.durable, late.pending) == (False, 1)
    go_on.set()
    writer.join(10)
    assert not durability.flush().durable


def test_a_record_that_is_scheduled_while_it_is_written_is_still_dirty() -> None:
    def write(tokens: Tokens, namespace: str, _: RunStep) -> bool:
        written.append(tokens)
        durability.schedule(tokens, namespace)
        return True

    written: list[Tokens] = []
    durability = Durability(lambda *_: bool(written), write, clock=lambda: 0.0)
    durability.schedule(ids([1]), "plain")
    assert durability.flush() == report(False, 1, pending=1)


def test_a_writer_that_raises_has_failed() -> None:
    def fail(*_: object) -> bool:
        raise ValueError("no")

    durability = Durability(lambda *_: False, fail, clock=lambda: 0.0)
    durability.schedule(ids([1]), "plain")
    assert durability.flush() == report(False, failed=1)


@pytest.mark.parametrize("number", [0, 1])
def test_a_failing_look_at_the_disk_is_a_failed_record(number: int) -> None:
    """Before the write or behind it, and not the end of the thread that writes."""
    looks = itertools.count()

    def look(*_: object) -> bool:
        if next(looks) == number:
            raise MemoryError("no")
        return False

    durability = Durability(look, lambda *_: True, debounce_s=0.0, clock=lambda: 0.0)
    durability.schedule(ids([1]), "plain")
    assert durability.flush() == report(False, failed=1)
    looks = itertools.count()
    durability.schedule(ids([1]), "plain")
    assert durability.step()
    assert durability.dirty == 1


def test_only_so_many_records_are_remembered(tmp_path: Path) -> None:
    memory = Memory(tmp_path, max_records=3)
    for number in range(5):
        memory.keep(number)
    assert memory.durability.dirty == 3
    assert memory.durability.flush() == report(False, 3, dropped=2)
    assert memory.durability.flush() == report(True)


def test_what_was_scheduled_again_is_not_the_first_to_be_given_up(tmp_path: Path) -> None:
    memory = Memory(tmp_path, max_records=2)
    for number in (1, 2, 1, 3):
        memory.keep(number)
    assert memory.durability.flush() == report(False, 2, dropped=1)
    assert memory.writes == [[1], [3]]


class DurabilityMachine(RuleBasedStateMachine):
    """Law `durable`: a flush says durable iff every scheduled record is there after a restart.

    Nothing is dropped here: then it says no although all may be there.
    """

    def __init__(self) -> None:
        super().__init__()
        self.path = Path(tempfile.mkdtemp())
        self.memory = Memory(self.path)
        self.scheduled: set[tuple[int, ...]] = set()

    def teardown(self) -> None:
        shutil.rmtree(self.path)

    @rule(tokens=st.lists(st.integers(0, 1), min_size=1, max_size=3).map(tuple))
    def keep(self, tokens: tuple[int, ...]) -> None:
        self.memory.keep(*tokens)
        self.scheduled.add(tokens)

    @rule(data=st.data(), spilled=st.booleans())
    def leave_memory(self, data: st.DataObject, spilled: bool) -> None:
        if not self.memory.entries or self.memory.spill.counts.pending > 1:
            return
        namespace, tokens = data.draw(st.sampled_from(sorted(self.memory.entries)))
        if spilled:
            self.memory.evict(*tokens, namespace=namespace)
        else:
            del self.memory.entries[namespace, tokens]

    @rule(broken=st.booleans())
    def disk(self, broken: bool) -> None:
        self.memory.broken = broken

    @rule(seconds=st.sampled_from([0.5, 3.0]))
    def wait(self, seconds: float) -> None:
        self.memory.now += seconds

    @rule()
    def write_behind(self) -> None:
        self.memory.durability.step()

    @rule()
    def flush(self) -> None:
        spills = self.memory.spill.counts.failed
        said = self.memory.durability.flush()
        after = Store(self.path, IDENTITY, cap_bytes=1 << 40, codec=CODEC)
        lost = [t for t in self.scheduled if not after.has_durable_prefix(ids(t), "plain")]
        assert said.missing + said.failed >= len(lost)
        assert said.pending == said.dropped == 0
        if self.memory.spill.counts.failed == spills:
            assert said.durable == (not lost)
            assert said.missing + said.failed == len(lost)
        else:
            assert not said.durable


TestDurability = DurabilityMachine.TestCase
