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
    try:
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise BadInput(f"{option} {file}: cannot be written: {error.strerror}") from error
