"""The SSD tier: the longest prefix or nothing, whole or not at all, and never over its cap."""

from __future__ import annotations

import errno
import logging
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from xxhash import xxh3_128_hexdigest

from engine import BadInput
from engine.cache.entry import Entry, Identity, Reuse, RunStep, Step, TensorSpec, at_once, no_room
from engine.cache.files import Files
from engine.cache.format import plan
from engine.cache.keeper import Counts
from engine.cache.shelf import folder_of
from engine.cache.store import Store

from .entries import (
    CODEC,
    IDENTITY,
    ORIGIN,
    Memory,
    an_entry,
    attached,
    content,
    ids,
    unfinished,
    written,
)
from .faults import Watch

BIG = 1 << 40

SIZE = plan(an_entry(), ORIGIN).size
"""Of the usual entry's file. `created` has as many digits today."""


def a_store(
    path: Path,
    identity: Identity = IDENTITY,
    *,
    cap_bytes: int = BIG,
    codec: str = CODEC,
    **more: Any,
) -> Store:
    return Store(path, identity, cap_bytes=cap_bytes, codec=codec, **more)


def put(store: Store, entry: Entry, run_step: RunStep = at_once) -> bool:
    return store.put(entry, lambda tensor: content(entry, tensor), run_step)


def restored(store: Store, entry: Entry) -> bool:
    """Whether an entry that was found comes back; if so it is what was stored."""
    memory = Memory()
    if not store.restore(entry, memory):
        return False
    assert memory.found == {t.name: bytes(content(entry, t)) for t in entry.tensors}
    return True


def holds(store: Store, entry: Entry) -> bool:
    """Whether exactly this entry is there and comes back."""
    found = store.find(np.append(entry.tokens, np.int32(0)), entry.namespace)
    if found is None or found.count < len(entry.tokens):
        return False
    return restored(store, found.entry)


def files_in(path: Path) -> list[Path]:
    return sorted(p for p in path.rglob("*") if not p.is_dir() or p.is_symlink())


@pytest.fixture(autouse=True)
def no_descriptor_stays_open() -> Iterator[None]:
    def count() -> int:
        return len(os.listdir("/dev/fd"))

    before = count()
    yield
    assert count() == before


def test_what_was_put_is_found_and_restored_also_after_a_restart(tmp_path: Path) -> None:
    """Law `roundtrip`, of the tier."""
    store = a_store(tmp_path / "deep" / "er")
    assert put(store, an_entry([1, 2, 3, 4]))
    for opened in (store, a_store(tmp_path / "deep" / "er")):
        found = opened.find(ids([1, 2, 3, 9]), "plain")
        assert found is not None
        assert found.count == 3
        assert found.entry.tokens.tolist() == [1, 2, 3, 4]
        assert restored(opened, found.entry)
        assert opened.counts.hits == 1
        assert opened.counts.entries == 1
        assert opened.counts.nbytes == sum(f.stat().st_size for f in files_in(tmp_path))
        assert opened.has_durable_prefix(ids([1, 2, 3, 4]), "plain")
        assert opened.has_durable_prefix(ids([1, 2]), "plain")
        assert not opened.has_durable_prefix(ids([1, 2, 3, 4, 5]), "plain")
        assert opened.find(ids([1, 2, 3, 4]), "other") is None


def test_the_last_token_of_a_prompt_is_never_served(tmp_path: Path) -> None:
    store = a_store(tmp_path)
    assert put(store, an_entry([1, 2, 3]))
    found = store.find(ids([1, 2, 3]), "plain")
    assert found is not None
    assert found.count == 2
    assert store.find(ids([1]), "plain") is None


def test_folders_and_files_are_ours_alone_and_named_by_hashes(tmp_path: Path) -> None:
    """R14, R16."""
    root, names = tmp_path / "tier", ["../../up", "a\0b", "x" * 5000, "\u00c9", "\u00e9", "E\u0301"]
    store = a_store(root)
    for name in names:
        assert put(store, an_entry(namespace=name))
    assert len(files_in(root)) == len(names)
    for path in root.rglob("*"):
        assert path.stat().st_mode & 0o777 == (0o700 if path.is_dir() else 0o600)
        assert not set(path.name) - set("0123456789abcdef.mlxkvsafetensors")
    assert root.stat().st_mode & 0o777 == 0o700
    assert list(tmp_path.iterdir()) == [root]
    assert all(holds(a_store(root), an_entry(namespace=name)) for name in names)


def test_duplicates_and_prefixes_that_are_served_are_replaced(tmp_path: Path) -> None:
    """Law `supersede`."""
    store = a_store(tmp_path)
    short, other = an_entry([1, 2]), an_entry([1, 2], "other")
    assert all(put(store, entry) for entry in (short, short, other))
    assert store.counts.entries == 2
    rigid = an_entry([1, 2, 3], reuse=Reuse(trimmable=False))
    late = an_entry([1, 2, 3, 4], reuse=Reuse(trimmable=True, minimum=3))
    assert put(store, rigid)
    assert store.counts.entries == 3
    assert put(store, late)
    assert [holds(store, entry) for entry in (short, rigid, late, other)] == [
        True,
        True,
        True,
        True,
    ]
    assert store.counts.entries == 3
    assert put(store, an_entry([1, 2, 3, 4, 5]))
    assert store.counts.entries == 2
    assert holds(store, other)
    assert store.counts.superseded == 4
    assert a_store(tmp_path).counts.entries == 2


def test_an_entry_with_attachments_is_served_whole_or_not_at_all(tmp_path: Path) -> None:
    store = a_store(tmp_path)
    assert put(store, attached([1, 2, 3]))
    assert store.find(ids([1, 2, 9]), "plain") is None
    assert holds(store, attached([1, 2, 3]))


def test_the_cap_holds_and_the_newcomer_stays(tmp_path: Path) -> None:
    """Law `cap`: the least recently used go first, and use is remembered across a restart."""
    store = a_store(tmp_path, cap_bytes=3 * SIZE)
    first, second, third, fourth = (an_entry([n, n, n]) for n in range(1, 5))
    assert all(put(store, entry) for entry in (first, second, third))
    assert holds(store, first)
    assert put(store, fourth)
    assert [holds(store, e) for e in (first, second, third, fourth)] == [True, False, True, True]
    assert store.counts.nbytes == 3 * SIZE
    assert holds(store, first)
    store = a_store(tmp_path, cap_bytes=2 * SIZE)
    assert [holds(store, e) for e in (first, third, fourth)] == [True, False, True]
    assert store.counts.evicted == 1
    store = a_store(tmp_path, cap_bytes=SIZE)
    assert put(store, second)
    assert holds(store, second)
    assert store.counts.nbytes == SIZE == sum(f.stat().st_size for f in files_in(tmp_path))


def test_what_is_larger_than_the_cap_is_not_stored_and_replaces_nothing(tmp_path: Path) -> None:
    store = a_store(tmp_path, cap_bytes=SIZE)
    assert put(store, an_entry())
    assert not put(store, an_entry([1, 2, 3, 4, 5, 6]))
    assert holds(store, an_entry())
    assert store.counts.too_large == 1


def test_use_by_another_process_counts(tmp_path: Path) -> None:
    store, other = (a_store(tmp_path, cap_bytes=2 * SIZE) for _ in range(2))
    first, second, third = (an_entry([n, n, n]) for n in (1, 2, 3))
    assert put(store, first)
    assert put(store, second)
    other.rescan()
    assert holds(other, first)
    assert put(store, third)
    assert [holds(store, e) for e in (first, second, third)] == [True, False, True]


def test_stores_on_one_folder_learn_of_each_other(tmp_path: Path) -> None:
    """What another has removed is a miss; what it has stored is there after a rescan."""
    one, two = a_store(tmp_path, cap_bytes=2 * SIZE), a_store(tmp_path, cap_bytes=2 * SIZE)
    entries = [an_entry([n, n, n]) for n in range(3)]
    assert put(one, entries[0])
    assert not holds(two, entries[0])
    two.rescan()
    assert holds(two, entries[0])
    assert all(put(two, entry) for entry in entries[1:])
    assert two.counts.nbytes == 2 * SIZE
    assert not holds(one, entries[0])
    assert one.counts.misses == 1
    assert one.counts.entries == 0
    one.rescan()
    assert [holds(one, e) for e in entries] == [False, True, True]
    assert one.counts == Counts(entries=2, nbytes=2 * SIZE, foreign=0, stored=1, hits=2, misses=1)


def test_a_put_sees_what_others_stored_before_it_counts_bytes(tmp_path: Path) -> None:
    one, two = a_store(tmp_path, cap_bytes=2 * SIZE), a_store(tmp_path, cap_bytes=2 * SIZE)
    for number in range(6):
        assert put((one, two)[number % 2], an_entry([number, 1, 1]))
        assert sum(f.stat().st_size for f in files_in(tmp_path)) <= 2 * SIZE


def test_files_that_others_deleted_are_not_counted(tmp_path: Path) -> None:
    """R19."""
    store = a_store(tmp_path, cap_bytes=3 * SIZE)
    assert all(put(store, an_entry([n, n, n])) for n in range(3))
    files_in(tmp_path)[0].unlink()
    assert put(store, an_entry([7, 7, 7]))
    assert store.counts.evicted == 0
    assert store.counts.nbytes == 3 * SIZE
    files_in(tmp_path)[0].unlink()
    store.rescan()
    assert (store.counts.entries, store.counts.nbytes) == (2, 2 * SIZE)
    shutil.rmtree(tmp_path / IDENTITY.fingerprint)
    store.rescan()
    assert (store.counts.entries, store.counts.nbytes) == (0, 0)
    assert put(store, an_entry())
    assert holds(store, an_entry())


def test_a_clock_that_goes_back_changes_no_order(tmp_path: Path) -> None:
    """R19: the newcomer is the last to go, and so is what was used last."""
    now = 10**18
    store = a_store(tmp_path, cap_bytes=2 * SIZE, clock=lambda: now)
    entries = [an_entry([n, n, n]) for n in range(4)]
    for entry in entries:
        assert put(store, entry)
        assert holds(store, entry)
        now //= 2
    assert [holds(store, e) for e in entries] == [False, False, True, True]


def damaged_file(store: Store, path: Path) -> None:
    assert put(store, an_entry())
    file = files_in(path)[0]
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)


def test_a_damaged_entry_is_a_miss_and_goes(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Law `damage`: removed, counted, said once."""
    store = a_store(tmp_path)
    for number in range(1, 4):
        damaged_file(store, tmp_path)
        assert not holds(store, an_entry())
        assert files_in(tmp_path) == []
        assert (store.counts.damaged, store.counts.misses) == (number, number)
        assert (store.counts.entries, store.counts.nbytes) == (0, 0)
    assert [r.levelno for r in caplog.records] == [logging.WARNING]


def test_damaged_tensors_pass_where_no_verification_was_asked_for(tmp_path: Path) -> None:
    store = a_store(tmp_path, verify=False)
    damaged_file(store, tmp_path)
    found = store.find(ids([1, 2, 3, 4]), "plain")
    assert found is not None
    assert store.restore(found.entry, no_room)


def test_a_scan_removes_damage_and_keeps_what_is_for_others(tmp_path: Path) -> None:
    store = a_store(tmp_path)
    damaged_file(store, tmp_path)
    files_in(tmp_path)[0].write_bytes(b"nothing")
    folder = tmp_path / IDENTITY.fingerprint / folder_of("plain")
    theirs = "0" * 32 + ".mlxkv.safetensors"
    written(folder / theirs, replace(an_entry(), codec="other-codec"))
    for name in ("notes.txt", "f" * 32 + ".safetensors", "F" * 32 + ".mlxkv.safetensors"):
        (folder / name).write_bytes(b"mine")
    stranger = tmp_path / ("e" * 64) / folder_of("plain") / theirs
    stranger.parent.mkdir(parents=True)
    stranger.write_bytes(b"of another model")
    store = a_store(tmp_path)
    assert (store.counts.entries, store.counts.damaged, store.counts.foreign) == (0, 1, 1)
    assert {p.name for p in folder.iterdir()} == {
        theirs,
        "notes.txt",
        "f" * 32 + ".safetensors",
        "F" * 32 + ".mlxkv.safetensors",
    }
    assert stranger.exists()
    store.rescan()
    assert store.counts.foreign == 1
    shutil.rmtree(folder)
    store.rescan()
    assert store.counts.foreign == 0


@pytest.mark.parametrize(
    "identity",
    [Identity("tiny/model", "e" * 64, "7" * 64), Identity("tiny/model", "f" * 64, "8" * 64)],
)
def test_what_another_model_computed_is_never_used(tmp_path: Path, identity: Identity) -> None:
    """Law `identity`: not even from our own folder."""
    assert put(a_store(tmp_path), an_entry())
    theirs = a_store(tmp_path / "theirs", identity=identity)
    assert put(theirs, an_entry())
    (ours,) = files_in(tmp_path / IDENTITY.fingerprint)
    ours.write_bytes(files_in(tmp_path / "theirs")[0].read_bytes())
    store = a_store(tmp_path)
    assert not holds(store, an_entry())
    assert store.counts.damaged == 1


def forge(path: Path, entry: Entry, old: bytes, new: bytes) -> None:
    """An entry's file with something else in its header, and the right hash of that."""
    header = plan(entry, ORIGIN)
    text = header.text.replace(old, new).replace(header.digest.encode(), b"0" * 32)
    text = text.replace(b"0" * 32, xxh3_128_hexdigest(text).encode(), 1)
    folder = path / IDENTITY.fingerprint / folder_of(entry.namespace)
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / ("0" * 32 + ".mlxkv.safetensors")
    file.write_bytes(len(text).to_bytes(8, "little") + text + bytes(entry.nbytes))


def test_a_namespace_that_is_no_text_is_damage_and_does_not_stop_a_start(tmp_path: Path) -> None:
    forge(tmp_path, an_entry(namespace="plain"), b'"plain"', b'"\\ud800"')
    store = a_store(tmp_path)
    assert (store.counts.entries, store.counts.damaged) == (0, 1)


def test_the_disk_begins_to_work_before_the_sync(tmp_path: Path) -> None:
    watch, window = Watch(), 8 << 20
    store = a_store(tmp_path, files=watch.files())
    tensors = [
        TensorSpec(f"0.{n}", "U8", (size,)) for n, size in enumerate([10, 19 << 20, 7 << 20])
    ]
    assert put(store, an_entry(tensors=tensors))
    told = [arguments[1:] for name, arguments, _ in watch.log if name == "write_back"]
    assert told == [(0, window), (window, window), (2 * window, window)]


def test_a_header_that_was_forged_is_found_out_when_its_entry_is_asked_for(tmp_path: Path) -> None:
    """Law `damage`: a scan looks at outlines only, and what is handed out is looked at whole."""
    store = a_store(tmp_path)
    for entry in (an_entry([1, 2, 3]), unfinished("k", 2, [1, 2, 3])):
        forge(tmp_path, entry, b'"0.layout":', b'"0.layers":')
    store.rescan()
    assert (store.counts.entries, store.counts.damaged) == (2, 0)
    assert store.find(ids([1, 2, 3, 4]), "plain") is None
    assert store.find_generation_checkpoint(ids([1, 2]), "k", "plain") is None
    assert (store.counts.entries, store.counts.damaged) == (0, 2)
    assert files_in(tmp_path) == []


def test_a_file_in_another_namespaces_folder_is_removed(tmp_path: Path) -> None:
    store = a_store(tmp_path)
    assert put(store, an_entry(namespace="one"))
    assert put(store, an_entry(namespace="two"))
    one, two = files_in(tmp_path)
    one.rename(two.parent / one.name)
    store = a_store(tmp_path)
    assert (store.counts.entries, store.counts.damaged) == (1, 1)


def test_swapped_files_are_misses_until_they_are_known_as_what_they_are(tmp_path: Path) -> None:
    """R6: no name says what is in a file."""
    store = a_store(tmp_path)
    one, two = an_entry([1, 1, 1]), an_entry([2, 2, 2])
    assert put(store, one)
    assert put(store, two)
    first, second = files_in(tmp_path)
    kept = first.read_bytes()
    first.write_bytes(second.read_bytes())
    second.write_bytes(kept)
    assert not holds(store, one)
    assert not holds(store, two)
    assert holds(store, one)
    assert holds(store, two)
    assert store.counts.entries == 2


def a_link(path: Path) -> None:
    path.symlink_to("/etc/hostname")


def a_pipe(path: Path) -> None:
    os.mkfifo(path)


def a_folder(path: Path) -> None:
    path.mkdir()


def a_device(path: Path) -> None:
    path.symlink_to("/dev/zero")


@pytest.mark.parametrize("make", [a_link, a_pipe, a_folder, a_device])
@pytest.mark.parametrize("suffix", ["", ".tmp"])
def test_what_is_no_file_is_ignored_and_never_hangs(
    tmp_path: Path, make: Callable[[Path], None], suffix: str
) -> None:
    """R15."""
    store = a_store(tmp_path)
    assert put(store, an_entry())
    (file,) = files_in(tmp_path)
    thing = file.with_name("0" * 32 + ".mlxkv.safetensors" + suffix)
    make(thing)
    file.unlink()
    make(file)
    assert not holds(store, an_entry())
    assert os.path.lexists(file)
    store = a_store(tmp_path)
    assert store.counts.entries == store.counts.damaged == store.counts.orphans == 0
    assert os.path.lexists(thing)
    assert put(store, an_entry())
    assert holds(store, an_entry())


@pytest.mark.parametrize("depth", [1, 2])
def test_a_folder_that_was_replaced_by_a_link_is_not_entered(tmp_path: Path, depth: int) -> None:
    """R15."""
    root, elsewhere = tmp_path / "root", tmp_path / "elsewhere"
    store = a_store(root)
    assert put(store, an_entry())
    folder = (root / IDENTITY.fingerprint / folder_of("plain")).parents[2 - depth - 0].resolve()
    folder = [root / IDENTITY.fingerprint, root / IDENTITY.fingerprint / folder_of("plain")][
        depth - 1
    ]
    folder.rename(elsewhere)
    folder.symlink_to(elsewhere)
    before = files_in(elsewhere)
    assert not holds(store, an_entry())
    assert not put(store, an_entry())
    assert not put(a_store(root), an_entry())
    assert files_in(elsewhere) == before


def test_orphans_go_and_a_live_writers_temporary_stays(tmp_path: Path) -> None:
    """R18."""
    store, seen = a_store(tmp_path), []

    def run_step(step: Step) -> None:
        other = a_store(tmp_path)
        seen.append((other.counts.orphans, other.counts.entries, len(files_in(tmp_path))))
        step()

    assert put(store, an_entry(), run_step)
    assert seen == [(0, 0, 1)] * 2
    (file,) = files_in(tmp_path)
    file.rename(file.with_name(file.name + ".tmp"))
    store = a_store(tmp_path)
    assert (store.counts.orphans, store.counts.entries) == (1, 0)
    assert files_in(tmp_path) == []


def test_a_temporary_that_a_cleaner_took_is_made_again(tmp_path: Path) -> None:
    """Between a file's creation and its lock it looks like an orphan."""
    taken: list[Path] = []

    class Eager(Files):
        def lock(self, file: int) -> None:
            if not taken:
                taken.extend(files_in(tmp_path))
                taken[0].unlink()
            super().lock(file)

    store = a_store(tmp_path, files=Eager())
    assert put(store, an_entry())
    assert taken
    assert holds(store, an_entry())


def test_an_entry_put_twice_as_one_value_is_two_entries(tmp_path: Path) -> None:
    store, entry = a_store(tmp_path), an_entry()
    assert put(store, entry)
    assert put(store, entry)
    assert store.counts.entries == 1
    assert len(files_in(tmp_path)) == 1
    found = store.find(ids([1, 2, 3, 4]), "plain")
    assert found is not None
    assert found.entry is not entry
    assert not store.restore(entry, no_room)


@pytest.mark.parametrize("error", [MemoryError(), OSError(5, "EIO"), ValueError("no"), TypeError()])
def test_whatever_a_reader_or_a_builder_raises_is_not_passed_on(
    tmp_path: Path, error: Exception
) -> None:
    def fail(*_: Any) -> Any:
        raise error

    store = a_store(tmp_path)
    assert not store.put(an_entry(), fail)
    assert not put(store, an_entry(), fail)
    assert files_in(tmp_path) == []
    assert put(store, an_entry())
    found = store.find(ids([1, 2, 3, 4]), "plain")
    assert found is not None
    assert not store.restore(found.entry, fail)
    assert holds(store, an_entry())
    assert (store.counts.failed, store.counts.misses) == (2, 1)


def test_an_interrupt_leaves_nothing_behind_and_is_passed_on(tmp_path: Path) -> None:
    def interrupt(_: Any) -> Any:
        raise KeyboardInterrupt

    store = a_store(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        store.put(an_entry(), interrupt)
    assert files_in(tmp_path) == []


def test_bad_entries_are_not_stored_and_raise_nothing(tmp_path: Path) -> None:
    store = a_store(tmp_path)
    bad = [
        an_entry([]),
        an_entry(namespace="\ud800"),
        an_entry(namespace="__generation_checkpoint__:"),
    ]
    assert not any(put(store, entry) for entry in bad)
    assert not put(a_store(tmp_path, codec="other"), an_entry())
    assert files_in(tmp_path) == []


@pytest.mark.parametrize("fingerprint", ["../../../../../../../../../../etc", "", "F" * 64])
def test_a_fingerprint_is_a_digest(tmp_path: Path, fingerprint: str) -> None:
    with pytest.raises(BadInput, match="hex digits"):
        a_store(tmp_path, identity=Identity("m", fingerprint, "7"))
    with pytest.raises(BadInput, match="at least 1"):
        a_store(tmp_path, cap_bytes=0)


def test_a_lookup_makes_no_call(tmp_path: Path) -> None:
    watch = Watch()
    store = a_store(tmp_path, files=watch.files())
    assert put(store, an_entry())
    watch.log.clear()
    store.find(ids([1, 2, 3, 4]), "plain")
    store.has_durable_prefix(ids([1, 2]), "plain")
    store.find_generation_checkpoint(ids([1, 2]), "k", "plain")
    assert store.counts.entries == 1
    assert watch.log == []


def test_a_file_is_synced_before_its_name_and_its_folder_after(tmp_path: Path) -> None:
    """Law `atomic`: what a loss of power may not tear apart."""
    watch = Watch()
    store = a_store(tmp_path / "root", files=watch.files())
    assert put(store, an_entry())
    lasting = ("make_folder", "write", "sync", "sync_folder", "rename")
    assert [name for name, _, _ in watch.log if name in lasting] == [
        *(["make_folder", "sync_folder"] * 3),
        *("write", "write", "write", "sync", "rename", "sync_folder"),
    ]


def test_a_rescan_of_folders_that_did_not_change_opens_no_file(tmp_path: Path) -> None:
    watch = Watch()
    assert all(put(a_store(tmp_path), an_entry([n], namespace=str(n % 3))) for n in range(9))
    for folder in (tmp_path / IDENTITY.fingerprint).iterdir():
        os.utime(folder, ns=(10**18, 10**18))
    store = a_store(tmp_path, files=watch.files())
    watch.log.clear()
    store.rescan()
    assert {name for name, _, _ in watch.log} == {"open_folder", "names", "status", "close"}
    assert sum(name == "names" for name, _, _ in watch.log) == 1


def test_a_folder_that_changed_a_moment_ago_is_listed_again(tmp_path: Path) -> None:
    """Two changes within one tick of the file system's clock leave the same mtime."""
    assert put(a_store(tmp_path), an_entry([1]))
    store, folder = a_store(tmp_path), tmp_path / IDENTITY.fingerprint / folder_of("plain")
    then = folder.stat().st_mtime_ns
    assert put(a_store(tmp_path), an_entry([2]))
    os.utime(folder, ns=(then, then))
    store.rescan()
    assert store.counts.entries == 2


def test_a_generation_is_found_by_its_key_and_by_nothing_else(tmp_path: Path) -> None:
    """SPEC: unfinished generations are invisible to ordinary lookups."""
    store = a_store(tmp_path)
    entry = unfinished("k", 2, [1, 2, 3])
    assert put(store, entry)
    for opened in (store, a_store(tmp_path)):
        found = opened.find_generation_checkpoint(ids([1, 2]), "k", "plain")
        assert found is not None
        assert found.generation == entry.generation
        assert restored(opened, found)
        for prompt, key, namespace in (
            ([1, 2], "other", "plain"),
            ([1, 2], "k", "other"),
            ([1, 2, 3], "k", "plain"),
            ([1], "k", "plain"),
            ([1, 9], "k", "plain"),
        ):
            assert opened.find_generation_checkpoint(ids(prompt), key, namespace) is None
        for namespace in ("plain", entry.namespace):
            assert opened.find(ids([1, 2, 3, 4]), namespace) is None
            assert not opened.has_durable_prefix(ids([1, 2]), namespace)


def test_of_equally_long_checkpoints_the_newest_goes_on(tmp_path: Path) -> None:
    """There are such where a removal failed, or was undone by a crash."""
    watch = Watch()
    store = a_store(tmp_path, files=watch.files())

    def fault(_: int, called: str) -> None:
        if called == "remove":
            raise OSError(errno.EIO, "not now")

    for pending in (7, 8):
        entry = unfinished("k", 2, [1, 2, 3])
        assert entry.generation is not None
        with watch.failing(fault):
            assert put(store, replace(entry, generation=replace(entry.generation, pending=pending)))
    assert store.counts.entries == 2
    for opened in (store, a_store(tmp_path)):
        found = opened.find_generation_checkpoint(ids([1, 2]), "k", "plain")
        assert found is not None
        assert found.generation is not None
        assert found.generation.pending == 8


def test_a_checkpoint_holds_more_than_its_prompt(tmp_path: Path) -> None:
    store = a_store(tmp_path)
    assert put(store, unfinished("k", 3, [1, 2, 3]))
    assert store.find_generation_checkpoint(ids([1, 2, 3]), "k", "plain") is None


def test_a_newer_checkpoint_replaces_the_older_and_the_end_removes_all(tmp_path: Path) -> None:
    store = a_store(tmp_path)
    for length in range(3, 7):
        assert put(store, unfinished("k", 2, list(range(1, length + 1))))
        assert put(store, unfinished("other", 2, [1, 2, 3]))
        assert store.counts.entries == 2
    found = store.find_generation_checkpoint(ids([1, 2]), "k", "plain")
    assert found is not None
    assert len(found.tokens) == 6
    other = a_store(tmp_path)
    assert put(other, unfinished("k", 2, list(range(1, 9))))
    store.remove_generation_checkpoints("k")
    store.remove_generation_checkpoints("k")
    store.remove_generation_checkpoints("never there \ud800")
    assert store.counts.entries == 1
    assert len(files_in(tmp_path)) == 1
    assert len(list((tmp_path / IDENTITY.fingerprint).iterdir())) == 1


def test_the_longest_checkpoint_wins(tmp_path: Path) -> None:
    """A crash may leave the older one beside the newer."""
    store = a_store(tmp_path)
    assert put(store, unfinished("k", 2, [1, 2, 3, 4]))
    (file,) = files_in(tmp_path)
    kept = file.read_bytes()
    assert put(store, unfinished("k", 2, [1, 2, 3]))
    file.write_bytes(kept)
    store = a_store(tmp_path)
    found = store.find_generation_checkpoint(ids([1, 2]), "k", "plain")
    assert found is not None
    assert len(found.tokens) == 4


@pytest.mark.parametrize("entry", [an_entry(), unfinished()])
def test_a_rejected_step_fails_the_write_and_nothing_is_left(tmp_path: Path, entry: Entry) -> None:
    """Law `exclusive`: of a generation also the folder, the name and the cleaning up are steps."""
    steps = 0

    def counted(step: Step) -> None:
        nonlocal steps
        steps += 1
        step()

    assert put(a_store(tmp_path / "count"), entry, counted)
    assert steps == (2 if entry.generation is None else 4)
    for rejected in range(steps):
        for swallowed in (False, True):
            left = rejected

            def run_step(step: Step, swallowed: bool = swallowed) -> None:
                nonlocal left
                left -= 1
                if left >= 0:
                    step()
                elif not swallowed:
                    raise RuntimeError("the model is going")

            store = a_store(tmp_path / f"{rejected}{swallowed}")
            assert not put(store, entry, run_step)
            assert store.counts.entries == 0
            assert files_in(tmp_path / f"{rejected}{swallowed}") == []


def test_no_lock_is_held_while_a_step_runs(tmp_path: Path) -> None:
    """A lookup on the model's thread must not wait for a writer that waits for that thread."""
    store = a_store(tmp_path)

    def run_step(step: Step) -> None:
        def look() -> None:
            store.rescan()
            done.append(store.counts)

        done: list[object] = []
        thread = threading.Thread(target=look)
        thread.start()
        thread.join(10)
        assert done
        step()

    assert put(store, unfinished(), run_step)


def test_entries_of_any_tensors_come_back(tmp_path: Path) -> None:
    tensors = [
        TensorSpec("0.0", "BF16", (1, 2, 3, 4)),
        TensorSpec("0.1", "F32", (0,)),
        TensorSpec("1.0", "C64", (70_000,)),
        TensorSpec("2.0", "U8", (3_000_001,)),
    ]
    entry = an_entry(range(9), tensors=tensors)
    store = a_store(tmp_path)
    assert put(store, entry)
    assert holds(a_store(tmp_path), entry)
    assert put(store, an_entry([5], tensors=[]))
    assert holds(store, an_entry([5], tensors=[]))
