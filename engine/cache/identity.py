"""What state may stand for what other state: it follows from content, never from names or places.

An SSD folder's `fingerprint` covers what computed every entry in it, a `namespace` what may differ
from request to request. Sampling and seeds are in neither: they decide what follows, not the state.
Two things that differ must never meet here: that is the worst defect this project can have. So
fields go into a hash each behind its length, and options as canonical JSON, by name. No mlx here.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import stat
import time
import uuid
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeAlias

from ..errors import BadInput

SEED: Final = b"mlx-parity artifact 1"
"""In front of everything that is hashed for an artifact: another text, another definition."""

LAYOUT: Final = "1"
"""Of the caches in an entry. Raise it when the same numbers come to mean another state."""

SETTLED_S: Final = 2.0
"""A file younger than this may still change without a sign: its times are as coarse as that on
some file systems."""

CHUNK: Final = 1 << 20

TOKENIZER_FILES: Final = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template*",
    "vocab*",
    "merges.txt",
    "*.model",
    "*.tiktoken",
)
"""What a folder may hold that decides which ids a text becomes."""

Option: TypeAlias = str | int | float | bool | None


def digest(*fields: str | bytes) -> str:
    """sha256 over the fields, each behind its length, so that no two lists of fields meet."""
    sha = hashlib.sha256()
    for field in fields:
        data = field.encode() if isinstance(field, str) else field
        sha.update(len(data).to_bytes(8, "little"))
        sha.update(data)
    return sha.hexdigest()


def canonical(value: Any) -> str:
    """JSON that is the same for equal values, whatever the order of their keys.

    Raises:
        BadInput: a key is not text, or something is no JSON.
    """
    _require_text_keys(value)
    try:
        return json.dumps(value, sort_keys=True, separators=(",", ":"))
    except (TypeError, ValueError) as error:
        raise BadInput(f"what an identity is made of must be JSON: {error}") from error


def _require_text_keys(value: Any) -> None:
    """Refuse keys that JSON would turn into text: 1 and "1" would meet."""
    if isinstance(value, Mapping):
        if wrong := [key for key in value if not isinstance(key, str)]:
            raise BadInput(f"an option's name must be text, got {wrong[0]!r}")
        for inner in value.values():
            _require_text_keys(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            _require_text_keys(inner)


def fingerprint(
    *,
    config: Mapping[str, Any],
    artifact: str,
    tokenizer: str,
    dtype: str,
    scheme: str,
    layout: str = LAYOUT,
) -> str:
    """What computed a folder's entries.

    `config` is the whole of config.json, `artifact` the identity of the weights, `tokenizer` that
    of its files, `dtype` that of the state, `scheme` how it is stored (`kv8`, or the dtype again).
    """
    return digest("fingerprint", canonical(config), artifact, tokenizer, dtype, scheme, layout)


def namespace(
    *,
    adapter: str | None = None,
    drafter: str | None = None,
    kv: Mapping[str, Option] | None = None,
) -> str:
    """What may differ between entries of one folder, as canonical JSON that people can read.

    `adapter` is the digest of its files, `drafter` its `<schema>:<identity>`, `kv` every option
    about keys and values.
    """
    return canonical({"adapter": adapter, "drafter": drafter, "kv": dict(kv or {})})


MEMO = "identities.json"
"""The file in a tier's folder in which artifacts' identities are remembered."""


class FileState(NamedTuple):
    """What changes when a file is replaced or written to; `path` is the real one."""

    path: str
    device: int
    inode: int
    size: int
    mtime_ns: int
    ctime_ns: int


class Memo:
    """Remembers artifacts' identities, in a file if one is given.

    A file that is damaged, foreign or unwritable is as good as none. `clock` gives seconds since
    1970, as files' times do.
    """

    KEEP = 256
    """Identities, the latest ones."""

    def __init__(self, file: Path | None = None, clock: Callable[[], float] = time.time) -> None:
        self._file = file
        self.clock = clock
        self._known: dict[str, str] = {} if file is None else _read_memo(file)

    def get(self, key: str) -> str | None:
        return self._known.get(key)

    def put(self, key: str, identity: str) -> None:
        self._known[key] = identity
        if self._file is None:
            return
        # What another process has written meanwhile is kept.
        merged = {**_read_memo(self._file), **self._known}
        self._known = dict(list(merged.items())[-self.KEEP :])
        temporary = self._file.with_name(f"{self._file.name}.{uuid.uuid4().hex}.tmp")
        try:
            flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW
            with open(os.open(temporary, flags, 0o600), "w", encoding="ascii") as out:
                json.dump(self._known, out)
            temporary.replace(self._file)
        except OSError:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)


def _read_memo(file: Path) -> dict[str, str]:
    try:
        if not stat.S_ISREG(file.lstat().st_mode):
            return {}
        found = json.loads(file.read_text(encoding="ascii"))
    except (OSError, ValueError, RecursionError):
        return {}
    if not isinstance(found, dict) or not all(map(_is_digest, found.values())):
        return {}
    return found


def _is_digest(value: object) -> bool:
    return isinstance(value, str) and len(value) == 64 and set(value) <= set("0123456789abcdef")


@dataclass(frozen=True, slots=True)
class Artifact:
    """Files as they were when they were noted: before what they hold was loaded."""

    files: tuple[Path, ...]
    states: tuple[FileState | None, ...]

    @classmethod
    def noted(cls, files: Iterable[Path]) -> Artifact:
        """The files, ordered by name; a missing one is noted as such."""
        ordered = tuple(sorted(files, key=lambda file: (file.name, str(file))))
        return cls(ordered, tuple(map(_state, ordered)))

    def identity(self, memo: Memo | None = None) -> str:
        """sha256 over `SEED`, then each file's name and bytes, each behind its length.

        Raises:
            BadInput: there are no files, one cannot be read, or one is not what it was: then
                nobody can tell what was loaded.
        """
        if not self.files:
            raise BadInput("an artifact needs at least 1 file, got 0")
        self._require_unchanged()
        key = digest(SEED, canonical(list(zip(map(str, self._names), self.states, strict=True))))
        known = None if memo is None else memo.get(key)
        if known is not None:
            return known
        began_s = 0.0 if memo is None else memo.clock()
        sha = hashlib.sha256(SEED)
        for file in self.files:
            _hash_file(sha, file)
        self._require_unchanged()
        identity = sha.hexdigest()
        states = [state for state in self.states if state is not None]
        youngest_ns = max(max(state.mtime_ns, state.ctime_ns) for state in states)
        if memo is not None and began_s - youngest_ns / 1e9 > SETTLED_S:
            memo.put(key, identity)
        return identity

    @property
    def _names(self) -> list[str]:
        return [file.name for file in self.files]

    def _require_unchanged(self) -> None:
        for file, state in zip(self.files, self.states, strict=True):
            if state is None:
                raise BadInput(f"{file} is missing: no identity")
            if _state(file) != state:
                raise BadInput(f"{file} has changed since it was loaded: no identity")


def digest_of(files: Iterable[Path], memo: Memo | None = None) -> str:
    """The identity of an artifact as it lies there now; see `Artifact.identity`."""
    return Artifact.noted(files).identity(memo)


def tokenizer_files(folder: Path) -> list[Path]:
    """What a model's folder holds of `TOKENIZER_FILES`."""
    return sorted({file for pattern in TOKENIZER_FILES for file in folder.glob(pattern)})


def _state(file: Path) -> FileState | None:
    try:
        real = os.path.realpath(file)
        found = os.stat(real)
    except OSError:
        return None
    return FileState(
        real,
        found.st_dev,
        found.st_ino,
        found.st_size,
        found.st_mtime_ns,
        found.st_ctime_ns,
    )


def _hash_file(sha: Any, file: Path) -> None:
    name = file.name.encode()
    sha.update(len(name).to_bytes(8, "little") + name)
    try:
        with file.open("rb") as opened:
            size = os.fstat(opened.fileno()).st_size
            sha.update(size.to_bytes(8, "little"))
            left = size
            while chunk := opened.read(min(CHUNK, left)):
                sha.update(chunk)
                left -= len(chunk)
    except OSError as error:
        raise BadInput(f"{file} cannot be read: {error}") from error
    if left:
        raise BadInput(f"{file} ended {left} bytes early: it is being changed")
