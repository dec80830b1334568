"""What must fail in a changed world: each function asserts one thing that holds in this one."""

from __future__ import annotations

import math
from typing import Any

import pytest

import fixtures

from .world import World

PROMPT = "Name: Anna. Say it again: "


def _engine(world: World) -> tuple[Any, Any, tuple[int, ...]]:
    engine = world["engine"]
    target = engine.Target.load(fixtures.target_dir("dense"))
    return engine, target, tuple(target.encode(PROMPT))


def position_after_an_early_close(world: World) -> None:
    """`position`: the state holds the prompt and the tokens of whole rounds, in order."""
    engine, target, prompt = _engine(world)
    live = engine.open_live(target)
    events = engine.generate(target, engine.Request(prompt, 24), live=live)
    tokens = [next(events).token for _ in range(3)]
    events.close()
    assert live.target.processed == len(live.held)
    assert live.held == [*prompt, *tokens[:-1]]


def poison_after_a_failed_commit(world: World) -> None:
    """`poison`: a target that is a round ahead of its drafter refuses any use."""
    engine, target, prompt = _engine(world)
    puppet = world["tests.engine.puppet"].Puppet(lambda number, step, depth: [7], commits=1)
    live = engine.open_live(target)
    with pytest.raises(RuntimeError, match="commit broke"):
        list(engine.generate(target, engine.Request(prompt, 24), puppet, live=live))
    with pytest.raises(engine.LawError, match="state is lost"):
        live.target.begin()


def too_many_drafts_are_reported(world: World) -> None:
    """`advice`: more drafts than asked for are an error and not a longer window."""
    engine, target, prompt = _engine(world)
    puppet = world["tests.engine.puppet"].Puppet(lambda number, step, depth: [7] * (depth + 1))
    with pytest.raises(engine.LawError, match="lengths"):
        list(engine.generate(target, engine.Request(prompt, 24), puppet, depth=2))


def ngram_history_after_a_rejection(world: World) -> None:
    """`companion`: the history is the prompt, the pending tokens and the accepted drafts."""
    rows = world["engine.drafters.ngram"].NgramProvider().open(None)
    rows.append(None)
    rows.draft([5], 4, [0])
    rows.commit([0])
    rows.draft([5], 4, [0])
    rows.commit([0])
    rows.draft([5], 4, [0])
    rows.commit([1])
    assert rows.capture(0).attachment.tensors[0].tolist() == [5, 5, 5, 5]


def _compare(world: World, expected: Any, actual: Any, measure: Any = None) -> Any:
    fakes, compare = world["tests.parity.fakes"], world["parity.compare"]
    return compare.compare(
        expected, actual, fakes.EXACT, lambda *_: measure, lambda count: None
    ).verdict


def last_token_differs(world: World) -> None:
    answer = world["tests.parity.fakes"].answer
    other = answer((97, 98, 100), origin="engine", text="abc")  # tokens that decode alike
    assert _compare(world, answer((97, 98, 99)), other) == "different"


def one_token_is_missing(world: World) -> None:
    answer = world["tests.parity.fakes"].answer
    shorter = answer((97, 98), origin="engine", text="abc", completion_tokens=3)
    assert _compare(world, answer((97, 98, 99)), shorter) == "different"


def finish_reason_differs(world: World) -> None:
    answer = world["tests.parity.fakes"].answer
    stopped = answer((97, 98, 99), origin="engine", finish="stop", completion_tokens=3)
    assert _compare(world, answer((97, 98, 99)), stopped) == "different"


def text_differs(world: World) -> None:
    answer = world["tests.parity.fakes"].answer
    assert _compare(world, answer(), answer(origin="engine", text="abd")) == "different"


def a_logprob_is_nan(world: World) -> None:
    answer = world["tests.parity.fakes"].answer
    broken = answer(origin="engine", logprobs=(-0.5, math.nan, -0.5))
    assert _compare(world, answer(), broken) == "different"


def a_stream_meets_itself(world: World) -> None:
    answer = world["tests.parity.fakes"].answer
    with pytest.raises(ValueError, match="compared with itself"):
        _compare(world, answer(), answer())


def a_tie_in_float32_fails(world: World) -> None:
    """On float32 on the CPU there is no excuse, however close the decision was."""
    answer = world["tests.parity.fakes"].answer
    tiny = world["parity.compare"].Measure(margin=1e-9, delta=0.0, top_logit=1.0)
    ids = tuple(range(97, 117))
    other = (*ids[:-1], 64)
    assert _compare(world, answer(ids), answer(other, origin="engine"), tiny) == "different"


def a_wide_margin_is_no_tie(world: World) -> None:
    """Where ties are ties, a decision with margin to spare still is none."""
    fakes, compare = world["tests.parity.fakes"], world["parity.compare"]
    wide = compare.Measure(margin=0.5, delta=1e-5, top_logit=1.0)
    expected = fakes.answer((97, 98, 99))
    actual = fakes.answer((97, 98, 100), origin="engine")
    result = compare.compare(expected, actual, fakes.LOOSE, lambda *_: wide, lambda count: None)
    assert result.verdict == "different"


def most_is_unchecked(world: World) -> None:
    """A tie at the start that cannot be resumed leaves nearly everything open."""
    fakes, compare = world["tests.parity.fakes"], world["parity.compare"]
    tiny = compare.Measure(margin=1e-9, delta=0.0, top_logit=1.0)
    expected = fakes.answer((97, 98, 99, 100))
    actual = fakes.answer((64, 98, 99, 100), origin="engine")
    result = compare.compare(expected, actual, fakes.LOOSE, lambda *_: tiny, lambda count: None)
    assert result.verdict == "inconclusive"


def _run(world: World, expected: Any, actual: Any, error: Exception | None = None) -> Any:
    fakes, runner = world["tests.parity.fakes"], world["parity.runner"]
    case = fakes.case()
    oracle = fakes.FakeOracle(expected)
    if error is not None:
        oracle = fakes.FakeOracle(expected, dies_at=case.id, error=error)
    subject = fakes.FakeSubject({0: actual})
    return runner.run_case(case, oracle, subject, fakes.FakeMeter(None), fakes.EXACT)


def a_server_dies(world: World) -> None:
    answer = world["tests.parity.fakes"].answer
    unusable = world["parity.errors"].Unusable
    with pytest.raises(unusable, match="gone"):
        _run(world, answer(), answer(origin="engine"), unusable("gone"))


def a_difference_exits_1(world: World) -> None:
    answer = world["tests.parity.fakes"].answer
    result = _run(world, answer((97, 98, 99)), answer((97, 98, 100), origin="engine"))
    assert world["parity.report.words"].exit_code([result], ()) == 1
