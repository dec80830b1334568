"""Selectors and shards."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parity.errors import BadInput
from parity.selection import parse, shard

words = st.sampled_from(("ab", "bc", "serial/off", "top-p+sequential", "d3"))


@st.composite
def expressions(draw: st.DrawFn, depth: int = 3) -> tuple[str, str]:
    """An expression, and the same in Python over `text`."""
    kind = draw(st.sampled_from(("word", "not", "and", "or", "()"))) if depth else "word"
    if kind == "word":
        word = draw(words)
        return word, f"({word!r} in text)"
    left, python_left = draw(expressions(depth - 1))
    if kind == "not":
        return f"not ({left})", f"(not {python_left})"
    if kind == "()":
        return f"({left})", python_left
    right, python_right = draw(expressions(depth - 1))
    return f"({left}) {kind} ({right})", f"({python_left} {kind} {python_right})"


@given(expressions(), st.text("abcd3/serialofftp-+qun", max_size=20))
def test_a_selector_means_what_python_means(pair: tuple[str, str], text: str) -> None:
    """and, or, not and parentheses over substrings."""
    expression, python = pair
    assert parse(expression)(text) == eval(python, {"text": text})  # the oracle of this test


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
