"""Requests that start from kept states say what they say without any (R21)."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from engine import Engine, Finish, Limits
from engine.cache.inspect import Seen, look
from engine.cache.prompt_cache import PromptCache
from engine.tiers import Tiers, open_tiers
from tests.engine.pools import PAIRS, Pool, pool, same

WORLDS = 12
"""Per family and drafter; each is cold, warm, restarted, and restarted with damaged files."""


def serve(own: Pool, numbers: Sequence[int], tiers: Tiers, draw: random.Random) -> list[Finish]:
    """Those requests of the pool, up to eight rows at a time."""
    drafters = [own.drafter] if own.drafter else []
    limits = Limits(rows=draw.randint(1, 8), prefill_chunk=draw.choice([1, 7, 2048]))
    engine = Engine(own.target, drafters, limits=limits, tiers=tiers)
    streams = [engine.submit(own.requests[number]) for number in numbers]
    while engine.turn():
        pass
    engine.close()
    return [stream.result() for stream in streams]


def reused(own: Pool, numbers: Sequence[int], finishes: Sequence[Finish]) -> int:
    """How many prompt tokens were not processed, each answer being what it is without tiers."""
    for number, finish in zip(numbers, finishes, strict=True):
        alone = own.alone[number]
        usage = replace(finish.usage, cached_tokens=0)
        assert same(replace(finish, usage=usage), alone), number
    return sum(finish.usage.cached_tokens for finish in finishes)


def damage(folder: Path, draw: random.Random) -> None:
    """Flip a bit, or cut, or remove, in every second file, in an order that never varies."""
    for seen in sorted(look(folder), key=_what):
        file = folder / seen.place
        data = bytearray(file.read_bytes())
        fate = draw.randrange(6)
        if fate == 0:
            data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
        elif fate == 1:
            del data[draw.randrange(len(data)) :]
        if fate == 2:
            file.unlink()
        else:
            file.write_bytes(data)


def _what(seen: Seen) -> tuple[str, bytes, bytes]:
    assert seen.header is not None
    entry = seen.header.entry
    return entry.namespace, entry.tokens.tobytes(), repr(entry.attachments).encode()


@pytest.mark.parametrize(("family", "kind"), PAIRS)
def test_text_from_kept_states_is_the_text(family: str, kind: str, tmp_path: Path) -> None:
    """`roundtrip`, `tier-agree`, `damage`: any order, rows, chunks and caps, both tiers."""
    own = pool(family, kind)
    draw = random.Random(f"{family} {kind}")
    hits = {"cold": 0, "warm": 0, "restarted": 0, "damaged": 0}
    for world in range(WORLDS):
        folder = tmp_path / str(world)
        caps = {"ram_bytes": draw.choice([0, 1 << 18, 1 << 30]), "ssd_bytes": 1 << 30}
        if draw.randrange(4) == 0:
            caps["ssd_bytes"] = 1 << 18
        numbers = [draw.randrange(20) for _ in range(draw.randint(2, 6))]
        for state in hits:
            if state == "damaged":
                damage(folder, draw)
            if state != "warm":
                tiers = open_tiers(own.target, ssd=folder, **caps)
            hits[state] += reused(own, numbers, serve(own, numbers, tiers, draw))
            draw.shuffle(numbers)
    # Only a prompt that came twice can hit in the cold.
    assert all(hits[state] for state in ("warm", "restarted", "damaged")), hits


def test_what_is_idle_moves_to_the_disk_and_comes_back(tmp_path: Path) -> None:
    """The memory of an engine that nobody asks is freed; the next request still finds its state."""
    own = pool("dense", "off")
    tiers = open_tiers(own.target, ssd=tmp_path, demote_after_s=0.05)
    with Engine(own.target, tiers=tiers) as engine:
        engine.submit(own.requests[10]).result()
        deadline = time.monotonic() + 60
        while len(held(tiers)) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not len(held(tiers))
        assert reused(own, [10], [engine.submit(own.requests[10]).result()]) > 0


def held(tiers: Tiers) -> PromptCache:
    assert tiers._cache is not None
    return tiers._cache


def test_serving_and_writing_take_turns(tmp_path: Path) -> None:
    """`exclusive`: requests and write steps take turns, and at last all is durable."""
    own = pool("dense", "two-model")
    assert own.drafter is not None
    tiers = open_tiers(own.target, ram_bytes=1 << 19, ssd=tmp_path)
    with Engine(own.target, [own.drafter], limits=Limits(rows=3), tiers=tiers) as engine:
        numbers = [*range(20), *range(20)]
        streams = [engine.submit(own.requests[number]) for number in numbers]
        reused(own, numbers, [stream.result() for stream in streams])
    again = open_tiers(own.target, ram_bytes=0, ssd=tmp_path)
    draw = random.Random(0)
    assert reused(own, [4, 9, 14], serve(own, [4, 9, 14], again, draw)) > 0
