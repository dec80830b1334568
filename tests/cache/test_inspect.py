"""`engine cache` on folders where anyone may have put anything."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from engine.cache.cli import app
from engine.cache.entry import AttachmentHeader, Entry, Identity, Reuse, TensorSpec
from engine.cache.inspect import Removed, clean, look
from engine.cache.shelf import Shelf
from engine.cache.store import Store

FINGERPRINT = "a" * 64


def put(folder: Path, model: str = "model", schema: str = "draft:1") -> Path:
    """An entry's file."""
    store = Store(folder, Identity(model, FINGERPRINT, "b" * 64), cap_bytes=1 << 20, codec="c")
    entry = Entry(
        namespace="n",
        tokens=np.arange(3, dtype=np.int32),
        codec="c",
        layout=("[/layout] [bold]",),
        reuse=Reuse(trimmable=False),
        tensors=(TensorSpec("0.0", "U8", (4,)),),
        attachments=(AttachmentHeader(schema, {"k": ":boom: [/k]"}, ("0.0",)),),
    )
    assert store.put(entry, lambda spec: memoryview(b"four"))
    (file,) = folder.rglob("*.safetensors")
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
