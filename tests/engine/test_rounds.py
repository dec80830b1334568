"""One round for several rows, on a target that is arithmetic; and what is launched when."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

import mlx.core as mx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlx_lm.models.cache import KVCache

from engine import BadInput, DraftProvider, LawError, Request, Target, generate, open_live
from engine.acceptance import walk
from engine.drafters.source import Draft, Lender, Taps
from engine.host import read
from engine.rounds import Rounds, Row
from engine.sampling import Greedy, RowSampling
from engine.state.donors import Donor
from engine.state.rows import Undo

from .conftest import finish_of, last
from .puppet import Puppet, PuppetRows

V = 11


def successor(history: Sequence[int]) -> int:
    """The toy target's next token: it depends on the whole history."""
    return (sum(history) * 7 + len(history) * 3 + history[-1]) % V


class ToyRows:
    """B histories; the logits of each position point at `successor`. Remembers its windows."""

    steps_back_freely = True
    tapped: Taps = ()

    def __init__(self, histories: list[list[int]]) -> None:
        self.histories = histories
        self.longest_windows = (None,) * len(histories)
        self.due = (False,) * len(histories)
        self.opened: list[int] = []
        self.windows: list[list[list[int]]] = []

    def begin(self, undo: Undo) -> None:
        self.opened = [len(history) for history in self.histories]

    def forward(self, tokens: mx.array) -> mx.array:
        window: list[list[int]] = read(tokens)
        self.windows.append(window)
        rows = []
        for history, ids in zip(self.histories, window, strict=True):
            row = []
            for token in ids:
                history.append(token)
                row.append([float(v == successor(history)) for v in range(V)])
            rows.append(row)
        return mx.array(rows)

    def resolve(self, keep: Sequence[int]) -> None:
        for history, start, kept in zip(self.histories, self.opened, keep, strict=True):
            del history[start + kept :]

    def poison(self, error: BaseException) -> None:
        raise AssertionError("the toy never fails") from error

    def donor(self, windowed: bool) -> Donor:
        raise AssertionError("the toy lends nothing")

    def lowered(self, row: int) -> list[Any]:
        return []

    def arrays(self) -> list[Any]:
        return []

    def selected(self, keep: Sequence[int]) -> Self:
        return type(self)([self.histories[r] for r in keep])

    def joined(self, other: Self) -> Self:
        return type(self)(self.histories + other.histories)


class Rows(PuppetRows):
    """Drafts given per row."""

    def __init__(self, drafts: list[list[int]]) -> None:
        super().__init__(lambda number, step, depth: [], "tail-split", None)
        self.drafts = drafts

    def draft(
        self, pending: Sequence[int], depth: int, steps: Sequence[int], lender: Lender
    ) -> Draft:
        return Draft.of(self.drafts)


class Taker:
    """Takes tokens, at most `most` of them."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.tokens: list[int] = []

    def take(self, token: int, logprob: float, *, from_draft: bool, round: int) -> bool:
        self.tokens.append(token)
        return len(self.tokens) < self.most


@st.composite
def groups(draw: st.DrawFn) -> list[tuple[list[int], list[int], int, int]]:
    """Rows: a history with its pending token, a draft right up to some point, budget, stop."""
    rows = []
    for _ in range(draw(st.integers(1, 4))):
        known = draw(st.lists(st.integers(0, V - 1), min_size=2, max_size=5))
        draft: list[int] = []
        for right in draw(st.lists(st.booleans(), max_size=5)):
            token = successor([*known, *draft])
            draft.append(token if right else (token + 1) % V)
        rows.append((known, draft, draw(st.integers(1, 7)), draw(st.integers(1, 7))))
    depth = max(budget for *_, budget, _ in rows)  # no drafter is asked for more
    return [(known, draft[:depth], budget, stop) for known, draft, budget, stop in rows]


@given(groups())
def test_a_round_of_many_rows_is_many_rounds_of_one(
    rows: list[tuple[list[int], list[int], int, int]],
) -> None:
    """`solitude`, `padding`, `position`: each row as the walk over its own samples says."""
    target = ToyRows([known[:-1] for known, *_ in rows])
    draft = Rows([draft for _, draft, _, _ in rows])
    records = [
        Row(Taker(stop), frozenset(), known[:-1], known[-1], 0, budget)
        for known, _, budget, stop in rows
    ]
    sampling = RowSampling([Greedy()] * len(rows))
    Rounds(target, draft, sampling, records, depth=7, vocab_size=V).step()
    # A row drafts no more than its budget, whatever the others may.
    rows = [(known, drafted[:budget], budget, stop) for known, drafted, budget, stop in rows]
    width = 1 + max(len(d) for _, d, _, _ in rows)
    for (known, drafted, budget, stop), row, held, window in zip(
        rows, records, target.histories, target.windows[0], strict=True
    ):
        own = [known[-1], *drafted]
        assert window == own + [known[-1]] * (width - len(own))
        samples = [successor([*known, *drafted[:i]]) for i in range(len(own))]
        expected = walk(drafted, samples, budget, frozenset())
        taken = expected.emitted[:stop]
        assert isinstance(row.consumer, Taker)
        assert tuple(row.consumer.tokens) == taken
        kept = min(len(taken), expected.accepted)
        assert held == row.held == [*known, *drafted[:kept]]
        assert (row.step, row.remaining) == (len(taken), budget - len(taken))
        stopped = len(taken) == stop
        assert row.end == ("stop" if stopped else expected.end)
    assert draft.committed == [row.trace[0].retained for row in records]


def test_depth_is_capped_by_the_largest_budget() -> None:
    """A drafter is never asked for more than some row can still emit."""
    asked: list[int] = []

    def ask(_number: int, _step: int, depth: int) -> list[int]:
        asked.append(depth)
        return []

    puppet = PuppetRows(ask, "tail-split", None)
    row = Row(Taker(9), frozenset(), [1], 2, 0, 3)
    sampling = RowSampling([Greedy()])
    rounds = Rounds(ToyRows([[1]]), puppet, sampling, [row], depth=7, vocab_size=V)
    while not rounds.done:
        rounds.step()
    assert asked == [3, 2, 1]


@pytest.mark.parametrize("lengths", [(1, 1), ()])
def test_a_draft_for_other_rows_is_an_error(lengths: tuple[int, ...]) -> None:
    class Wrong(PuppetRows):
        def draft(
            self, pending: Sequence[int], depth: int, steps: Sequence[int], lender: Lender
        ) -> Draft:
            return Draft(mx.zeros((1, 1), dtype=mx.uint32), lengths)

    class Lost(ToyRows):
        def poison(self, error: BaseException) -> None:
            pass

    row = Row(Taker(9), frozenset(), [1], 2, 0, 3)
    wrong = Wrong(lambda number, step, depth: [], "tail-split", None)
    rounds = Rounds(Lost([[1]]), wrong, RowSampling([Greedy()]), [row], depth=2, vocab_size=V)
    with pytest.raises(LawError, match="for 1 rows at depth 2"):
        rounds.step()


def recorded(target: Target, live: Any) -> list[list[int]]:
    """Every window that a live state's model is given from now on."""
    windows: list[list[int]] = []

    def model(tokens: mx.array, cache: Any) -> mx.array:
        windows.append(read(tokens)[0])
        logits: mx.array = target.model(tokens, cache=cache)
        return logits

    live.target._model = model
    return windows


def test_plain_decoding_launches_the_next_window_before_it_reads(
    target: Target, prompt: tuple[int, ...]
) -> None:
    """One window ahead at the first token, and none for the last."""
    live = open_live(target)
    windows = recorded(target, live)
    events = generate(target, Request(prompt, 3), live=live)
    next(events)
    assert len(windows) == 3  # the prompt, the first window, and the second ahead of its time
    list(events)
    assert len(windows) == 4


def test_ids_outside_the_vocabulary_never_reach_the_model(
    target: Target, prompt: tuple[int, ...]
) -> None:
    """An embedding has no row for them: what is read there is not defined."""
    v = target.vocab_size
    live = open_live(target)
    windows = recorded(target, live)
    puppet = Puppet(lambda number, step, depth: [v, v + 1, 2**32 - 1, v - 1][:depth])
    plain = finish_of(target, prompt)
    got = last(list(generate(target, Request(prompt, 24), puppet, depth=4, live=live)))
    assert got.tokens == plain.tokens
    assert max(map(max, windows)) == v - 1


class Unknown(KVCache):
    """A kind that the table does not know."""


def test_a_target_without_rollback_decodes_plainly_and_refuses_a_drafter(
    target: Target, prompt: tuple[int, ...], ngram: DraftProvider
) -> None:
    """Refused by name before anything runs; and plain decoding never needs to take back."""
    unknown: Any = Unknown
    live = open_live(target)
    live.target.caches = [unknown() for _ in live.target.caches]
    with pytest.raises(BadInput, match="ngram cannot serve this target: cache kind Unknown"):
        generate(target, Request(prompt, 24), ngram, live=live)
    stop_id = finish_of(target, prompt).tokens[5]
    request = Request(prompt, 24, stop_ids=frozenset({stop_id}))
    plain = last(list(generate(target, request)))
    assert last(list(generate(target, request, live=live))).tokens == plain.tokens
    assert live.target.processed[0] == len(live.held) == len(prompt) + len(plain.tokens)
