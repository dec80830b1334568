"""The slow definitions against what they define, and the exact distribution of acceptance."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fractions import Fraction
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oracle.models import (
    Drafter,
    Ids,
    Walk,
    acceptance,
    common_denominator,
    draw,
    emitted_distribution,
    ngram_scan,
    target_distribution,
)

EOS = 0
LENGTH = 3
HALF = Fraction(1, 2)


@pytest.mark.parametrize(
    ("history", "n", "max_n", "min_n", "proposed"),
    [
        ([], 5, 3, 1, ()),
        ([7], 5, 3, 1, ()),
        ([7, 7], 5, 3, 1, (7,)),  # runs into the tail itself
        ([1, 2, 3, 9, 1, 2, 3], 2, 3, 1, (9, 1)),
        ([1, 2, 9, 1, 2, 8, 1, 2], 3, 3, 1, (9, 1, 2)),  # the first place, not the last
        ([5, 2, 9, 1, 2, 8, 1, 2], 3, 3, 1, (8, 1, 2)),  # two ids beat one found earlier
        ([5, 2, 9, 1, 2], 3, 3, 2, ()),  # one id is too few
        ([5, 2, 9, 1, 2], 3, 3, 1, (9, 1, 2)),
        ([1, 1, 1, 1], 9, 3, 1, (1,)),  # k = 3 at 0 is followed by one id
        ([4, 5, 4], 0, 3, 1, ()),
        ([4, 5, 4], 3, 0, 0, (5, 4)),  # max and min are clamped to 1
    ],
)
def test_ngram_scan_proposes_what_followed_the_first_longest_match(
    history: list[int], n: int, max_n: int, min_n: int, proposed: Ids
) -> None:
    """`advice`: the text of SPEC's definition, case by case."""
    assert ngram_scan(history, n, max_n, min_n) == proposed


@pytest.mark.parametrize(
    ("draft", "samples", "remaining", "walk"),
    [
        ([], [5], 9, Walk(0, (5,), 5, "continue")),
        ([], [EOS], 9, Walk(0, (), None, "stop")),
        ([5], [6, 9], 9, Walk(0, (6,), 6, "continue")),  # the sample after a mismatch is unused
        ([5], [5, 7], 9, Walk(1, (5, 7), 7, "continue")),  # the bonus
        ([5], [5, EOS], 9, Walk(1, (5,), None, "stop")),
        ([5, 6], [5, EOS, 9], 9, Walk(1, (5,), None, "stop")),  # EOS is the correction
        ([5, EOS], [5, EOS, 9], 9, Walk(2, (5,), None, "stop")),  # EOS is accepted
        ([5, 6], [5, 6, 7], 2, Walk(2, (5, 6), None, "length")),  # budget inside the accepted run
        ([5, 6], [5, 6, 7], 3, Walk(2, (5, 6, 7), 7, "length")),
        ([5, 6], [5, 9, 7], 2, Walk(1, (5, 9), 9, "length")),
        ([EOS], [EOS, 4], 1, Walk(1, (), None, "stop")),
    ],
)
def test_acceptance_stops_at_mismatch_eos_and_budget(
    draft: list[int], samples: list[int], remaining: int, walk: Walk
) -> None:
    """`budget`: each rule of the walk once."""
    assert acceptance(draft, samples, remaining, {EOS}) == walk


def test_acceptance_emits_the_samples_up_to_the_first_reason_to_stop() -> None:
    """`budget`: over every draft and every sample of up to 3 ids, told again without a walk."""
    for depth, remaining in product(range(4), range(1, 5)):
        for draft in product((EOS, 1, 2), repeat=depth):
            for samples in product((EOS, 1, 2), repeat=depth + 1):
                matches = [d == s for d, s in zip(draft, samples, strict=False)]
                num_seen = (matches.index(False) if False in matches else depth) + 1
                seen = list(samples[: min(num_seen, remaining)])
                if EOS in seen:
                    seen = seen[: seen.index(EOS) + 1]
                walk = acceptance(draft, samples, remaining, {EOS})
                assert walk.emitted == tuple(token for token in seen if token != EOS)
                assert walk.accepted == sum(matches[: len(seen)])
                assert (walk.outcome == "stop") == (EOS in seen)
                assert len(walk.emitted) <= remaining


def test_draw_gives_each_token_its_share() -> None:
    """`distribution`: of 6 equal pieces of noise each token gets its sixths."""
    table = {2: Fraction(1, 6), 0: Fraction(1, 2), 1: Fraction(1, 3)}
    assert [draw(table, Fraction(i, 6)) for i in range(6)] == [0, 0, 0, 1, 1, 2]


def _same_noise(_text: Ids, noise: tuple[Fraction, ...]) -> Mapping[Ids, Fraction]:
    """A sampled drafter of another distribution that draws with the target's own noise."""
    other = {0: Fraction(1, 5), 1: Fraction(2, 5), 2: Fraction(2, 5)}
    return {tuple(draw(other, u) for u in noise[:2]): Fraction(1)}


def _own_noise(_text: Ids, _noise: tuple[Fraction, ...]) -> Mapping[Ids, Fraction]:
    """A sampled drafter with noise of its own, of varying length."""
    return {(1, 1): Fraction(1, 4), (2,): Fraction(1, 4), (): HALF}


def _clairvoyant(_text: Ids, noise: tuple[Fraction, ...]) -> Mapping[Ids, Fraction]:
    """A drafter that picks its draft by all the noise to come."""
    return {((1, 2, 1), (2, 0, 1), (), (1,))[int(sum(noise) * 12) % 4]: Fraction(1)}


def _silent(_text: Ids, _noise: tuple[Fraction, ...]) -> Mapping[Ids, Fraction]:
    return {(): Fraction(1)}


def _over_eager(text: Ids, _noise: tuple[Fraction, ...]) -> Mapping[Ids, Fraction]:
    return {(1,) * 9: HALF, (2, *text) * 9: HALF}


Tables = dict[Ids, dict[int, Fraction]]
PIECES = 6
CUTS = st.tuples(st.integers(0, PIECES), st.integers(0, PIECES)).map(sorted)


def _tables(cuts: Sequence[Sequence[int]]) -> Tables:
    """p(. | text) for every text of fewer than LENGTH ids, from where 6 pieces are cut in three."""
    contexts = [c for n in range(LENGTH) for c in product((1, 2), repeat=n)]
    return {
        context: {
            0: Fraction(a, PIECES),
            1: Fraction(b - a, PIECES),
            2: Fraction(PIECES - b, PIECES),
        }
        for context, (a, b) in zip(contexts, cuts, strict=True)
    }


@pytest.mark.parametrize(
    "drafter",
    [_same_noise, _own_noise, _clairvoyant, _silent, _over_eager],
    ids=lambda d: d.__name__,
)
@settings(max_examples=8, deadline=None)
@given(cuts=st.lists(CUTS, min_size=7, max_size=7))
def test_acceptance_emits_the_targets_distribution(drafter: Drafter, cuts: list[list[int]]) -> None:
    """`distribution`: exactly, in fractions, whatever the drafter knows."""
    tables = _tables(cuts)
    denominator = common_denominator(tables.values())
    emitted = emitted_distribution(tables.__getitem__, drafter, LENGTH, EOS, denominator)
    assert emitted == target_distribution(tables.__getitem__, LENGTH, EOS)
    assert sum(emitted.values()) == 1


def test_the_enumeration_sees_an_acceptance_that_is_not_the_targets(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`distribution`: accepting the first draft unseen moves it, so the law above is not empty."""
    tables = _tables([(2, 4)] * 7)

    def credulous(draft: Ids, samples: list[int], remaining: int, eos_ids: set[int]) -> Walk:
        believed = [*draft[:1], *samples[1:]] if draft else samples
        return acceptance(draft, believed, remaining, eos_ids)

    monkeypatch.setattr("oracle.models.acceptance", credulous)
    emitted = emitted_distribution(tables.__getitem__, _own_noise, LENGTH, EOS, 3)
    assert emitted != target_distribution(tables.__getitem__, LENGTH, EOS)
