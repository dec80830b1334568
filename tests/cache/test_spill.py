"""The queue of what memory had no room for."""

from __future__ import annotations

import gc
import threading
import weakref

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine import BadInput
from engine.cache.entry import RunStep, Step
from engine.cache.spill import SpillCounts, SpillQueue


class Item:
    """Something whose end can be watched."""

    def __init__(self, name: int = 0) -> None:
        self.name = name


def test_items_are_written_in_order() -> None:
    def write(item: int, _: RunStep) -> bool:
        done.append(item)
        return item != 2

    done: list[int] = []
    queue: SpillQueue[int] = SpillQueue(10, write)
    for number in (1, 2, 3):
        queue.offer(number, 3)
    assert queue.counts == SpillCounts(pending=3, nbytes=9, written=0, failed=0, dropped=0)
    while queue.run_one():
        pass
    assert done == [1, 2, 3]
    assert queue.counts == SpillCounts(pending=0, nbytes=0, written=2, failed=1, dropped=0)


@given(st.integers(0, 20), st.lists(st.integers(0, 9), max_size=12))
def test_the_oldest_are_dropped_and_the_newcomer_never(cap: int, sizes: list[int]) -> None:
    def write(item: int, _: RunStep) -> bool:
        written.append(item)
        return True

    written: list[int] = []
    queue: SpillQueue[int] = SpillQueue(cap, write)
    model: list[int] = []
    for number, size in enumerate(sizes):
        queue.offer(number, size)
        model.append(number)
        while sum(sizes[n] for n in model) > cap and len(model) > 1:
            del model[0]
        assert queue.counts.nbytes == sum(sizes[n] for n in model)
        assert queue.counts.dropped == number + 1 - len(model)
    while queue.run_one():
        pass
    assert written == model


def test_what_is_dropped_and_stored_already_is_not_lost() -> None:
    queue: SpillQueue[int] = SpillQueue(2, lambda item, _: True, lambda item: item % 2 == 0)
    for number in range(7):
        queue.offer(number, 1)
    assert (queue.items, queue.counts.dropped) == ([5, 6], 2)


def test_what_is_in_flight_counts_and_is_not_dropped() -> None:
    queue: SpillQueue[str]

    def write(item: str, _: RunStep) -> bool:
        for number in range(3):
            queue.offer(f"{item}{number}", 6)
            assert queue.counts == SpillCounts(2, 12, 0, 0, number)
        return True

    queue = SpillQueue(10, write)
    queue.offer("a", 6)
    assert queue.run_one()
    assert queue.counts == SpillCounts(pending=1, nbytes=6, written=1, failed=0, dropped=2)


@pytest.mark.parametrize("error", [None, ValueError(), MemoryError(), KeyboardInterrupt()])
@pytest.mark.parametrize("written", [True, False])
def test_an_item_is_freed_whatever_becomes_of_it(
    error: BaseException | None, written: bool
) -> None:
    def write(*_: object) -> bool:
        if error is not None:
            raise error
        return written

    queue: SpillQueue[Item] = SpillQueue(4, write)
    ends = []
    for number in range(4):  # two of them are dropped
        item = Item(number)
        ends.append(weakref.ref(item))
        queue.offer(item, 2)
        del item
    for _ in range(2):
        if isinstance(error, KeyboardInterrupt):
            with pytest.raises(KeyboardInterrupt):
                queue.run_one()
            error.__traceback__ = None
        else:
            assert queue.run_one()
            if error is not None:
                error.__traceback__ = None
    assert not queue.run_one()
    gc.collect()
    assert [end() for end in ends] == [None] * 4
    assert (queue.counts.pending, queue.counts.nbytes, queue.counts.dropped) == (0, 0, 2)


def test_what_waits_can_be_withdrawn_and_what_is_called_off_has_not_failed() -> None:
    queue: SpillQueue[int]

    def write(item: int, _: RunStep) -> bool | None:
        withdrawn.append(queue.withdraw(lambda other: other % 2 == 1))
        return None if item == 1 else True

    withdrawn: list[list[int]] = []
    queue = SpillQueue(10, write)
    for number in (1, 2, 3):
        queue.offer(number, 3)
    assert queue.run_one()
    assert withdrawn == [[3, 1]]
    assert queue.counts == SpillCounts(pending=1, nbytes=3, written=0, failed=0, dropped=0)
    assert queue.run_one()
    assert not queue.run_one()
    assert withdrawn[1:] == [[]]
    assert queue.counts == SpillCounts(pending=0, nbytes=0, written=1, failed=0, dropped=0)


def test_writers_take_turns_and_a_late_one_gives_up() -> None:
    begun, go_on = threading.Event(), threading.Event()
    order: list[int] = []

    def write(item: int, _: RunStep) -> bool:
        begun.set()
        assert go_on.wait(10)
        order.append(item)
        return True

    queue: SpillQueue[int] = SpillQueue(10, write)
    queue.offer(1, 1)
    queue.offer(2, 1)
    first = threading.Thread(target=queue.run_one)
    first.start()
    assert begun.wait(10)
    assert not queue.run_one(timeout_s=0.01)
    second = threading.Thread(target=queue.run_one)
    second.start()
    go_on.set()
    first.join(10)
    second.join(10)
    assert order == [1, 2]


def test_an_item_is_written_in_the_steps_of_whoever_runs_it() -> None:
    steps: list[str] = []

    def run_step(step: Step) -> None:
        steps.append("in")
        step()

    def write(item: str, run_step: RunStep) -> bool:
        run_step(lambda: steps.append(item))
        return True

    queue: SpillQueue[str] = SpillQueue(1, write)
    queue.offer("a", 1)
    assert queue.run_one(run_step)
    assert steps == ["in", "a"]


def test_a_negative_cap_is_refused() -> None:
    with pytest.raises(BadInput, match="at least 0, got -1"):
        SpillQueue(-1, lambda item, _: True)
