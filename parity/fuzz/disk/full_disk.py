"""A real file system of 4 MiB that is filled to its end. To mount one, most have no right."""

from __future__ import annotations

import logging
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random

from engine.cache.entry import TensorSpec
from engine.cache.files import Files
from engine.cache.format import read_header

from .budget import Budget, scratch
from .contract import advance, broken, every_file, opened, perform
from .failing import BASE
from .jobs import InMemory
from .model import Model
from .plays import Use
from .small import read, small

DISK_BYTES = 4 << 20
CAP_BYTES = 1 << 30


class Unmountable(Exception):
    """Why no file system can be mounted here."""


@contextmanager
def small_disk() -> Iterator[Path]:
    """An empty file system of 4 MiB.

    Raises:
        Unmountable: it cannot be mounted.
    """
    if not sys.platform.startswith("linux"):
        raise Unmountable("a file system in memory is mounted on Linux only")
    with scratch() as folder:
        size = f"size={DISK_BYTES}"
        command = ["mount", "-t", "tmpfs", "-o", size, "tmpfs", str(folder)]
        try:
            said = subprocess.run(command, capture_output=True, text=True, check=False)
        except OSError as error:
            raise Unmountable(f"mount cannot be run: {error}") from None
        if said.returncode:
            raise Unmountable(f"mounting is not allowed: {said.stderr.strip()}")
        try:
            yield folder
        finally:
            subprocess.run(["umount", str(folder)], check=True)


def full_disk(budget: Budget) -> None:
    """R7: a disk that is full stops nothing but the storing, and is mentioned once.

    Raises:
        Unmountable: there is no such disk.
    """
    with small_disk() as disk:
        for seed in budget.seeds():
            folder = disk / "cache"
            if found := _filled(folder, Random(f"{seed} disk")):
                budget.violated(seed, found)
            shutil.rmtree(folder)
            budget.done += 1


class _Heard(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(record.getMessage())


def _filled(folder: Path, random: Random) -> str | None:
    heard, logger = _Heard(), logging.getLogger("engine.cache")
    logger.addHandler(heard)
    logger.propagate, before = False, logger.propagate
    try:
        return _fill(folder, random, heard.said)
    finally:
        logger.removeHandler(heard)
        logger.propagate = before


def _fill(folder: Path, random: Random, said: list[str]) -> str | None:
    store, model = opened(folder, CAP_BYTES, Files()), Model(CAP_BYTES)
    for operation in BASE:
        perform(operation, store)
        advance(model, operation)
    refused = 0
    for version in range(100, 200):
        tensors = [TensorSpec("0.0", "U8", (random.choice((100, 4_000, 70_000, 900_000)),))]
        entry = small((version, 1), version=version, tensors=tensors)
        if store.put(entry, read(entry)):
            model.put(entry)
        elif (refused := refused + 1) > 5:
            break
        if any(path.suffix == ".tmp" for path in every_file(folder)):
            return "a partial file is left"
        if (outcome := perform(Use("plain", (1, 2, 3, 9)), store))[-1] is not None:
            return f"{outcome} while the disk is full"
    if not refused or len(said) != 1:
        return f"{refused} entries were refused, {len(said)} warnings: {said[:3]}"
    biggest = max(every_file(folder), key=lambda path: path.stat().st_size)
    gone = biggest.read_bytes()
    biggest.unlink()
    entry = small((3, 3), version=300)
    if not store.put(entry, read(entry)):
        return "nothing is stored although there is room again"
    model.put(entry)
    model.drop(lambda kept: kept.entry.tokens.tobytes() == _tokens(gone))
    return broken(folder, model, model)


def _tokens(image: bytes) -> bytes:
    """The token ids of a file, as bytes."""
    return read_header(InMemory(image=image), 0, len(image)).entry.tokens.tobytes()
