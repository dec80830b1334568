"""Files that are there whole or not at all."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from parity.errors import BadInput


def write_whole(path: Path, text: str) -> None:
    """Write a file in UTF-8 under another name, then give it its own."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def check_folder(option: str, folder: Path) -> None:
    """Refuse a folder that is none, or that cannot be made or written to.

    Raises:
        BadInput: naming the option and the folder.

    """
    there = folder.absolute()
    while not os.path.lexists(there):
        there = there.parent
    if not there.is_dir():
        above = "" if there == folder.absolute() else f"{there} "
        raise BadInput(f"{option} {folder}: {above}is no folder")
    _require_open(option, folder, there)


def check_writable(option: str, file: Path) -> None:
    """Refuse a file whose folder is missing or closed, or that is no regular file.

    Raises:
        BadInput: naming the option and the file.

    """
    folder = file.absolute().parent
    if not folder.is_dir():
        raise BadInput(f"{option} {file}: its folder does not exist")
    if file.exists() and not file.is_file():
        raise BadInput(f"{option} {file}: is no regular file")
    _require_open(option, file, folder)


def _require_open(option: str, path: Path, folder: Path) -> None:
    try:
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise BadInput(f"{option} {path}: cannot be written: {error.strerror}") from error
