"""Reading text that anyone may have written: JSON and base64, and nothing unexpected in them."""

from __future__ import annotations

import base64
import binascii
import json
import re
from collections.abc import Mapping
from typing import Any, TypeVar

import numpy as np

from .entry import Tokens

MAX_PARTS = 1 << 18
"""JSON values in a header. Each may take 100 bytes of memory, however short its text."""

T = TypeVar("T")


class Damaged(ValueError):
    """Not what any version of this engine has written, or not all of it."""


class Foreign(ValueError):
    """Whole, but for others to read: another version of the format, or another codec."""


def dump(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))


def load(text: str, *, unique: bool = True) -> Any:
    """JSON of a bounded number of parts; `unique`: each key once in its object, or else the last.

    Raises:
        Damaged: it is anything else.
    """
    if len(text) > MAX_PARTS and sum(map(text.count, "[{,")) > MAX_PARTS:
        raise Damaged(f"JSON of more than {MAX_PARTS} parts")
    try:
        return (_UNIQUE if unique else _QUICK).decode(text)
    except Damaged:
        raise
    except (ValueError, RecursionError) as error:
        raise Damaged(f"not JSON: {str(error)[:80]}") from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise Damaged("a key stands twice in one JSON object")
    return found


_UNIQUE = json.JSONDecoder(object_pairs_hook=_unique)
_QUICK = json.JSONDecoder()


def object_of(value: Any, kinds: Mapping[str, type]) -> dict[str, Any]:
    """A JSON object of exactly these keys, with values of these types."""
    if not isinstance(value, dict) or value.keys() != kinds.keys():
        raise Damaged(f"not an object of {', '.join(kinds)}")
    for key, kind in kinds.items():
        if type(value[key]) is not kind:
            raise Damaged(f"{key!r} is no {kind.__name__}")
    return value


def items_of(value: Any, kind: type[T]) -> tuple[T, ...]:
    """A JSON list of one type."""
    if type(value) is not list or not {kind}.issuperset(map(type, value)):
        raise Damaged(f"not a list of {kind.__name__}")
    return tuple(value)


def decimal(text: str) -> int:
    """A whole number of at most 18 digits, which int64 holds.

    Raises:
        Damaged: it is something else.
    """
    if not re.fullmatch("[0-9]{1,18}", text):
        raise Damaged(f"{text[:40]!r} is no whole number")
    return int(text)


def packed(tokens: Tokens) -> str:
    """Base64 of the ids as little-endian int32."""
    return base64.b64encode(tokens.astype("<i4", copy=False).tobytes()).decode("ascii")


def unpacked(text: str) -> Tokens:
    """The reverse of `packed`.

    Raises:
        Damaged: it is something else.
    """
    try:
        data = binascii.a2b_base64(text, strict_mode=True)
    except ValueError:
        raise Damaged("token ids are not base64") from None
    if len(data) % 4:
        raise Damaged(f"{len(data)} bytes of token ids, not a multiple of 4")
    return np.frombuffer(data, "<i4").astype(np.int32, copy=False)
