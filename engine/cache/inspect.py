"""What lies in a tier's folder, for people: listed, verified, cleaned up. No mlx here.

It looks at every fingerprint's entries, unlike a store, which knows its own alone. Nothing is
followed out of the folder.
"""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

from .files import Descriptor, Files, closing
from .format import Header, read_header, read_tensors
from .identity import MEMO
from .keeper import is_gone
from .shelf import Shelf, folder_of
from .strict import Damaged, Foreign

State: TypeAlias = Literal["readable", "damaged", "foreign", "unread"]

ABANDONED_S = 60.0
"""Writing what is remembered of identities takes a moment."""

FINGERPRINT = re.compile("[0-9a-f]{32,128}")


@dataclass(frozen=True, slots=True)
class Seen:
    """One file; or a folder that cannot be read: its `size` is 0, and its `used_s` None.

    `state`: a `readable` entry, a `damaged` one, one that is `foreign`, for other versions to read,
    or what is `unread` since a call failed; `problem` says more. `place` is its path in the tier's
    folder, `used_s` when it was written or used last, in seconds since 1970.
    """

    place: Path
    size: int
    used_s: float | None
    header: Header | None
    state: State = "readable"
    problem: str = ""


def look(folder: Path, *, verify: bool = False) -> Iterator[Seen]:
    """Every entry in a tier's folder, by path. With `verify` every byte is checked.

    Raises:
        OSError: the folder itself cannot be read.
    """
    for shelf in shelves(folder):
        try:
            folders = sorted(shelf.folders())
        except OSError as error:
            yield from _unread(Path(shelf.fingerprint), error)
            continue
        for below in folders:
            yield from _entries(shelf, below, verify)


def shelves(folder: Path) -> list[Shelf]:
    """Each fingerprint's."""
    files = Files()
    with closing(files, files.open_folder(str(folder))) as at:
        names = sorted(name for name, _ in files.names(at) if FINGERPRINT.fullmatch(name))
    return [Shelf(files, str(folder.absolute()), name) for name in names]


def _unread(place: Path, error: OSError) -> Iterator[Seen]:
    """What stands there; nothing if it is gone, or if something else has our name."""
    if not is_gone(error):
        yield Seen(place, 0, None, None, "unread", _why(error))


def _why(error: OSError) -> str:
    return error.strerror or str(error)


def _entries(shelf: Shelf, below: str, verify: bool) -> Iterator[Seen]:
    """What is in a namespace's folder."""
    place = Path(shelf.fingerprint, below)
    try:
        with shelf.opened(below) as at:
            for name in sorted(shelf.listed(at)[0]):
                yield from _seen(shelf.files, name, at, place / name, verify)
    except OSError as error:
        yield from _unread(place, error)


def _seen(files: Files, name: str, at: Descriptor, place: Path, verify: bool) -> Iterator[Seen]:
    """One file, if it is still there."""
    header: Header | None = None
    state: State = "readable"
    problem = ""
    try:
        status = files.status_of(name, at)
    except OSError as error:
        yield from _unread(place, error)
        return
    try:
        with closing(files, files.open(name, at)) as file:
            status = files.status(file)
            header = read_header(files, file, status.size)
            _require_place(header, place)
            if verify:
                read_tensors(files, file, header)
    except Damaged as error:
        state, problem = "damaged", str(error)
    except Foreign as error:
        state, problem = "foreign", str(error)
    except OSError as error:
        if is_gone(error):
            return
        state, problem = "unread", _why(error)
    yield Seen(place, status.size, status.mtime_ns / 1e9, header, state, problem)


def _require_place(header: Header, place: Path) -> None:
    """As a store does: elsewhere it is of no use to any."""
    fingerprint, below, _ = place.parts
    if header.origin.identity.fingerprint != fingerprint:
        raise Damaged("of another fingerprint than its folder")
    if folder_of(header.entry.namespace) != below:
        raise Damaged("of another namespace than its folder")


@dataclass(frozen=True, slots=True)
class Removed:
    """What a clean-up has removed; `failed` entries or folders could not be looked at or removed.

    `orphans` are what killed writers left; what a living one holds stays, and is not counted.
    """

    damaged: int = 0
    orphans: int = 0
    evicted: int = 0
    freed_bytes: int = 0
    failed: int = 0


def clean(folder: Path, *, max_bytes: int | None = None, verify: bool = False) -> Removed:
    """Remove damaged files and orphaned temporaries, then the least recently used above a cap.

    With `verify` damage is looked for in every byte, else in headers.

    Raises:
        OSError: the folder itself cannot be read.
    """
    ours = {shelf.fingerprint: shelf for shelf in shelves(folder)}
    orphans = _remove_memos(folder) + sum(map(_remove_orphans, ours.values()))
    seen = list(look(folder, verify=verify))
    damaged = [one for one in seen if one.state == "damaged" and _removed(ours, one)]
    rest = sorted(
        (one for one in seen if one.state != "damaged" and one.used_s is not None),
        key=lambda one: one.used_s or 0.0,
    )
    left = sum(one.size for one in rest)
    evicted: list[Seen] = []
    stuck: list[Seen] = []
    for one in rest:
        if max_bytes is None or left <= max_bytes:
            break
        if _removed(ours, one):
            evicted.append(one)
            left -= one.size
        else:
            stuck.append(one)
    for shelf in ours.values():
        with contextlib.suppress(OSError):
            for below in shelf.folders():
                shelf.remove_if_empty(below)
    gone = {one.place for one in (*damaged, *evicted)}
    troubled = {one.place for one in seen if one.state in ("damaged", "unread")}
    failed = len((troubled | {one.place for one in stuck}) - gone)
    freed = sum(one.size for one in (*damaged, *evicted))
    return Removed(len(damaged), orphans, len(evicted), freed, failed)


def _remove_memos(folder: Path) -> int:
    """Remove what was being written of remembered identities by whoever was killed."""
    before_s = time.time() - ABANDONED_S
    return sum(
        _tried(file.unlink)
        for file in folder.glob(f"{MEMO}.*.tmp")
        if file.is_file() and file.stat().st_mtime < before_s
    )


def _remove_orphans(shelf: Shelf) -> int:
    count = 0
    with contextlib.suppress(OSError):
        for below in shelf.folders():
            with contextlib.suppress(OSError), shelf.opened(below) as at:
                count += sum(shelf.remove_orphan(name, at) for name in shelf.listed(at)[1])
    return count


def _removed(ours: dict[str, Shelf], seen: Seen) -> bool:
    fingerprint, below, name = seen.place.parts
    return _tried(lambda: ours[fingerprint].remove(below, name))


def _tried(call: Callable[[], None]) -> bool:
    """Whether it did what it does."""
    try:
        call()
    except OSError:
        return False
    return True
