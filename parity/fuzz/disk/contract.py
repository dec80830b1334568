"""What a store owes whoever opens it on a folder, whatever has happened to that folder before."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from engine.cache.entry import Entry, Identity, Tokens
from engine.cache.files import Files
from engine.cache.store import Store

from .faults import Unsynced
from .model import Kept, Model, key_of
from .plays import Finish, Operation, Put
from .small import CODEC, IDENTITY, Checked, read, version_of

SENTINEL = -1
"""A token that no entry holds; behind an entry's tokens it asks for all of them."""

MISSING = "is not found"

ENTRY = re.compile(r"[0-9a-f]{64}/[0-9a-f]{64}/[0-9a-f-]{32,36}\.mlxkv\.safetensors")

Outcome: TypeAlias = tuple[Any, ...]


def opened(
    folder: Path,
    cap_bytes: int,
    files: Files | None = None,
    *,
    identity: Identity = IDENTITY,
    codec: str = CODEC,
    clock: Iterator[int] | None = None,
) -> Store:
    """A store of tiny entries. Nothing is synced unless `files` does so."""
    return Store(
        folder,
        identity,
        cap_bytes=cap_bytes,
        codec=codec,
        files=Unsynced() if files is None else files,
        clock=time.time_ns if clock is None else partial(next, clock),
    )


def ids(tokens: tuple[int, ...]) -> Tokens:
    return np.array(tokens, np.int32)


def restored(store: Store, entry: Entry) -> str | None:
    """None if all came back; "miss" if the store said so; else what is wrong."""
    checked = Checked(entry)
    if not store.restore(entry, checked):
        return "miss"
    return None if checked.whole else f"wrong bytes of {key_of(entry)}"


def perform(operation: Operation, store: Store) -> Outcome:
    """Do it, and say what came of it in words that `advance` uses as well."""
    if isinstance(operation, Put):
        return "put", store.put(operation.entry, read(operation.entry))
    if isinstance(operation, Finish):
        store.remove_generation_checkpoints(operation.key)
        return ("finished",)
    found = store.find(ids(operation.tokens), operation.namespace)
    if found is None:
        return "nothing", 0
    key, version = key_of(found.entry), version_of(found.entry)
    return "used", key, version, found.count, restored(store, found.entry)


def advance(model: Model, operation: Operation) -> Outcome:
    """The same of a model."""
    if isinstance(operation, Put):
        return "put", model.put(operation.entry)
    if isinstance(operation, Finish):
        model.finish(operation.key)
        return ("finished",)
    best, count = model.find(operation.namespace, operation.tokens)
    if not best:
        return "nothing", 0
    model.use(best[0])
    return "used", best[0].key, best[0].version, count, None


def broken(folder: Path, before: Model, after: Model, excess: int = 0) -> str | None:
    """Open a store and say what is not as promised, or None.

    All of `before` is there, but for what an operation that leads to `after` may have removed; what
    else there is, is whole. A crash may undo removals: if there are more bytes than the cap
    allows now, or were by `excess`, as many may be missing.
    """
    excess = max(excess, bytes_in(folder) - before.cap_bytes)
    try:
        store = opened(folder, before.cap_bytes)
    except Exception as error:
        return f"opening raised {error!r}"
    known = {(kept.key, kept.version): kept for kept in [*before.kept, *after.kept]}
    promised = {(kept.key, kept.version) for kept in before.kept}
    for name, kept in known.items():
        owed = name in promised and _served(before, kept) and _served(after, kept)
        if found := _missing(store, kept, owed):
            if found.endswith(MISSING) and excess > 0:
                excess -= kept.size
                continue
            return found
    return _unclean(folder, store)


def _served(state: Model, kept: Kept) -> bool:
    if kept.entry.generation is not None:
        return any(kept.key[0] == other.key[0] for other in state.kept)
    count = len(kept.key[1])
    # What is too short for its own minimum is served by others alone, which are asked for as well.
    return kept.entry.reuse.serves(count, count) and state.covered(*kept.key)


def _missing(store: Store, kept: Kept, owed: bool) -> str | None:
    """What is wrong with how the store serves an entry's tokens."""
    namespace, tokens = kept.key
    generation = kept.entry.generation
    if generation is not None:
        prompt = ids(tokens[: generation.prompt_tokens])
        entry = store.find_generation_checkpoint(prompt, generation.key, generation.namespace)
        count = len(tokens)
    else:
        found = store.find(ids((*tokens, SENTINEL)), namespace)
        entry, count = (None, 0) if found is None else (found.entry, found.count)
    if entry is None or count < len(tokens):
        return f"{kept.key}, version {kept.version}, {MISSING}" if owed else None
    same = key_of(entry) == kept.key or generation is not None
    if owed and same and version_of(entry) < kept.version:
        return f"{kept.key}: version {version_of(entry)} is found, not {kept.version}"
    if wrong := restored(store, entry):
        return f"{kept.key}, version {kept.version}: found, and then: {wrong}"
    return None


def _unclean(folder: Path, store: Store) -> str | None:
    """Files beside those of the entries, or more bytes than the cap."""
    for path in every_file(folder):
        if not ENTRY.fullmatch(os.path.relpath(path, folder)):
            return f"{path.name} is left in the folder"
    size, counts = bytes_in(folder), store.counts
    if size != counts.nbytes or size > store.cap_bytes:
        return f"{size} bytes of files, {counts.nbytes} counted, {store.cap_bytes} allowed"
    return None


def every_file(folder: Path) -> list[Path]:
    return [Path(place, name) for place, _, names in os.walk(folder) for name in names]


def bytes_in(folder: Path) -> int:
    size = 0
    for place, _, names in os.walk(folder):
        size += sum(os.stat(os.path.join(place, name)).st_size for name in names)
    return size
