"""The rig's disk loses what a disk may lose, and nothing else: the tester of crashes, tested."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest

from engine.cache.files import closing, write_all
from parity.fuzz.disk.images import Disk, Image, everything, images, nothing, some, zeros
from parity.fuzz.disk.recording import Change, Recorded


def published(folder: Path, *, sync: bool = True, sync_folder: bool = True) -> list[Change]:
    """The calls of a file that is written, synced and renamed."""
    files = Recorded()
    with closing(files, files.open_folder(str(folder))) as at:
        with closing(files, files.create("temporary", at)) as file:
            write_all(files, file, memoryview(b"abc"), 4)
            write_all(files, file, memoryview(b"0123"), 0)
            if sync:
                files.sync(file)
        files.rename("temporary", "final", at)
        if sync_folder:
            files.sync_folder(at)
    return files.log.changes


def left(
    folder: Path, changes: list[Change], drawn: int = 60
) -> set[tuple[tuple[str, bytes], ...]]:
    """What images of the moment after these changes hold, as names and bytes."""
    disk = Disk(str(folder))
    for change in changes:
        disk.apply(change)
    return {
        tuple((Path(path).name, data) for path, data, _ in image.files)
        for image in images(disk, Random(1), drawn)
    }


def test_what_was_synced_is_certain(tmp_path: Path) -> None:
    assert left(tmp_path, published(tmp_path)) == {(("final", b"0123abc"),)}


def test_a_name_that_was_not_synced_is_the_old_one_the_new_one_or_none(tmp_path: Path) -> None:
    found = left(tmp_path, published(tmp_path, sync_folder=False))
    whole = b"0123abc"
    assert found == {(), (("temporary", whole),), (("final", whole),)}


def test_bytes_that_were_not_synced_are_any_of_those_that_were_written(tmp_path: Path) -> None:
    found = {data for ((_, data),) in left(tmp_path, published(tmp_path, sync=False))}
    assert {b"", b"0123abc", bytes(7), b"0123", b"\0\0\0\0abc"} <= found
    written = (*zip(b"0123abc", bytes(7), strict=True),)
    assert all(byte in written[at] for data in found for at, byte in enumerate(data))


def test_every_prefix_of_the_calls_is_a_moment(tmp_path: Path) -> None:
    changes = published(tmp_path)
    assert left(tmp_path, changes[:1]) == {(), (("temporary", b""),)}
    assert len(left(tmp_path, changes[:3])) > 5


def test_a_removal_that_was_not_synced_may_be_undone(tmp_path: Path) -> None:
    changes = published(tmp_path)
    files = Recorded()
    files.log.names[str(tmp_path), "final"] = 1
    with closing(files, files.open_folder(str(tmp_path))) as at:
        files.remove("final", at)
    assert left(tmp_path, changes + files.log.changes) == {(), (("final", b"0123abc"),)}


def test_what_stands_in_a_lost_folder_is_lost(tmp_path: Path) -> None:
    files = Recorded()
    with closing(files, files.open_folder(str(tmp_path))) as at:
        files.make_folder("sub", at)
        with closing(files, files.open_folder("sub", at)) as sub:
            files.close(files.create("file", sub))
            files.sync_folder(sub)
    assert left(tmp_path, files.log.changes) == {(), (("file", b""),)}


@pytest.mark.parametrize("rule", [everything, nothing, zeros, some(Random(3))])
def test_no_rule_changes_what_is_certain_and_was_not_written_to(rule: object) -> None:
    assert rule(b"certain", []) == b"certain"  # type: ignore[operator]


def test_an_image_on_disk_is_the_image(tmp_path: Path) -> None:
    origin = str(tmp_path / "origin")
    image = Image(
        frozenset({origin, f"{origin}/a"}),
        ((f"{origin}/a/f", b"x", 10**18), (f"{origin}/g", b"", None)),
    )
    (tmp_path / "there").mkdir()
    image.materialise(origin, tmp_path / "there")
    assert (tmp_path / "there/a/f").read_bytes() == b"x"
    assert (tmp_path / "there/a/f").stat().st_mtime_ns == 10**18
    names, disk = Disk.of(image, origin, str(tmp_path / "there"))
    assert set(names) == {(f"{tmp_path}/there/a", "f"), (f"{tmp_path}/there", "g")}
    assert len(set(images(disk, Random(1), 5))) == 1
