"""Requests in groups: whatever comes, goes and shares a forward, each is served as if alone."""

from __future__ import annotations

import asyncio
import gc
import itertools
import random
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from re import fullmatch
from types import FrameType
from typing import Any

import mlx.core as mx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine import (
    BadInput,
    Engine,
    Finish,
    GroupError,
    GroupRound,
    KVQuantization,
    Limits,
    Request,
    Sampling,
    Stream,
    Target,
    generate,
    groups,
)
from engine.clone import with_classes
from engine.collector import Collector
from engine.drafters.ngram import NgramRows
from engine.rounds import Row
from engine.state.rows import Rows

from .conftest import last
from .pools import PAIRS, Pool, drafter_of, pool, same
from .test_adapters import fresh, write_adapter

SCHEDULES = 42
"""Per family and drafter: more than 500 in all."""

ROUNDING = {"sliding": 1e-3, "mla": 1e-3}
"""How far log-probabilities may be off: there, the width of a forward changes rounding."""


@st.composite
def schedules(draw: st.DrawFn) -> list[tuple[str, int]]:
    """What happens between turns: `submit` request i, `cancel` the i-th stream, `turn` i times."""
    steps: list[tuple[str, int]] = []
    for _ in range(draw(st.integers(1, 6))):
        steps.append(("submit", draw(st.integers(0, 19))))
        steps.append(("turn", draw(st.integers(0, 6))))
        if draw(st.integers(0, 4)) == 0:
            steps.append(("cancel", draw(st.integers(0, 5))))
    return steps


@pytest.mark.parametrize(("family", "kind"), PAIRS)
def test_a_row_is_served_as_if_alone(family: str, kind: str) -> None:
    """`solitude`, `isolation`: any arrivals, limits, chunks and cancels."""
    own = pool(family, kind)
    drafters = [own.drafter] if own.drafter else []

    @settings(max_examples=SCHEDULES)
    @given(schedules(), st.integers(1, 6), st.sampled_from([1, 7, 64, 2048]))
    def run(steps: list[tuple[str, int]], rows: int, chunk: int) -> None:
        engine = Engine(own.target, drafters, limits=Limits(rows=rows, prefill_chunk=chunk))
        streams: list[tuple[int, Stream]] = []
        cancelled: set[int] = set()
        for step, number in steps:
            if step == "submit":
                streams.append((number, engine.submit(own.requests[number])))
            elif step == "cancel" and number < len(streams):
                streams[number][1].cancel()
                cancelled.add(number)
            elif step == "turn":
                for _ in range(number):
                    engine.turn()
        while engine.turn():
            pass
        for place, (number, stream) in enumerate(streams):
            if place in cancelled:
                assert list(stream) == []
            else:
                got = last(list(stream))
                assert same(got, own.alone[number]), (number, got, own.alone[number])
                off = ROUNDING.get(family, 0.0)
                assert got.logprobs == pytest.approx(own.alone[number].logprobs, rel=0.0, abs=off)

    run()


@pytest.mark.parametrize(("family", "kind"), [pair for pair in PAIRS if pair[1] != "off"])
def test_rows_of_one_round_accept_different_counts(family: str, kind: str) -> None:
    """`solitude` is about something: rows share rounds, differ in them, and come and go."""
    own = pool(family, kind)
    assert own.drafter is not None
    rounds: list[GroupRound] = []
    engine = Engine(own.target, [own.drafter], on_round=rounds.append)
    for number in (4, 9, 14, 19):
        engine.submit(own.requests[number])
        engine.turn()
        engine.turn()
    while engine.turn():
        pass
    assert any(len(set(one.accepted)) > 1 for one in rounds)
    companies = [one.requests for one in rounds]
    assert max(map(len, companies)) >= 3
    steps = list(pairwise(companies))
    assert any(len(after) < len(before) for before, after in steps)
    assert any(set(before) < set(after) for before, after in steps)


def test_plain_rows_share_their_forwards() -> None:
    """Four requests of eight tokens take about eight rounds, not 32."""
    own = pool("dense", "off")
    rounds: list[GroupRound] = []
    engine = Engine(own.target, on_round=rounds.append)
    for text in ("Up the hill", "Name: Anna", "Q: Where", "The end of"):
        engine.submit(Request(tuple(own.target.encode(text))[:8], 8))
    while engine.turn():
        pass
    assert sum(len(one.requests) for one in rounds) > 3 * len(rounds)


def test_requests_that_cannot_share_have_groups_of_their_own() -> None:
    """Another depth, another drafter, the sequential policy: each as if alone."""
    own = pool("dense", "two-model")
    ngram = drafter_of("dense", "ngram")
    assert own.drafter is not None
    assert ngram is not None
    sequential = Sampling(0.8, seed=3, rng="sequential")
    prompt = own.requests[3].prompt
    rounds: list[GroupRound] = []
    engine = Engine(own.target, [own.drafter, ngram], on_round=rounds.append)
    wanted: list[tuple[Stream, Finish]] = []
    for drafter, name, depth, sampling in (
        (own.drafter, "default", None, Sampling()),
        (own.drafter, "two-model", 1, Sampling()),
        (ngram, "ngram", None, Sampling()),
        (None, None, None, Sampling()),
        (own.drafter, "default", None, sequential),
        (own.drafter, "default", None, sequential),
    ):
        request = Request(prompt, 9, sampling)
        alone = last(list(generate(own.target, request, drafter, depth=depth)))
        wanted.append((engine.submit(request, drafter=name, depth=depth), alone))
    while engine.turn():
        pass
    assert all(len(one.requests) == 1 for one in rounds)
    assert all(same(stream.result(), alone) for stream, alone in wanted)


@pytest.mark.parametrize("start", [0, 12])
@pytest.mark.parametrize("kind", ["off", "ngram"])
def test_rows_with_quantized_keys_are_served_as_if_alone(kind: str, start: int) -> None:
    """Rows are converted one by one and meet again where all are."""
    how = KVQuantization(8, 32, start)
    folder = pool("dense", kind).target.path
    target = Target.load(folder, quantization=how)
    drafter = drafter_of("dense", kind)
    rounds: list[GroupRound] = []
    engine = Engine(target, [drafter] if drafter else [], on_round=rounds.append)
    requests = [
        Request(tuple(target.encode(text)), 20)
        for text in ("Up", "Up the hill", "Name: Anna. Say it again: ", "Q: Where does")
    ]
    alone = [last(list(generate(target, request, drafter))) for request in requests]
    streams = [engine.submit(request) for request in requests]
    while engine.turn():
        pass
    assert all(same(s.result(), one) for s, one in zip(streams, alone, strict=True))
    assert max(len(one.requests) for one in rounds) == 4


def test_an_adapter_has_a_group_of_its_own(tmp_path: Path) -> None:
    """`isolation`: no row sees another adapter's weights; drafters for the base are left out."""
    own = pool("dense", "two-model")
    assert own.drafter is not None
    adapted = own.target.adapted(write_adapter(tmp_path / "adapter", fresh()))
    engine = Engine(own.target, [own.drafter], adapters={"mine": adapted})
    request = Request(own.requests[3].prompt, 9)
    streams = [engine.submit(request, adapter=name) for name in (None, "mine", None, "mine")]
    while engine.turn():
        pass
    base, mine = (last(list(generate(t, request))).tokens for t in (own.target, adapted))
    assert base != mine
    assert [stream.result().tokens for stream in streams] == [base, mine, base, mine]
    with pytest.raises(BadInput, match="adapter 'other' is not mounted"):
        engine.submit(request, adapter="other")


def told(model: Any, before: Callable[[mx.array], None]) -> Any:
    """The same model, which says what it is given before it runs."""

    def call(self: Any, tokens: mx.array, cache: Any) -> mx.array:
        before(tokens)
        logits: mx.array = type(model).__call__(self, tokens, cache=cache)
        return logits

    kind = type("Told", (type(model),), {"__call__": call})
    return with_classes(model, lambda module: kind if module is model else type(module))


def broken_at(model: Any, calls: int) -> Any:
    """The same model, whose forward number `calls` and no other fails."""
    widths: list[int] = []

    def before(tokens: mx.array) -> None:
        widths.append(tokens.shape[1])
        if len(widths) == calls:
            raise RuntimeError("the graph broke")

    return told(model, before)


@pytest.mark.parametrize("calls", [1, 3, 5, 8])
def test_a_graph_failure_ends_its_group_and_nothing_else(calls: int) -> None:
    """`isolation`: in a prompt or in a round; the next requests are served."""
    own = pool("dense", "two-model")
    assert own.drafter is not None
    folder = own.target.path
    target = Target.load(folder)
    engine = Engine(target, [own.drafter])
    plain = engine.submit(own.requests[9], drafter=None)
    engine.turn()
    target.model = broken_at(target.model, calls)
    streams = [engine.submit(own.requests[number]) for number in (4, 14, 19)]
    while engine.turn():
        pass
    said = []
    for stream in streams:
        try:
            list(stream)
        except GroupError as error:
            said.append(str(error))
    assert said
    assert all(
        fullmatch(r"a group of \d ended: RuntimeError: the graph broke", one) for one in said
    )
    survived = pool("dense", "off").alone[9]
    assert same(plain.result(), survived)
    again = engine.submit(own.requests[14])
    while engine.turn():
        pass
    assert same(again.result(), own.alone[14])


def test_a_failed_join_ends_the_newcomer_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """`membership`: the others are what they were."""
    own = pool("dense", "ngram")
    assert own.drafter is not None
    engine = Engine(own.target, [own.drafter])
    first = engine.submit(own.requests[4])
    for _ in range(3):
        engine.turn()

    def fails(*_: NgramRows) -> NgramRows:
        raise MemoryError("no room")

    with monkeypatch.context() as patch:
        patch.setattr(NgramRows, "joined", fails)
        second = engine.submit(own.requests[19])
        for _ in range(3):
            engine.turn()
    while engine.turn():
        pass
    assert same(first.result(), own.alone[4])
    with pytest.raises(GroupError, match="MemoryError: no room"):
        second.result()


def test_a_tokenizer_that_fails_ends_one_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """`isolation`: what takes a row's tokens is that row's business."""
    own = pool("dense", "off")
    engine = Engine(own.target)
    streams = [engine.submit(own.requests[number]) for number in (4, 9, 14)]
    take = Collector.take

    def sometimes(self: Collector, token: int, logprob: float, **where: Any) -> bool:
        if self.request is own.requests[9] and len(self._taken) == 3:
            raise UnicodeError("no such character")
        return take(self, token, logprob, **where)

    monkeypatch.setattr(Collector, "take", sometimes)
    while engine.turn():
        pass
    with pytest.raises(UnicodeError, match="no such character"):
        list(streams[1])
    for number, stream in ((4, streams[0]), (14, streams[2])):
        assert same(stream.result(), own.alone[number])


def test_a_long_prompt_stalls_running_rows_by_one_step_at_most() -> None:
    """Between two rounds of a running row there is at most one chunk of anybody's prompt."""
    own = pool("dense", "off")
    seen: list[str] = []
    engine = Engine(
        own.target,
        limits=Limits(prefill_chunk=16),
        on_round=lambda one: seen.append("round") if 0 in one.requests else None,
    )
    engine.submit(Request(own.requests[3].prompt, 24))
    engine.turn()
    engine.turn()
    model = own.target.model

    own.target.model = told(model, lambda tokens: seen.extend(["chunk"] * (tokens.shape[1] > 1)))
    try:
        long = Request(tuple(own.target.encode("Up the hill and down again. " * 12)), 2)
        streams = [engine.submit(long), engine.submit(long)]
        while engine.turn():
            pass
    finally:
        own.target.model = model
    assert all(stream.result().tokens for stream in streams)
    text = " ".join(seen)
    assert text.count("chunk") > 20
    assert "chunk chunk" not in text[: text.rindex("round")]


def test_limits_hold_requests_back_and_refuse_the_impossible() -> None:
    own = pool("dense", "off")
    request = own.requests[9]
    tokens = len(request.prompt) + request.max_tokens
    rounds: list[GroupRound] = []
    per_row = own.target.footprint.bytes(tokens)
    for limits in (Limits(rows=2), Limits(tokens=2 * tokens), Limits(state_bytes=2 * per_row)):
        rounds.clear()
        engine = Engine(own.target, limits=limits, on_round=rounds.append)
        streams = [engine.submit(request) for _ in range(5)]
        while engine.turn():
            pass
        assert all(same(stream.result(), own.alone[9]) for stream in streams)
        assert max(len(one.requests) for one in rounds) == 2
    for limits, message in (
        (Limits(tokens=tokens - 1), f"{tokens} tokens exceeds the limit of {tokens - 1}"),
        (Limits(state_bytes=per_row - 1), f"{per_row} state_bytes exceeds the limit"),
    ):
        with pytest.raises(BadInput, match=message):
            Engine(own.target, limits=limits).submit(request)
    for name in ("rows", "tokens", "state_bytes", "prefill_chunk", "prefill_steps"):
        with pytest.raises(BadInput, match=f"{name} must be at least 1, got 0"):
            Limits(**{name: 0})


def test_what_cannot_be_served_is_refused_at_the_call() -> None:
    own = pool("dense", "off")
    engine = Engine(own.target)
    with pytest.raises(BadInput, match="prompt ids"):
        engine.submit(Request((10**6,)))
    with pytest.raises(BadInput, match=r"drafter 'ngram' is not mounted \(mounted: none\)"):
        engine.submit(own.requests[0], drafter="ngram")
    with pytest.raises(BadInput, match="depth must be at least 0, got -1"):
        engine.submit(own.requests[0], depth=-1)
    engine.close()
    with pytest.raises(BadInput, match="the engine is closed"):
        engine.submit(own.requests[0])


@pytest.mark.parametrize(
    "where",
    [
        *("_admit", "_enter", "_start", "_step", "_keep_prompts", "_round", "_regroup"),
        *("_checkpoint", "_keep_retired", "_deliver", "on_round", "join", "part_of"),
    ],
)
@pytest.mark.parametrize("times", [1, 3])
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_no_reader_waits_for_an_engine_that_is_gone(
    where: str, times: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever fails, and wherever a row is at that moment, its stream ends."""
    own = pool("dense", "off")
    left = itertools.count(1)

    def failing(work: Callable[..., Any]) -> Callable[..., Any]:
        def fails(*arguments: Any) -> Any:
            if next(left) == times:
                raise MemoryError("none left")
            return work(*arguments)

        return fails

    on_round = failing(lambda _: None) if where == "on_round" else None
    engine = Engine(own.target, limits=Limits(rows=2), on_round=on_round)
    for home in (groups, groups.Groups):
        if where in vars(home):
            monkeypatch.setattr(home, where, failing(getattr(home, where)))
    with ThreadPoolExecutor(3) as threads, engine:
        streams = []

        def served(request: Request) -> Finish:
            streams.append(stream := engine.submit(request))
            return stream.result()

        ends = [threads.submit(served, request) for request in own.requests[:3]]
        try:
            failures = [end.exception(timeout=30) for end in ends]
        finally:
            for stream in streams:
                stream.cancel()
    # Not every place is come by three times, and rows that have ended have nothing to lose.
    assert any(failures) or times > 1 or where == "part_of"
    for end, failure, alone in zip(ends, failures, own.alone, strict=False):
        assert failure is not None or same(end.result(), alone)
    known = (MemoryError, GroupError, BadInput)
    assert all(failure is None or isinstance(failure, known) for failure in failures)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_the_model_thread_cannot_close_its_engine() -> None:
    """It would wait for itself: an error where the round's answer would have stood, and no hang."""
    own = pool("dense", "off")
    engine = Engine(own.target, on_round=lambda _: engine.close())
    with engine, pytest.raises(RuntimeError, match="cannot be closed by its model thread"):
        engine.submit(own.requests[0]).result()


def test_an_engine_without_a_thread_can_be_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The end of the process does that, and must not wait for what never began."""
    engine = Engine(pool("dense", "off").target)

    def fails(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", fails)
    with pytest.raises(RuntimeError, match="new thread"):
        engine.start()
    engine.close()


@pytest.mark.skipif(sys.platform != "linux", reason="macOS forbids most of what follows a fork")
@pytest.mark.parametrize("held", [False, True])
def test_a_child_of_a_fork_ends_without_the_thread_that_it_has_not(held: bool) -> None:
    """The end of the process closes what is open, and would wait for the parent's model thread.

    Or for another one that held the engine's lock.
    """
    program = f"""if True:
        import os, sys, threading
        from engine import Engine
        from tests.engine.pools import pool
        taken, waited = threading.Event(), threading.Event()
        def hold(engine):
            with engine._changed:
                taken.set()
                waited.wait(50)
        with Engine(pool('dense', 'off').target) as engine:
            if {held}:
                threading.Thread(target=hold, args=[engine]).start()
                taken.wait()
            if (child := os.fork()) == 0:
                sys.exit(7)
            code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            waited.set()
        sys.exit(code)
    """
    assert subprocess.run([sys.executable, "-c", program], timeout=40).returncode == 7


def test_an_engine_is_started_once() -> None:
    with (
        Engine(pool("dense", "off").target) as engine,
        pytest.raises(BadInput, match="started already"),
    ):
        engine.start()


def rows_alive() -> int:
    """Rows of requests and states of models that anything still refers to."""
    gc.collect()
    return sum(isinstance(one, Row | Rows) for one in gc.get_objects())


def test_a_thousand_requests_leave_nothing_behind() -> None:
    """Memory is back at its baseline within 5 %, and no finished row's state is reachable."""
    own = pool("dense", "ngram")
    assert own.drafter is not None
    engine = Engine(own.target, [own.drafter])
    draw = random.Random(0)

    def serve(count: int) -> None:
        streams = []
        for _ in range(count):
            number = draw.randrange(20)
            prompt, budget = own.requests[number].prompt[:12], draw.randint(1, 6)
            streams.append(engine.submit(Request(prompt, budget)))
            if draw.random() < 0.3:
                draw.choice(streams).cancel()
            engine.turn()
        while engine.turn():
            pass

    def held() -> int:
        gc.collect()
        mx.clear_cache()
        return mx.get_active_memory()

    serve(60)
    baseline, rows = held(), rows_alive()
    serve(1000)
    assert held() <= baseline * 1.05
    assert rows_alive() == rows


def test_streams_can_be_read_in_threads_and_in_coroutines() -> None:
    own: Pool = pool("hybrid", "two-model")
    assert own.drafter is not None
    with Engine(own.target, [own.drafter], limits=Limits(rows=4)) as engine:
        with ThreadPoolExecutor(8) as threads:
            finishes = list(threads.map(lambda r: engine.submit(r).result(), own.requests))
        assert all(map(same, finishes, own.alone))

        async def read(request: Request) -> Finish:
            return last([event async for event in engine.submit(request)])

        async def read_all() -> list[Finish]:
            return await asyncio.gather(*map(read, own.requests))

        assert all(map(same, asyncio.run(read_all()), own.alone))
        stream = engine.submit(own.requests[4])
        next(stream)
        stream.cancel()
        assert list(stream) == []
        with pytest.raises(RuntimeError, match="cancelled"):
            stream.result()
        unread = engine.submit(own.requests[9])
    with pytest.raises(BadInput, match="the engine is closed"):
        unread.result()


@pytest.mark.parametrize("number", range(12))
def test_a_host_that_is_interrupted_as_a_request_begins_goes_on_without_it(number: int) -> None:
    """At each line of admitting it: its reader is told, and no other request is changed."""
    own = pool("dense", "off")
    engine = Engine(own.target, limits=Limits(rows=3))
    before = engine.submit(own.requests[0])
    engine.turn()
    begins = engine.submit(own.requests[1])
    lines = itertools.count()

    def trace(frame: FrameType, event: str, _: object) -> Any:
        if frame.f_code.co_name not in ("_admit", "_enter"):
            return None
        if event == "line" and next(lines) == number:
            sys.settrace(None)
            raise KeyboardInterrupt
        return trace

    sys.settrace(trace)
    interrupted = False
    try:
        engine.turn()
    except KeyboardInterrupt:
        interrupted = True
    finally:
        sys.settrace(None)
    after = engine.submit(own.requests[2])
    while engine.turn():
        pass
    assert all(stream._closed for stream in (before, begins, after))
    for stream, alone in ((before, own.alone[0]), (after, own.alone[2])):
        assert same(stream.result(), alone)
    try:
        assert same(begins.result(), own.alone[1])
    except KeyboardInterrupt:
        assert interrupted
