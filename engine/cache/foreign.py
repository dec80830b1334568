"""Prompt caches that mlx-lm has saved. Its classes are found in a table, never by a file's word."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_unflatten
from mlx_lm.models.cache import CacheList

from ..errors import BadInput, one_line
from ..state.layouts import LAYOUTS, Cache
from ..state.quantize import KVQuantization
from .codecs import CODECS, LIST, MAX_DEPTH
from .stored import Stored

CLASSES: Mapping[str, type] = {
    kind.__name__: kind for kind, layout in LAYOUTS.items() if layout.name in CODECS
}


def imported(file: Path, tokens: int, quantization: KVQuantization | None = None) -> Stored:
    """The state in a file that mlx-lm's `save_prompt_cache` wrote after `tokens` tokens.

    Which tokens they are, and how few bits came about, the file does not say. It is read whole:
    nothing points at it afterwards.

    Raises:
        BadInput: it is no such file, holds a cache of an unknown class, or one that stands
            elsewhere.
    """
    try:
        values: Any = mx.load(str(file), format="safetensors", return_metadata=True)
        return Stored.of(_caches(*values), tokens, quantization)
    except BadInput:
        raise
    except Exception as error:
        # mlx raises RuntimeError for a damaged file, and a wrong tree fails where it is used.
        raise BadInput(f"{file} is no prompt cache of mlx-lm: {one_line(error)}") from error


def _caches(values: dict[str, Any], metadata: Mapping[str, str]) -> list[Cache]:
    _bounded([*values, *metadata])
    _, classes, scalars = tree_unflatten(list(metadata.items()))
    for name, kind in scalars[1:]:
        values[name] = _plain(values[name], kind)
    states = tree_unflatten(list(values.items()))
    return [_cache(name, state) for name, state in zip(classes, states, strict=False)]


def _plain(value: mx.array, kind: str) -> int | str | None:
    """A small tensor as what it stands for."""
    if kind == "none":
        return None
    if kind == "string":
        letters: Any = value.tolist()
        return "".join(map(chr, letters))
    if kind != "scalar":
        raise BadInput(f"a tensor stands for a {kind}, not a scalar, string or none")
    number: Any = value.item()
    if type(number) is not int:
        raise BadInput(f"a cache's number is {number!r}, not a whole number")
    return number


def _cache(name: str, state: Any) -> Cache:
    if name == LIST:
        return CacheList(*(_cache(inner_name, inner) for inner, inner_name in state))
    if name not in CLASSES:
        raise BadInput(f"cache class {name!r} is not known, only {', '.join(sorted(CLASSES))}")
    kind: Any = CLASSES[name]
    return kind.from_state(state)


def _bounded(names: Sequence[str]) -> None:
    """Refuse names that would make a larger tree than there are things to put into it."""
    for name in names:
        steps = name.split(".")
        numbers = [int(step) for step in steps if step.isdecimal()]
        if len(steps) > 2 * MAX_DEPTH + 2 or any(n > len(names) for n in numbers):
            raise BadInput(f"a tensor or field is named {name[:80]!r}")
