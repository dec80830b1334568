"""Ids for an answer that is nothing but text: the expected ones as far as it goes along with them.

What follows is the text's own re-tokenization. So the first position where the ids part is the
oracle's token that the text contradicts, and its margin can be measured.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from parity.trace import UNFINISHED, Answer

Texts = Callable[[tuple[int, ...]], Sequence[str]]
"""The texts that ids decode to, each of them whole: nothing is held back."""

Encode = Callable[[str], Sequence[int]]
"""The ids of a text, without special tokens."""


def map_onto(expected: Answer, text: str, texts: Texts, encode: Encode) -> tuple[int, ...]:
    """The ids of `text`: exactly the expected ones if an answer with these may read so.

    Else the longest prefix of the expected ids whose text it begins with, and what the rest of it
    is cut into. A prefix that ends inside a character is none: its last bytes are not known to be
    those of the text, but are found again by cutting the rest.
    """
    if expected.may_read(text, mapped=True):
        return expected.ids
    kept, shown = _longest_prefix(expected.ids, text, texts)
    rest = text[shown:]
    if not rest:
        return expected.ids[:kept]
    # In its context if that is cut as the oracle's tokens are: some tokenizers put a space in front
    # of whatever text they are given.
    whole = tuple(encode(text))
    if kept and whole[:kept] == expected.ids[:kept]:
        return whole
    return (*expected.ids[:kept], *encode(rest))


def _longest_prefix(ids: tuple[int, ...], text: str, texts: Texts) -> tuple[int, int]:
    """How many ids, and how many characters of `text` they are."""
    for kept in range(len(ids), 0, -1):
        for decoded in texts(ids[:kept]):
            if text.startswith(decoded) and not decoded.endswith(UNFINISHED):
                return kept, len(decoded)
    return 0, 0
