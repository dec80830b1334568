"""Files that are not what was written: bits changed, files swapped, files of others."""

from __future__ import annotations

import os
import time
from itertools import product
from pathlib import Path
from random import Random
from typing import Any

from engine.cache.entry import Entry, TensorSpec
from engine.cache.files import Files, closing
from engine.cache.format import CHUNK, plan, read_header, read_tensors, write_entry
from engine.cache.store import Store
from engine.cache.strict import Damaged

from .budget import Budget, scratch
from .children import Nursery
from .contract import broken, every_file, ids, opened, restored
from .crashes import ROOMY
from .failing import prepare
from .hostile import BASES, hostile_file
from .jobs import InMemory
from .model import ORIGIN, Model
from .sequences import file_of
from .small import read, small

BATCH = 250
"""Hostile headers that one child reads, and a tenth of it a store."""

LONG = (
    TensorSpec("0.0", "BF16", (CHUNK + 77,)),
    TensorSpec("0.1", "U8", (1,)),
    TensorSpec("1.0", "F32", (3, CHUNK // 16)),
)
"""Tensors of several chunks, and of less than one."""


def flips(budget: Budget) -> None:
    """R5: random bits of the tensors of a long file; each is noticed."""
    data, start = _file(small((1, 2, 3), tensors=LONG))
    for seed in budget.seeds():
        bit = Random(f"{seed} flips").randrange(8 * start, 8 * len(data))
        data[bit // 8] ^= 1 << bit % 8
        files = InMemory(image=data)
        try:
            read_tensors(files, 0, read_header(files, 0, len(data)))
        except Damaged:
            pass
        else:
            budget.violated(seed, f"bit {bit} is flipped, and nobody notices")
        data[bit // 8] ^= 1 << bit % 8
        budget.done += 1


def header_flips(budget: Budget) -> None:
    """R5: every bit of a header and of its length. Counts headers."""
    for seed, entry in budget.each(BASES):
        data, start = _file(entry)
        for bit in range(8 * start):
            data[bit // 8] ^= 1 << bit % 8
            try:
                read_header(InMemory(image=data), 0, len(data))
            except Damaged:
                pass
            else:
                budget.violated(seed, f"bit {bit} is flipped, and nobody notices")
                return
            data[bit // 8] ^= 1 << bit % 8
        budget.done += 1


def _file(entry: Entry) -> tuple[bytearray, int]:
    """An entry's file, and where its tensors begin."""
    files = Files()
    with scratch() as folder:
        at = files.open_folder(str(folder))
        with closing(files, at), closing(files, files.create("file", at)) as file:
            header = write_entry(files, file, plan(entry, ORIGIN), read(entry))
        return bytearray((folder / "file").read_bytes()), header.data_start


def headers(budget: Budget) -> None:
    """R11: each hostile header is refused, or one of ours, within 1 s and 256 MiB."""
    with Nursery() as nursery:
        slowest, most, limited = 0.0, 0, True
        for seed in budget.seeds():
            child = nursery.start("headers", seed=seed, count=BATCH)
            status = child.wait(600)
            said: Any
            word, said = child.said[-1] if child.said else ("died", status)
            if word != "read":
                budget.violated(seed, f"{word} {said}")
                return
            slowest, most = max(slowest, said["seconds"]), max(most, said["bytes"])
            limited = limited and said["limited"]
            budget.done += BATCH
        how = "under a limit" if limited else "as measured"
        budget.notes.append(f"at most {slowest:.2f} s, {most >> 20} MiB more {how}")


def hostile_folders(budget: Budget) -> None:
    """R11, R13: a folder of hostile files beside ours is opened, and ours are served."""
    for seed in budget.seeds():
        random = Random(f"{seed} folders")
        with scratch() as base:
            folder, model = base / "cache", Model(1 << 30)
            prepare(folder, model)
            places = sorted({path.parent for path in every_file(folder)})
            for number in range(BATCH // 10):
                name = f"{number:032x}.mlxkv.safetensors"
                (random.choice(places) / name).write_bytes(hostile_file(random))
            began = time.process_time()
            found = broken(folder, model, model)
            if found and "counted" not in found:  # files of other codecs stay, and are not counted
                budget.violated(seed, found)
            if (took := time.process_time() - began) > BATCH / 10:
                budget.violated(seed, f"{took:.1f} s for {BATCH // 10} files")
        budget.done += BATCH // 10


MIXED = ("swapped", "moved", "swapped while open", "of mlx-lm", "of another version", "text")


def mixed_up(budget: Budget) -> None:
    """R6: whole files in the wrong place, and files of others."""
    for seed, (kind, one, other) in budget.each(product(MIXED, range(4), range(4))):
        with scratch() as base:
            if one != other and (found := _mixed_up(kind, one, other, base / "cache")):
                budget.violated(seed, f"{kind}, entries {one} and {other}: {found}")
        budget.done += one != other


def _mixed_up(kind: str, one: int, other: int, folder: Path) -> str | None:
    model = Model(ROOMY)
    prepare(folder, model)
    store = opened(folder, ROOMY)
    entries = [kept.entry for kept in model.kept]
    paths = [_path(folder, entry) for entry in entries]
    moved = []
    if kind.startswith("swapped"):
        os.rename(paths[one], folder / "between")
        os.rename(paths[other], paths[one])
        os.rename(folder / "between", paths[other])
        moved = [one, other]
    elif kind == "moved":
        os.rename(paths[one], paths[other].parent / paths[one].name)
        moved = [one]
    else:
        (paths[one].parent / f"{7:032x}.mlxkv.safetensors").write_bytes(_theirs(kind, paths[one]))
    if kind != "swapped while open":
        store = opened(folder, ROOMY)
    for number, entry in enumerate(entries):
        found = store.find(ids((*entry.tokens.tolist(), 9)), entry.namespace)
        if found is None:
            if entry.generation is None and number not in moved:
                return f"entry {number} is lost"
            continue
        outcome = restored(store, found.entry)
        if outcome is not None and (outcome != "miss" or number not in moved):
            return f"entry {number}: {outcome}"
    store = opened(folder, ROOMY)
    if kind == "swapped while open" and paths[one].parent == paths[other].parent:
        return next(filter(None, (_served(store, entries[n]) for n in (one, other))), None)
    return None


def _served(store: Store, entry: Entry) -> str | None:
    """A file that took another's name is as good as before, once that is known."""
    found = store.find(ids((*entry.tokens.tolist(), 9)), entry.namespace)
    whole = found is not None and restored(store, found.entry) is None
    return None if whole else f"{entry.tokens} was removed"


def _path(folder: Path, entry: Entry) -> Path:
    path = file_of(folder, entry)
    assert path is not None
    return path


def _theirs(kind: str, ours: Path) -> bytes:
    if kind == "text":
        return b"not a safetensors file at all"
    if kind == "of mlx-lm":
        header = b'{"__metadata__":{"0.0":"","1.0":"KVCache"},"0.0":{"dtype":"U8","shape":[4],'
        header += b'"data_offsets":[0,4]}}'
        return len(header).to_bytes(8, "little") + header + b"abcd"
    return ours.read_bytes().replace(b'"0.version":"1"', b'"0.version":"2"')
