"""What must fail in a world whose durable tier is wrong: a little of each row of its rig."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import tempfile
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import KVCache

import fixtures

from .world import World


def _holds(world: World, module: str, row: str, count: int) -> None:
    """Some of a row of the tier's rig, in that world."""
    budget = world["parity.fuzz.disk.budget"].Budget(count, 60.0)
    run: Callable[[Any], None] = getattr(world[f"parity.fuzz.disk.{module}"], row)
    run(budget)
    assert not budget.violations, budget.violations
    assert budget.done


def crash_images(world: World) -> None:
    """`atomic`, `durable`: what was acknowledged outlives a loss of power."""
    _holds(world, "crashes", "crash_images", 400)


def flipped_bits(world: World) -> None:
    """`damage`: bytes that are not what was written are not used."""
    _holds(world, "damage", "flips", 20)


def flipped_header_bits(world: World) -> None:
    """`damage`: a header that is not what was written is not believed."""
    _holds(world, "damage", "header_flips", 1)


def files_mixed_up(world: World) -> None:
    """`damage`: a whole file in another's place is not used for it."""
    _holds(world, "damage", "mixed_up", 40)


def model_beside_the_store(world: World) -> None:
    """`longest-prefix`, `supersede`, `cap`: every operation answers as a list would."""
    _holds(world, "sequences", "sequences", 25)


def identities(world: World) -> None:
    """`identity`: nothing is used under another identity."""
    _holds(world, "names", "identities", 90)


def temporaries(world: World) -> None:
    """`atomic`: orphans go, what a writer holds stays."""
    _holds(world, "intruders", "temporaries", 20)


def failing_syncs(world: World) -> None:
    """`durable`: what was not synced is not published."""
    _holds(world, "failing", "failing_syncs", 40)


def races_of_processes(world: World) -> None:
    """`tier-agree`: others on the folder cost a miss at most."""
    _holds(world, "races", "processes", 300)


def removed_by_others(world: World) -> None:
    """`durable`: what somebody else removed from the folder is not said to be there."""
    small, contract = world["parity.fuzz.disk.small"], world["parity.fuzz.disk.contract"]
    entry = small.small((1, 2, 3))
    with tempfile.TemporaryDirectory() as name:
        store = contract.opened(Path(name), 1 << 20)
        assert store.put(entry, small.read(entry))
        assert store.would_find(entry.tokens, entry.namespace)
        world["engine.cache.inspect"].clean(Path(name), max_bytes=0)
        assert not store.would_find(entry.tokens, entry.namespace)


def ended_while_it_was_written(world: World) -> None:
    """`resume`: a generation that has ended leaves nothing to go on with."""
    cache: Any = KVCache()
    cache.update_and_fetch(mx.ones((1, 1, 6, 4)), mx.ones((1, 1, 6, 4)))
    tokens = np.arange(6, dtype=np.int32)
    state = world["engine.cache.stored"].Stored.of([cache], 6)
    kept = world["engine.cache.prompt_cache"].Kept("plain", tokens, state)
    generation = world["engine.cache.entry"].Generation("key", "plain", 4, (4, 5, 9), 9, 0, False)
    contract, codec = world["parity.fuzz.disk.contract"], world["engine.cache.codecs"].CODEC
    with tempfile.TemporaryDirectory() as name:
        store, left = contract.opened(Path(name), 1 << 20, codec=codec), iter([True, True])
        world["engine.cache.ssd"].SSD(store).checkpoint(kept, generation, lambda: next(left, False))
        assert store.find_generation_checkpoint(tokens[:4], "key", "plain") is None


def waiting_for_the_disk(world: World) -> None:
    """`tier-agree`: what left the memory is found before it is in a file."""
    cache: Any = KVCache()
    cache.update_and_fetch(mx.ones((1, 1, 6, 4)), mx.ones((1, 1, 6, 4)))
    tokens, tiers = np.arange(6, dtype=np.int32), world["engine.cache.prompt_cache"]
    contract, codec = world["parity.fuzz.disk.contract"], world["engine.cache.codecs"].CODEC
    with tempfile.TemporaryDirectory() as name:
        ssd = world["engine.cache.ssd"].SSD(contract.opened(Path(name), 1 << 20, codec=codec))
        ssd.start(lambda: None)  # its first step waits for `flush`
        memory = tiers.PromptCache(1 << 20, ssd)
        memory.put(tokens, "plain", world["engine.cache.stored"].Stored.of([cache], 6))
        assert memory.demote(0) == 1
        hit = memory.take(np.arange(9, dtype=np.int32), "plain")
        ssd.flush()
        assert hit is not None


def interrupted_while_it_closes(world: World) -> None:
    """`durable`: a Ctrl-C that meets `close` does not end the process before the model thread."""
    at_exit: list[Callable[[], None]] = []
    go, ended = threading.Event(), []
    tiers = world["engine.tiers"].Tiers()
    tiers.flush = lambda: ended.append(go.wait())
    service = world["engine.service"]
    service.atexit = SimpleNamespace(register=at_exit.append, unregister=at_exit.remove)
    engine = service.Engine(
        world["engine.target"].Target.load(fixtures.target_dir("dense")), tiers=tiers
    )
    engine.start()
    here = threading.get_ident()
    with contextlib.suppress(KeyboardInterrupt):
        threading.Timer(0.2, signal.pthread_kill, (here, signal.SIGINT)).start()
        engine.close()
    threading.Timer(0.2, go.set).start()
    for close in reversed(at_exit):
        close()
    assert ended, "the process would be gone by now"


def one_of_twins_cancelled(world: World) -> None:
    """`resume`: of two equal requests in flight, the one that stays is still kept."""
    engine = world["engine"]
    target = engine.Target.load(fixtures.target_dir("dense"))
    request = engine.Request(tuple(target.encode("Name: ")), 40)
    with tempfile.TemporaryDirectory() as folder:
        tiers = world["engine.tiers"].open_tiers(target, ssd=folder, checkpoint_tokens=6)
        host = engine.Engine(target, tiers=tiers)
        first = host.submit(request)
        for _ in range(9):
            host.turn()
        host.submit(request)
        host.turn()
        first.cancel()
        host.turn()
        seen = world["engine.cache.inspect"].look(Path(folder))
        assert any(one.header.entry.generation for one in seen), "it could not go on after a kill"


def reader_whose_loop_is_gone(world: World) -> None:
    """`isolation`: a reader that is no longer there is no reason to fail."""
    engine = world["engine"]
    target = engine.Target.load(fixtures.target_dir("dense"))
    host = engine.Engine(target)
    stream = host.submit(engine.Request(tuple(target.encode("Name: ")), 4))

    async def read() -> None:
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(anext(stream), 0.05)

    asyncio.run(read())
    try:
        host.close()
    except RuntimeError as error:
        raise AssertionError("it cannot be closed") from error


def another_geometry(world: World) -> None:
    """`identity`: arrays that the model never makes are refused, whatever file they came from."""
    target = world["engine.target"].Target.load(fixtures.target_dir("dense"))
    rows = target.new_rows()
    rows.forward(mx.array([[1, 2, 3]]))
    held = list(world["engine.state.checkpoint"].capture(rows.lowered(0)))
    target.rows_holding(held, 3)
    wrong = tuple(array.view(mx.int32) for array in held[0].arrays)
    try:
        target.rows_holding([replace(held[0], arrays=wrong), *held[1:]], 3)
    except world["engine.errors"].BadInput:
        return
    raise AssertionError("float32 is not int32")
