"""Selectors and shards."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parity.errors import BadInput
from parity.selection import parse, shard

words = st.sampled_from(("ab", "bc", "serial/off", "top-p+sequential", "d3"))


Meaning = Callable[[str], bool]


@st.composite
def expressions(draw: st.DrawFn, depth: int = 3) -> tuple[str, Meaning]:
    """An expression, and what it says of a text in Python."""
    kind = draw(st.sampled_from(("word", "not", "and", "or", "()"))) if depth else "word"
    if kind == "word":
        word = draw(words)
        return word, lambda text: word in text
    left, means = draw(expressions(depth - 1))
    if kind == "not":
        return f"not ({left})", lambda text: not means(text)
    if kind == "()":
        return f"({left})", means
    right, also = draw(expressions(depth - 1))
    if kind == "and":
        return f"({left}) and ({right})", lambda text: means(text) and also(text)
    return f"({left}) or ({right})", lambda text: means(text) or also(text)


@given(expressions(), st.text("abcd3/serialofftp-+qun", max_size=20))
def test_a_selector_means_what_python_means(pair: tuple[str, Meaning], text: str) -> None:
    """and, or, not and parentheses over substrings."""
    expression, means = pair
    assert parse(expression)(text) == means(text)


@pytest.mark.parametrize(
    ("expression", "matches"),
    [
        ("a or b and c", ["a", "bc", "ab"]),
        ("not a and b", ["bc", "b"]),
        ("not not a", ["a", "ab"]),
        ("not (a or b)", ["c"]),
    ],
)
def test_not_binds_before_and_before_or(expression: str, matches: list[str]) -> None:
    """As in Python and in pytest's -k."""
    assert sorted(filter(parse(expression), ["a", "b", "c", "ab", "bc"])) == sorted(matches)


@pytest.mark.parametrize("expression", ["", "  ", "a b", "a and", "(a", "a)", "or a", "not", "()"])
def test_a_malformed_selector_is_refused_by_name(expression: str) -> None:
    """Bad input names the value."""
    with pytest.raises(BadInput, match="selector"):
        parse(expression)


@given(st.lists(st.integers(), max_size=30), st.integers(1, 8))
def test_shards_are_disjoint_and_complete(cases: list[int], parts: int) -> None:
    """Every case runs in exactly one shard."""
    together = [c for part in range(parts) for c in shard(cases, f"{part + 1}/{parts}")]
    assert sorted(together) == sorted(cases)


@pytest.mark.parametrize("spec", ["0/3", "4/3", "1", "1/0", "a/b", "-1/3", "1/3/5"])
def test_a_shard_out_of_bounds_is_refused_by_name(spec: str) -> None:
    """Bad input names the value and the limit."""
    with pytest.raises(BadInput, match="shard"):
        shard([1, 2, 3], spec)
