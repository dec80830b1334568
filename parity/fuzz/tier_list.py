"""The list model of two tiers: what each holds, and what may be handed out, by linear scans."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import mlx.core as mx

from engine.cache.entry import Reuse

from .history import Chunk, History
from .namespaces import Namespace

Key = tuple[str, Chunk]
Outcome = tuple[str, int]
"""Which tier served, or "miss", and how many tokens."""

MISS: Outcome = ("miss", 0)


@dataclass(slots=True, eq=False)
class Line:
    """An entry of one tier. `arrays` are copies of what its tensors must be for ever.

    `used` orders uses, `at_s` is when the last one was. `file` is where the colder tier has it;
    `harmed`: somebody has damaged or removed that.
    """

    namespace: Namespace
    history: History
    reuse: Reuse
    nbytes: int
    file_bytes: int
    drafted: bool
    arrays: tuple[mx.array, ...]
    used: int = 0
    at_s: float = 0.0
    file: Path | None = None
    harmed: bool = False

    @property
    def tokens(self) -> Chunk:
        return self.history.tokens

    @property
    def key(self) -> Key:
        return self.namespace.name, self.tokens

    def serves(self, namespace: Namespace, tokens: Chunk, at_most: int) -> int:
        """How many of the tokens; 0 if none."""
        if self.namespace != namespace:
            return 0
        own, count = self.tokens, 0
        while count < min(len(own), at_most) and own[count] == tokens[count]:
            count += 1
        return count if self.reuse.serves(count, len(own)) else 0

    def makes_needless(self, other: Line) -> bool:
        """Whether the other holds the same tokens, or a front of them that this one serves."""
        own, theirs = self.tokens, other.tokens
        if self.namespace != other.namespace or own[: len(theirs)] != theirs:
            return False
        if len(own) == len(theirs):
            return True
        return self.reuse.trimmable and self.reuse.serves(len(theirs), len(own))


def best_of(
    lines: Iterable[Line], namespace: Namespace, tokens: Chunk, at_most: int | None = None
) -> tuple[Line | None, int]:
    """The first of those that serve most of the tokens, of which one is left if not told so."""
    found: tuple[Line | None, int] = None, 0
    for line in lines:
        count = line.serves(namespace, tokens, len(tokens) - 1 if at_most is None else at_most)
        if count > found[1]:
            found = line, count
    return found


class TierList:
    """What both tiers hold, each in the order of addition; `cold_cap` bytes of files in the colder.

    It is told what has been done to the tiers afterwards, with the files that there are then:
    whether a damaged file was known as such is not foreseen. While there may be such a file the
    list is `doubtful`; if it makes more of a difference than that, the list is `lost` and of no use
    any more. `dirty` are the scheduled prefixes, in order. `failed`: since the last flush an entry
    was too large to be written. `now_s` is the clock of the tiers.
    """

    def __init__(self, cap: int, cold_cap: int | None) -> None:
        self.cap, self.cold_cap = cap, cold_cap
        self.ram: list[Line] = []
        self.cold: list[Line] = []
        self.dirty: dict[Key, Namespace] = {}
        self.on_disk: dict[Key, Path] = {}
        self.doubtful = False
        self.lost = False
        self.failed = False
        self.now_s = 0.0
        self._uses = 0

    @property
    def sound(self) -> list[Line]:
        return [line for line in self.cold if not line.harmed]

    def note(self, on_disk: dict[Key, Path]) -> None:
        """Which files there are now that something was done, before the list is told what."""
        self.on_disk = on_disk
        self.doubtful = self.doubtful or any(line.harmed for line in self.cold)

    def outcomes(self, namespace: Namespace, tokens: Chunk) -> set[Outcome]:
        """What a take may give: one thing, or without a damaged file two."""
        _, own = best_of(self.ram, namespace, tokens)
        _, stored = best_of(self.sound, namespace, tokens)
        here: Outcome = ("RAM", own) if own else MISS
        allowed: set[Outcome] = {("SSD", stored) if stored > own else here}
        harmed = (line for line in self.cold if line.harmed)
        _, promised = best_of(harmed, namespace, tokens)
        if promised > own and promised >= stored:
            allowed.add(here)  # it was tried, and nothing else was
        return allowed

    def took(self, namespace: Namespace, tokens: Chunk, outcome: Outcome) -> Line | None:
        """That take gave this; returns the entry that served it."""
        tier, _ = outcome
        line, own = best_of(self.ram, namespace, tokens)
        if tier == "SSD":
            line, _ = best_of(self.sound, namespace, tokens)
            assert line is not None
            line.used = self._tick()
            if line.nbytes <= self.cap:
                self._adopt(replace(line, file=None))
            return line
        tried, promised = best_of(self.cold, namespace, tokens)
        if tried is not None and promised > own and tried.harmed:
            self.cold.remove(tried)
        if line is not None:
            line.used, line.at_s = self._tick(), self.now_s
        return line

    def put(self, line: Line) -> None:
        if line.nbytes > self.cap:
            self._spill(line)
        else:
            self._adopt(line)

    def demote(self, idle_s: float) -> None:
        """Move what is idle to the colder tier, the one used longest ago first."""
        idle = [line for line in self.ram if line.at_s <= self.now_s - idle_s]
        for line in sorted(idle, key=lambda line: line.used):
            if self._spill(line):
                self.ram.remove(line)

    def schedule(self, namespace: Namespace, tokens: Chunk) -> None:
        key = (namespace.name, tokens)
        self.dirty.pop(key, None)
        self.dirty[key] = namespace

    def flush(self) -> bool:
        """Write what is dirty; whether all of it is durable then, and nothing has failed before."""
        for (_, tokens), namespace in self.dirty.items():
            if not self._covered(self.cold, namespace, tokens):
                line, count = best_of(self.ram, namespace, tokens, len(tokens))
                if line is not None and count == len(tokens):
                    self._spill(line)
        self.dirty = {
            key: namespace
            for key, namespace in self.dirty.items()
            if not self._covered(self.cold, namespace, key[1])
        }
        durable, self.failed = not self.dirty and not self.failed, False
        return durable

    def restart(self) -> None:
        """Only files are left. Headers are read, and what was used last comes last."""
        self.ram, self.dirty, self.failed = [], {}, False
        self.cold = [line for line in self.cold if not line.harmed or _exists(line)]
        self.cold.sort(key=lambda line: line.used)

    def agree(self) -> str | None:
        """What is wrong with the files that there are, in words."""
        expected = {line.key for line in self.cold if not line.harmed or _exists(line)}
        if expected != set(self.on_disk):
            if not self.doubtful:
                return f"files hold {sorted(self.on_disk)}, expected {sorted(expected)}"
            self.lost = True
            return None
        self.doubtful = False
        for line in self.sound:
            line.file = self.on_disk[line.key]
        return None

    def _adopt(self, line: Line) -> None:
        self.ram = [old for old in self.ram if not line.makes_needless(old)]
        while sum(old.nbytes for old in self.ram) + line.nbytes > self.cap:
            oldest = min(self.ram, key=lambda old: old.used)
            self._spill(oldest)
            self.ram.remove(oldest)
        line.used, line.at_s = self._tick(), self.now_s
        self.ram.append(line)

    def _spill(self, line: Line) -> bool:
        if self.cold_cap is None:
            return False
        if self._covered(self.sound, line.namespace, line.tokens):
            return True
        written = self.on_disk.get(line.key) not in (None, *(old.file for old in self.cold))
        if self._covered(self.cold, line.namespace, line.tokens) and not written:
            return True  # a damaged one is thought to be as good
        if line.file_bytes > self.cold_cap:
            self.failed = True
            return False
        # A write looks at the folders, so that it is known who is gone.
        self.cold = [
            old
            for old in self.cold
            if not line.makes_needless(old) and (not old.harmed or _exists(old))
        ]
        added = replace(line, used=self._tick(), file=None)
        self.cold.append(added)
        while sum(old.file_bytes for old in self.cold) > self.cold_cap:
            rest = [old for old in self.cold if old is not added]
            self.cold.remove(min(rest, key=lambda old: old.used))
        return True

    def _covered(self, lines: Sequence[Line], namespace: Namespace, tokens: Chunk) -> bool:
        return best_of(lines, namespace, tokens, len(tokens))[1] == len(tokens)

    def _tick(self) -> int:
        self._uses += 1
        return self._uses


def _exists(line: Line) -> bool:
    return line.file is not None and line.file.exists()
