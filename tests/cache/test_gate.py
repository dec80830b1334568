"""Write steps and forwards never run at the same time (law `exclusive`)."""

from __future__ import annotations

import threading
import time

import pytest

from engine.cache.gate import Gate, Rejected


def test_exclusive_steps_run_on_the_model_thread_between_forwards() -> None:
    gate = Gate()
    forward = threading.Lock()
    ran: list[int] = []
    threads: set[int] = set()

    def step(number: int) -> None:
        assert forward.acquire(blocking=False), "a step beside a forward"
        threads.add(threading.get_ident())
        ran.append(number)
        forward.release()

    def write(first: int) -> None:
        for number in range(first, first + 50):
            gate.run(lambda number=number: step(number))  # type: ignore[misc]

    writers = [threading.Thread(target=write, args=(first,)) for first in (0, 100)]
    for writer in writers:
        writer.start()
    while any(writer.is_alive() for writer in writers):
        with forward:
            time.sleep(0.0001)
        gate.serve()
    assert threads == {threading.get_ident()}
    assert [n for n in ran if n < 100] == list(range(50))
    assert [n for n in ran if n >= 100] == list(range(100, 150))


def test_a_step_that_fails_fails_its_writer_and_nobody_else() -> None:
    gate = Gate()
    caught: list[BaseException] = []

    def fail() -> None:
        raise OSError("no space")

    def write() -> None:
        try:
            gate.run(fail)
        except OSError as error:
            caught.append(error)
        gate.run(lambda: None)

    writer = threading.Thread(target=write)
    writer.start()
    deadline = time.monotonic() + 10
    while writer.is_alive() and time.monotonic() < deadline:
        gate.serve()
    assert not writer.is_alive()
    assert [str(error) for error in caught] == ["no space"]


def test_a_closed_gate_rejects_who_waits_and_who_comes() -> None:
    gate = Gate()
    rejected: list[str] = []

    def write() -> None:
        try:
            gate.run(lambda: rejected.append("ran"))
        except Rejected as error:
            rejected.append(str(error))

    writer = threading.Thread(target=write)
    writer.start()
    while not gate.asks:
        time.sleep(0.001)
    gate.close()
    writer.join(10)
    assert rejected == ["the model thread takes no more write steps"]
    with pytest.raises(Rejected):
        gate.run(lambda: None)
    assert not gate.serve()


def test_the_model_thread_is_woken_for_a_step() -> None:
    woken = threading.Event()
    gate = Gate(woken.set)
    writer = threading.Thread(target=lambda: gate.run(lambda: None))
    writer.start()
    assert woken.wait(10)
    assert gate.serve()
    writer.join(10)
