"""What one row's cache holds, as a value: given out, taken in, written as a word, cut back.

The same value is what checkpoints, the RAM tier and files keep. How each kind of cache does all
that is in `kinds.py`. Arrays go out as they are: who owns them is the caller's business. What a
cache was filled with it never changes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice

import mlx.core as mx

from ..errors import BadInput
from .kinds import FORMS, Arrays, Form, Numbers
from .layouts import Cache, handle, layout_of


@dataclass(frozen=True, slots=True, eq=False)
class Held:
    """What a cache holds: its kind's name, numbers, and arrays that nobody changes.

    A cache that holds nothing, as in a layer that the model never uses, has no arrays.
    """

    kind: str
    numbers: Numbers
    arrays: Arrays

    @property
    def word(self) -> str:
        """The kind and the numbers, joined by colons."""
        return ":".join([self.kind, *map(str, self.numbers)])


def save(cache: Cache) -> Held:
    """What a cache of one row holds.

    Raises:
        BadInput: it is of an unknown kind.
    """
    kind = layout_of(cache).name
    numbers, arrays = _form(kind).save(cache)
    return Held(kind, tuple(numbers), tuple(arrays))


def load(cache: Cache, held: Held, tokens: int) -> None:
    """Fill a fresh cache with what one held after `tokens` tokens.

    Raises:
        BadInput: kind, sizes or lengths do not fit. The cache may then be half filled.
    """
    kind = layout_of(cache).name
    if held.kind != kind:
        raise BadInput(f"checkpoint holds a {held.kind} cache where the model has {kind}")
    require_position(held, tokens)
    form, arrays = _form(kind), tuple(map(handle, held.arrays))
    try:
        if len(arrays) != form.number_of_arrays(held.numbers):
            raise ValueError(len(arrays))
        # Handles, since a cache writes into the arrays that it has.
        form.load(cache, held.numbers, arrays)
    except BadInput:
        raise
    except ValueError as error:
        raise _malformed(held.kind, held.word) from error


def parse_word(word: str) -> Held:
    """The reverse of `Held.word`, without the arrays.

    Raises:
        BadInput: it is malformed, or of an unknown kind.
    """
    kind, *rest = word.split(":")
    form = _form(kind)
    try:
        numbers = tuple(map(int, rest))
        form.number_of_arrays(numbers)
        form.cut_from(numbers)
    except (ValueError, LookupError, ArithmeticError) as error:
        raise _malformed(kind, word) from error
    return Held(kind, numbers, ())


def number_of_arrays(held: Held) -> int:
    """How many arrays belong to a cache's numbers."""
    return _form(held.kind).number_of_arrays(held.numbers)


def with_arrays(held: Held, arrays: Iterator[mx.array]) -> Held:
    """The same with its share of the arrays, which are taken from the iterator."""
    return replace(held, arrays=tuple(islice(arrays, number_of_arrays(held))))


def parse(words: Sequence[str], arrays: Sequence[mx.array]) -> list[Held]:
    """The reverse of `Held.word`, each with its share of the arrays.

    Raises:
        BadInput: a word is malformed, or there are too few or too many arrays.
    """
    bare, left = [parse_word(word) for word in words], iter(arrays)
    if (wanted := sum(map(number_of_arrays, bare))) != len(arrays):
        size = "few" if len(arrays) < wanted else "many"
        raise BadInput(f"checkpoint holds {len(arrays)} arrays, too {size}: {wanted} are expected")
    return [with_arrays(held, left) for held in bare]


def require_position(held: Held, tokens: int) -> None:
    """Refuse what stands elsewhere than behind `tokens` tokens, or behind none if unused.

    Raises:
        BadInput: naming both numbers.
    """
    if _form(held.kind).positioned and held.numbers[:1] not in ((tokens,), (0,)):
        raise BadInput(f"a checkpoint cache stands at {held.numbers[0]} tokens, expected {tokens}")


def cut_from(held: Held) -> int | None:
    """The least n for which `cut` is possible, as it is for every larger one; None: it never is."""
    return _form(held.kind).cut_from(held.numbers) if held.arrays else 1


def cut(held: Held, n: int) -> Held:
    """What a cache that has seen n tokens at least would hold had it seen only the first n of them.

    The arrays are parts of the longer ones.
    """
    if not held.arrays:
        return held
    numbers, arrays = _form(held.kind).cut(held.numbers, held.arrays, n)
    return Held(held.kind, numbers, arrays)


def _form(kind: str) -> Form:
    if kind not in FORMS:
        raise BadInput(f"cache kind {kind} has no checkpoint form")
    return FORMS[kind]


def _malformed(kind: str, word: str) -> BadInput:
    return BadInput(f"a {kind} cache of the checkpoint is malformed: {word}")
