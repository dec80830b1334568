"""A generation's journal leads a fresh row to where the old one stood (law `resume`)."""

from __future__ import annotations

from base64 import b64encode
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine import BadInput, LogitsOptions, Request, Sampling
from engine.journal import Delivered, Journal, generation_key
from engine.prefill import Prompt
from engine.rounds import Row, accept

EOS = 9
PROMPT = (1, 2, 3)


class Reader:
    """Keeps what it is handed."""

    def __init__(self) -> None:
        self.taken: list[tuple[int, float, bool, int]] = []

    def take(self, token: int, logprob: float, *, from_draft: bool, round: int) -> bool:
        self.taken.append((token, logprob, from_draft, round))
        return True


def fresh(budget: int) -> tuple[Prompt, Reader]:
    reader = Reader()
    row = Row(reader, frozenset({EOS}), [], PROMPT[-1], 0, budget)
    return Prompt(PROMPT, row, forwards=2, cached=1), reader


ROUND = st.tuples(
    st.lists(st.integers(0, 8), max_size=3), st.lists(st.integers(0, 8), min_size=4, max_size=4)
)


@given(st.lists(ROUND, max_size=6), st.integers(25, 40))
def test_resume_replays_any_rounds_that_go_on(
    rounds: list[tuple[list[int], list[int]]], budget: int
) -> None:
    prompt, reader = fresh(budget)
    row = prompt.row
    row.held += PROMPT[:-1]
    for draft, samples in rounds:
        accept(row, draft, samples, [-0.1 * token for token in samples])
    assert row.end is None
    logprobs = [logprob for _, logprob, *_ in reader.taken]
    journal = Journal.from_text(Journal.of(prompt, logprobs).to_text())
    again, told = fresh(budget)
    journal.require(again, row.held, row.pending)
    assert not told.taken
    journal.replay(again)
    assert told.taken == reader.taken
    for name in ("held", "pending", "step", "remaining", "trace", "end"):
        assert getattr(again.row, name) == getattr(row, name)


@pytest.mark.parametrize(
    "rounds",
    [
        [Delivered((4, 5), (4,), ())],
        [Delivered((4, 5), (), ())],
        [Delivered((4, 5), (6, 7), (0.0, 0.0))],
        [Delivered((), (EOS,), (0.0,))],
        [Delivered((), (4,), (0.0,))] * 3,
    ],
    ids=["no log-probability", "nothing", "not its draft", "an end", "budget"],
)
def test_a_journal_that_does_not_go_on_is_refused(rounds: list[Delivered]) -> None:
    prompt, _ = fresh(2)
    with pytest.raises(BadInput, match="journal"):
        Journal(1, 0, tuple(rounds)).require(prompt, [1, 2, 3], 4)


def test_a_journal_leads_to_its_state_and_no_other() -> None:
    prompt, _ = fresh(9)
    journal = Journal(1, 0, (Delivered((4, 5), (4, 6), (0.0, 0.0)),))
    journal.require(prompt, [1, 2, 3, 4], 6)
    for tokens, pending in (([1, 2, 3], 6), ([1, 2, 3, 4], 5), ([1, 2, 3, 5], 6)):
        with pytest.raises(BadInput, match="elsewhere"):
            journal.require(prompt, tokens, pending)


@pytest.mark.parametrize(
    "text", ["", "[]", "[2, 0, 0, []]", '[1, 0, 0, [{"draft": 3}]]', "{}", "[1, 2"]
)
def test_a_malformed_journal_is_refused(text: str) -> None:
    for said in (text, b64encode(text.encode()).decode()):
        with pytest.raises(BadInput, match="journal"):
            Journal.from_text(said)


def test_the_key_tells_apart_what_decides_the_text() -> None:
    request = Request((1, 2, 3), 10, Sampling(temperature=1.0, seed=4))

    def key(of: Request, eos: frozenset[int] = frozenset({9}), depth: int = 3, ns: str = "") -> str:
        return generation_key(of, eos, depth, ns)

    others = [
        key(replace(request, prompt=(1, 2))),
        key(replace(request, max_tokens=11)),
        key(replace(request, stop_strings=("a",))),
        key(replace(request, first_step=1)),
        key(replace(request, sampling=Sampling(temperature=1.0, seed=5))),
        key(replace(request, sampling=Sampling(temperature=1.0))),
        key(replace(request, sampling=Sampling(temperature=1.0, seed=4, rng="sequential"))),
        key(
            replace(
                request,
                sampling=Sampling(
                    temperature=1.0, seed=4, logits=LogitsOptions(logit_bias=((1, 2.0),))
                ),
            )
        ),
        key(request, frozenset({8, 9})),
        key(request, depth=2),
        key(request, ns="adapter"),
    ]
    assert len({key(request), *others}) == 1 + len(others)
    assert key(request) == key(Request((1, 2, 3), 10, Sampling(temperature=1.0, seed=4)))
