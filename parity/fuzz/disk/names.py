"""Names and identities: what a store calls its files, and for whom they are."""

from __future__ import annotations

import os
import re
import shutil
from dataclasses import replace
from itertools import combinations, product
from pathlib import Path
from random import Random

from engine.cache.entry import Identity
from engine.errors import BadInput

from .budget import Budget, scratch
from .contract import ids, opened, restored
from .crashes import ROOMY
from .recording import Created, MadeFolder, Recorded, Renamed
from .small import CODEC, IDENTITY, read, small, unfinished

OURS = re.compile(r"cache|[0-9a-f]{64}|[0-9a-f]{32}\.mlxkv\.safetensors(\.tmp)?")
"""Every name that may be used on disk."""

IDENTITIES: tuple[Identity, ...] = (
    IDENTITY,
    replace(IDENTITY, fingerprint="e" * 64),
    replace(IDENTITY, fingerprint="f" * 63 + "e"),
    replace(IDENTITY, tokenizer="8" * 64),
    replace(IDENTITY, fingerprint="e" * 64, tokenizer="8" * 64),
)
CODECS = (CODEC, "fuzz-v2")


def hostile_name(random: Random) -> str:
    """An id that would be something else as a file name, or nothing."""
    parts = ("../", "/", "\0", "..", ".", "~", "\\", "CON", "ﬀ", "İ", "ß", "é", "é", "\n", "a", "A")
    return random.choice(("", "/" * 300, "x" * 5000, "\U0001f600" * 200)) + "".join(
        random.choices(parts, k=random.randint(0, 12))
    )


def names(budget: Budget) -> None:
    """R14: whatever namespaces, models and keys are called, files are called by digests."""
    for seed in budget.seeds():
        random = Random(f"{seed} names")
        name = hostile_name(random)
        with scratch() as base:
            if found := _named(name, base):
                budget.violated(seed, f"{name[:80]!r}: {found}")
        budget.done += 1


def _named(name: str, base: Path) -> str | None:
    files = Recorded()
    identity = replace(IDENTITY, model=name)
    store = opened(base / "cache", ROOMY, files, identity=identity)
    entry, checkpoint = small((1, 2), name), unfinished((1, 2, 3), name, 2)
    if not (store.put(entry, read(entry)) and store.put(checkpoint, read(checkpoint))):
        return "is not stored"
    for change in files.log.changes:
        used = {MadeFolder: ("name",), Created: ("name",), Renamed: ("old", "new")}
        for field in used.get(type(change), ()):
            if not OURS.fullmatch(used_name := getattr(change, field)):
                return f"is in the name {used_name!r}"
    store = opened(base / "cache", ROOMY, identity=identity)
    found = store.find(ids((1, 2, 3)), name)
    if found is None or restored(store, found.entry):
        return "is not found"
    if store.find_generation_checkpoint(ids((1, 2)), name, "plain") is None:
        return "is a key that is not found"
    others = {name + "x", name.lower(), name.upper(), name.casefold(), os.path.normpath(name)}
    if any(store.find(ids((1, 2, 3)), other) for other in others - {name}):
        return "is found under another name"
    try:
        opened(base / "cache", ROOMY, identity=replace(IDENTITY, fingerprint=name))
    except BadInput:
        return None
    return "is taken for a digest"


def modes(budget: Budget) -> None:
    """R16: folders are for us alone, and files too, whatever the umask is."""
    for seed, mask in budget.each((0, 0o22, 0o77, 0o277)):
        before = os.umask(mask)
        try:
            with scratch() as base:
                store = opened(base / "deep" / "cache", ROOMY)
                for entry in (small((1, 2)), unfinished((1, 2, 3), "a", 2)):
                    store.put(entry, read(entry))
                for path in (base / "deep").rglob("*"):
                    mode = path.stat().st_mode & 0o777
                    if mode & ~(0o700 if path.is_dir() else 0o600):
                        budget.violated(seed, f"umask {mask:o}: {path} has mode {mode:o}")
                    budget.done += 1
        finally:
            os.umask(before)


def identities(budget: Budget) -> None:
    """R17: no pair of identities or codecs shares an entry, not even where files are moved."""
    readers = list(product(IDENTITIES, CODECS))
    for seed, (one, other) in budget.each(combinations(readers, 2)):
        for moved in (False, True):
            with scratch() as base:
                if found := _shared(one, other, moved, base / "cache"):
                    budget.violated(seed, f"{one} and {other}: {found}")
            budget.done += 1


def _shared(
    one: tuple[Identity, str], other: tuple[Identity, str], moved: bool, folder: Path
) -> str | None:
    entry = replace(small((1, 2, 3)), codec=one[1])
    checkpoint = replace(unfinished((1, 2, 3), "a", 2), codec=one[1])
    store = opened(folder, ROOMY, identity=one[0], codec=one[1])
    if not (store.put(entry, read(entry)) and store.put(checkpoint, read(checkpoint))):
        return "not stored"
    ours, theirs = (folder / who[0].fingerprint for who in (one, other))
    if moved and ours != theirs:
        shutil.copytree(ours, theirs)
    reader = opened(folder, ROOMY, identity=other[0], codec=other[1])
    if reader.find(ids((1, 2, 3, 4)), "plain") or reader.has_durable_prefix(ids((1,)), "plain"):
        return "an entry is shared"
    if reader.find_generation_checkpoint(ids((1, 2)), "a", "plain"):
        return "a generation is shared"
    same_place = ours == theirs
    again = opened(folder, ROOMY, identity=one[0], codec=one[1])
    if again.find(ids((1, 2, 3, 4)), "plain") is None and not (
        same_place and one[0] != other[0]  # one fingerprint, two tokenizers: damage
    ):
        return "the other's entry is gone"
    return None
