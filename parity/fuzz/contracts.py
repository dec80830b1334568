"""What mlx-lm promises about a cache, one predicate each, and the broken promises that are known.

A promise that is broken is a `Violation`. Sources: the docstrings of `trim_prompt_cache`,
`save_prompt_cache` and `load_prompt_cache` in mlx_lm/models/cache.py, the name of `LRUPromptCache`
and its comments, and the use that mlx_lm/generate.py and mlx_lm/server.py make of the rest.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import (
    ArraysCache,
    BatchRotatingKVCache,
    CacheList,
    ChunkedKVCache,
    ConcatenateKVCache,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
)

from engine.state.layouts import Cache, leaves

from .participants import counts
from .worlds import kinds


class Promise(Enum):
    """The predicates. The first is what every operation must leave behind."""

    HOLDS = "the state holds the tokens that it was given"
    TRIM = "after trim returned m, every layer holds the list without its last m tokens"
    NO_TRIM = "a cache that is not trimmable does not trim"
    LOAD = "a loaded cache is the saved one, whatever happens to the file"
    METADATA = "metadata comes back as it was saved"
    COPY = "a deep copy and its original do not touch each other"
    QUANTIZE = "to_quantized gives the same keys and values within one step"
    MERGE = "rows merged into a batch are the rows that they were alone"
    FETCH = "what the prompt cache hands out holds the tokens asked for, but for the rest"
    NEAREST = "the prompt cache hands out as many of the tokens as some entry has"
    RECENT = "the prompt cache evicts what was not used for longest"


@dataclass(frozen=True, slots=True)
class Key:
    """Which promise, broken by which class, under which condition (empty: none is known)."""

    promise: Promise
    kind: str
    condition: str


@dataclass(frozen=True, slots=True)
class Violation:
    key: Key
    detail: str

    def __str__(self) -> str:
        when = f", {self.key.condition}" if self.key.condition else ""
        return f"{self.key.kind}{when}: not so: {self.key.promise.value} ({self.detail})"


LAST_ALONE = Key(Promise.MERGE, "BatchRotatingKVCache", "last of a padded prompt alone")
IN_CHUNKS = Key(Promise.MERGE, "ArraysCache", "padded prompt in several chunks")

EXPLANATIONS: Mapping[Key, str] = {
    Key(Promise.TRIM, "ConcatenateKVCache", "tokens trimmed"): "D15",
    Key(Promise.TRIM, "ChunkedKVCache", "front dropped"): "D15",
    Key(Promise.NO_TRIM, "RotatingKVCache", "ring is full"): "D15",
    Key(Promise.LOAD, "every class", "file written over"): "D16",
    Key(Promise.LOAD, "ConcatenateKVCache", "empty"): "D25",
    Key(Promise.METADATA, "every class", "key with a dot"): "D16",
    Key(Promise.LOAD, "BatchKVCache", "attribute lost"): "D16",
    Key(Promise.LOAD, "BatchRotatingKVCache", "attribute lost"): "D16",
    Key(Promise.QUANTIZE, "RotatingKVCache", "asked to"): "D12",
    Key(Promise.MERGE, "BatchRotatingKVCache", "protected tokens"): "D7",
    Key(Promise.MERGE, "BatchRotatingKVCache", "rotated"): "D23",
    LAST_ALONE: "D24",
    IN_CHUNKS: "D26",
    Key(Promise.FETCH, "ConcatenateKVCache", "tokens trimmed"): "D15",
    Key(Promise.FETCH, "ChunkedKVCache", "front dropped"): "D15",
    Key(Promise.FETCH, "QuantizedKVCache", "cut to less than its start"): "D12",
    Key(Promise.NEAREST, "LRUPromptCache", "prefix of one token"): "D14",
    Key(Promise.NEAREST, "LRUPromptCache", "hidden by a longer one"): "D14",
    Key(Promise.RECENT, "LRUPromptCache", "fetched meanwhile"): "D14",
}
"""Key to deviation. Nothing of ours can be looked up here."""


def cause(promise: Promise, caches: Sequence[Cache]) -> tuple[str, str]:
    """The class and condition to blame, from what the caches were before the operation."""
    flat = leaves(caches)
    if promise is Promise.TRIM:
        if any(isinstance(leaf, ConcatenateKVCache) for leaf in flat):
            return "ConcatenateKVCache", "tokens trimmed"
        if any(isinstance(leaf, ChunkedKVCache) and leaf.start_position for leaf in flat):
            return "ChunkedKVCache", "front dropped"
    if promise is Promise.QUANTIZE and any(isinstance(leaf, RotatingKVCache) for leaf in flat):
        return "RotatingKVCache", "asked to"
    return " and ".join(kinds(caches)), ""


def fetch_cause(caches: Sequence[Cache], cut_below: bool) -> tuple[str, str]:
    """The same for caches that were handed out; `cut_below`: to what was not yet quantized then."""
    if cut_below:
        return "QuantizedKVCache", "cut to less than its start"
    return cause(Promise.TRIM, caches)


def load_cause(fresh: Sequence[Cache], empty: bool, overwritten: bool) -> tuple[str, str] | None:
    """What to blame for a failed load; `empty`: nothing was in the caches that were saved."""
    if empty and any(isinstance(leaf, ConcatenateKVCache) for leaf in leaves(fresh)):
        return "ConcatenateKVCache", "empty"
    return ("every class", "file written over") if overwritten else None


def batch_key(promise: Promise, caches: Sequence[Cache], protected: bool) -> Key:
    """The same for a batch; `protected`: its rows came from rings that keep their first tokens."""
    if protected:
        return Key(Promise.MERGE, "BatchRotatingKVCache", "protected tokens")
    if any(isinstance(leaf, BatchRotatingKVCache) and leaf.rotated for leaf in leaves(caches)):
        return Key(Promise.MERGE, "BatchRotatingKVCache", "rotated")
    return Key(promise, " and ".join(kinds(caches)), "")


def padded_prompt_key(caches: Sequence[Cache], longest: int, step: int) -> Key | None:
    """What to blame if a ragged prompt, prefilled `step` tokens at a time, goes wrong."""
    flat = leaves(caches)
    if longest % step == 1 and any(isinstance(leaf, BatchRotatingKVCache) for leaf in flat):
        return LAST_ALONE
    if longest > step and any(isinstance(leaf, ArraysCache) for leaf in flat):
        return IN_CHUNKS
    return None


def refused_trim_does_nothing(caches: Sequence[Cache], n: int) -> Violation | None:
    """`is_trimmable` is the whole of a cache's answer: who calls `trim` all the same gets nothing.

    Tried on copies. To raise is a refusal as well.
    """
    lists = [cache for cache in caches if type(cache) is CacheList]
    for cache in (*leaves(caches), *lists):
        if cache.is_trimmable():
            continue
        tried = copy.deepcopy(cache)
        try:
            said = tried.trim(n)
        except Exception as error:
            said = f"{type(error).__name__}: {error}"
        before, after = counts([cache]), counts([tried])
        if before != after:
            full = isinstance(cache, RotatingKVCache) and cache.offset >= cache.max_size
            key = Key(Promise.NO_TRIM, type(cache).__name__, "ring is full" if full else "")
            detail = f"trim({n}) said {said}, offset {sorted(before)} became {sorted(after)}"
            return Violation(key, detail)
    return None


def metadata_changed(saved: Mapping[str, str], loaded: object) -> Violation:
    dotted = any("." in key for key in saved)
    key = Key(Promise.METADATA, "every class", "key with a dot" if dotted else "")
    return Violation(key, f"{dict(saved)} became {loaded}")


def quantized_is_close(before: Sequence[Cache], after: Sequence[Cache]) -> Violation | None:
    """Within one step of each group's scale, for the layers that were converted."""
    for exact, cache in zip(before, after, strict=True):
        if not (isinstance(exact, KVCache) and isinstance(cache, QuantizedKVCache)):
            continue
        if not exact.offset:
            continue
        pairs: Iterable[Any] = zip(exact.keys_and_values(), cache.keys_and_values(), strict=True)
        for array, packed in pairs:
            options: Any = {"group_size": cache.group_size, "bits": cache.bits}
            step = mx.repeat(mx.abs(packed[1]), cache.group_size, axis=-1)
            error = mx.abs(mx.dequantize(*packed, **options) - array)
            if not mx.all(error <= step + 1e-6).item():
                key = Key(Promise.QUANTIZE, "KVCache", "")
                return Violation(key, f"off by {mx.max(error - step).item():.1e}")
    return None
