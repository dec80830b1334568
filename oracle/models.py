"""The definitions, written to be obviously right and nothing else: lists, loops and fractions."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import product
from typing import Any, Literal, Protocol

import mlx.core as mx
import numpy as np

Ids = tuple[int, ...]


class LanguageModel(Protocol):
    """An mlx-lm model: ids [B, N] to logits [B, N, V], appended to ``cache`` if there is one."""

    def __call__(self, inputs: mx.array, cache: list[Any] | None = None) -> mx.array: ...


def no_cache_greedy(
    model: LanguageModel, prompt: Sequence[int], max_tokens: int, eos_ids: Collection[int] = ()
) -> Ids:
    """Greedy content ids from one full forward per token: no cache, no window, no drafter."""
    tokens = list(prompt)
    for _ in range(max_tokens):
        token = np.array(mx.argmax(model(mx.array([tokens]))[0, -1])).item()
        if token in eos_ids:
            break
        tokens.append(token)
    return tuple(tokens[len(prompt) :])


def ngram_scan(history: Sequence[int], n: int, max_n: int = 3, min_n: int = 1) -> Ids:
    """At most ``n`` ids that the n-gram drafter proposes after ``history``, by scanning it all.

    Longest tail first; for a tail of k ids the first place from the left where they occur and are
    followed by something; the ids after it, up to the end of the history.
    """
    history = list(history)
    max_n = max(1, max_n)
    min_n = min(max(1, min_n), max_n)
    for k in range(min(max_n, len(history) - 1), min_n - 1, -1):
        tail = history[-k:]
        for i in range(len(history)):
            if i + k < len(history) and history[i : i + k] == tail:
                return tuple(history[i + k : i + k + n])
    return ()


@dataclass(frozen=True, slots=True)
class Walk:
    """One round's outcome: ``emitted`` is content, so it never holds EOS."""

    accepted: int
    emitted: Ids
    correction: int | None
    outcome: Literal["stop", "length", "continue"]


def acceptance(
    draft: Sequence[int], samples: Sequence[int], remaining: int, eos_ids: Collection[int]
) -> Walk:
    """Walk the target's samples along the draft; ``samples`` holds len(draft) + 1 ids.

    ``remaining`` >= 1 is the budget before this round. The correction is the target's id at the
    first mismatch or, after a full accept, its bonus; EOS there is a stop and no correction.
    """
    emitted: list[int] = []
    for accepted, proposed in enumerate(draft):
        if samples[accepted] != proposed:
            return _last_token(accepted, emitted, samples[accepted], remaining, eos_ids)
        if proposed in eos_ids:
            return Walk(accepted + 1, tuple(emitted), None, "stop")
        emitted.append(proposed)
        if len(emitted) == remaining:
            return Walk(accepted + 1, tuple(emitted), None, "length")
    return _last_token(len(draft), emitted, samples[len(draft)], remaining, eos_ids)


def _last_token(
    accepted: int, emitted: list[int], token: int, remaining: int, eos_ids: Collection[int]
) -> Walk:
    if token in eos_ids:
        return Walk(accepted, tuple(emitted), None, "stop")
    emitted.append(token)
    outcome: Literal["length", "continue"] = "length" if len(emitted) == remaining else "continue"
    return Walk(accepted, tuple(emitted), token, outcome)


# Acceptance as an exact distribution. Noise is one number u in [0, 1) per position; a token is
# drawn by inverting the cumulative distribution at u. All tables are fractions, so u needs only as
# many equally likely values as the common denominator, and every probability below is exact.

Table = Mapping[int, Fraction]
Target = Callable[[Ids], Table]
"""p(. | text so far), summing to 1."""
Drafter = Callable[[Ids, tuple[Fraction, ...]], Mapping[Ids, Fraction]]
"""Drafts and their probabilities, given the text so far and the noise of the positions to come.

A drafter that samples with the shared noise looks at it; a cheating one may look at all of it.
"""


def draw(table: Table, u: Fraction) -> int:
    """The token whose interval of the cumulative distribution, in id order, holds ``u``."""
    total = Fraction(0)
    for token in sorted(table):
        total += table[token]
        if u < total:
            return token
    raise ValueError(f"the table sums to {total}, not to 1")


def target_distribution(target: Target, length: int, eos: int) -> dict[Ids, Fraction]:
    """Probability of every generated text of at most ``length`` ids, by the chain rule alone."""
    open_texts: dict[Ids, Fraction] = {(): Fraction(1)}
    closed: dict[Ids, Fraction] = {}
    for _ in range(length):
        grown: dict[Ids, Fraction] = {}
        for text, weight in open_texts.items():
            for token, p in target(text).items():
                if p:
                    end = closed if token == eos else grown
                    end[*text, token] = weight * p
        open_texts = grown
    return closed | open_texts


def emitted_distribution(
    target: Target, drafter: Drafter, length: int, eos: int, denominator: int
) -> dict[Ids, Fraction]:
    """Probability of every text that exact-match acceptance emits, by enumerating all noise.

    ``denominator`` is a common denominator of every entry of the target's tables. Each round
    samples position ``step + i`` with that position's noise, whatever was drafted before.
    """
    result: dict[Ids, Fraction] = {}
    values = [Fraction(i, denominator) for i in range(denominator)]
    share = Fraction(1, denominator**length)
    for noise in product(values, repeat=length):
        for text, weight in _speculate(target, drafter, noise, eos):
            result[text] = result.get(text, Fraction(0)) + share * weight
    return result


def common_denominator(tables: Collection[Table]) -> int:
    return math.lcm(*(p.denominator for table in tables for p in table.values()))


def _speculate(
    target: Target, drafter: Drafter, noise: tuple[Fraction, ...], eos: int, text: Ids = ()
) -> Iterator[tuple[Ids, Fraction]]:
    step = len(text)
    if step == len(noise):
        yield text, Fraction(1)
        return
    for full_draft, weight in drafter(text, noise[step:]).items():
        draft = full_draft[: len(noise) - step]
        samples = [
            eos  # never looked at: beyond the budget, or behind EOS
            if step + i == len(noise) or eos in draft[:i]
            else draw(target(text + draft[:i]), noise[step + i])
            for i in range(len(draft) + 1)
        ]
        walk = acceptance(draft, samples, len(noise) - step, {eos})
        grown = text + walk.emitted
        if walk.outcome == "stop":
            yield (*grown, eos), weight
        else:
            for end, inner in _speculate(target, drafter, noise, eos, grown):
                yield end, weight * inner
