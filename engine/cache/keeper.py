"""What a store knows of its files, and the files themselves, kept in agreement.

Others may store and remove beside us, and anyone may damage what is there. A scan reads the headers
of files that are new, and what is no entry of ours is skipped or removed. Names that do not look
like an entry or its temporary are never touched, and neither is any folder but ours.
"""

from __future__ import annotations

import errno
import heapq
import logging
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from .catalog import Catalog, Record
from .entry import Identity
from .files import Descriptor, closing
from .format import Header, read_text
from .header import generation_namespace
from .shelf import Shelf, Temporary, folder_of
from .strict import Damaged, Foreign

log = logging.getLogger(__name__)

SETTLED_NS = 2_000_000_000
"""A folder may change again within one tick of the clock that its mtime is taken from."""


@dataclass(frozen=True, slots=True)
class Counts:
    """What is stored now, and what has happened since the store was opened.

    `hits` and `misses` count restores; `foreign` files are there now, for others to read.
    """

    entries: int
    nbytes: int
    foreign: int
    stored: int = 0
    too_large: int = 0
    failed: int = 0
    hits: int = 0
    misses: int = 0
    damaged: int = 0
    evicted: int = 0
    superseded: int = 0
    orphans: int = 0


class Gone(Exception):
    """What was to be read is no file any more."""


class Keeper:
    """The catalog of a shelf, and who may change either.

    `lock` is held for the catalog and the counters, never during a call; `disk` while names change.
    Whoever holds `disk` may take `lock`, not the other way round. Methods that say so want `disk`
    to be held; the others may be called by any thread.
    """

    def __init__(
        self,
        shelf: Shelf,
        identity: Identity,
        *,
        cap_bytes: int,
        codec: str,
        clock: Callable[[], int],
    ) -> None:
        self.shelf, self.files, self.clock = shelf, shelf.files, clock
        self.identity, self.cap_bytes, self.codec = identity, cap_bytes, codec
        self.catalog = Catalog()
        self.lock, self.disk = threading.Lock(), threading.Lock()
        self._foreign: dict[str, frozenset[str]] = {}
        self._settled: dict[str, int] = {}
        self._counts: Counter[str] = Counter()
        self._said: set[str] = set()

    @property
    def counts(self) -> Counts:
        with self.lock:
            foreign = sum(map(len, self._foreign.values()))
            return Counts(len(self.catalog), self.catalog.nbytes, foreign, **self._counts)

    def publish(self, temporary: Temporary, header: Header, mtime_ns: int) -> None:
        """Give a synced file its name, then remove what it makes needless and what is too much."""
        record = Record.of(header.text, header.size, "", mtime_ns, self.codec)
        with self.disk:
            self.scan()
            # Before our own name is there: of two who store at once one does not see the other, and
            # they cannot both remove each other's.
            with self.lock:
                replaced = self.catalog.replaced_by(record.outline)
            record.name = temporary.publish()
            with self.lock:
                self.catalog.add(record)
                self._counts["stored"] += 1
            for old in replaced:
                if self.remove(old):
                    self.count("superseded")
            self.evict(record)

    def rescan(self) -> None:
        """Scan all, then keep to the cap."""
        with self.disk:
            self.scan()
            self.evict(None)

    def rescan_folder(self, namespace: str) -> None:
        """Scan the folder of one namespace."""
        with self.disk:
            self.scan_folder(folder_of(namespace))

    def remove_generations(self, key: str) -> None:
        """Remove every checkpoint of an unfinished generation."""
        folder = folder_of(generation_namespace(key))
        with self.disk:
            self.scan_folder(folder)
            with self.lock:
                records = self.catalog.generations(key)
            for record in records:
                self.remove(record)

    def scan(self) -> None:
        """List our folders and look at what is new. `disk` is held."""
        try:
            folders = self.shelf.folders()
        except OSError as error:
            self.say("the folders could not be listed", error)
            return
        with self.lock:
            gone = {*self.catalog.folders(), *self._foreign} - set(folders)
        for folder in [*folders, *gone]:
            self.scan_folder(folder)

    def scan_folder(self, folder: str) -> None:
        """Look at what is new in a folder, if it may have changed. `disk` is held."""
        try:
            with self.shelf.opened(folder) as at:
                mtime_ns = self.files.status(at).mtime_ns
                if self._settled.get(folder) == mtime_ns:
                    return
                complete = self._scan_names(folder, at)
            self._settled.pop(folder, None)
            if complete and self.clock() - mtime_ns > SETTLED_NS:
                self._settled[folder] = mtime_ns
        except OSError as error:
            if is_gone(error):
                self.forget(*self.known(folder).values())
                self._settled.pop(folder, None)
                with self.lock:
                    self._foreign.pop(folder, None)
            else:
                self.say("a folder could not be listed", error)

    def _scan_names(self, folder: str, at: Descriptor) -> bool:
        """Compare an open folder with what is known; False if not every file could be read."""
        names, temporaries = self.shelf.listed(at)
        known, complete = self.known(folder), True
        self.forget(*(known[name] for name in known.keys() - set(names)))
        foreign = self._foreign.get(folder, frozenset()) & set(names)
        found: list[Record] = []
        for name in names:
            if name in known or name in foreign:
                continue
            try:
                with closing(self.files, self.files.open(name, at)) as file:
                    found += [self.record(folder, name, file)]
            except Foreign:
                foreign |= {name}
            except Damaged as error:
                self.remove_damaged(folder, name, error)
            except (Gone, OSError, MemoryError) as error:
                complete &= is_gone(error)
                if not is_gone(error):
                    self.say("an entry's header could not be read", error)
        with self.lock:
            self._foreign[folder] = foreign
            for record in sorted(found, key=lambda record: (record.mtime_ns, record.name)):
                self.catalog.add(record)
        for name in temporaries:
            if self.shelf.remove_orphan(name, at):
                self.count("orphans")
        return complete

    def record(self, folder: str, name: str, file: Descriptor) -> Record:
        """What an open file is, if it may be used here."""
        status = self.files.status(file)
        if not status.regular:
            raise Gone(f"{name} is no regular file any more")
        text = read_text(self.files, file, status.size)
        record = Record.of(text, status.size, name, status.mtime_ns, self.codec)
        ours, theirs = self.identity, record.outline.origin.identity
        if (theirs.fingerprint, theirs.tokenizer) != (ours.fingerprint, ours.tokenizer):
            raise Damaged(f"computed by {theirs}")
        if record.folder != folder:
            raise Damaged(f"of namespace {record.outline.namespace!r}, in another's folder")
        return record

    def evict(self, newcomer: Record | None) -> None:
        """Remove what was unused for longest until the rest is within the cap. `disk` is held."""
        with self.lock:
            heap = self.catalog.by_age() if self.catalog.nbytes > self.cap_bytes else []
        while heap and self.catalog.nbytes > self.cap_bytes:
            known_ns, _, record = heapq.heappop(heap)
            if record is newcomer:
                continue
            try:
                status = self.shelf.status(record.folder, record.name)
            except OSError as error:
                if is_gone(error):
                    self.forget(record)
                continue
            # Another process may have used it.
            mtime_ns = max(record.mtime_ns, status.mtime_ns)
            if mtime_ns > known_ns:
                with self.lock:
                    self.catalog.touch(record, mtime_ns)
                heapq.heappush(heap, (mtime_ns, record.name, record))
            elif self.remove(record):
                self.count("evicted")

    def remove(self, record: Record) -> bool:
        """Remove a file, then forget it; False if it is still there."""
        try:
            self.shelf.remove(record.folder, record.name)
        except OSError as error:
            self.say("an entry could not be removed", error)
            return False
        self.forget(record)
        if not self.known(record.folder):
            self.shelf.remove_if_empty(record.folder)
        return True

    def remove_damaged(self, folder: str, name: str, why: Exception) -> None:
        """Remove a file that is not what was stored, or of no use."""
        self.count("damaged")
        self.say("a damaged entry was removed", why)
        try:
            self.shelf.remove(folder, name)
        except OSError as error:
            self.say("a damaged entry could not be removed", error)

    def known(self, folder: str) -> dict[str, Record]:
        with self.lock:
            return self.catalog.names(folder)

    def forget(self, *records: Record) -> None:
        with self.lock:
            for record in records:
                self.catalog.remove(record)

    def tick(self) -> int:
        """The time of a use, later than every other that is known. The lock is held."""
        self.catalog.newest_ns = max(self.clock(), self.catalog.newest_ns + 1)
        return self.catalog.newest_ns

    def count(self, what: str) -> None:
        with self.lock:
            self._counts[what] += 1

    def say(self, what: str, error: Exception) -> None:
        """Warn, of each kind of trouble once: a broken disk must not fill the log as well."""
        log.log(logging.DEBUG if what in self._said else logging.WARNING, "%s: %s", what, error)
        self._said.add(what)

    def replace(self, old: Record, new: Record) -> None:
        """Another entry stands under a name that we know: whole, but not what was asked for."""
        with self.lock:
            if old in self.catalog:
                self.catalog.remove(old)
                self.catalog.add(new, newest=False)


def is_gone(error: Exception) -> bool:
    """Whether something else stands in a file's or a folder's place, or nothing."""
    gone = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENXIO)
    return isinstance(error, Gone) or (isinstance(error, OSError) and error.errno in gone)
