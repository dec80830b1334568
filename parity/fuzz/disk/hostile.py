"""Headers that say what none of ours says, with the right hash where that gets them further.

A header is taken apart, JSON inside strings as well; one to four of its places are given a value
that is wrong, huge, deep or of another type; then it is put together again.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from random import Random
from typing import Any

from xxhash import xxh3_128_hexdigest

from engine.cache.entry import ITEM_BYTES, Entry
from engine.cache.format import BEGIN, DIGITS, MAX_HEADER_BYTES, plan

from .model import ORIGIN
from .small import exact, small, unfinished

BLANK = "0" * DIGITS

NUMBERS = (-1, 0, 1, 7, 2**15, 2**31 - 1, 2**31, 2**32, 2**53, 2**63 - 1, 2**63, 2**64 - 1, 10**40)
LENGTHS = (0, 7, 8, 65, 66, 2**24, 2**24 + 1, 2**31, 2**32, 2**63, 2**64 - 1)
TEXTS = ("", "\0", "../../x", "/etc/passwd", "os.system", "é", "\ud800", "F8_E4M3", "C128", "=" * 9)
INSIDE = ("0.layout", "0.reuse", "0.attachments", "0.generation")
"""Metadata that is JSON in a string."""

BASES: tuple[Entry, ...] = (
    small((91, 92, 93)),
    exact((94, 95)),
    unfinished((91, 92, 93), "key", 2),
)


MOST_EDITS = 4
DEEPEST = 200
"""Lists in lists. One inside the other, as many as there are edits, Python can still write."""


def hostile_file(random: Random) -> bytes:
    """A file of a hostile header and as many bytes as its tensors had, more, or fewer."""
    entry = random.choice(BASES)
    giant = random.random() < 0.006
    header = random.choice(_GIANT)(random) if giant else _rewritten(entry, random)
    header = _bytes_changed(header, random)
    header = header.replace(BEGIN + BLANK.encode(), BEGIN + xxh3_128_hexdigest(header).encode(), 1)
    length = len(header)
    if random.random() < 0.15:
        length = random.choice((*LENGTHS, max(length - 1, 0), length + 1, length + 8))
    size = random.choice((entry.nbytes,) * 6 + (0, entry.nbytes - 1, entry.nbytes + 1, 1 << 16))
    return length.to_bytes(8, "little") + header + bytes(size)


def _rewritten(entry: Entry, random: Random) -> bytes:
    document = json.loads(plan(entry, ORIGIN).text)
    metadata: dict[str, Any] = document["__metadata__"]
    metadata["0.header_hash"] = BLANK
    for key in INSIDE:
        if key in metadata:
            metadata[key] = json.loads(metadata[key])
    for _ in range(random.randint(1, MOST_EDITS)):
        _edit(document, random)
    metadata = document["__metadata__"]
    if isinstance(metadata, dict):
        for key, value in metadata.items():
            if key in INSIDE or (type(value) is not str and random.random() < 0.9):
                metadata[key] = _dumped(value, random)
    return _dumped(document, random).encode("utf-8", "surrogatepass")


def _edit(document: Any, random: Random) -> None:
    """Change one place, anywhere."""
    places = [p for p in _places(document) if p[1] not in ("__metadata__", "0.header_hash")]
    if not places:
        return
    holder, key = random.choice(places)
    kind = random.random()
    if kind < 0.15:
        del holder[key]
    elif kind < 0.3 and isinstance(holder, dict):
        holder[random.choice((*TEXTS, *holder, "0.class", "3.0", "1.0"))] = holder[key]
    elif kind < 0.4:
        other, name = random.choice(places)
        holder[key] = _copied(other[name]) if _has(other, name) else None
    else:
        holder[key] = _nasty(random, holder[key])


def _has(holder: Any, key: Any) -> bool:
    return key in holder if isinstance(holder, dict) else 0 <= key < len(holder)


def _copied(value: Any) -> Any:
    return json.loads(json.dumps(value))


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    pairs: Sequence[tuple[Any, Any]] = ()
    if isinstance(value, dict):
        pairs = list(value.items())
    elif isinstance(value, list):
        pairs = list(enumerate(value))
    for key, inside in pairs:
        yield value, key
        yield from _places(inside)


def _nasty(random: Random, was: Any) -> Any:
    number = random.choice(NUMBERS)
    choices: list[Any] = [
        number,
        -number,
        random.choice(TEXTS),
        random.choice(list(ITEM_BYTES)),
        [number] * random.choice((1, 2, 33, 1000)),
        {"class": "os.system", "args": ["true"]},
        None,
        True,
        [],
        {},
        1.5,
        float("nan"),
        [was],
        [[], was],
        str(was),
        "A" * random.choice((1, 4, 5, 100_000)),
        _deep(random.choice((2, 50, DEEPEST))),
    ]
    return random.choice(choices)


def _deep(levels: int) -> Any:
    value: Any = []
    for _ in range(levels):
        value = [value]
    return value


def _dumped(value: Any, random: Random) -> str:
    """JSON; now and then with a key twice, deep, or followed by more."""
    text = json.dumps(value, separators=(",", ":"), ensure_ascii=random.random() < 0.97)
    kind = random.random()
    if kind < 0.02 and text.startswith("{") and len(text) > 2:
        return "{" + text[1:-1] + "," + text[1:]
    if kind < 0.03:
        return text + random.choice(("{}", "\0", "]", " x"))
    if kind < 0.04:
        return "[" * 100_000
    return text


def _bytes_changed(header: bytes, random: Random) -> bytes:
    """Now and then: other bytes, spaces behind, or an end that is missing."""
    kind = random.random()
    if kind < 0.9:
        return header
    if kind < 0.93:
        at = random.randrange(len(header))
        return header[:at] + random.randbytes(random.randint(1, 4)) + header[at + 1 :]
    if kind < 0.96:
        return header[: random.randrange(len(header))]
    return header + b" " * random.choice((1, 7, 4096))


def _begun(rest: bytes) -> bytes:
    return BEGIN + BLANK.encode() + rest


_GIANT: tuple[Callable[[Random], bytes], ...] = (
    lambda random: _begun(b'"}' + b',"":[' + b"[" * random.choice((10**5, 10**6, 10**7))),
    lambda random: _begun(b'","a":"' + b"a" * (MAX_HEADER_BYTES - 100) + b'"}}'),
    lambda random: _begun(b'"},"a":[' + b"[]," * 5_500_000 + b"[]]}"),
    lambda random: _begun(b'"},"a":[' + b"{}," * 5_500_000 + b"{}]}"),
    lambda random: _begun(b'","0.layout":"[' + b"[]," * 5_500_000 + b'[]]"}}'),
    lambda random: _begun(b'"}' + b"".join(b',"%d":{}' % n for n in range(1 << 17)) + b"}"),
    lambda random: _begun(b'"},"a":[' + b"1," * (MAX_HEADER_BYTES // 2 - 100) + b"1]}"),
    lambda random: _begun(b'","0.layout":"[' + b"0," * (MAX_HEADER_BYTES // 2 - 99) + b'0]"}}'),
    lambda random: _begun(b'"},"a":' + b"9" * random.choice((5_000, 10**6, 10**7)) + b"}"),
    lambda random: _begun(b'"}' + b"\\u0000" * 10**6 + b"}"),
    lambda random: plan(small(range(1 << 20)), ORIGIN).digest.encode() * (1 << 19),
    lambda random: _begun(b" " * (MAX_HEADER_BYTES - 66)),
)
