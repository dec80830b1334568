"""A run as a folder of files: a page, the document itself, JUnit XML and a Markdown summary."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from parity.report import junit, markdown, page
from parity.report.document import dumps
from parity.report.files import write_whole


def write_report(folder: Path, run: Mapping[str, Any]) -> None:
    """Write index.html, report.json, junit.xml and summary.md, each whole or not at all.

    All are made before the first one is written. The folder is made if it is missing.

    Raises:
        OSError: the folder cannot be made or written to.

    """
    files = {
        "report.json": dumps(run),
        "junit.xml": junit.render(run),
        "summary.md": markdown.render(run),
        "index.html": page.render(run),
    }
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        write_whole(folder / name, text)
