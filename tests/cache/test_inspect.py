"""`engine cache` on folders where anyone may have put anything."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from engine import BadInput
from engine.cache.cli import app
from engine.cache.entry import AttachmentHeader, Entry, Identity, Reuse, TensorSpec
from engine.cache.files import Files
from engine.cache.identity import MEMO
from engine.cache.inspect import Removed, clean, look
from engine.cache.shelf import Shelf, folder_of
from engine.cache.store import Store

FINGERPRINT = "a" * 64


def put(
    folder: Path,
    model: str = "model",
    schema: str = "draft:1",
    *,
    fingerprint: str = FINGERPRINT,
    namespace: str = "n",
) -> Path:
    """An entry's file."""
    store = Store(folder, Identity(model, fingerprint, "b" * 64), cap_bytes=1 << 20, codec="c")
    entry = Entry(
        namespace=namespace,
        tokens=np.arange(3, dtype=np.int32),
        codec="c",
        layout=("[/layout] [bold]",),
        reuse=Reuse(trimmable=False),
        tensors=(TensorSpec("0.0", "U8", (4,)),),
        attachments=(AttachmentHeader(schema, {"k": ":boom: [/k]"}, ("0.0",)),),
    )
    assert store.put(entry, lambda spec: memoryview(b"four"))
    (file,) = (folder / fingerprint / folder_of(namespace)).iterdir()
    return file


@pytest.mark.parametrize("said", ["a[/b]c", "[red]x[/red]", "[bold", ":smile:", "\x1b[31mred\r\n"])
def test_what_a_header_says_is_shown_as_it_is(said: str, tmp_path: Path) -> None:
    """As text, not as markup, and nothing that a terminal would act on."""
    shown = ascii(said)[1:-1]
    name = put(tmp_path, said, said).name
    for command in (["ls", str(tmp_path)], ["show", str(tmp_path), name[:8]]):
        done = CliRunner().invoke(app, command)
        assert done.exit_code == 0, done.exception
        assert shown in done.stdout
        assert "\x1b" not in done.stdout
    assert "[/layout] [bold]" in done.stdout
    assert ":boom: [/k]" in done.stdout


def a_file(place: Path) -> None:
    place.write_text("no folder")


def a_link(place: Path) -> None:
    place.symlink_to(place.parent)


def a_dangling_link(place: Path) -> None:
    place.symlink_to("nowhere")


@pytest.mark.parametrize("make", [a_file, a_link, a_dangling_link, os.mkfifo])
@pytest.mark.parametrize("name", ["0" * 32, f"{FINGERPRINT}/{'0' * 64}"])
def test_other_things_of_our_names_are_passed_over(
    name: str, make: Callable[[Path], None], tmp_path: Path
) -> None:
    file = put(tmp_path)
    make(tmp_path / name)
    assert [tmp_path / seen.place for seen in look(tmp_path, verify=True)] == [file]
    assert clean(tmp_path) == Removed()
    assert os.path.lexists(tmp_path / name)


def test_what_others_remove_meanwhile_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = put(tmp_path)
    listed = Shelf.folders

    def folders(shelf: Shelf) -> list[str]:
        return [*listed(shelf), "0" * 64]

    monkeypatch.setattr(Shelf, "folders", folders)
    assert [tmp_path / seen.place for seen in look(tmp_path)] == [file]
    assert clean(tmp_path, max_bytes=0).evicted == 1


def refuse(monkeypatch: pytest.MonkeyPatch, method: str, name: str) -> None:
    """Have a call fail where it is about this name."""
    real: Callable[..., int] = getattr(Files, method)

    def call(files: Files, asked: str, *where: int) -> int:
        if asked == name:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), asked)
        return real(files, asked, *where)

    monkeypatch.setattr(Files, method, call)


def run(*command: str) -> tuple[int, str]:
    done = CliRunner().invoke(app, command)
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return done.exit_code, done.stdout


@pytest.mark.parametrize("unread", ["file", "namespace", "fingerprint"])
def test_what_cannot_be_read_is_named_and_the_rest_is_shown(
    unread: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    good, bad = put(tmp_path), put(tmp_path, fingerprint="c" * 64, namespace="other")
    size = good.stat().st_size
    place = {"file": bad, "namespace": bad.parent, "fingerprint": bad.parent.parent}[unread]
    refuse(monkeypatch, "open" if unread == "file" else "open_folder", place.name)
    seen = list(look(tmp_path, verify=True))
    assert [(tmp_path / one.place, one.state) for one in seen] == [
        (good, "readable"),
        (place, "unread"),
    ]
    assert [one.size for one in seen] == [size, bad.stat().st_size if unread == "file" else 0]
    assert [one.used_s is None for one in seen] == [False, unread != "file"]
    assert ("ago" in run("ls", str(tmp_path))[1].splitlines()[2]) == (unread == "file")
    relative = place.relative_to(tmp_path)
    assert run("verify", str(tmp_path)) == (
        1,
        f"unread: {relative}: Permission denied\n"
        f"{'2 entries' if unread == 'file' else '1 entry'}, 0 damaged, 1 unread, 0 foreign\n",
    )
    code, said = run("gc", str(tmp_path))
    assert (code, said.rpartition("; ")[2]) == (1, "1 could not be looked at or removed\n")
    assert good.exists()
    assert bad.exists()


def test_a_damaged_file_that_stays_is_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = put(tmp_path)
    file.write_bytes(b"damaged")
    refuse(monkeypatch, "remove", file.name)
    assert clean(tmp_path) == Removed(failed=1)
    monkeypatch.undo()
    assert clean(tmp_path) == Removed(damaged=1, freed_bytes=7)


def test_an_entry_that_stays_above_the_cap_is_counted_and_the_next_one_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    older, newer = put(tmp_path), put(tmp_path, namespace="other")
    os.utime(older, (1, 1))
    refuse(monkeypatch, "remove", older.name)
    size = newer.stat().st_size
    assert clean(tmp_path, max_bytes=size) == Removed(evicted=1, freed_bytes=size, failed=1)
    assert (older.exists(), newer.exists()) == (True, False)


def test_what_a_killed_process_was_writing_of_identities_is_removed(tmp_path: Path) -> None:
    memo, left, living = (tmp_path / f"{MEMO}{end}" for end in ("", ".1.tmp", ".2.tmp"))
    for file in (memo, left, living):
        file.write_text("{}")
    os.utime(memo, (1, 1))
    os.utime(left, (1, 1))
    assert clean(tmp_path) == Removed(orphans=1)
    assert [file.exists() for file in (memo, left, living)] == [True, False, True]


@pytest.mark.parametrize("where", ["namespace", "fingerprint"])
def test_an_entry_in_the_place_of_another_is_damaged(where: str, tmp_path: Path) -> None:
    """As it is for a store, which removes it."""
    file = put(tmp_path)
    below = Path(FINGERPRINT, folder_of("other"))
    place = tmp_path / (below if where == "namespace" else Path("c" * 64, file.parent.name))
    place.mkdir(parents=True)
    moved = file.rename(place / file.name)
    (seen,) = look(tmp_path)
    assert (seen.state, seen.problem) == ("damaged", f"of another {where} than its folder")
    assert clean(tmp_path).damaged == 1
    assert not moved.exists()


def test_no_more_goes_than_is_above_the_cap_and_nothing_empty_is_left(tmp_path: Path) -> None:
    files = [put(tmp_path, namespace=str(number)) for number in range(5)]
    for number, file in enumerate(files):
        os.utime(file, (number + 1, number + 1))
    files[4].write_bytes(b"damaged")  # which takes no room from the others
    left = files[0].with_name(f"{'1' * 32}.mlxkv.safetensors.tmp")
    left.write_bytes(b"begun")
    size = files[0].stat().st_size
    removed = clean(tmp_path, max_bytes=2 * size)
    assert removed == Removed(damaged=1, orphans=1, evicted=2, freed_bytes=2 * size + 7)
    assert [file.exists() for file in files] == [False, False, True, True, False]
    assert not left.exists()
    assert [file.parent.exists() for file in files] == [False, False, True, True, False]


def test_damage_behind_a_header_goes_if_every_byte_is_looked_at(tmp_path: Path) -> None:
    file = put(tmp_path)
    file.write_bytes(file.read_bytes()[:-1] + b"!")
    assert clean(tmp_path) == Removed()
    assert run("verify", str(tmp_path))[0] == 1
    assert run("gc", str(tmp_path), "--verify")[0] == 0
    assert not file.exists()


@pytest.mark.parametrize("command", ["ls", "show", "verify", "gc"])
def test_an_empty_name_is_not_the_current_folder(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(tmp_path)
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, [command, "", *(["0"] if command == "show" else [])])
    assert isinstance(done.exception, BadInput)
    assert "DIR is empty" in str(done.exception)
