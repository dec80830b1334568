"""Answers that are nothing but text: what is equal, and at which token the rest parts."""

from __future__ import annotations

from functools import partial
from itertools import takewhile

import pytest
from hypothesis import given
from hypothesis import strategies as st

import fixtures
from oracle.inprocess import Loaded, load
from parity.compare import Verdict, compare, first_difference
from parity.references import decode, decodings
from parity.remote.retokenize import map_onto
from parity.trace import Answer
from tests.parity.fakes import EXACT

FIRST_BYTE, NUM_BYTES = 5, 256
"""The fixtures' tokenizer: byte b is token 5 + b."""


@pytest.fixture(scope="module")
def target() -> Loaded:
    return load(fixtures.target_dir("dense"), lazy=True)


any_ids = st.lists(
    st.one_of(
        st.text("ab é木\U0001f600", max_size=3).map(lambda text: tuple(text.encode())),
        st.tuples(st.integers(0, NUM_BYTES - 1)),  # bytes that need not be characters
    ),
    max_size=6,
).map(lambda parts: tuple(FIRST_BYTE + byte for part in parts for byte in part))
texts = st.text("ab é木林\U0001f600\ufffd", max_size=8)


def answer_of(target: Loaded, ids: tuple[int, ...], finish: str = "length") -> Answer:
    """What the oracle answers by these ids."""
    text = decode(target, ids)
    return Answer("oracle", ids, text, finish, 1, 1, None, decodings=decodings(target, (), ids))


def mapped(target: Loaded, expected: Answer, text: str) -> tuple[int, ...]:
    return map_onto(expected, text, partial(decodings, target, ()), target.encode_bare)


@given(ids=any_ids)
def test_an_equal_text_has_the_expected_ids(target: Loaded, ids: tuple[int, ...]) -> None:
    """However else the text might be cut, and wherever its characters or spaces end."""
    expected = answer_of(target, ids)
    for text in (expected.text, *expected.decodings):
        assert mapped(target, expected, text) == ids


@given(ids=any_ids, text=texts)
def test_a_text_is_equal_only_if_the_expected_ids_may_read_so(
    target: Loaded, ids: tuple[int, ...], text: str
) -> None:
    """mutants: what follows the shared beginning is ignored."""
    expected = answer_of(target, ids)
    actual = Answer(
        "subject", mapped(target, expected, text), text, "length", 1, 1, None, mapped=True
    )
    verdict = compare(expected, actual, EXACT, lambda *_: None, lambda _: None).verdict
    assert (verdict is Verdict.EQUAL) == expected.may_read(text, mapped=True)


@given(
    # mlx-lm drops a first space: a text without one may stand for ids that begin with one.
    text=st.text("ab é木\U0001f600", min_size=1, max_size=8).filter(lambda t: t[0] != " "),
    place=st.integers(0, 7),
    other=st.sampled_from("xü林\U0001f601"),
)
def test_a_changed_character_parts_at_its_token(
    target: Loaded, text: str, place: int, other: str
) -> None:
    """Of a character of several tokens, at the first that differs: 木 and 林 share one."""
    place %= len(text)
    changed = text[:place] + other + text[place + 1 :]
    expected = answer_of(target, tuple(target.encode_bare(text)))
    pairs = zip(text.encode(), changed.encode(), strict=False)
    first = len(list(takewhile(lambda pair: pair[0] == pair[1], pairs)))
    ids = mapped(target, expected, changed)
    actual = Answer("subject", ids, changed, "length", 1, 1, None, mapped=True)
    assert first_difference(expected, actual, 0) == first
    assert ids == tuple(target.encode_bare(changed))


WORDS = {1: "hel", 2: "lo", 3: " wor", 4: "ld"}


def spelled(ids: tuple[int, ...]) -> tuple[str]:
    return ("".join(WORDS.get(token) or chr(token) for token in ids),)


@pytest.mark.parametrize(
    ("text", "ids"),
    [
        ("hello world", (1, 2, 3, 4)),
        ("help", (1, ord("p"))),
        ("hello", (1, 2)),
        ("hello world!", (1, 2, 3, 4, ord("!"))),
        ("hello wxrld", (1, 2, *map(ord, " wxrld"))),
        ("", ()),
        ("x", (ord("x"),)),
    ],
)
def test_tokens_of_many_characters_are_kept_whole(text: str, ids: tuple[int, ...]) -> None:
    """The token that holds the first other character is the one that differs."""
    expected = Answer("oracle", (1, 2, 3, 4), "hello world", "length", 1, 4, None)
    assert map_onto(expected, text, spelled, lambda rest: [*map(ord, rest)]) == ids


def test_a_rest_is_cut_in_its_context_where_that_keeps_the_beginning() -> None:
    """Some tokenizers put a space in front of any text they are given."""
    cuts = {"help me": [1, 5, 6], "p me": [9, 5, 6]}
    expected = Answer("oracle", (1, 2), "hello", "length", 1, 2, None)
    assert map_onto(expected, "help me", spelled, cuts.__getitem__) == (1, 5, 6)
