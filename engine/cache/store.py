"""The SSD tier: entries that survive the process, in files that are their own database.

A lookup asks what is known and makes no call, but to remove a forgery that it meets. `restore` and
`put` never raise what a disk, a file or a model's owner may do to them: they return False, and the
tier is as it was.

Any thread may call anything. Lookups and `counts` wait for nothing else. `put` waits for the disk
and for `run_step`; `would_find` and `remove_generation_checkpoints` for the disk. `restore` runs
where `room` may run. Several processes may share a folder: what one of them has removed is a miss
for the others, and what it has stored they see when they `rescan`, as every `put` does.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from ..errors import BadInput
from .catalog import Record
from .entry import CalledOff, Entry, Identity, Read, Room, RunStep, Tokens, at_once
from .files import Descriptor, Files, closing
from .format import plan, read_tensors, write_entry
from .header import Origin
from .keeper import Counts, Keeper, is_gone
from .shelf import Shelf, folder_of
from .strict import Damaged, Foreign


@dataclass(frozen=True, slots=True)
class Found:
    """An entry, and how many of the tokens asked for it serves."""

    entry: Entry
    count: int


class Store:
    """The entries of one identity and one codec under `folder`, at most `cap_bytes` of files.

    What is there already is found by reading headers only. `verify` also checks the hash of every
    tensor that is restored. `clock` gives nanoseconds since 1970.

    Raises:
        BadInput: a fingerprint that is no hexadecimal digest, or a cap below 1 byte.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        identity: Identity,
        *,
        cap_bytes: int,
        codec: str,
        files: Files | None = None,
        verify: bool = True,
        clock: Callable[[], int] = time.time_ns,
    ) -> None:
        if not re.fullmatch("[0-9a-f]{32,128}", identity.fingerprint):
            raise BadInput(f"fingerprint {identity.fingerprint!r} is not 32 to 128 hex digits")
        if cap_bytes < 1:
            raise BadInput(f"cap_bytes must be at least 1, got {cap_bytes}")
        self.identity, self.cap_bytes, self.codec = identity, cap_bytes, codec
        self._files, self._verify, self._clock = files or Files(), verify, clock
        self._shelf = Shelf(self._files, os.path.abspath(folder), identity.fingerprint)
        self._keeper = Keeper(self._shelf, identity, cap_bytes=cap_bytes, codec=codec, clock=clock)
        self._catalog = self._keeper.catalog
        self._lock = self._keeper.lock
        self.rescan()

    @property
    def counts(self) -> Counts:
        return self._keeper.counts

    def find(self, tokens: Tokens, namespace: str) -> Found | None:
        """The entry that serves most of `tokens`, all but the last one at most."""
        return self._whole(lambda: self._catalog.longest(tokens, namespace))

    def _whole(self, look: Callable[[], tuple[Record, int] | None]) -> Found | None:
        """What a look finds first that is an entry in all its parts."""
        while True:
            with self._lock:
                if (found := look()) is None:
                    return None
                record, count = found
                try:
                    return Found(self._catalog.entry_of(record), count)
                except Damaged as error:
                    why = error
            # No accident: someone has written it so, with the right hash.
            self._keeper.remove_damaged(record.folder, record.name, why)
            self._keeper.forget(record)

    def has_durable_prefix(self, tokens: Tokens, namespace: str) -> bool:
        """Whether some entry serves all of `tokens`."""
        with self._lock:
            return self._catalog.covers(tokens, namespace)

    def would_find(self, tokens: Tokens, namespace: str) -> bool:
        """The same as a restart would say: others may have removed what we know of."""
        self._keeper.rescan_folder(namespace)
        return self.has_durable_prefix(tokens, namespace)

    def find_generation_checkpoint(self, prompt: Tokens, key: str, namespace: str) -> Entry | None:
        """The longest state of the unfinished generation `key`, which began with `prompt`."""

        def look() -> tuple[Record, int] | None:
            record = self._catalog.generation(prompt, key, namespace)
            return None if record is None else (record, len(record.outline.tokens))

        found = self._whole(look)
        return None if found is None else found.entry

    def restore(self, entry: Entry, room: Room) -> bool:
        """Read a found entry's tensors into the memory given; if False, it may hold anything.

        A file that is not what was stored is removed; one that cannot be read now is left.
        """
        with self._lock:
            record = self._catalog.record_of(entry)
        restored = record is not None and self._restore(record, room)
        self._keeper.count("hits" if restored else "misses")
        return restored

    def _restore(self, record: Record, room: Room) -> bool:
        place = (record.folder, record.name)
        try:
            with (
                self._shelf.opened(record.folder) as at,
                closing(self._files, self._files.open(record.name, at)) as file,
            ):
                now = self._keeper.record(record.folder, record.name, file)
                if now.digest != record.digest:
                    self._keeper.replace(record, now)
                    return False
                read_tensors(self._files, file, record.header, room, verify=self._verify)
                self._mark_used(record, file)
                return True
        except Damaged as error:
            self._keeper.remove_damaged(*place, error)
            self._keeper.forget(record)
        except Foreign:
            self._keeper.forget(record)
        except Exception as error:
            if is_gone(error):
                self._keeper.forget(record)
            else:
                self._keeper.say("an entry could not be restored", error)
        return False

    def reject(self, entry: Entry, why: Exception) -> None:
        """Remove a found entry of which no state can be made: it would stand before all others."""
        with self._lock:
            record = self._catalog.record_of(entry)
        if record is not None:
            self._keeper.remove_damaged(record.folder, record.name, why)
            self._keeper.forget(record)

    def _mark_used(self, record: Record, file: Descriptor) -> None:
        with self._lock:
            self._catalog.touch(record, self._keeper.tick())
        try:
            self._files.set_mtime(file, record.mtime_ns)
        except OSError as error:
            self._keeper.say("the time of use could not be written", error)

    def put(self, entry: Entry, read: Read, run_step: RunStep = at_once) -> bool:
        """Store an entry for good; True when it outlives a loss of power.

        Each tensor is read in a step of its own. For an unfinished generation, folder, name and
        cleaning up are steps as well.
        """
        try:
            return self._put(entry, read, run_step)
        except CalledOff:
            return False
        except Exception as error:
            self._keeper.say("an entry could not be stored", error)
            self._keeper.count("failed")
            return False

    def _put(self, entry: Entry, read: Read, run_step: RunStep) -> bool:
        if entry.codec != self.codec:
            raise BadInput(f"an entry of codec {entry.codec!r} in a store of {self.codec!r}")
        planned = plan(entry, Origin(self.identity, self._clock() // 1_000_000_000))
        if planned.size > self.cap_bytes:
            self._keeper.count("too_large")
            return False
        own_step = at_once if entry.generation is None else run_step
        with self._shelf.temporary(folder_of(entry.namespace), own_step) as temporary:
            header = write_entry(self._files, temporary.file, planned, read, run_step)
            with self._lock:
                mtime_ns = self._keeper.tick()
            self._files.set_mtime(temporary.file, mtime_ns)
            self._files.sync(temporary.file)
            own_step(partial(self._keeper.publish, temporary, header, mtime_ns))
            if temporary.name is not None:
                raise BadInput("run_step returned and did not run its step")
        return True

    def remove_generation_checkpoints(self, key: str) -> None:
        """Remove every state of the unfinished generation `key`: it has ended."""
        try:
            self._keeper.remove_generations(key)
        except Exception as error:
            self._keeper.say("a generation's checkpoints could not be removed", error)

    def rescan(self) -> None:
        """Learn what was stored and removed by others. Folders that did not change cost little."""
        self._keeper.rescan()
