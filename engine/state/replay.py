"""Sliced replay: how a recurrent state gets to a boundary inside a window.

A recurrent state cannot forget. So the state before the window is restored, and the modules that
write it run again on the inputs they had, cut to the kept tokens. Which modules those are is seen
in one small forward, not known by family name.

The inputs are recorded by a clone of the model that shares every array and every module that is not
on the way to a recorder: the model itself is never touched.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx_lm.models.cache import ArraysCache, CacheList

from ..clone import with_classes
from .layouts import RECURRENT, Cache, layout_of, leaves


@dataclass(frozen=True, slots=True)
class Call:
    """A module and what it was called with."""

    module: Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class Recorder:
    """A model whose writers of recurrent caches can be recorded.

    `rewritten` are the positions, among a row's leaves, of the other caches that the writers also
    append to: a replay fills those again.
    """

    def __init__(self, model: Module, writers: Sequence[Module], rewritten: Collection[int]):
        self.rewritten = frozenset(rewritten)
        self._calls: list[Call] | None = None
        chosen = set(map(id, writers))
        self._clone: Any = with_classes(
            model, lambda module: self._class_for(module) if id(module) in chosen else type(module)
        )

    def forward(self, tokens: mx.array, caches: list[Cache]) -> tuple[mx.array, list[Call]]:
        """The model's logits [B, N, V] for ids [B, N], and the writers' calls in order."""
        calls: list[Call] = []
        self._calls = calls
        try:
            return self._clone(tokens, cache=caches), calls
        finally:
            self._calls = None

    def _class_for(self, module: Module) -> type:
        """A subclass, so that a recorded module is in everything else what it was."""
        base: Any = type(module)

        def call(copy: Any, *args: Any, **kwargs: Any) -> Any:
            calls, self._calls = self._calls, None
            if calls is None:
                return base.__call__(copy, *args, **kwargs)
            calls.append(Call(copy, args, kwargs))
            try:
                # What it calls is part of its own replay.
                return base.__call__(copy, *args, **kwargs)
            finally:
                self._calls = calls

        return type(base.__name__, (base,), {"__call__": call})


def replay(calls: Sequence[Call], width: int, kept: int, batch: int = 1) -> None:
    """Run recorded calls again on the first `kept` of their `width` >= 2 tokens per row."""
    for call in calls:
        kwargs = {name: cut(value, width, kept, batch) for name, value in call.kwargs.items()}
        call.module(*(cut(value, width, kept, batch) for value in call.args), **kwargs)


def replay_rows(
    calls: Sequence[Call],
    recurrent: Sequence[Cache],
    width: int,
    kept: int,
    batch: int,
    rows: Sequence[int],
) -> None:
    """As `replay`, for those of the `batch` rows alone; the others stay as they are.

    `recurrent` are the caches that the calls write. The rows run on stand-ins for these.
    """
    index = mx.array(list(rows))
    stand_ins: dict[int, Cache] = {}
    for cache in recurrent:
        stand_ins[id(cache)] = own = ArraysCache(len(cache.cache))
        own.cache = [None if slot is None else slot[index] for slot in cache.cache]

    def chosen(value: Any) -> Any:
        if isinstance(value, mx.array):
            return value[index] if value.ndim >= 2 and value.shape[0] == batch else value
        if isinstance(value, list | tuple):
            return type(value)(map(chosen, value))
        if type(value) is CacheList:
            return CacheList(*map(chosen, value.caches))
        return stand_ins.get(id(value), value)

    own_calls = [
        Call(call.module, chosen(call.args), {k: chosen(v) for k, v in call.kwargs.items()})
        for call in calls
    ]
    replay(own_calls, width, kept, len(rows))
    for cache in recurrent:
        advanced = stand_ins[id(cache)].cache
        for slot, part in enumerate(advanced):
            if part is not None:
                whole = cache.cache[slot]
                shape = (batch, *part.shape[1:])
                whole = mx.zeros(shape, part.dtype) if whole is None else copy.copy(whole)
                whole[index] = part
                cache.cache[slot] = whole


def cut(value: Any, width: int, kept: int, batch: int = 1) -> Any:
    """A recorded argument without the last `width - kept` tokens.

    Arrays [B, N, ...] and [N] lose positions; attention masks [..., N, M] lose queries and the keys
    of the same tokens. Anything else is not made of tokens.
    """
    if not isinstance(value, mx.array):
        return value
    if value.ndim == 1:
        return value[:kept] if value.shape[0] == width else value
    if value.ndim >= 2 and value.shape[0] == batch and value.shape[1] == width:
        return value[:, :kept]
    if value.ndim >= 2 and value.shape[-2] == width:
        return value[..., :kept, : value.shape[-1] - (width - kept)]
    return value


def find_writers(
    model: Module, tokens: mx.array, caches: list[Cache]
) -> tuple[list[Module], set[int]]:
    """The modules that are handed a recurrent cache and do not hand it on.

    Runs one forward of `tokens` on `caches`, which must be the model's own and empty. Where the
    model itself is such a module, a replay is the forward again.

    Returns:
        The modules, and the positions among the leaves of the other caches they are handed.
    """
    flat = leaves(caches)
    position = {id(leaf): index for index, leaf in enumerate(flat)}
    recurrent = {i for i, leaf in enumerate(flat) if layout_of(leaf) is RECURRENT}
    writers: dict[int, Module] = {}
    handed: set[int] = set()
    frames: list[set[int]] = []

    def class_for(module: Module) -> type:
        base: Any = type(module)

        def call(copy: Any, *args: Any, **kwargs: Any) -> Any:
            received = _positions_in((*args, *kwargs.values()), position)
            for frame in frames:
                frame -= received
            frames.append(received & recurrent)
            try:
                return base.__call__(copy, *args, **kwargs)
            finally:
                if frames.pop():
                    writers[id(module)] = module
                    handed.update(received)

        return type(base.__name__, (base,), {"__call__": call})

    spied: Any = with_classes(model, class_for)
    mx.eval(spied(tokens, cache=caches))
    return list(writers.values()), handed - recurrent


def _positions_in(values: Iterable[Any], position: Mapping[int, int]) -> set[int]:
    found: set[int] = set()
    for value in values:
        if isinstance(value, list | tuple):
            found |= _positions_in(value, position)
        elif type(value) is CacheList:
            found |= _positions_in(leaves([value]), position)
        elif id(value) in position:
            found.add(position[id(value)])
    return found
