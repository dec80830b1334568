"""A row's state as an entry and bytes, and back: the seam at which the tiers meet mlx.

Tensors and metadata are named as mlx-lm's `save_prompt_cache` names them, so that its
`load_prompt_cache` opens our files; `foreign.py` is the other direction. mlx-lm writes a cache as
its `state`: arrays, and numbers and names as small tensors. We write those for mlx-lm only: our own
reader takes the kinds and numbers from the entry's layout, one line for each cache.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import mlx.core as mx

from ..errors import BadInput
from ..state.checkpoint import Attachment, Checkpoint
from ..state.forms import Held, parse_word, with_arrays
from ..state.kinds import Numbers
from ..state.layouts import CHUNKED, CONCATENATED, PLAIN, QUANTIZED, RECURRENT, RING
from .arrays import bytes_of, empty, spec_of
from .entry import AttachmentHeader, Entry, Generation, Read, TensorSpec, Tokens
from .stored import Part, Stored

CODEC: Final = "mlx-lm-caches-1"
"""Who wrote an entry's layout. No other one is read."""

ARRAY: Final = object()
"""What stands where the next of a cache's own arrays goes."""

Slots = Mapping[str, Any]
"""The dotted places in what mlx-lm calls a cache's state: `ARRAY`, a number, text or None."""

MAX_DEPTH = 8
"""Lists of caches in lists of caches; mlx-lm's models have one."""


@dataclass(frozen=True, slots=True)
class Codec:
    """How mlx-lm lays out one kind: its class, and its slots given a form's numbers."""

    class_name: str
    slots: Callable[[Numbers], Slots]


def _pair(numbers: Numbers, parts: Sequence[str] = ("",)) -> dict[str, Any]:
    """Keys and values, each perhaps in parts. An empty cache has None for them."""
    if not numbers[0]:
        return {"0": None, "1": None}
    return {side + part: ARRAY for side in "01" for part in parts}


def _plain(numbers: Numbers) -> Slots:
    return {**_pair(numbers), "2": numbers[0]}


def _quantized(numbers: Numbers) -> Slots:
    offset, group_size, bits = numbers
    return {**_pair(numbers, (".0", ".1", ".2")), "2": offset, "3": group_size, "4": bits}


def _ring(numbers: Numbers) -> Slots:
    offset, index, max_size, keep, _ = numbers
    return {**_pair(numbers), "2": offset, "3": keep, "4": max_size, "5": index}


def _chunked(numbers: Numbers) -> Slots:
    offset, start, chunk_size = numbers
    return {**_pair(numbers), "2": offset, "3": chunk_size, "4": start}


def _recurrent(filled: Numbers) -> Slots:
    slots = {f"0.{number}": ARRAY if one else None for number, one in enumerate(filled)}
    return {**slots, "1": None, "2": None}


CODECS: Mapping[str, Codec] = {
    PLAIN.name: Codec("KVCache", _plain),
    CONCATENATED.name: Codec("ConcatenateKVCache", _pair),
    QUANTIZED.name: Codec("QuantizedKVCache", _quantized),
    RING.name: Codec("RotatingKVCache", _ring),
    CHUNKED.name: Codec("ChunkedKVCache", _chunked),
    RECURRENT.name: Codec("ArraysCache", _recurrent),
}
"""Each cache kind that has a form, by its name: exactly one codec matches, or none."""

LIST: Final = "CacheList"


def encode(
    stored: Stored,
    namespace: str,
    tokens: Tokens,
    attachments: Sequence[Checkpoint] = (),
    generation: Generation | None = None,
) -> tuple[Entry, Read]:
    """An entry of those tokens, and what reads its tensors, on the thread that runs the model.

    Raises:
        BadInput: the state is not that of so many tokens, or a cache's kind has no codec.
    """
    for stands in (stored.num_tokens, *(a.processed_tokens for a in attachments)):
        if stands != len(tokens):
            raise BadInput(f"a state of {stands} tokens cannot be stored under {len(tokens)}")
    slots, own = _all_slots(stored.caches), iter(stored.arrays)
    arrays = {name: next(own) if v is ARRAY else _small(v) for name, v in slots.items()}
    headers = []
    for number, checkpoint in enumerate(attachments, start=len(stored.caches)):
        attachment = checkpoint.attachment
        named = {f"{number}.{slot}": array for slot, array in enumerate(attachment.tensors)}
        arrays |= named
        headers.append(AttachmentHeader(attachment.schema, attachment.metadata, tuple(named)))
    reuse = stored.reuse
    entry = Entry(
        namespace=namespace,
        tokens=tokens,
        codec=CODEC,
        layout=tuple(map(_line, stored.caches)),
        # A drafter's state, or a token to come, belongs to this boundary and no other.
        reuse=replace(reuse, trimmable=False) if attachments or generation else reuse,
        tensors=tuple(spec_of(name, array) for name, array in arrays.items()),
        attachments=tuple(headers),
        generation=generation,
        foreign=_foreign(stored.caches, slots),
    )
    return entry, lambda spec: bytes_of(arrays[spec.name])


class Decoder:
    """Takes an entry's tensors and gives the state that `encode` was given.

    Raises:
        BadInput: another codec wrote it, or a cache kind, position or tensor is not as it would be.
    """

    def __init__(self, entry: Entry) -> None:
        if entry.codec != CODEC:
            raise BadInput(f"codec {entry.codec!r} is not read here, only {CODEC!r}")
        self._entry = entry
        self._caches = tuple(map(_parsed, entry.layout))
        self._count = len(entry.tokens)
        slots = _all_slots(self._caches)
        attached = [name for header in entry.attachments for name in header.tensors]
        if {spec.name for spec in entry.tensors} != {*slots, *attached}:
            raise BadInput(f"an entry's tensors are not those of its layout {entry.layout}")
        Stored(self._count, self._caches)  # which checks where the caches stand
        self._own = [name for name, value in slots.items() if value is ARRAY]
        self._wanted = {*self._own, *attached}
        self._arrays: dict[str, mx.array] = {}

    def room(self, tensors: Sequence[TensorSpec]) -> list[memoryview | None]:
        """Memory for all the tensors that are arrays; see `Room`."""
        wanted = [spec for spec in tensors if spec.name in self._wanted]
        names = [spec.name for spec in wanted]
        arrays, memory = empty(wanted)
        self._arrays |= dict(zip(names, arrays, strict=True))
        rooms = dict(zip(names, memory, strict=True))
        return [rooms.get(spec.name) for spec in tensors]

    def finish(self) -> tuple[Stored, tuple[Checkpoint, ...]]:
        """The state, once the memory has been filled.

        Raises:
            BadInput: one is lacking.
        """
        if missing := self._wanted - set(self._arrays):
            raise BadInput(f"tensor {min(missing)} is missing")
        own = iter([self._arrays[name] for name in self._own])
        caches = tuple(_filled(part, own) for part in self._caches)
        attachments = [
            Attachment(
                header.schema, header.metadata, tuple(self._arrays[name] for name in header.tensors)
            )
            for header in self._entry.attachments
        ]
        stored = Stored(self._count, caches, max(1, self._entry.reuse.minimum))
        return stored, tuple(Checkpoint(self._count, a) for a in attachments)


def _all_slots(caches: Sequence[Part]) -> dict[str, Any]:
    """Every slot by its full name, `ARRAY`s in the order of `Stored.arrays`."""
    return {
        name: content
        for number, part in enumerate(caches)
        for name, content in _slots(f"{number}.", part)
    }


def _slots(above: str, part: Part) -> Iterator[tuple[str, Any]]:
    if isinstance(part, Held):
        for slot, content in _codec(part).slots(part.numbers).items():
            yield above + slot, content
        return
    # A list's state is, for each of its caches, that one's state and its class.
    for number, inner in enumerate(part):
        yield from _slots(f"{above}{number}.0.", inner)
        yield f"{above}{number}.1", _class_name(inner)


def _class_name(part: Part) -> str:
    return _codec(part).class_name if isinstance(part, Held) else LIST


def _codec(held: Held) -> Codec:
    if held.kind not in CODECS:
        raise BadInput(f"cache kind {held.kind} has no codec")
    return CODECS[held.kind]


def _small(content: int | str | None) -> mx.array:
    """What mlx-lm writes for what is no array."""
    if content is None:
        return mx.array([])
    return mx.array(content if isinstance(content, int) else [ord(c) for c in content])


def _foreign(caches: Sequence[Part], slots: Slots) -> dict[str, str]:
    """The metadata in which mlx-lm finds the classes, and which tensors are no arrays."""
    found = {f"1.{number}": _class_name(part) for number, part in enumerate(caches)}
    found["2.0"] = ""
    small = [(name, content) for name, content in slots.items() if content is not ARRAY]
    for number, (name, content) in enumerate(small, start=1):
        kinds = {int: "scalar", str: "string", type(None): "none"}
        found |= {f"2.{number}.0": name, f"2.{number}.1": kinds[type(content)]}
    return found


def _line(part: Part) -> str:
    """A cache in an entry's layout: a word, or in brackets those of a list of caches."""
    return part.word if isinstance(part, Held) else f"[{' '.join(map(_line, part))}]"


def _parsed(line: str) -> Part:
    """The reverse of `_line`, without the arrays."""
    levels: list[list[Part]] = [[]]
    for piece in re.findall(r"[\[\]]|[^\s\[\]]+", line):
        if piece == "[" and len(levels) <= MAX_DEPTH:
            levels.append([])
        elif piece == "]" and len(levels) > 1:
            part = tuple(levels.pop())
            levels[-1].append(part)
        else:
            levels[-1].append(parse_word(piece))
    if len(levels) != 1 or len(levels[0]) != 1:
        raise BadInput(f"a layout names one cache, with as many brackets closed as opened: {line}")
    return levels[0][0]


def _filled(part: Part, arrays: Iterator[mx.array]) -> Part:
    if isinstance(part, Held):
        return with_arrays(part, arrays)
    return tuple(_filled(inner, arrays) for inner in part)
