"""Choosing cases: pytest-like expressions over ids, and shards."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import TypeVar

from parity.errors import BadInput

T = TypeVar("T")
Predicate = Callable[[str], bool]

_TOKEN = re.compile(r"[()]|[^\s()]+")


def parse(expression: str) -> Predicate:
    """A predicate over case ids from `and`, `or`, `not`, parentheses and substrings.

    Raises:
        BadInput: the expression is empty or malformed.

    """
    tokens = _TOKEN.findall(expression)
    position = 0

    def complain(what: str) -> BadInput:
        return BadInput(f"selector {expression!r}: {what}")

    def peek() -> str | None:
        return tokens[position] if position < len(tokens) else None

    def take() -> str | None:
        nonlocal position
        token = peek()
        position += 1
        return token

    def any_of() -> Predicate:
        terms = [all_of()]
        while peek() == "or":
            take()
            terms.append(all_of())
        return lambda text: any(term(text) for term in terms)

    def all_of() -> Predicate:
        terms = [negated()]
        while peek() == "and":
            take()
            terms.append(negated())
        return lambda text: all(term(text) for term in terms)

    def negated() -> Predicate:
        if peek() == "not":
            take()
            term = negated()
            return lambda text: not term(text)
        return atom()

    def atom() -> Predicate:
        token = take()
        if token is None:
            raise complain("it ends where a part of a case id is expected")
        if token == "(":
            inner = any_of()
            if take() != ")":
                raise complain("a parenthesis is not closed")
            return inner
        if token in ("and", "or", ")"):
            raise complain(f"{token!r} where a part of a case id is expected")
        return lambda text: token in text

    predicate = any_of()
    if peek() is not None:
        raise complain(f"{peek()!r} where 'and' or 'or' is expected")
    return predicate


def shard(cases: Sequence[T], spec: str) -> list[T]:
    """Part i of n (`i/n`, i from 1): every n-th case.

    Raises:
        BadInput: not `i/n`, or i is not within 1..n.

    """
    match = re.fullmatch(r"(\d+)/(\d+)", spec)
    if match is None:
        raise BadInput(f"shard {spec!r} is not of the form i/n")
    part, parts = int(match[1]), int(match[2])
    if not 1 <= part <= parts:
        raise BadInput(f"shard {spec!r}: i must be within 1..n")
    return list(cases[part - 1 :: parts])
