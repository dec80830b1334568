"""The three that take part in a sequence: the list, our rows, mlx-lm's caches. One protocol."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import mlx.core as mx
from mlx.utils import tree_map
from mlx_lm.models.cache import (
    can_trim_prompt_cache,
    load_prompt_cache,
    save_prompt_cache,
    trim_prompt_cache,
)

from engine import BadInput
from engine.state.checkpoint import capture_caches, restore_caches
from engine.state.layouts import Cache, leaves
from engine.state.quantize import KVQuantization, require_quantizable
from engine.state.rows import Rows

from .history import History, Reference, ask, difference, forward, quantize
from .worlds import BITS, GROUP_SIZE, TOLERANCE, World

Windows = Sequence[Sequence[int]]


class Refused(Exception):
    """A participant declines an operation by name and has changed nothing that counts."""


class Participant(Protocol):
    """The state of one row. Every operation may raise `Refused`; the state is then rebuilt."""

    def append(self, tokens: Sequence[int]) -> mx.array:
        """One forward; returns logits [N, V]."""

    def draft(self, windows: Windows, keep: int) -> tuple[mx.array, int]:
        """Append the windows, one forward each, and take back all but their first `keep` tokens.

        Returns the logits [N, V] of all, and how many tokens are gone.
        """

    def trim(self, n: int) -> int:
        """Forget the last n tokens; returns how many are gone."""

    def save(self, metadata: Mapping[str, str]) -> Any:
        """Something to come back to, any number of times."""

    def restore(self, saved: Any, overwritten: bool) -> Mapping[str, str]:
        """Become what was saved and return its metadata.

        With `overwritten` the file that was read is written over with another state afterwards.
        """

    def copy(self) -> Participant:
        """Another state that holds the same and shares nothing that changes."""

    def quantize(self) -> None:
        """Quantize what can be."""

    def counts(self) -> frozenset[int]:
        """The token counts that the layers keep; one number if all is well."""

    def answer(self) -> mx.array:
        """The logits [P, V] of the probe, asked of a copy."""


class ListModel:
    """What should be: a list of tokens. It says what a fresh cache says that is given the list."""

    def __init__(self, reference: Reference, history: History | None = None) -> None:
        self.reference = reference
        self.history = History() if history is None else history

    def append(self, tokens: Sequence[int]) -> mx.array:
        logits = self.reference.logits(self.history, (tuple(tokens),))
        self.history = self.history.append(tokens)
        return logits

    def draft(self, windows: Windows, keep: int) -> tuple[mx.array, int]:
        before = len(self.history)
        logits = self.reference.logits(self.history, tuple(map(tuple, windows)))
        for window in windows:
            self.history = self.history.append(window)
        return logits, self.trim(len(self.history) - before - keep)

    def trim(self, n: int) -> int:
        self.history = self.history.first(len(self.history) - n)
        return n

    def save(self, metadata: Mapping[str, str]) -> Any:
        return self.history, dict(metadata)

    def restore(self, saved: Any, overwritten: bool) -> Mapping[str, str]:
        self.history, metadata = saved
        return dict(metadata)

    def copy(self) -> ListModel:
        return type(self)(self.reference, self.history)

    def quantize(self) -> None:
        if not self.reference.world.quantizable:
            raise Refused("a ring is not quantized")
        self.history = self.history.quantize()

    def counts(self) -> frozenset[int]:
        return frozenset({len(self.history)})

    def answer(self) -> mx.array:
        return self.reference.answer(self.history)


class Ours:
    """The engine's rows. They forget inside a transaction only, and are saved as checkpoints."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.rows = self._rows(world.fresh())
        self.quantized = False

    def append(self, tokens: Sequence[int]) -> mx.array:
        logits = self.rows.forward(mx.array([list(tokens)]))[0]
        mx.eval(logits, self.rows.arrays())
        return logits

    def draft(self, windows: Windows, keep: int) -> tuple[mx.array, int]:
        if names := self.rows.cannot_roll_back:
            raise Refused(f"{', '.join(names)} cannot roll back")
        before = self.rows.processed[0]
        self.rows.begin()
        logits = mx.concatenate([self.rows.forward(mx.array([list(w)]))[0] for w in windows])
        appended = self.rows.processed[0] - before
        self.rows.resolve([keep])
        mx.eval(logits, self.rows.arrays())
        return logits, before + appended - self.rows.processed[0]

    def trim(self, n: int) -> int:
        raise Refused("rows do not forget what was committed")

    def save(self, metadata: Mapping[str, str]) -> Any:
        captured = capture_caches(self.rows.caches)
        return captured, self.rows.processed[0], self.quantized, dict(metadata)

    def restore(self, saved: Any, overwritten: bool) -> Mapping[str, str]:
        (layout, tensors), processed, self.quantized, metadata = saved
        caches = self.world.fresh()
        if self.quantized:
            quantize(caches)
        restore_caches(caches, layout, tensors, processed)
        self.rows = self._rows(caches, processed)
        return dict(metadata)

    def copy(self) -> Ours:
        other = type(self)(self.world)
        other.restore(self.save({}), False)
        return other

    def quantize(self) -> None:
        wanted = KVQuantization(BITS, GROUP_SIZE, start=0)
        try:
            require_quantizable(self.world.model, self.world.fresh(), wanted)
        except BadInput as error:
            raise Refused(str(error)) from error
        wanted.convert(self.rows.caches, self.rows.processed)
        self.quantized = True

    def counts(self) -> frozenset[int]:
        return counts(self.rows.caches) | {self.rows.processed[0]}

    def answer(self) -> mx.array:
        return ask(self.world, copy.deepcopy(self.rows.caches))

    def _rows(self, caches: list[Cache], processed: int = 0) -> Rows:
        return Rows(self.world.model, caches, (processed,), replayer=self.world.replayer)


@dataclass(frozen=True, slots=True)
class SavedFile:
    file: Path
    metadata: Mapping[str, str]


class Theirs:
    """mlx-lm's caches, used as its own `generate.py` and `cache_prompt.py` use them."""

    def __init__(self, world: World, new_file: Callable[[], Path]) -> None:
        self.world = world
        self.caches = world.fresh()
        self._new_file = new_file

    def append(self, tokens: Sequence[int]) -> mx.array:
        return forward(self.world, self.caches, [tokens])

    def draft(self, windows: Windows, keep: int) -> tuple[mx.array, int]:
        if not can_trim_prompt_cache(self.caches):
            raise Refused("the caches cannot be trimmed")
        logits = forward(self.world, self.caches, windows)
        dropped = sum(map(len, windows)) - keep
        return logits, self.trim(dropped) if dropped else 0

    def trim(self, n: int) -> int:
        gone: Any = trim_prompt_cache(self.caches, n)  # annotated as a list, returns a count
        return int(gone)

    def save(self, metadata: Mapping[str, str]) -> SavedFile:
        file = self._new_file()
        save_prompt_cache(str(file), self.caches, dict(metadata))
        return SavedFile(file, metadata)

    def restore(self, saved: SavedFile, overwritten: bool) -> Mapping[str, str]:
        file = self._new_file()
        shutil.copyfile(saved.file, file)
        loaded: Any = load_prompt_cache(str(file), return_metadata=True)
        metadata: Mapping[str, str]
        self.caches, metadata = loaded
        if overwritten:
            self._write_other(saved.file, file)
        return metadata

    def copy(self) -> Theirs:
        other = type(self)(self.world, self._new_file)
        other.caches = copy.deepcopy(self.caches)
        return other

    def quantize(self) -> None:
        quantize(self.caches)

    def counts(self) -> frozenset[int]:
        return counts(self.caches)

    def answer(self) -> mx.array:
        return ask(self.world, copy.deepcopy(self.caches))

    def _write_other(self, source: Path, file: Path) -> None:
        """A file of the same size, so that the reader of the old one meets numbers, not an end."""
        stored: Any = mx.load(str(source), return_metadata=True)
        arrays, metadata = stored
        other = tree_map(lambda a: -a if a.dtype == mx.float32 else a, arrays)
        mx.save_safetensors(str(file), other, metadata)


def counts(caches: Sequence[Cache]) -> frozenset[int]:
    """The offsets of all layers that have one; recurrent ones do not."""
    return frozenset(leaf.offset for leaf in leaves(caches) if hasattr(leaf, "offset"))


def rebuild(fresh: Participant, history: History) -> None:
    """Give an empty participant what a history holds."""
    early, late = history.before_quantization()
    for chunk in early:
        fresh.append(chunk)
    if history.exact is not None:
        fresh.quantize()
    for chunk in late:
        fresh.append(chunk)


def compare(expected: Participant, actual: Participant) -> str | None:
    """How two states differ, in words: by the tokens they count or by what they answer."""
    if actual.counts() != expected.counts():
        return f"layers count {sorted(actual.counts())}, expected {sorted(expected.counts())}"
    return difference(expected.answer(), actual.answer(), TOLERANCE)
