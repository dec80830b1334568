"""What lies in a tier's folder, for people: listed, shown, verified, cleaned up. No mlx here.

It looks at every fingerprint's entries, unlike a store, which knows its own alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from .files import Files, closing
from .format import Header
from .store import ENTRY_SUFFIX


@dataclass(frozen=True, slots=True)
class Found:
    """One file. Without a `header` it cannot be read, and `problem` says why.

    `place` is its path in the folder, `mtime_ns` when it was last written or used.
    """

    place: Path
    size: int
    mtime_ns: int
    header: Header | None
    problem: str = ""
    damaged: bool = False


def look(folder: Path, *, verify: bool = False, files: Files | None = None) -> Iterator[Found]:
    """Every entry in the folder, by path. With `verify`, the bytes of every tensor are checked.

    Raises:
        OSError: the folder cannot be read.
    """
    files = files or Files()
    with closing(files, files.open_folder(str(folder))) as top:
        for fingerprint in _folders(files, top):
            with closing(files, files.open_folder(fingerprint, top)) as middle:
                for namespace in _folders(files, middle):
                    with closing(files, files.open_folder(namespace, middle)) as inner:
                        for name in sorted(n for n, is_file in files.names(inner) if is_file):
                            if name.endswith(ENTRY_SUFFIX):
                                place = Path(fingerprint, namespace, name)
                                yield _found(files, inner, name, place, verify)
