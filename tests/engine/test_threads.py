"""Each kind of drafter, opened in one thread and drafting in another."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import mlx.core as mx
import pytest

import fixtures
from engine import DraftProvider, Engine, Target, open_drafter

from .pools import PAIRS, pool, spec_of


def opened(family: str, kind: str) -> tuple[Target, DraftProvider | None]:
    """Target and drafter, of whose arrays no forward has been asked for."""
    try:
        target = Target.load(fixtures.target_dir(family))
        return target, open_drafter(spec_of(family, kind), target)
    finally:
        mx.clear_streams()  # MLX aborts the process at its end if the thread is gone before


@pytest.mark.parametrize(("family", "kind"), PAIRS)
def test_a_drafter_drafts_in_another_thread_than_it_was_opened_in(family: str, kind: str) -> None:
    """What an opener leaves lazy belongs to its thread, and no other thread may evaluate it."""
    with ThreadPoolExecutor(1) as elsewhere:
        target, drafter = elsewhere.submit(opened, family, kind).result()
    own = pool(family, kind)
    with Engine(target, [drafter] if drafter else []) as engine:
        served = [engine.submit(request) for request in own.requests[:5]]
        for stream, alone in zip(served, own.alone, strict=False):
            assert stream.result().rounds == alone.rounds
