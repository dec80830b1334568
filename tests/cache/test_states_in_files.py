"""Every cache kind through the SSD tier, a restart, and mlx-lm's own loader."""

from __future__ import annotations

import errno
import shutil
import threading
import tracemalloc
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import load_prompt_cache

from engine.cache.codecs import CODEC, Decoder, encode
from engine.cache.entry import Buffer, Generation, Identity, Reuse, Step, TensorSpec
from engine.cache.header import generation_namespace
from engine.cache.inspect import clean
from engine.cache.prompt_cache import Kept
from engine.cache.ssd import SSD
from engine.cache.store import Store
from engine.cache.stored import Stored
from engine.state.checkpoint import Attachment, Checkpoint, capture
from engine.state.forms import Held
from tests.engine.company import ids

from .faults import Watch, at
from .kinds import KINDS, fed, feed, restored, same_held, stored

IDENTITY = Identity("model", "f" * 64, "7" * 64)


def open_store(folder: Path) -> Store:
    return Store(folder, IDENTITY, cap_bytes=1 << 30, codec=CODEC)


def companion(count: int) -> Checkpoint:
    tensors = (mx.arange(count, dtype=mx.int32), mx.full((1, 1, 4), 0.1, mx.bfloat16))
    return Checkpoint(count, Attachment("draft-v1:abc", {"layers": "plain:3", "n": 7}, tensors))


@pytest.mark.parametrize("drafted", [False, True], ids=["alone", "drafted"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_state_survives_a_restart_and_mlx_lm_opens_its_file(
    kind: str, drafted: bool, tmp_path: Path
) -> None:
    """`roundtrip`: the same bytes and the same future, from the file alone."""
    tokens = np.array(ids(19, 1), np.int32)
    rows = fed(kind, tokens.tolist())
    value = stored(kind, rows)
    entry, read = encode(value, "plain", tokens, [companion(19)] if drafted else [])
    assert open_store(tmp_path).put(entry, read)

    store = open_store(tmp_path)
    found = store.find(np.append(tokens, np.int32(3)), "plain")
    assert found is not None
    assert (found.count, found.entry.reuse) == (19, entry.reuse)
    decoder = Decoder(found.entry)
    assert store.restore(found.entry, decoder.room)
    again, checkpoints = decoder.finish()
    assert same_held(again.leaves, value.leaves)
    assert len(checkpoints) == drafted
    for checkpoint in checkpoints:
        own = companion(19).attachment
        assert (checkpoint.attachment.schema, checkpoint.attachment.metadata) == (
            own.schema,
            own.metadata,
        )
        for ours, theirs in zip(checkpoint.attachment.tensors, own.tensors, strict=True):
            assert ours.dtype == theirs.dtype
            assert mx.array_equal(ours, theirs)
    (file,) = tmp_path.rglob("*.mlxkv.safetensors")
    caches = load_prompt_cache(str(file))
    assert same_held(capture(caches), value.leaves)
    file.write_bytes(b"\0" * file.stat().st_size)  # nothing points at it any more
    assert mx.array_equal(feed(restored(kind, again), [7]), feed(rows, [7]))


def test_an_unfinished_generation_keeps_its_state(tmp_path: Path) -> None:
    """`resume`: found by its key only, with the drafter's state of the same boundary."""
    tokens = np.array(ids(9, 1), np.int32)
    value = stored("hybrid", fed("hybrid", tokens.tolist()))
    generation = Generation("key", "plain", 5, (1, 2, 3, 4), 7, 11, True, (1, 2))
    namespace = generation_namespace("key")
    assert open_store(tmp_path).put(*encode(value, namespace, tokens, [companion(9)], generation))
    store = open_store(tmp_path)
    assert store.find(np.append(tokens, np.int32(3)), "plain") is None
    entry = store.find_generation_checkpoint(tokens[:5], "key", "plain")
    assert entry is not None
    assert entry.generation == generation
    decoder = Decoder(entry)
    assert store.restore(entry, decoder.room)
    again, (checkpoint,) = decoder.finish()
    assert same_held(again.leaves, value.leaves)
    assert checkpoint.processed_tokens == 9


def test_peak_memory_is_the_result_and_one_tensor(tmp_path: Path) -> None:
    """P8: a write needs less than a tensor besides, a restore the result and one tensor."""
    count, tensor_bytes = 64, 64 * 1024 * 4
    pairs = [tuple(mx.full((1, 4, count, 256), n + side) for side in (0, 1)) for n in range(8)]
    caches = tuple(Held("plain", (count,), pair) for pair in pairs)
    mx.eval([held.arrays for held in caches])
    value, tokens = Stored(count, caches), np.arange(count, dtype=np.int32)
    assert value.arrays[0].nbytes == tensor_bytes
    entry, read = encode(value, "", tokens)
    store = open_store(tmp_path)

    tracemalloc.start()
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    assert store.put(entry, read)
    assert mx.get_peak_memory() - before < tensor_bytes
    assert tracemalloc.get_traced_memory()[1] < tensor_bytes
    tracemalloc.reset_peak()
    mx.reset_peak_memory()
    before, traced = mx.get_active_memory(), tracemalloc.get_traced_memory()[0]
    found = store.find(np.append(tokens, np.int32(3)), "")
    assert found is not None
    decoder = Decoder(found.entry)
    assert store.restore(found.entry, decoder.room)
    peak = mx.get_peak_memory() - before + tracemalloc.get_traced_memory()[1] - traced
    tracemalloc.stop()
    assert peak <= value.nbytes + 1.5 * tensor_bytes


def test_a_state_is_read_in_steps_that_may_be_refused(tmp_path: Path) -> None:
    """`exclusive`: a tensor is touched inside a step only; a refused step leaves nothing."""
    tokens = np.array(ids(5, 1), np.int32)
    entry, read = encode(stored("dense", fed("dense", tokens.tolist())), "", tokens)
    inside, reads = [False], []

    def watched(spec: TensorSpec) -> Buffer:
        assert inside[0]
        reads.append(spec.name)
        return read(spec)

    def run(step: Step) -> None:
        if len(reads) == 3:
            raise RuntimeError("a request came")
        inside[0] = True
        step()
        inside[0] = False

    store = open_store(tmp_path)
    assert not store.put(entry, watched, run)
    assert len(reads) == 3
    assert not list(tmp_path.rglob("*.safetensors"))
    assert store.put(entry, read)


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("spilled", [False, True])
def test_what_others_removed_is_written_again(spilled: bool, whole: bool, tmp_path: Path) -> None:
    """What is in memory still is not durable because it once was."""
    kept, _ = unfinished(6)
    store = open_store(tmp_path)
    ssd = SSD(store)
    ssd.serve_from(lambda tokens, namespace: kept)
    for again in (False, True):
        if again and whole:
            shutil.rmtree(tmp_path)
        elif again:
            clean(tmp_path, max_bytes=0)
        if spilled:
            assert ssd.spill(kept)
        else:
            ssd.schedule(kept.tokens, kept.namespace)
        report = ssd.flush()
        assert report is not None
        assert report.durable
        assert len(list(tmp_path.rglob("*.safetensors"))) == 1


def test_a_stored_state_that_is_of_no_use_gives_way(tmp_path: Path) -> None:
    """It is removed, and what was behind it is found: else nothing would be, for ever."""
    tokens = np.array(ids(9, 1), np.int32)
    store = open_store(tmp_path)
    useful = stored("sliding", fed("sliding", tokens[:6].tolist()))
    assert store.put(*encode(useful, "plain", tokens[:6], [companion(6)]))
    entry, read = encode(stored("dense", fed("dense", tokens.tolist())), "plain", tokens)
    useless = replace(entry, layout=("nonsense:3",), reuse=Reuse(False))
    assert store.put(useless, read)
    ssd, prompt = SSD(open_store(tmp_path)), np.append(tokens, np.int32(3))
    assert ssd.promises(prompt, "plain") == 9
    kept = ssd.fetch(prompt, "plain")
    assert kept is not None
    assert len(kept.tokens) == 6
    assert (ssd.promises(prompt, "plain"), ssd.store.counts.damaged) == (6, 1)
    assert not ssd.store.would_find(tokens, "plain")
    assert len(list(tmp_path.rglob("*.safetensors"))) == 1


def test_what_cannot_be_read_now_is_a_miss_and_stays(tmp_path: Path) -> None:
    """And is asked for once."""
    tokens, watch = np.array(ids(9, 1), np.int32), Watch()
    store = Store(tmp_path, IDENTITY, cap_bytes=1 << 30, codec=CODEC, files=watch.files())
    assert store.put(*encode(stored("dense", fed("dense", tokens.tolist())), "plain", tokens))
    prompt = np.append(tokens, np.int32(3))
    with watch.failing(at(0, errno.EIO, on=True)):
        assert SSD(store).fetch(prompt, "plain") is None
    assert store.counts.misses == 1
    assert SSD(store).fetch(prompt, "plain") is not None


def unfinished(count: int) -> tuple[Kept, Generation]:
    """A generation from a prompt of 4 tokens whose state holds `count`."""
    tokens = np.array(ids(count, 1), np.int32)
    kept = Kept("plain", tokens, stored("dense", fed("dense", tokens.tolist())))
    return kept, Generation("key", "plain", 4, (*tokens[4:].tolist(), 9), 9, 0, False)


@pytest.mark.parametrize("steps", [0, 1, 3, 5, 1000])
def test_a_checkpoint_of_a_generation_that_has_ended_is_not_written(
    steps: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Ended before it was written, or while it was; nothing is wrong with that."""
    (kept, generation), store = unfinished(6), open_store(tmp_path)
    ssd, left = SSD(store), iter([True] * steps)
    assert ssd.checkpoint(kept, generation, lambda: next(left, False))
    found = store.find_generation_checkpoint(kept.tokens[:4], "key", "plain")
    assert (found is not None) == (steps == 1000) == bool(list(tmp_path.rglob("*.safetensors*")))
    report = ssd.flush()
    assert report is not None
    assert report.durable
    assert not caplog.messages
    assert store.counts.failed == 0


@pytest.mark.parametrize("ended", [False, True])
def test_of_the_checkpoints_that_wait_the_latest_is_enough(ended: bool, tmp_path: Path) -> None:
    """And an older one does not take the place of what is written at once when all is closed."""
    store = open_store(tmp_path)
    ssd = SSD(store)
    asked = threading.Semaphore(0)
    ssd.start(asked.release)
    assert ssd.checkpoint(*unfinished(6), lambda: True)
    assert asked.acquire(timeout=10)  # this one is being written, and waits for its first step
    for count in (7, 8):
        assert ssd.checkpoint(*unfinished(count), lambda: True)
    assert ssd._spill_queue.counts.pending == 2
    if ended:
        ssd.finished("key")
    else:
        assert ssd.suspend(*unfinished(9))
    report = ssd.flush()
    assert report is not None
    assert report.durable
    found = store.find_generation_checkpoint(unfinished(6)[0].tokens[:4], "key", "plain")
    assert (0 if found is None else len(found.tokens)) == (0 if ended else 9)
    assert store.counts.stored == (0 if ended else 1)
