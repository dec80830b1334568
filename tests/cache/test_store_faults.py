"""Any call of the file system may fail, at any time: once, or from then on."""

from __future__ import annotations

import errno
import itertools
import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from engine.cache.entry import Entry
from engine.cache.files import Files
from engine.cache.format import plan
from engine.cache.store import Store

from .entries import IDENTITY, ORIGIN, an_entry, ids, unfinished
from .faults import CALLS, ERRORS, Watch, at
from .test_store import SIZE, a_store, files_in, holds, put, restored

OLD = (an_entry([1, 1, 1]), an_entry([2, 2, 2], "other"), an_entry([3, 3]))
NEW = an_entry([3] * 9)
"""It replaces the last of the old ones; with the cap below, the first has to go as well."""

CAP = sum(plan(entry, ORIGIN).size for entry in OLD)


def there(store: Store, entry: Entry) -> bool:
    if entry.generation is None:
        return holds(store, entry)
    found = store.find_generation_checkpoint(entry.tokens[:2], "k", "plain")
    return found is not None and len(found.tokens) == len(entry.tokens) and restored(store, found)


def filled(path: Path, watch: Watch, old: tuple[Entry, ...], cap: int) -> Store:
    """A store opened on the old entries, through files that are watched."""
    before = a_store(path)
    assert all(put(before, entry) for entry in old)
    return a_store(path, files=watch.files(), cap_bytes=cap)


def faults(calls: int) -> list[Callable[[int, str], None]]:
    numbers = range(calls)
    return [
        at(number, ERRORS[number % len(ERRORS)], on=on)
        for number, on in itertools.product(numbers, (False, True))
    ]


OLDER = unfinished("k", 2, [1, 2, 3])

KINDS = {
    "entry": (OLD, NEW, CAP),
    "generation": ((OLDER, OLD[0]), unfinished("k", 2, [1, 2, 3, 4]), 1 << 40),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_failing_call_leaves_the_old_whole_and_the_new_whole_or_absent(
    tmp_path: Path, kind: str
) -> None:
    """Law `atomic`, R7 and R8: the Nth call of a put, for every N."""
    old, new, cap = KINDS[kind]
    watch = Watch()
    store = filled(tmp_path / "count", watch, old, cap)
    with watch.failing(lambda number, name: None):
        assert put(store, new)
    called = {name for name, _, _ in watch.log}
    assert {"create", "lock", "write", "sync", "rename", "sync_folder", "remove"} <= called
    for number, fault in enumerate(faults(watch.called)):
        path, watch = tmp_path / str(number), Watch()
        store = filled(path, watch, old, cap)
        with watch.failing(fault):
            done = put(store, new)
        after = a_store(path)
        assert after.counts.damaged == 0
        assert not [file for file in files_in(path) if file.suffix == ".tmp"]
        kept = sum(there(after, entry) for entry in old)
        if there(after, new):
            # Where the oldest cannot be removed, the next one is.
            assert kept >= len(old) - (2 if kind == "entry" else 1)
        else:
            assert not done
            assert kept == len(old)
        # The process that saw the fault goes on as well.
        assert put(store, new)
        assert there(store, new)
        sizes = [file.stat().st_size for file in files_in(path)]
        assert store.counts.nbytes == sum(sizes) <= cap
        assert store.counts.entries == len(sizes)
        shutil.rmtree(path)


def test_a_failing_call_of_a_restore_is_a_miss_and_leaves_the_file(tmp_path: Path) -> None:
    watch = Watch()
    store = filled(tmp_path, watch, OLD, 1 << 40)
    with watch.failing(lambda number, name: None):
        assert holds(store, OLD[0])
    for fault in faults(watch.called):
        with watch.failing(fault):
            holds(store, OLD[0])
        assert all(holds(store, entry) for entry in OLD)
    assert len(files_in(tmp_path)) == len(OLD)
    assert store.counts.damaged == 0
    assert store.counts.misses > 0


def test_a_failing_call_of_a_scan_loses_nothing(tmp_path: Path) -> None:
    """What could not be read is looked at again, and a start never fails."""
    watch = Watch()
    filled(tmp_path, watch, OLD, 1 << 40)
    calls = watch.called
    for fault in faults(calls):
        watch = Watch()
        for folder in (tmp_path / IDENTITY.fingerprint).iterdir():
            os.utime(folder, ns=(10**18, 10**18))
        watch.fault = fault
        store = a_store(tmp_path, files=watch.files())
        watch.fault = lambda number, name: None
        store.rescan()
        assert all(holds(store, entry) for entry in OLD)
    assert len(files_in(tmp_path)) == len(OLD)


def test_short_writes_and_reads_are_continued(tmp_path: Path) -> None:
    class Slow(Files):
        def write(self, file: int, data: memoryview, offset: int) -> int:
            return super().write(file, data[: max(1, len(data) // 3)], offset)

        def read(self, file: int, into: memoryview, offset: int) -> int:
            return super().read(file, into[: max(1, len(into) // 2)], offset)

    store = a_store(tmp_path, files=Slow())
    assert put(store, NEW)
    assert holds(store, NEW)
    assert holds(a_store(tmp_path), NEW)


@pytest.mark.parametrize("name", ["sync", "sync_folder"])
def test_what_is_not_synced_is_not_published(tmp_path: Path, name: str) -> None:
    """R8."""

    def fault(_: int, called: str) -> None:
        if called == name:
            raise OSError(errno.EIO, "not on the disk")

    watch = Watch()
    store = filled(tmp_path, watch, OLD, CAP + SIZE)
    with watch.failing(fault):
        assert not put(store, NEW)
    assert all(holds(store, entry) for entry in OLD)
    assert not holds(store, NEW)
    assert len(files_in(tmp_path)) == len(OLD)


@pytest.mark.parametrize("number", range(4))
def test_a_folder_that_was_not_made_for_good_is_made_again(number: int, tmp_path: Path) -> None:
    """`durable`: a later put is not acknowledged on a folder whose name is on no disk."""
    watch, left = Watch(), itertools.count()
    root = tmp_path / "a" / "b"
    store = a_store(root, files=watch.files())

    def fault(_: int, called: str) -> None:
        if called == "sync_folder" and next(left) == number:
            raise OSError(errno.EIO, "not on the disk")

    with watch.failing(fault):
        assert not put(store, NEW)
    watch.log.clear()
    assert put(store, NEW)
    (file,) = files_in(root)
    above = [tmp_path, root.parent][number:]
    assert synced(watch) == {*above, root, file.parent.parent, file.parent}


def synced(watch: Watch) -> set[Path]:
    opened: dict[int, Path] = {}
    found: set[Path] = set()
    for name, arguments, result in watch.log:
        if name == "open_folder":
            path, *at = arguments
            opened[result] = Path(path) if at in ([], [None]) else opened[at[0]] / path
        elif name == "sync_folder":
            found.add(opened[arguments[0]])
    return found


@pytest.mark.parametrize("depth", [1, 2])
def test_a_folder_that_another_has_made_is_synced_before_a_put_is_acknowledged(
    depth: int, tmp_path: Path
) -> None:
    """`durable`: the other one may have been killed between the two."""
    watch = Watch()
    first = a_store(tmp_path)
    assert put(first, NEW)
    (file,) = files_in(tmp_path)
    place = file.parent
    shutil.rmtree(place if depth == 2 else place.parent)
    place.mkdir(parents=True)
    assert put(a_store(tmp_path, files=watch.files()), NEW)
    assert synced(watch) == {tmp_path, place.parent, place}


def test_a_folder_that_goes_while_it_is_made_is_made_again(tmp_path: Path) -> None:
    """Another process removes what is empty."""
    watch = Watch()
    store = a_store(tmp_path, files=watch.files())

    def fault(_: int, called: str) -> None:
        if called == "sync_folder":
            for folder in tmp_path.glob("*/*"):
                watch.fault = lambda number, name: None
                folder.rmdir()

    with watch.failing(fault):
        assert put(store, NEW)
    assert holds(store, NEW)


def test_a_disk_that_can_only_be_read_serves_and_says_so_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """R16: the tier does not store, and serving goes on."""
    writes = {"make_folder", "create", "write", "set_mtime", "rename", "remove", "remove_folder"}

    def fault(_: int, name: str) -> None:
        if name in writes:
            raise OSError(errno.EROFS, "Read-only file system")

    assert writes < set(CALLS)
    watch = Watch()
    store = filled(tmp_path, watch, OLD, 1 << 40)
    with watch.failing(fault):
        for _ in range(3):
            assert not put(store, NEW)
            assert all(holds(store, entry) for entry in OLD)
    assert [record.levelname for record in caplog.records] == ["WARNING"] * 2
    empty = a_store(tmp_path / "none", files=watch.files())
    with watch.failing(fault):
        assert not put(empty, NEW)
    assert not (tmp_path / "none").exists()


def test_a_newcomer_stays_even_where_nothing_else_can_be_removed(tmp_path: Path) -> None:
    """Law `cap`: what it was stored for is not undone to make room for what is old."""
    old = [1, 2, 3, 4]  # the one that is replaced, then all three for the cap

    def fault(_: int, name: str) -> None:
        if name == "remove" and old and old.pop():
            raise OSError(errno.EPERM, "Operation not permitted")

    watch = Watch()
    store = filled(tmp_path, watch, OLD, CAP)
    with watch.failing(fault):
        assert put(store, NEW)
    assert all(holds(store, entry) for entry in (*OLD, NEW))
    assert put(store, an_entry([7]))
    assert store.counts.nbytes <= CAP
    assert holds(store, an_entry([7]))


def test_threads_that_put_find_restore_and_evict_see_whole_entries_or_none(
    tmp_path: Path,
) -> None:
    """R10, for a moment: five threads, one small cap, the same few keys."""
    store = a_store(tmp_path, cap_bytes=3 * SIZE)
    entries = [an_entry([n, n, n]) for n in range(5)]
    failed: list[BaseException] = []

    def work(seed: int) -> None:
        try:
            for number in range(30):
                entry = entries[(seed * 7 + number * 3) % 5]
                if number % 3 == 0:
                    assert put(store, entry)
                elif (found := store.find(ids([*entry.tokens, 9]), "plain")) is not None:
                    restored(store, found.entry)
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == []
    files = files_in(tmp_path / IDENTITY.fingerprint)
    store.rescan()
    counts = store.counts
    assert counts.entries == len(files)
    assert counts.nbytes == sum(file.stat().st_size for file in files) <= 3 * SIZE
    assert counts.damaged == counts.failed == 0
