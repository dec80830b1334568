"""The system calls of the SSD tier."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.cache import files as files_module
from engine.cache.files import Files, closing, read_all, write_all


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[int]:
    files = Files()
    with closing(files, files.open_folder(str(tmp_path))) as opened:
        yield opened


def test_what_is_created_is_ours_alone(tmp_path: Path, folder: int) -> None:
    files = Files()
    files.make_folder("sub", folder)
    files.close(files.create("file", folder))
    assert (tmp_path / "sub").stat().st_mode & 0o777 == 0o700
    assert (tmp_path / "file").stat().st_mode & 0o777 == 0o600
    with pytest.raises(FileExistsError):
        files.create("file", folder)
    with pytest.raises(FileExistsError):
        files.make_folder("sub", folder)


def test_a_link_is_never_followed(tmp_path: Path, folder: int) -> None:
    files = Files()
    (tmp_path / "target").write_bytes(b"x")
    (tmp_path / "real").mkdir()
    for name, target in (("link", "target"), ("linked", "real"), ("dangling", "nowhere")):
        (tmp_path / name).symlink_to(target)
    for name in ("link", "dangling"):
        with pytest.raises(OSError, match="symbolic links"):
            files.open(name, folder)
        with pytest.raises(FileExistsError):
            files.create(name, folder)
        assert not files.status_of(name, folder).regular
    with pytest.raises(NotADirectoryError):
        files.open_folder("linked", folder)
    regular = {name for name, is_regular in files.names(folder) if is_regular}
    assert regular == {"target"}


def test_a_pipe_does_not_block_and_is_told_from_a_file(tmp_path: Path, folder: int) -> None:
    files = Files()
    os.mkfifo(tmp_path / "pipe")
    with closing(files, files.open("pipe", folder)) as pipe:
        assert not files.status(pipe).regular


def test_one_descriptor_at_a_time_holds_the_lock(folder: int) -> None:
    files = Files()
    with closing(files, files.create("file", folder)) as ours:
        files.lock(ours)
        with closing(files, files.open("file", folder)) as theirs, pytest.raises(BlockingIOError):
            files.lock(theirs)
    with closing(files, files.open("file", folder)) as theirs:
        files.lock(theirs)


def test_reads_and_writes_go_on_until_all_is_done(folder: int) -> None:
    class Slow(Files):
        def write(self, file: int, data: memoryview, offset: int) -> int:
            return super().write(file, data[:3], offset)

        def read(self, file: int, into: memoryview, offset: int) -> int:
            return super().read(file, into[:2], offset)

    files = Slow()
    found = bytearray(9)
    with closing(files, files.create("file", folder)) as file:
        write_all(files, file, memoryview(b"0123456789"), 1)
        assert read_all(files, file, memoryview(found), 2)
        assert found == b"123456789"
        assert not read_all(files, file, memoryview(found), 3)


def test_a_write_of_nothing_is_an_error_and_not_a_loop(folder: int) -> None:
    class Full(Files):
        def write(self, file: int, data: memoryview, offset: int) -> int:
            return 0

    with pytest.raises(OSError, match="no bytes"):
        write_all(Full(), folder, memoryview(b"x"), 0)


@pytest.mark.parametrize(
    ("refusal", "full_sync", "expected"),
    [
        (None, True, ["full"]),
        (errno.ENOTSUP, True, ["full", "plain"]),
        (errno.EIO, True, ["full", "EIO"]),
        (None, False, ["plain"]),
    ],
)
def test_macos_syncs_through_the_drives_cache_unless_the_file_system_refuses(
    monkeypatch: pytest.MonkeyPatch,
    folder: int,
    refusal: int | None,
    full_sync: bool,
    expected: list[str],
) -> None:
    """SPEC: fsync means F_FULLFSYNC; a field chooses. The call is made up where there is none."""
    calls: list[str] = []

    def full(_: int, command: int) -> int:
        assert command == 51
        calls.append("full")
        if refusal is not None:
            raise OSError(refusal, os.strerror(refusal))
        return 0

    monkeypatch.setattr(files_module, "FULL_SYNC", 51)
    monkeypatch.setattr(fcntl, "fcntl", full)
    monkeypatch.setattr(os, "fsync", lambda descriptor: calls.append("plain"))
    try:
        Files(full_sync).sync(folder)
    except OSError as error:
        calls.append(errno.errorcode[error.errno or 0])
    assert calls == expected


@pytest.mark.parametrize(("number", "fails"), [(errno.EINVAL, False), (errno.EIO, True)])
def test_a_folder_that_cannot_be_synced_is_no_error_but_one_that_fails_to_be_is(
    monkeypatch: pytest.MonkeyPatch, folder: int, number: int, fails: bool
) -> None:
    def refuse(_: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", refuse)
    monkeypatch.setattr(files_module, "FULL_SYNC", None)
    if not fails:
        Files().sync_folder(folder)
        return
    with pytest.raises(OSError, match="Input/output"):
        Files().sync_folder(folder)
