"""A generation that was interrupted goes on as if it had not been (law `resume`)."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import random
import subprocess
import sys
import threading
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from pathlib import Path

import pytest

from engine import (
    BadInput,
    Engine,
    Finish,
    GroupRound,
    Limits,
    Request,
    Sampling,
    Stream,
    generate,
    generations,
)
from engine.cache.entry import Generation
from engine.cache.inspect import look
from engine.cache.prompt_cache import Kept
from engine.cache.ssd import SSD
from engine.tiers import Tiers, open_tiers
from tests.engine.conftest import last
from tests.engine.pools import PAIRS, Pool, drafter_of, pool, target_of


def begun(
    own: Pool, requests: Sequence[Request], tiers: Tiers, rows: int
) -> tuple[Engine, list[Stream]]:
    drafters = [own.drafter] if own.drafter else []
    engine = Engine(own.target, drafters, limits=Limits(rows=rows), tiers=tiers)
    return engine, [engine.submit(request) for request in requests]


def same_stream(got: Finish, alone: Finish) -> bool:
    """All of it: text, trace, statistics; log-probabilities up to rounding.

    How many forwards a prompt takes depends on its company, and on what of it was kept.
    """
    forwards = alone.statistics.target_forwards
    statistics = replace(got.statistics, target_forwards=forwards)
    usage = replace(got.usage, cached_tokens=0, resumed_tokens=0)
    plain = replace(got, logprobs=(), usage=usage, statistics=statistics)
    close = all(abs(a - b) < 1e-3 for a, b in zip(got.logprobs, alone.logprobs, strict=True))
    return close and plain == replace(alone, logprobs=())


@pytest.mark.parametrize(("family", "kind"), PAIRS)
def test_resume_at_any_round(family: str, kind: str, tmp_path: Path) -> None:
    """Interrupted twice, alone and in company, greedy and sampled."""
    own = pool(family, kind)
    requests = [replace(r, max_tokens=24) for r in own.requests[:12]]
    alone = [last(list(generate(own.target, r, own.drafter))) for r in requests]
    draw = random.Random(f"{family} {kind}")
    resumed = 0
    for world in range(4):
        chosen = draw.sample(range(12), 3)
        rows = draw.randint(1, 3)
        for _ in range(2):
            # Without a RAM tier to start from, and so with nothing but the generation's own state.
            tiers = open_tiers(own.target, ram_bytes=0, ssd=tmp_path / str(world))
            engine, streams = begun(own, [requests[i] for i in chosen], tiers, rows)
            for _ in range(draw.randint(1, 9)):
                engine.turn()
            engine.close()
        tiers = open_tiers(own.target, ram_bytes=0, ssd=tmp_path / str(world))
        engine, streams = begun(own, [requests[i] for i in chosen], tiers, rows)
        kept = len(unfinished_in(tmp_path / str(world)))
        while engine.turn():
            pass
        for number, stream in zip(chosen, streams, strict=True):
            finish = stream.result()
            assert same_stream(finish, alone[number]), number
            ends = accumulate((len(r.emitted) for r in finish.rounds), initial=0)
            assert finish.usage.resumed_tokens in ends
            kept -= finish.usage.resumed_tokens > 0
            resumed += finish.usage.resumed_tokens > 0
        assert kept == 0
        # Nothing is left to go on with.
        assert not unfinished_in(tmp_path / str(world))
    assert resumed


def _head(file: Path) -> bytes:
    return file.read_bytes()[:4096] if file.is_file() else b""


@pytest.mark.parametrize(("family", "kind"), PAIRS)
def test_resume_of_what_nobody_could_close(family: str, kind: str, tmp_path: Path) -> None:
    """The process is gone between two turns: it goes on from the last checkpoint."""
    own = pool(family, kind)
    requests = [replace(own.requests[i], max_tokens=24) for i in (3, 4, 9)]
    alone = [last(list(generate(own.target, r, own.drafter))) for r in requests]
    resumed = 0
    for turns in (4, 11):
        folder = tmp_path / str(turns)
        for _ in range(2):
            tiers = open_tiers(own.target, ram_bytes=0, ssd=folder, checkpoint_tokens=3)
            engine, streams = begun(own, requests, tiers, 3)
            for _ in range(turns):
                engine.turn()
        while engine.turn():
            pass
        finishes = [stream.result() for stream in streams]
        assert all(map(same_stream, finishes, alone))
        resumed += sum(finish.usage.resumed_tokens > 0 for finish in finishes)
        assert not unfinished_in(folder)
    assert resumed


def unfinished_in(folder: Path) -> list[Path]:
    return [file for file in folder.rglob("*") if b"__generation" in _head(file)]


def test_a_cancelled_generation_is_not_to_go_on(tmp_path: Path) -> None:
    own = pool("dense", "off")
    tiers = open_tiers(own.target, ssd=tmp_path, checkpoint_tokens=2)
    engine, (stream,) = begun(own, [replace(own.requests[4], max_tokens=24)], tiers, 1)
    for _ in range(6):
        engine.turn()
    assert unfinished_in(tmp_path)
    stream.cancel()
    engine.turn()
    assert not unfinished_in(tmp_path)


def test_a_generation_that_was_cancelled_as_the_engine_closes_is_not_kept(tmp_path: Path) -> None:
    """No turn comes between: its checkpoint goes, and none is made."""
    own = pool("dense", "off")
    request = replace(own.requests[4], max_tokens=24)
    tiers = open_tiers(own.target, ssd=tmp_path, checkpoint_tokens=2)
    engine, (stream,) = begun(own, [request], tiers, 1)
    for _ in range(6):
        engine.turn()
    assert unfinished_in(tmp_path)
    stream.cancel()
    engine.close()
    assert not unfinished_in(tmp_path)


@pytest.mark.parametrize(
    ("chain", "journal"),
    [
        ((1, 2), "[1, Infinity, 0, []]"),
        ((1, 2), "[1, 1e400, 0, []]"),
        ((1, 2), "[" * 100_000),
        ((1, 2), "{}"),
        ((-1, 2), None),
        ((1, 1 << 40), None),
        ((1, 2, 3), None),
        ((), None),
    ],
)
def test_a_checkpoint_of_no_use_is_removed(
    chain: tuple[int, ...],
    journal: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`resume`: the request begins anew, and says what it would say."""
    own = Pool(target_of("dense"), None, (), ())
    sampling = Sampling(temperature=1.0, seed=3, rng="sequential")
    request = Request(tuple(own.target.encode("Name: ")), 24, sampling)
    alone = last(list(generate(own.target, request)))
    tiers = open_tiers(own.target, ram_bytes=0, ssd=tmp_path)
    suspend = SSD.suspend

    def altered(ssd: SSD, kept: Kept, generation: Generation) -> bool:
        text = generation.journal
        if journal is not None:
            text = base64.b64encode(journal.encode()).decode()
        return suspend(ssd, kept, replace(generation, rng=chain, journal=text))

    monkeypatch.setattr(SSD, "suspend", altered)
    engine, _ = begun(own, [request], tiers, 1)
    for _ in range(6):
        engine.turn()
    engine.close()
    monkeypatch.undo()
    engine, (stream,) = begun(own, [request], open_tiers(own.target, ssd=tmp_path), 1)
    while engine.turn():
        pass
    finish = stream.result()
    assert same_stream(finish, alone)
    assert finish.usage.resumed_tokens == 0
    assert not unfinished_in(tmp_path)


def test_a_checkpoint_that_fails_is_not_tried_again_every_round(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, tried = pool("dense", "off"), []

    def fails(*_: object) -> Kept:
        tried.append(1)
        raise MemoryError("none left")

    tiers = open_tiers(own.target, ram_bytes=0, ssd=tmp_path, checkpoint_tokens=5)
    monkeypatch.setattr(generations, "captured", fails)
    engine, (stream,) = begun(own, [replace(own.requests[4], max_tokens=24)], tiers, 1)
    while engine.turn():
        pass
    assert 1 < len(tried) <= len(stream.result().tokens) // 5


@pytest.mark.parametrize("interrupted", [False, True])
def test_a_generation_in_flight_is_nobody_elses(interrupted: bool, tmp_path: Path) -> None:
    """The same request again, while the first is served: it draws for itself."""
    target = target_of("dense")
    own = Pool(target, None, (), ())
    request = Request(tuple(target.encode("Name: ")), 24, Sampling(temperature=1.0))
    if interrupted:
        engine, _ = begun(own, [request], open_tiers(target, ssd=tmp_path), 1)
        for _ in range(5):
            engine.turn()
        engine.close()
    tiers = open_tiers(target, ssd=tmp_path, checkpoint_tokens=1)
    engine, (first,) = begun(own, [request], tiers, 2)
    for _ in range(5):
        engine.turn()
    assert unfinished_in(tmp_path)
    second = engine.submit(request)
    while engine.turn():
        pass
    assert first.result().seed != second.result().seed
    assert not unfinished_in(tmp_path)


def test_a_twin_inherits_what_is_stored(tmp_path: Path) -> None:
    """Two equal requests in flight: when one is cancelled or ends, the other can still go on."""
    target = target_of("dense")
    own = Pool(target, None, (), ())
    request = Request(tuple(target.encode("Name: ")), 40, Sampling(temperature=1.0))
    tiers = open_tiers(target, ssd=tmp_path, checkpoint_tokens=6)
    engine, (first,) = begun(own, [request], tiers, 3)
    for _ in range(9):
        engine.turn()
    second = engine.submit(request)
    engine.turn()
    third = engine.submit(request)
    engine.turn()
    first.cancel()
    engine.turn()
    assert unfinished_in(tmp_path)
    ended = [False, False]
    while engine.turn():
        now = [stream._closed for stream in (second, third)]
        if now != ended and not all(now):
            assert unfinished_in(tmp_path)
        ended = now
    assert not unfinished_in(tmp_path)


def test_resume_of_a_seed_that_was_drawn(tmp_path: Path) -> None:
    """The draws go on with the seed of the first half, and the whole is what that seed gives."""
    target = target_of("dense")
    own = Pool(target, None, (), ())
    request = Request(tuple(target.encode("Name: ")), 24, Sampling(temperature=1.0))
    engine, _ = begun(own, [request], open_tiers(target, ssd=tmp_path), 1)
    for _ in range(9):
        engine.turn()
    engine.close()
    engine, (stream,) = begun(own, [request], open_tiers(target, ssd=tmp_path), 1)
    while engine.turn():
        pass
    finish = stream.result()
    assert finish.seed is not None
    seeded = replace(request, sampling=replace(request.sampling, seed=finish.seed))
    assert same_stream(finish, last(list(generate(target, seeded))))


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_what_an_engine_kept_outlives_its_failure(tmp_path: Path) -> None:
    """`durable`: also when its model thread dies of a host's callback."""
    own, failing = pool("dense", "off"), threading.Event()

    def on_round(_: GroupRound) -> None:
        if failing.is_set():
            raise MemoryError("none left")

    tiers = open_tiers(own.target, ssd=tmp_path)
    with Engine(own.target, tiers=tiers, on_round=on_round) as engine:
        engine.submit(own.requests[3]).result()
        failing.set()
        with pytest.raises(MemoryError):
            engine.submit(own.requests[4]).result()
    assert {seen.problem for seen in look(tmp_path, verify=True)} == {""}


def left_alone(stream: Stream) -> None:
    """A coroutine that waited for a stream, and whose loop has ended meanwhile."""

    async def read() -> None:
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(anext(stream), 0.05)

    asyncio.run(read())


def test_a_reader_whose_loop_is_gone_keeps_nobody_from_closing(tmp_path: Path) -> None:
    """`isolation`, `durable`: its own generation is kept, and the others are told."""
    own = pool("dense", "off")
    requests = [replace(own.requests[4], max_tokens=24), own.requests[3]]
    engine, (gone, waits) = begun(own, requests, open_tiers(own.target, ssd=tmp_path), 1)
    left_alone(gone)
    for _ in range(6):
        engine.turn()
    left_alone(waits)
    engine.close()
    assert unfinished_in(tmp_path)
    for stream in (gone, waits):
        with pytest.raises(BadInput, match="the engine is closed"):
            stream.result()


def test_ctrl_c_at_any_moment_of_closing(tmp_path: Path) -> None:
    """`durable`: a Ctrl-C while the engine closes loses nothing, and is no crash."""
    command = [sys.executable, "-m", "tests.cache.closing", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    engines = int(done.stdout)
    assert engines > 5
    for number in range(engines):
        assert [seen.problem for seen in look(tmp_path / str(number), verify=True)] == [""]


@pytest.mark.parametrize("kind", ["off", "two-model"])
def test_resume_of_a_chain_of_keys(kind: str, tmp_path: Path) -> None:
    """`sequential`: the chain goes on where it stood, drafts and rejected positions counted."""
    target, drafter = target_of("dense"), drafter_of("dense", kind)
    own = Pool(target, drafter, (), ())
    sampling = Sampling(temperature=1.0, seed=3, rng="sequential")
    request = Request(tuple(target.encode("Name: ")), 24, sampling)
    alone = last(list(generate(target, request, drafter)))
    for turns in (3, 5, 8):
        folder = tmp_path / str(turns)
        engine, _ = begun(own, [request], open_tiers(target, ssd=folder), 1)
        for _ in range(turns):
            engine.turn()
        engine.close()
        engine, (stream,) = begun(own, [request], open_tiers(target, ssd=folder), 1)
        while engine.turn():
            pass
        assert same_stream(stream.result(), alone)


def test_another_request_does_not_go_on(tmp_path: Path) -> None:
    """`identity`: other budget, sampling, stops, drafter or depth, and the same prompt."""
    target, drafter = target_of("dense"), drafter_of("dense", "ngram")
    request = Request(tuple(target.encode("Name: ")), 24)
    engine, _ = begun(Pool(target, None, (), ()), [request], open_tiers(target, ssd=tmp_path), 1)
    for _ in range(6):
        engine.turn()
    engine.close()
    others = [
        (replace(request, max_tokens=23), None),
        (replace(request, sampling=Sampling(temperature=1.0, seed=1)), None),
        (replace(request, stop_ids=frozenset({7})), None),
        (replace(request, stop_strings=("zz",)), None),
        (request, drafter),
    ]
    for other, own in others:
        tiers = open_tiers(target, ram_bytes=0, ssd=tmp_path)
        engine, (stream,) = begun(Pool(target, own, (), ()), [other], tiers, 1)
        engine.turn()
        assert not stream._events or stream._events[0].round == 0  # type: ignore[union-attr]
        assert len(stream._events) <= 11
        while engine.turn():
            pass
        assert same_stream(stream.result(), last(list(generate(target, other, own))))


def test_a_target_of_other_weights_does_not_go_on(tmp_path: Path) -> None:
    """`identity`: the dense target's files are never the qwen3 target's."""
    dense = target_of("dense")
    request = Request(tuple(dense.encode("Name: ")), 24)
    engine, _ = begun(Pool(dense, None, (), ()), [request], open_tiers(dense, ssd=tmp_path), 1)
    for _ in range(6):
        engine.turn()
    engine.close()
    other = target_of("sliding")
    engine, (stream,) = begun(
        Pool(other, None, (), ()), [request], open_tiers(other, ssd=tmp_path), 1
    )
    while engine.turn():
        pass
    finish = stream.result()
    assert finish.usage.cached_tokens == 0
    assert same_stream(finish, last(list(generate(other, request))))
