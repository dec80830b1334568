"""The oracles: each question once, no server forgotten, no dead or cheating one believed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from threading import Barrier
from time import sleep
from types import SimpleNamespace
from typing import Any

import pytest

from oracle.client import Completion, OracleError
from oracle.server import ServerFailed
from parity import references, served
from parity.cases import GREEDY, Case, Row, Source, question_of
from parity.errors import Unusable
from parity.models import Models
from parity.references import References
from parity.served import Served
from parity.trace import Round, Trace
from tests.parity.fakes import TOP_P, FakeSubject, answer, case

COMPLETION = Completion((97, 98), (97, 98), "ab", "length", 4, 2, 0, (-0.5, -0.5))


@dataclass
class World:
    """What the fake servers do, and what they saw."""

    says: Completion = COMPLETION
    error: Exception | None = None
    fails_to_start: bool = False
    start_s: float = 0.0
    alive: bool = True
    running: int = 0
    started: list[Path | None] = field(default_factory=list)
    requests: list[dict[str, Any]] = field(default_factory=list)
    company: Barrier | None = None
    """Requests are answered when as many are under way."""


class Letters:
    """A tokenizer and its detokenizer: each id is a character, and a first space is dropped."""

    text = ""

    @property
    def detokenizer(self) -> Letters:
        return Letters()

    def add_token(self, token: int) -> None:
        self.text = (self.text + chr(token)).removeprefix(" ")

    def finalize(self) -> None:
        pass

    def decode(self, ids: list[int]) -> str:
        return "".join(map(chr, ids))


def fake_loaded() -> Any:
    """A model of which only the tokenizer is there."""

    def encode(text: str) -> list[int]:
        return [*map(ord, text)]

    return SimpleNamespace(
        eos_ids=frozenset({0}),
        encode=encode,
        encode_bare=encode,
        tokenizer=Letters(),
        xtc_special_tokens=(),
    )


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    """Servers and clients made of paper."""
    world = World()

    class FakeServer:
        pid = 4711

        def __init__(self, model: Path, *, draft: Path | None, **_: Any) -> None:
            world.started.append(draft)

            self.runs = False

        def start(self) -> None:
            sleep(world.start_s)
            if world.fails_to_start:
                raise ServerFailed("port 80 is in use")
            self.runs = True
            world.running += 1

        def stop(self) -> None:
            world.running -= self.runs
            self.runs = False

        def alive(self) -> bool:
            return world.alive

    class FakeClient:
        def __init__(self, *_: Any, **__: Any) -> None:
            pass

        def close(self) -> None:
            pass

        def complete(self, prompt: str, **options: Any) -> Completion:
            world.requests.append({"prompt": prompt, **options})
            if world.company is not None:
                world.company.wait()
                return replace(world.says, prompt_tokens=len(prompt))
            if world.error is not None:
                raise world.error
            return world.says

    monkeypatch.setattr(served, "Server", FakeServer)
    monkeypatch.setattr(served, "Client", FakeClient)
    return world


@pytest.fixture
def oracle(world: World, tmp_path: Path) -> Iterator[References]:
    """References on the fake servers, and on an engine whose plain stream is scripted."""
    loaded = fake_loaded()
    models = Models("dense", Path("target"), Path("draft"))
    rounds = (Round((1,), 1, (97, 98)),)
    plain = answer((97, 98), origin="engine", trace=Trace((True,), ((1, 1),)), rounds=rounds)
    subject = FakeSubject({0: plain})
    with References(models, loaded, loaded, subject, tmp_path) as opened:
        yield opened
    assert world.running == 0


def test_one_question_is_asked_once(oracle: References, world: World) -> None:
    """Cases that differ in what the oracle does not see share one answer and one server."""
    first = oracle.expected(case(depth=1))
    assert oracle.expected(case(depth=8)) is first
    assert (len(world.requests), world.started) == (1, [None])
    oracle.expected(case(lane="batch"))
    oracle.expected(case("long"))
    assert len(world.requests) == 2, "kinds share a prompt here, lanes do not"
    oracle.expected(case(drafter="two-model", source=Source.SERVER_DRAFT))
    assert world.started == [None, Path("draft")]


def test_what_was_asked_ahead_is_not_asked_again(oracle: References, world: World) -> None:
    """The servers are asked in the order in which the cases will come; others are left out."""
    draft = case(drafter="two-model", source=Source.SERVER_DRAFT)
    own = case(sampling=TOP_P, source=Source.OWN_PLAIN)
    oracle.ask_ahead([own, case(), draft, case(depth=8)])
    oracle.expected(draft)
    oracle.expected(case())
    assert [request["options"].num_draft_tokens for request in world.requests] == [None, 3]


def test_questions_nobody_waits_for_do_not_outlive_the_run(world: World, tmp_path: Path) -> None:
    """Ctrl-C: what is queued is dropped, and the servers stop whatever they were doing."""
    loaded = fake_loaded()
    models = Models("dense", Path("target"), Path("draft"))
    with References(models, loaded, loaded, FakeSubject({}), tmp_path) as oracle:
        oracle.ask_ahead(replace(case(), prompt=str(number)) for number in range(1000))
    assert world.running == 0
    assert len(world.requests) < 1000


def grouped(kinds: str = "ab") -> list[Case]:
    """The cases of a plain group in the batch lane, a row for each letter."""
    rows = tuple(Row(kind, f"Once {kind}", GREEDY, 8 + n) for n, kind in enumerate(kinds))
    first = case(kinds[0], lane="batch", drafter="off", depth=0, group=rows)
    cell = replace(first.cell, rows=len(rows))
    return list(replace(first, cell=cell).together)


def test_rows_of_a_group_are_under_way_together(oracle: References, world: World) -> None:
    """A server that is asked one by one shares nothing; each row gets its own answer, once."""
    world.company = Barrier(3, timeout=10)
    rows = grouped("abc")
    answers = [oracle.expected(row) for row in rows]
    assert [answer.prompt_tokens for answer in answers] == [len(str(row.prompt)) for row in rows]
    assert sorted(request["max_tokens"] for request in world.requests) == [8, 9, 10]
    assert [oracle.expected(row) for row in rows] == answers
    assert len(world.requests) == 3
    world.company = None
    oracle.expected(rows[0].alone)
    oracle.expected(grouped("ab")[0])
    assert len(world.requests) == 6, "a row alone, and one of another group, are other questions"


def test_a_group_starts_a_server_once_even_if_it_fails(oracle: References, world: World) -> None:
    """honest-gap: not once per row, and nobody waits for an answer."""
    world.fails_to_start, world.start_s = True, 0.05
    for row in grouped("abcd"):
        with pytest.raises(Unusable, match="port 80 is in use"):
            oracle.expected(row)
    assert len(world.started) == 1


def test_a_drafting_row_is_held_to_its_own_stream_alone(oracle: References) -> None:
    """solitude: rounds and flags included, which a plain stream would not have."""
    row = replace(grouped()[0], source=Source.OWN_ALONE)
    expected = oracle.expected(row)
    assert expected.trace is not None
    assert expected.rounds
    by_drafter = [
        question_of(replace(row, cell=replace(row.cell, drafter=drafter, depth=3)))
        for drafter in ("ngram", "two-model")
    ]
    assert len({*by_drafter, question_of(row)}) == 3


def test_lanes_and_depths_are_asked_for(oracle: References, world: World) -> None:
    """A seed is the serial lane; a depth is sent to a drafting server only."""
    oracle.expected(case(lane="serial"))
    oracle.expected(case(lane="batch"))
    oracle.expected(case(drafter="two-model", depth=3, source=Source.SERVER_DRAFT))
    seeds = [request["options"].seed for request in world.requests]
    depths = [request["options"].num_draft_tokens for request in world.requests]
    assert seeds == [1, None, 1]
    assert depths == [None, None, 3]


def test_a_server_that_died_is_named_with_its_log(oracle: References, world: World) -> None:
    """mutants: swallow a dead server. It is noticed even if its answers are all in."""
    oracle.expected(case())
    world.alive = False
    with pytest.raises(Unusable, match=r"mlx_lm.server \(pid 4711\) died; its log: .*plain\.log"):
        oracle.expected(case())
    with pytest.raises(Unusable, match="died"):
        oracle.check_alive()


def test_a_server_that_does_not_answer_ends_the_run(oracle: References, world: World) -> None:
    """One line that names the case, the reason and the log."""
    world.error = OracleError("status 500: boom")
    with pytest.raises(Unusable, match=r"did not answer dense/serial/ngram/d3.*boom; its log: "):
        oracle.expected(case())


def test_a_server_that_does_not_start_ends_the_run(oracle: References, world: World) -> None:
    """A port in use, no compiler: in the server's words."""
    world.fails_to_start = True
    with pytest.raises(Unusable, match="port 80 is in use"):
        oracle.expected(case())


def test_a_server_that_failed_ahead_of_its_cases_ends_the_run_at_once(
    oracle: References, world: World
) -> None:
    """No case in between is run for nothing."""
    world.fails_to_start = True
    with pytest.raises(Unusable, match="port 80 is in use"):
        oracle.expected(case())
    with pytest.raises(Unusable, match="port 80 is in use"):
        oracle.expected(case(sampling=TOP_P, source=Source.OWN_PLAIN))


def test_a_server_that_failed_is_not_started_again(world: World, tmp_path: Path) -> None:
    """What a second one said would not be what the first was asked."""
    world.fails_to_start = True
    with Served(Models("dense", Path("target"), None), {0}, lambda _: [], tmp_path) as servers:
        asked = [servers.ask(replace(case(), prompt=str(number))) for number in range(9)]
        assert all(isinstance(one.exception(), Unusable) for one in asked)
    assert len(world.started) == 1


def test_an_answer_from_the_prompt_cache_is_not_believed(oracle: References, world: World) -> None:
    """D2, D8: it would depend on what was asked before."""
    world.says = replace(COMPLETION, cached_tokens=3)
    with pytest.raises(Unusable, match="reused 3 tokens"):
        oracle.expected(case())


@pytest.mark.parametrize("tokens", [(97, 98), (97, 99)])
def test_both_oracles_of_a_traced_case_must_agree(
    oracle: References, monkeypatch: pytest.MonkeyPatch, tokens: tuple[int, ...]
) -> None:
    """oracle-trace: the in-process rounds are believed only if they led to the served text."""
    rounds = (SimpleNamespace(drafted=3, accepted=1),)
    run = SimpleNamespace(
        tokens=tokens, finish_reason="length", from_draft=(True, False), rounds=rounds
    )
    monkeypatch.setattr(references, "speculative", lambda *_: run)
    traced = case(drafter="two-model", source=Source.SERVER_DRAFT, traced=True)
    if tokens == COMPLETION.tokens:
        assert oracle.expected(traced).trace == Trace((True, False), ((3, 1),))
    else:
        with pytest.raises(Unusable, match="disagrees with itself"):
            oracle.expected(traced)


def test_the_plain_stream_is_another_run_and_has_no_trace(oracle: References) -> None:
    """lossless-sampled: what a drafter did is compared with nothing here."""
    expected = oracle.expected(case(sampling=TOP_P, source=Source.OWN_PLAIN))
    assert (expected.trace, expected.rounds) == (None, ())


def test_what_the_served_ids_decode_to_is_known_too(oracle: References, world: World) -> None:
    """D21: at a stop the server drops a last space; it never serves a first one."""
    world.says = replace(
        COMPLETION, tokens=(32, 97, 32), text="a", finish_reason="stop", logprobs=(-0.5,) * 3
    )
    expected = oracle.expected(case())
    assert (expected.text, expected.decodings) == ("a", ("a ", " a "))


def test_a_server_may_start_before_it_is_asked(oracle: References, world: World) -> None:
    """It is started once, and stopped though nobody asked."""
    oracle.start_ahead(Source.SERVER)
    oracle.expected(case())
    assert world.started == [None]


def test_a_server_that_cannot_start_ahead_is_known_to_whoever_asks(
    oracle: References, world: World
) -> None:
    world.fails_to_start = True
    oracle.start_ahead(Source.SERVER)
    with pytest.raises(Unusable, match="port 80 is in use"):
        oracle.expected(case())
    assert len(world.started) == 1
