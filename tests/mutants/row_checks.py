"""What must fail in a changed world, for rows of many: see `checks`."""

from __future__ import annotations

from typing import Any

import pytest

from .world import World


def _company(world: World, name: str, *lengths: int, **options: Any) -> Any:
    """Rows of these lengths, each beside its twin alone."""
    company = world["tests.engine.company"]
    prompts = [company.ids(length, seed) for seed, length in enumerate(lengths)]
    return company.Company.of(name, *prompts, **options)


def each_row_as_alone(world: World) -> None:
    """`solitude`: ragged windows, another order, and a row that joins."""
    company = _company(world, "dense", 9, 3, 6)
    company.round([5], [2, 0, 5], seed=1)
    company.round([2, 3], [1, 4, 3], seed=2)
    company = company.selected([2, 0]).joined(_company(world, "dense", 7))
    company.round([4], [0, 4, 1], seed=3)
    company.append(2, seed=4)
    company.check()


def windows_as_alone(world: World) -> None:
    """`solitude`: until columns have been dropped, ragged; and what a row is stored as then."""
    company = _company(world, "gemma4_text", 1, 30, 12)
    for number in range(16):
        company.round([6], [6, number % 7, 3], seed=number)
    company.round([1], [1, 1, 1], seed=17)
    company.check()
    company = _company(world, "gemma4_text", 80, 90)
    company.round([2], [0, 0], seed=18)
    company.check()


def nan_behind_the_ends(world: World) -> None:
    """`padding`: of rejected tokens, and of donors."""
    company = _company(world, "dense", 9, 3, spoils=True)
    company.round([5], [1, 0], seed=1)
    company.round([2], [2, 1], seed=2)
    company.append(3, seed=3)
    company.append(3, seed=4)
    company.check()


def recurrent_rows_as_alone(world: World) -> None:
    """`rollback`: rows that keep other parts of a window, and other forwards."""
    company = _company(world, "hybrid", 9, 3, 6)
    company.round([5], [5, 2, 0], seed=1)
    company.round([5], [0, 3, 3], seed=2)
    company.round([1, 1, 1], [1, 3, 0], seed=3)
    company.append(1, seed=4)
    company.check()


def a_failed_join_changes_nothing(world: World) -> None:
    """`membership`: the last layer fails, and both sides go on."""
    ours, theirs = _company(world, "dense", 9, 3), _company(world, "dense", 4)
    last = ours.rows.caches[-1]
    kind, whole = type(last), type(last).joined

    def breaks(self: Any, *args: Any) -> Any:
        if self is last:
            raise MemoryError("no room")
        return whole(self, *args)

    kind.joined = breaks
    try:
        with pytest.raises(MemoryError):
            ours.rows.joined(theirs.rows)
    finally:
        kind.joined = whole
    try:
        ours.round([3], [1, 2], seed=1)
        ours.append(1, seed=2)
    except world["engine"].LawError as error:
        pytest.fail(str(error))
    ours.check()


def lifted_rows_are_their_own(world: World) -> None:
    """`membership`: what is written to lifted rows is not seen by the row they came from."""
    company = _company(world, "dense", 5)
    company.rows.lifted().forward(world["mlx.core"].array([[60, 61, 62]]))
    twin = company.rows.caches[0]
    assert not world["mlx.core"].any(twin.keys[:, :, twin.offset :]).item()


def other_kinds_are_refused(world: World) -> None:
    """`membership`: a plain row without tokens beside quantized ones."""
    quantized, empty = _company(world, "quantized", 4, 3), _company(world, "dense", 0)
    try:
        quantized.rows.joined(empty.rows)
    except world["engine"].LawError:
        return
    pytest.fail("they were joined")


def a_model_of_one_position_is_refused(world: World) -> None:
    """The probe of rows looks at every row."""
    company = world["tests.engine.company"]
    (reason,) = company.model_of("recurrent_gemma").cannot_share or ("",)
    assert "computed wrongly" in reason


def draft_rows_as_alone(world: World) -> None:
    """`companion`: rows that lag beside rows that do not, reordered and stored."""
    mx, company = world["mlx.core"], world["tests.engine.company"]
    sampling = world["engine.sampling"]
    greedy = sampling.RowSampling([sampling.Greedy()])
    provider = company.provider_of("dense")

    def fresh(held: list[int]) -> Any:
        rows = provider.open(greedy)
        rows.prefill(mx.array([held], dtype=mx.uint32), ())
        return rows

    held = [company.ids(4, 0), company.ids(6, 1), company.ids(9, 2)]
    rows = fresh(held[0]).joined(fresh(held[1])).joined(fresh(held[2]))
    for number, kept in enumerate(([3, 0, 3], [3, 1, 0], [0, 3, 2], [1, 1, 1])):
        pending = company.ids(3, 10 + number)
        drafts = rows.draft(pending, 3, [0] * 3, None).tokens.tolist()
        for r in range(3):
            alone = fresh(held[r]).draft(pending[r : r + 1], 3, [0], None).tokens.tolist()
            assert drafts[r] == alone[0]
            held[r] += [pending[r], *drafts[r][: kept[r]]]
        rows.commit(kept, ())
        assert [rows.capture(r).processed_tokens for r in range(3)] == list(map(len, held))
        rows = rows.selected([2, 0, 1])
        held = [held[2], held[0], held[1]]


def samplers_go_with_their_rows(world: World) -> None:
    """`solitude`: a sampled row stays sampled, with its own seed."""
    mx, sampling = world["mlx.core"], world["engine.sampling"]
    options = world["engine"].Sampling
    own = [sampling.Positional(options(1.0, seed=seed)) for seed in range(3)]
    rows = sampling.RowSampling(own).selected([2, 0])
    logprobs = mx.zeros((2, 40, 64)) - mx.log(mx.array(64.0))
    drawn = rows.sample(logprobs, [0, 0])
    for r, seed in enumerate((2, 0)):
        assert mx.array_equal(drawn[r], own[seed].draw(logprobs[r], 0))


class _Taker:
    """Takes tokens until its `last`-th, at which it raises."""

    def __init__(self, last: int) -> None:
        self.last = last
        self.tokens: list[int] = []

    def take(self, token: int, logprob: float, *, from_draft: bool, round: int) -> bool:
        if len(self.tokens) + 1 == self.last:
            raise KeyError("the consumer broke")
        self.tokens.append(token)
        return True


def _rounds(world: World, budgets: list[int], *, drafts: bool, last: int = 99) -> Any:
    """The same prompt in each row; the first one's consumer raises at its `last`-th token."""
    mx, company = world["mlx.core"], world["tests.engine.company"]
    rounds, sampling = world["engine.rounds"], world["engine.sampling"]
    target = company.model_of("dense")
    prompt = target.encode("Name: Anna. Say it again: Anna. Say it again: ")
    group = None
    for number, budget in enumerate(budgets):
        own = sampling.RowSampling([sampling.Greedy()])
        state, draft = target.new_rows(), None
        state.forward(mx.array([prompt[:-1]]))
        if drafts:
            draft = world["engine.drafters.ngram"].NgramProvider().open(own)
            draft.prefill(mx.array([prompt[:-1]]), ())
        taker = _Taker(99 if number else last)
        row = rounds.Row(taker, frozenset(), list(prompt[:-1]), prompt[-1], 0, budget)
        one = rounds.Rounds(state, draft, own, [row], depth=4, vocab_size=target.vocab_size)
        group = one if group is None else group.joined(one)
    return group


def a_failing_consumer_ends_its_row(world: World) -> None:
    """`isolation`: the row keeps nothing of its draft, and the other goes on."""
    for last in (2, 3, 4):
        group = _rounds(world, [12, 12], drafts=True, last=last)
        try:
            while group.rows[0].end is None:
                group.step()
        except KeyError as error:
            pytest.fail(f"the group broke: {error}")
        assert group.rows[0].end == "failed"
        assert group.rows[0].trace[-1].retained == 0
        assert group.target.processed == [len(row.held) for row in group.rows]
        group = group.selected([1])
        while not group.done:
            group.step()
        assert len(group.rows[0].consumer.tokens) == 12


def a_short_budget_drafts_little(world: World) -> None:
    """`solitude`: as many drafts as the row would be given alone."""
    group = _rounds(world, [1, 12], drafts=True)
    group.step()
    short, long = (row.trace[0].draft for row in group.rows)
    assert len(short) == 1
    assert len(long) > 1


def selection_settles_first(world: World) -> None:
    """`position`: the round that was launched ahead is taken back."""
    group = _rounds(world, [12, 12], drafts=False)
    group.step()
    try:
        group = group.selected([1])
    except world["engine"].LawError as error:
        pytest.fail(str(error))
    assert group.target.processed == [len(group.rows[0].held)]
