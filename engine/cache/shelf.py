"""The folders of one fingerprint: where entries' files stand, and how one comes to stand there.

`<root>/<fingerprint>/<namespace's hash>/<uuid>.mlxkv.safetensors`. Every call starts from the root
and goes down by folders that it holds open, so that nothing that was moved or linked is entered.
All methods raise OSError.
"""

from __future__ import annotations

import contextlib
import os
import re
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from typing import Self

from .entry import RunStep
from .files import Descriptor, Files, Status, closing

SUFFIX = ".mlxkv.safetensors"

_FILE = re.compile(r"[0-9a-f]{32}\.mlxkv\.safetensors")
_TEMPORARY = re.compile(r"[0-9a-f]{32}\.mlxkv\.safetensors\.tmp")
_FOLDER = re.compile(r"[0-9a-f]{64}")

ATTEMPTS = 5
"""At a new file: others may take its folder away, or the file itself before it is locked."""


def folder_of(namespace: str) -> str:
    """The name of a namespace's folder: the namespace itself may be any text."""
    return sha256(namespace.encode()).hexdigest()


def open_or_make(files: Files, path: str) -> Descriptor:
    """A folder, open; it and those above it are made for good where they are missing."""
    try:
        return files.open_folder(path)
    except FileNotFoundError:
        with closing(files, open_or_make(files, os.path.dirname(path))) as above:
            _make_for_good(files, os.path.basename(path), above)
        return files.open_folder(path)


def _make_for_good(files: Files, name: str, at: Descriptor) -> None:
    """Make a folder that outlives a loss of power, or none: whoever finds it takes it for such."""
    with contextlib.suppress(FileExistsError):
        files.make_folder(name, at)
    try:
        files.sync_folder(at)
    except BaseException:
        with contextlib.suppress(OSError):
            files.remove_folder(name, at)
        raise


@dataclass(slots=True)
class Temporary:
    """A locked file under a temporary name, in the open folder `at`.

    As a block: it is closed at the end, and removed if the block fails before it is published.
    """

    files: Files
    held: contextlib.ExitStack
    at: Descriptor
    file: Descriptor
    name: str | None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        with self.held:
            if kind is not None and self.name is not None:
                with contextlib.suppress(OSError):
                    self.files.remove(self.name, self.at)

    def publish(self) -> str:
        """Give the file its name, for good, and return that; its bytes must have been synced."""
        assert self.name is not None
        final = self.name.removesuffix(".tmp")
        self.files.rename(self.name, final, self.at)
        # Until the folder is synced a failure removes it: the name may not outlive a loss of power.
        self.name = final
        self.files.sync_folder(self.at)
        self.name = None
        return final


@dataclass(frozen=True, slots=True)
class Shelf:
    """The folders under `root` for one fingerprint, which is a hexadecimal digest."""

    files: Files
    root: str
    fingerprint: str

    def folders(self) -> list[str]:
        """The namespaces' folders; none if there are no folders yet."""
        with contextlib.ExitStack() as stack:
            try:
                ours = self._descend(stack, [])
            except FileNotFoundError:
                return []
            return [name for name, _ in self.files.names(ours) if _FOLDER.fullmatch(name)]

    @contextlib.contextmanager
    def opened(self, folder: str) -> Iterator[Descriptor]:
        """A namespace's folder, open."""
        with contextlib.ExitStack() as stack:
            yield self._descend(stack, [folder])

    def _descend(self, stack: contextlib.ExitStack, folders: list[str]) -> Descriptor:
        at = stack.enter_context(closing(self.files, self.files.open_folder(self.root)))
        for name in [self.fingerprint, *folders]:
            at = stack.enter_context(closing(self.files, self.files.open_folder(name, at)))
        return at

    def make(self, folder: str) -> None:
        """Make what is missing on the way to a namespace's folder, for good."""
        with contextlib.ExitStack() as stack:
            at = open_or_make(self.files, self.root)
            stack.enter_context(closing(self.files, at))
            for name in (self.fingerprint, folder):
                with contextlib.suppress(FileExistsError):
                    self.files.make_folder(name, at)
                # Whoever made it may not have come to that yet, and never will if it was killed.
                self.files.sync_folder(at)
                at = stack.enter_context(closing(self.files, self.files.open_folder(name, at)))

    def temporary(self, folder: str, own_step: RunStep) -> Temporary:
        """A new file in a namespace's folder, which is made, in a step of its own, if need be."""
        for _ in range(ATTEMPTS):
            # Others may clean up: remove an empty folder, or a file before it was locked.
            with contextlib.suppress(FileNotFoundError, BlockingIOError):
                own_step(partial(self.make, folder))
                return self._temporary(folder)
        raise OSError(f"a new file was lost {ATTEMPTS} times before it could be locked")

    def _temporary(self, folder: str) -> Temporary:
        name = f"{uuid.uuid4().hex}{SUFFIX}.tmp"
        with contextlib.ExitStack() as stack:
            at = stack.enter_context(self.opened(folder))
            file = stack.enter_context(closing(self.files, self.files.create(name, at)))
            try:
                self.files.lock(file)
                if not self.files.status(file).links:
                    raise FileNotFoundError(f"{name} was removed")
            except BaseException:
                with contextlib.suppress(OSError):
                    self.files.remove(name, at)
                raise
            return Temporary(self.files, stack.pop_all(), at, file, name)

    def listed(self, at: Descriptor) -> tuple[list[str], list[str]]:
        """The regular files in an open folder that are named as entries, and as temporaries."""
        names = [name for name, regular in self.files.names(at) if regular]
        return list(filter(_FILE.fullmatch, names)), list(filter(_TEMPORARY.fullmatch, names))

    def remove_orphan(self, name: str, at: Descriptor) -> bool:
        """Remove a temporary that nobody holds, if that is possible."""
        try:
            with closing(self.files, self.files.open(name, at)) as file:
                self.files.lock(file)
                self.files.remove(name, at)
        except OSError:
            return False
        return True

    def status(self, folder: str, name: str) -> Status:
        with self.opened(folder) as at:
            return self.files.status_of(name, at)

    def remove(self, folder: str, name: str) -> None:
        """Remove a file. That it is gone already is as good."""
        with contextlib.suppress(FileNotFoundError), self.opened(folder) as at:
            self.files.remove(name, at)

    def remove_if_empty(self, folder: str) -> None:
        with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
            self.files.remove_folder(folder, self._descend(stack, []))
