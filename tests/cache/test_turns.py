"""What the next turn finds after a restart, and what nobody may ever find."""

from __future__ import annotations

import errno
import shutil
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from engine import DraftProvider, Engine, Finish, Request, Target, open_drafter
from engine.cache import prompt_cache
from engine.cache.files import Files
from engine.tiers import Tiers, open_tiers
from tests.engine.pools import OWN, PAIRS, drafter_of, spec_of, target_of
from tests.engine.test_adapters import fresh, write_adapter


def answer(
    target: Target,
    request: Request,
    tiers: Tiers,
    drafter: DraftProvider | None = None,
) -> Finish:
    """By an engine of its own, under whatever adapter is mounted on the target."""
    base = target if target.adapter is None else target.adapter.base
    adapters = {} if base is target else {"own": target}
    engine = Engine(base, [drafter] if drafter else [], adapters=adapters, tiers=tiers)
    stream = engine.submit(request, adapter=next(iter(adapters), None))
    while engine.turn():
        pass
    engine.close()
    return stream.result()


@pytest.mark.parametrize(("family", "kind"), PAIRS)
def test_the_second_turn_goes_on_after_a_restart(family: str, kind: str, tmp_path: Path) -> None:
    """`roundtrip`: prompt, answer and the next question; at most one token of the first is lost."""
    target, drafter = target_of(family), drafter_of(family, kind)
    first = Request(
        tuple(target.encode("Name: Anna. Say it again: The sailor has a red boat. ")), 12
    )
    told = answer(target, first, open_tiers(target, ssd=tmp_path), drafter)
    prompt = first.prompt + told.tokens + tuple(target.encode(" And then? "))
    second = replace(first, prompt=prompt)
    warm = answer(target, second, open_tiers(target, ssd=tmp_path), drafter)
    cold = answer(target, second, Tiers(), drafter)
    assert warm.usage.cached_tokens >= len(first.prompt) - 1
    assert (warm.tokens, warm.text) == (cold.tokens, cold.text)
    if (
        family,
        kind,
    ) not in OWN:  # that layer's cache begins with a request, and a kept one goes on
        assert warm.rounds == cold.rounds


def test_a_prompt_cache_that_fails_costs_a_hit_only(monkeypatch: pytest.MonkeyPatch) -> None:
    target = target_of("dense")
    request = Request(tuple(target.encode("Name: Anna. Say it again: ")), 12)
    tiers, cold = open_tiers(target), answer(target, request, Tiers())
    answer(target, request, tiers)

    def fails(*_: object) -> None:
        raise RuntimeError("no memory")

    monkeypatch.setattr(prompt_cache, "_hit", fails)
    told = answer(target, request, tiers)
    assert told.usage.cached_tokens == 0
    assert told == cold


def test_a_full_disk_is_said_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """However many states it does not take, and at the end."""

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    target = target_of("dense")
    requests = [Request(tuple(target.encode(text)), 12) for text in ("Name: Anna.", "The end")]
    monkeypatch.setattr(Files, "write", full)
    tiers = open_tiers(target, ssd=tmp_path, checkpoint_tokens=3)
    with Engine(target, tiers=tiers) as engine:
        for stream in [engine.submit(request) for request in requests]:
            stream.result()
    (said,) = caplog.messages
    assert "No space left on device" in said
    assert not [file for file in tmp_path.rglob("*") if file.is_file()]


def test_what_nobody_uses_leaves_the_memory_whatever_else_is_served(tmp_path: Path) -> None:
    """Also where no pause is as long as the time after which it has to leave."""
    target = target_of("dense")
    old, others = (Request(tuple(target.encode(text)), 2) for text in ("Name: Anna.", "The end"))
    tiers = open_tiers(target, ssd=tmp_path, demote_after_s=0.3)
    cache = tiers._cache
    assert cache is not None
    with Engine(target, tiers=tiers) as engine:
        engine.submit(old).result()
        held = np.array(old.prompt[:-1], np.int32)
        namespace = target.namespace()
        deadline = time.monotonic() + 30
        while cache.holding(held, namespace) is not None:
            engine.submit(others).result()
            time.sleep(0.1)
            assert time.monotonic() < deadline


def copied(folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(folder, tmp_path / "model"))


def change_a_weight(folder: Path) -> None:
    file = str(folder / "model.safetensors")
    loaded: Any = mx.load(file)
    weights: dict[str, mx.array] = dict(loaded)
    name = min(weights)
    weights[name] = weights[name] * 1.001
    mx.eval(weights)
    mx.save_safetensors(file, weights, metadata={"format": "mlx"})


def test_weights_replaced_at_one_path_are_another_model(tmp_path: Path) -> None:
    """`identity`: the folder, its config and its sizes stay what they were, one number does not."""
    folder = copied(target_of("dense").path, tmp_path)
    request = Request(tuple(target_of("dense").encode("Name: Anna. Say it again: ")), 8)
    first = Target.load(folder)
    answer(first, request, open_tiers(first, ssd=tmp_path / "states"))
    assert answer(first, request, open_tiers(first, ssd=tmp_path / "states")).usage.cached_tokens
    change_a_weight(folder)
    second = Target.load(folder)
    told = answer(second, request, open_tiers(second, ssd=tmp_path / "states"))
    assert told.usage.cached_tokens == 0


def test_another_adapter_or_draft_never_hits(tmp_path: Path) -> None:
    """`identity`: beside one base, in one folder of states, in memory and on the disk."""
    base = target_of("dense")
    request = Request(tuple(base.encode("Name: Anna. Say it again: ")), 8)
    adapted = [base.adapted(write_adapter(tmp_path / str(n), fresh(), seed=n)) for n in (1, 2)]
    folder = copied(Path(spec_of("dense", "two-model").removeprefix("two-model:")), tmp_path)
    drafts: list[DraftProvider | None] = [drafter_of("dense", "two-model")]
    change_a_weight(folder)
    drafts.append(open_drafter(f"two-model:{folder}", base))
    who: list[tuple[Target, DraftProvider | None]] = [
        (base, None),
        *((one, None) for one in adapted),
        *((base, draft) for draft in drafts),
        (base, drafter_of("dense", "ngram")),
    ]
    for first in (True, False):
        tiers = open_tiers(base, ssd=tmp_path / "states")
        for target, drafter in who:
            told = answer(target, request, tiers, drafter)
            assert bool(told.usage.cached_tokens) is not first
