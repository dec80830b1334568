"""What lies in a tier's folder, for people: listed, verified, cleaned up. No mlx here.

It looks at every fingerprint's entries, unlike a store, which knows its own alone. Nothing is
followed out of the folder.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from .files import Descriptor, Files, closing
from .format import Header, read_header, read_tensors
from .keeper import is_gone
from .shelf import Shelf
from .strict import Damaged, Foreign

FINGERPRINT = re.compile("[0-9a-f]{32,128}")


@dataclass(frozen=True, slots=True)
class Seen:
    """One file. `problem` says why it is no entry, if it is none; `damaged` if it never will be.

    `place` is its path in the tier's folder, `used_s` when it was written or used last, in seconds
    since 1970.
    """

    place: Path
    size: int
    used_s: float
    header: Header | None
    problem: str = ""
    damaged: bool = False


def look(folder: Path, *, verify: bool = False) -> Iterator[Seen]:
    """Every entry in a tier's folder, by path. With `verify` every byte is checked.

    Raises:
        OSError: the folder cannot be read.
    """
    for shelf in shelves(folder):
        for below in sorted(_folders(shelf)):
            yield from _entries(shelf, below, verify)


def shelves(folder: Path) -> list[Shelf]:
    """Each fingerprint's."""
    files = Files()
    with closing(files, files.open_folder(str(folder))) as at:
        names = sorted(name for name, _ in files.names(at) if FINGERPRINT.fullmatch(name))
    return [Shelf(files, str(folder.absolute()), name) for name in names]


def _folders(shelf: Shelf) -> list[str]:
    """The namespaces' folders; none where something else stands in the place of theirs."""
    try:
        return shelf.folders()
    except OSError as error:
        if not is_gone(error):
            raise
        return []


def _entries(shelf: Shelf, below: str, verify: bool) -> list[Seen]:
    """What is in a namespace's folder, if it is one and still there."""
    found: list[Seen | None] = []
    with _whatever_is_gone(), shelf.opened(below) as at:
        for name in sorted(shelf.listed(at)[0]):
            place = Path(shelf.fingerprint, below, name)
            found.append(_seen(shelf.files, name, at, place, verify))
    return [seen for seen in found if seen is not None]


@contextlib.contextmanager
def _whatever_is_gone() -> Iterator[None]:
    """Others remove what is looked at, and names like ours may stand for something else."""
    try:
        yield
    except OSError as error:
        if not is_gone(error):
            raise


def _seen(files: Files, name: str, at: Descriptor, place: Path, verify: bool) -> Seen | None:
    """None if the file is gone."""
    try:
        with closing(files, files.open(name, at)) as file:
            status = files.status(file)
            size, used_s = status.size, status.mtime_ns / 1e9
            header = None
            try:
                header = read_header(files, file, size)
                if verify:
                    read_tensors(files, file, header)
            except Damaged as error:
                return Seen(place, size, used_s, header, str(error), damaged=True)
            except (Foreign, OSError) as error:
                return Seen(place, size, used_s, header, str(error))
            return Seen(place, size, used_s, header)
    except OSError as error:
        return None if is_gone(error) else Seen(place, 0, 0.0, None, str(error))


@dataclass(frozen=True, slots=True)
class Removed:
    """What a clean-up has removed."""

    damaged: int = 0
    orphans: int = 0
    evicted: int = 0
    freed_bytes: int = 0


def clean(folder: Path, *, max_bytes: int | None = None) -> Removed:
    """Remove damaged files and orphaned temporaries, then the least recently used above a cap.

    Raises:
        OSError: the folder cannot be read, or a file not removed.
    """
    orphans = damaged = evicted = freed = 0
    by_name = {shelf.fingerprint: shelf for shelf in shelves(folder)}
    for shelf in by_name.values():
        for below in _folders(shelf):
            with _whatever_is_gone(), shelf.opened(below) as at:
                orphans += sum(shelf.remove_orphan(name, at) for name in shelf.listed(at)[1])
    kept: list[Seen] = []
    for seen in list(look(folder)):
        if seen.damaged:
            _remove(by_name, seen)
            damaged, freed = damaged + 1, freed + seen.size
        else:
            kept.append(seen)
    total = sum(seen.size for seen in kept)
    for seen in sorted(kept, key=lambda one: one.used_s):
        if max_bytes is None or total <= max_bytes:
            break
        _remove(by_name, seen)
        total, evicted, freed = total - seen.size, evicted + 1, freed + seen.size
    for shelf in by_name.values():
        for below in _folders(shelf):
            with contextlib.suppress(OSError):
                shelf.remove_if_empty(below)
    return Removed(damaged, orphans, evicted, freed)


def _remove(shelves_by_name: dict[str, Shelf], seen: Seen) -> None:
    fingerprint, below, name = seen.place.parts
    shelves_by_name[fingerprint].remove(below, name)
