"""The verdict as properties: what is equal, what a tie is worth, what counts as checked."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from parity.compare import (
    MINIMUM_CHECKED,
    Comparison,
    Measure,
    Tie,
    Verdict,
    compare,
    judge,
    verdict_of,
)
from parity.trace import Answer, Round, Trace
from tests.parity.fakes import EXACT, LOOSE, answer

ids = st.lists(st.integers(97, 99), max_size=6).map(tuple)
finishes = st.sampled_from(("stop", "length"))
traces = st.one_of(
    st.none(),
    st.builds(
        Trace,
        st.lists(st.booleans(), max_size=3).map(tuple),
        st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), max_size=3).map(tuple),
    ),
)


def alone(expected: Answer, actual: Answer) -> Comparison:
    """Compare without any way to measure or to resume."""
    return compare(expected, actual, EXACT, lambda *_: None, lambda _: None)


@st.composite
def answers(draw: st.DrawFn, origin: str) -> Answer:
    return answer(
        draw(ids),
        origin=origin,
        finish=draw(finishes),
        text=draw(st.sampled_from(("", "a", "b"))),
        prompt_tokens=draw(st.integers(1, 2)),
        completion_tokens=draw(st.integers(1, 2)),
        trace=draw(traces),
    )


@st.composite
def similar(draw: st.DrawFn) -> tuple[Answer, Answer]:
    """Two answers that are often the same or differ in one respect."""
    expected = draw(answers("oracle"))
    other = draw(answers("engine"))
    field = draw(
        st.sampled_from(
            ("ids", "text", "finish_reason", "prompt_tokens", "completion_tokens", "trace", None)
        )
    )
    actual = replace(expected, origin="engine")
    if field == "ids":
        return expected, replace(actual, ids=other.ids, logprobs=other.logprobs)
    if field is not None:
        return expected, replace(actual, **{field: getattr(other, field)})
    return expected, actual


def same_in_everything(expected: Answer, actual: Answer) -> bool:
    unlike_origin = replace(expected, origin=actual.origin)
    if expected.trace is None:
        unlike_origin = replace(unlike_origin, trace=actual.trace)
    return unlike_origin == actual


@given(similar())
def test_equal_is_said_of_exactly_what_is_the_same_in_everything(
    pair: tuple[Answer, Answer],
) -> None:
    """lossless: ids, their number, finish reason, text, usage and, where known, the trace."""
    expected, actual = pair
    result = alone(expected, actual)
    assert (result.verdict is Verdict.EQUAL) == same_in_everything(expected, actual)
    if result.verdict is Verdict.EQUAL:
        assert result.checked == result.total == len(expected.ids) + 1
    else:
        assert result.verdict is Verdict.DIFFERENT
        assert result.failures


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("ids", (97, 98, 100)),
        ("ids", (97, 98)),
        ("text", "abd"),
        ("finish_reason", "stop"),
        ("prompt_tokens", 5),
        ("completion_tokens", 4),
        ("trace", None),
        ("trace", Trace((False, True, True), ((2, 1),))),
        ("trace", Trace((True, True, False), ((2, 2), (0, 0)))),
        ("trace", Trace((True, True, False, True), ((2, 1),))),
        ("trace", Trace((True, True, False), ((2, 1), (3, 0)))),
    ],
)
def test_each_field_counts(field: str, value: object) -> None:
    """The property above, field by field and without luck."""
    expected = answer(trace=Trace((True, True, False), ((2, 1),)))
    actual = replace(expected, origin="engine")
    assert alone(expected, actual).verdict is Verdict.EQUAL
    changed = replace(actual, **{field: value})  # type: ignore[arg-type]
    if field == "ids":
        changed = replace(changed, logprobs=tuple(-0.5 for _ in changed.ids))
    assert alone(expected, changed).verdict is Verdict.DIFFERENT


def test_text_as_the_ids_decode_is_right_and_counted() -> None:
    """D21: an honest side shows what the oracle's server lost; a third text is wrong."""
    expected = replace(answer(finish="stop", text="ab"), decodings=("abc", " abc"))
    served, decoded, wrong = (
        alone(expected, answer(finish="stop", text=text, origin="engine"))
        for text in ("ab", "abc", "abd")
    )
    assert (served.verdict, served.deviations) == (Verdict.EQUAL, ())
    assert decoded.verdict is Verdict.EQUAL
    assert [said[:4] for said in decoded.deviations] == ["D21:"]
    assert (wrong.verdict, wrong.deviations) == (Verdict.DIFFERENT, ())


def test_a_cut_character_may_be_left_out_only_where_nothing_but_text_is_known() -> None:
    """Ids that are told would show what the text does not."""
    expected = replace(answer(text="ab\ufffd"), decodings=("ab\ufffd",))
    told = answer(text="ab", origin="engine")
    assert alone(expected, told).verdict is Verdict.DIFFERENT
    mapped = alone(expected, replace(told, mapped=True))
    assert (mapped.verdict, mapped.unchecked) == (Verdict.EQUAL, ("ids", "last ids"))


@pytest.mark.parametrize(
    ("missing", "unchecked"),
    [
        ({}, ()),
        ({"mapped": True}, ("ids",)),
        ({"logprobs": None}, ("logprobs",)),
        ({"prompt_tokens": None}, ("usage",)),
        ({"completion_tokens": None}, ("usage",)),
    ],
)
def test_what_is_not_told_is_named(missing: dict[str, Any], unchecked: tuple[str, ...]) -> None:
    """Nothing that was not compared counts as checked in silence."""
    result = alone(answer(), replace(answer(origin="engine"), **missing))
    assert (result.verdict, result.unchecked) == (Verdict.EQUAL, unchecked)


def test_the_last_token_counts() -> None:
    """mutants: a comparator that skips it."""
    result = alone(answer((97, 98, 99)), answer((97, 98, 100), origin="engine"))
    assert result.verdict is Verdict.DIFFERENT
    assert [(f.position, f.expected, f.actual) for f in result.failures] == [(2, 99, 100)]


@pytest.mark.parametrize("actual_ids", [(97, 98), (97, 98, 99, 100)])
def test_length_counts(actual_ids: tuple[int, ...]) -> None:
    """mutants: a comparator that ignores it; one side is the other's beginning."""
    result = alone(answer((97, 98, 99)), answer(actual_ids, origin="engine"))
    assert result.verdict is Verdict.DIFFERENT
    assert result.failures[0].position == min(3, len(actual_ids))


def test_a_stream_is_not_compared_with_itself() -> None:
    """mutants: such a comparison proves nothing and is refused."""
    one = answer()
    with pytest.raises(ValueError, match="compared with itself"):
        alone(one, replace(one, text="other"))


@pytest.mark.parametrize(
    ("old", "new", "equal"),
    [(-0.5, -0.5, True), (-0.5, -0.5005, True), (-0.5, -0.502, False), (-0.5, math.nan, False)],
)
def test_logprobs_agree_within_the_table(old: float, new: float, equal: bool) -> None:
    """logprobs: the largest difference is reported and one beyond the limit fails."""
    expected = answer((97, 98), logprobs=(-1.0, old))
    result = alone(expected, answer((97, 98), origin="engine", logprobs=(-1.0, new)))
    assert (result.verdict is Verdict.EQUAL) == equal
    if equal:
        assert result.logprob_difference == abs(old - new)
    else:
        assert result.failures[0].position == 1


@pytest.mark.parametrize("side", ["oracle", "engine"])
def test_logprobs_have_one_entry_per_content_token(side: str) -> None:
    """logprobs: a missing entry is not an entry that agrees."""
    full, short = answer((97, 98)), answer((97, 98), logprobs=(-0.5,))
    expected, actual = (short, full) if side == "oracle" else (full, short)
    result = alone(replace(expected, origin="oracle"), replace(actual, origin="engine"))
    assert result.verdict is Verdict.DIFFERENT
    assert result.failures[0].what == "logprob count"


# Each position has its own, so that a comparison of shifted ones fails.
LOGPROBS = tuple(-position / 8 for position in range(30))


@dataclass(frozen=True)
class World:
    """An oracle's stream and an engine that leaves it at some positions, given its prefix."""

    expected: Answer
    margins: dict[int, float]
    delta: float
    ends_early_at: int | None

    def engine(self, given_count: int) -> Answer:
        wrong = [p for p in sorted(self.margins) if p >= given_count]
        stream = self.expected.ids
        finish = self.expected.finish_reason
        if wrong and wrong[0] < len(stream):
            stream = (*stream[: wrong[0]], 120)
            if wrong[0] == self.ends_early_at:
                stream, finish = stream[:-1], "stop"
        return answer(
            stream,
            origin="engine",
            finish=finish,
            logprobs=LOGPROBS[given_count : len(stream)],
        )

    def measure(self, position: int, expected: int | None, actual: int | None) -> Measure:
        assert expected == (self.expected.ids[position])
        assert actual == (None if position == self.ends_early_at else 120)
        return Measure(self.margins[position], self.delta, 1.0)


@st.composite
def worlds(draw: st.DrawFn) -> World:
    stream = draw(st.lists(st.integers(97, 99), min_size=1, max_size=30).map(tuple))
    positions = st.integers(0, len(stream) - 1)
    margins = st.sampled_from((0.0, 5e-4, 1e-3, 2e-3, 0.5))
    return World(
        answer(stream, finish=draw(finishes), logprobs=LOGPROBS[: len(stream)]),
        draw(st.dictionaries(positions, margins, max_size=4)),
        draw(st.sampled_from((0.0, 1e-3))),
        draw(st.one_of(st.none(), positions)),
    )


@given(worlds())
def test_after_a_tie_the_comparison_goes_on_from_the_oracles_prefix(world: World) -> None:
    """lossless: every disagreement is found in order, ties do not hide what comes after them."""
    result = compare(world.expected, world.engine(0), LOOSE, world.measure, world.engine)
    is_tie = {p: m < 1e-3 or m <= 2 * world.delta for p, m in world.margins.items()}
    hard = [p for p in sorted(world.margins) if not is_tie[p]]
    ties = [p for p in sorted(world.margins) if not hard or p < hard[0]]
    assert [tie.position for tie in result.ties] == ties
    assert [(f.what, f.position) for f in result.failures] == [("token", p) for p in hard[:1]]
    if hard:
        assert result.verdict is Verdict.DIFFERENT
        assert result.checked == hard[0] + 1
    elif ties:
        assert result.verdict in (Verdict.NEAR_TIE, Verdict.SHAPE_TIE)
        assert result.checked == result.total
        assert {"text", "usage"} <= set(result.unchecked)
    else:
        assert result.verdict is Verdict.EQUAL


@given(worlds())
def test_a_tie_is_never_equal_and_unchecked_is_never_checked(world: World) -> None:
    """Without a way to go on, all behind the first tie is unchecked; below 90 % it is open."""
    result = compare(world.expected, world.engine(0), LOOSE, world.measure, lambda _: None)
    if not result.ties:
        return
    assert result.checked == result.ties[0].position + 1
    assert result.verdict is not Verdict.EQUAL
    enough = result.checked >= MINIMUM_CHECKED * result.total
    assert (result.verdict is Verdict.INCONCLUSIVE) == (not enough)


@given(worlds())
def test_where_ties_are_not_allowed_they_fail(world: World) -> None:
    """On float32 and the CPU any tie is a failure, checked to the end or not."""
    result = compare(world.expected, world.engine(0), EXACT, world.measure, world.engine)
    assert (result.verdict is Verdict.EQUAL) == (not world.margins)
    assert (result.verdict is Verdict.DIFFERENT) == bool(world.margins)


def test_a_text_that_runs_over_its_budget_is_no_tie() -> None:
    """budget: an end by budget is not drawn, so no margin excuses it."""
    tie = Measure(0.0, 0.0, 1.0)
    longer = answer((97, 98, 99), origin="engine")
    for expected, actual in ((answer((97, 98)), longer), (longer, answer((97, 98)))):
        result = compare(expected, actual, LOOSE, lambda *_: tie, lambda _: None)
        assert result.verdict is Verdict.DIFFERENT
        assert not result.ties


def test_two_ends_of_different_reasons_are_no_tie() -> None:
    """budget: the same ids, but one side says it stopped."""
    tie = Measure(0.0, 0.0, 1.0)
    actual = answer((97,), origin="engine", finish="stop")
    result = compare(answer((97,)), actual, LOOSE, lambda *_: tie, lambda _: None)
    assert result.verdict is Verdict.DIFFERENT
    assert result.failures[0].what == "finish reason"


def test_an_eos_may_tie_with_a_token() -> None:
    """The oracle stopped where the engine went on: nothing of the oracle's is left to check."""
    tie = Measure(1e-4, 0.0, 1.0)
    expected = answer((97, 98), finish="stop")
    actual = answer((97, 98, 99), origin="engine")
    result = compare(expected, actual, LOOSE, lambda *_: tie, lambda _: pytest.fail("resumed"))
    assert result.verdict is Verdict.NEAR_TIE
    assert result.checked == result.total


@pytest.mark.parametrize(
    ("margin", "delta", "kind"),
    [
        (9e-4, 0.0, Verdict.NEAR_TIE),
        (1e-3, 0.0, Verdict.DIFFERENT),
        (2e-3, 1e-3, Verdict.SHAPE_TIE),
        (2.1e-3, 1e-3, Verdict.DIFFERENT),
    ],
)
def test_ties_end_at_the_floor_and_at_twice_delta(
    margin: float, delta: float, kind: Verdict
) -> None:
    """A margin at the floor is no near tie; one at 2 delta is still a shape tie."""
    assert judge(Measure(margin, delta, 1.0), LOOSE) is kind


def test_what_cannot_be_measured_is_different() -> None:
    """A tie is measured, never waved through."""
    assert judge(None, LOOSE) is Verdict.DIFFERENT
    assert judge(Measure(math.nan, math.nan, 1.0), LOOSE) is Verdict.DIFFERENT


def test_a_resumed_answer_must_begin_with_what_it_was_given() -> None:
    """Else the rest would be compared with another stream's."""
    expected, actual = answer((97, 98, 99)), answer((97, 120, 120), origin="engine")
    tie = Measure(0.0, 0.0, 1.0)
    with pytest.raises(ValueError, match="does not begin"):
        compare(expected, actual, LOOSE, lambda *_: tie, lambda _: actual)


def test_a_failure_behind_a_tie_names_its_own_position() -> None:
    """logprobs: counted from the answer's start, not from where it was resumed."""
    tie = Measure(0.0, 0.0, 1.0)
    resumed = answer((97, 98, 99), origin="engine", logprobs=(-2.0,))
    first = answer((97, 120, 120), origin="engine")
    result = compare(answer(), first, LOOSE, lambda *_: tie, lambda _: resumed)
    assert [(f.what, f.position, f.actual) for f in result.failures] == [("logprob", 2, -2.0)]


def test_nine_tenths_checked_are_enough_for_a_tie() -> None:
    """Below 90 % is inconclusive, 90 % is not."""
    tie = Tie(8, Verdict.NEAR_TIE, 97, 98, 0.0, 0.0)
    assert verdict_of(9, 10, (tie,), (), LOOSE) is Verdict.NEAR_TIE
    assert verdict_of(8, 9, (tie,), (), LOOSE) is Verdict.INCONCLUSIVE


@example(19, 20)
@given(st.integers(0, 50), st.integers(1, 50))
def test_equal_needs_every_position(checked: int, total: int) -> None:
    """honest verdict: with nothing failed, equal is checked == total and nothing less."""
    checked = min(checked, total)
    verdict = verdict_of(checked, total, (), (), LOOSE)
    assert verdict is (Verdict.EQUAL if checked == total else Verdict.INCONCLUSIVE)


@pytest.mark.parametrize(
    ("other", "what", "position"),
    [
        (Round((99, 97), 1, (98, 99)), "drafted ids", 1),
        (Round((99, 98), 1, (99, 98)), "ids of a round", 1),
    ],
)
def test_rounds_are_compared_where_they_are_known(other: Round, what: str, position: int) -> None:
    """solitude: the same counts and flags may come about by other drafts."""
    rounds = (Round((), 0, (97,)), Round((99, 98), 1, (98, 99)))
    trace = Trace((False, True, False), ((0, 0), (2, 1)))
    expected = answer(trace=trace, rounds=rounds)
    actual = answer(origin="engine", trace=trace, rounds=rounds)
    assert alone(expected, actual).verdict is Verdict.EQUAL
    (failure,) = alone(expected, replace(actual, rounds=(rounds[0], other))).failures
    assert (failure.what, failure.position) == (what, position)
    untold = replace(expected, rounds=())
    assert alone(untold, replace(actual, rounds=(rounds[0], other))).verdict is Verdict.EQUAL
