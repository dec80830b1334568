"""P7 to P11: what storing, restoring and finding states costs, beside the bare disk and model.

Cold means that the kernel was told to forget the file's pages; what lies beneath it may not have.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import KVCache, load_prompt_cache
from xxhash import xxh3_128

from engine import Target
from engine.cache.codecs import CODEC, Decoder, encode
from engine.cache.entry import Entry, Identity, Read, Reuse, TensorSpec, Tokens
from engine.cache.store import Store
from engine.cache.stored import Stored
from engine.prefill import Cohort, Prompt
from engine.rounds import Row
from engine.sampling import Greedy, RowSampling
from engine.tiers import open_tiers
from parity.bench.loops import Collector
from parity.bench.pairs import Figure, Goal, Pair, Side, interleave
from parity.fuzz.disk.faults import Unsynced

FEW = 7
"""Pairs that tell: these sides differ by more than noise does."""

STORE = Goal("P7", "at least", 0.85, fewest=FEW)
COLD = Goal("P7", "at least", 0.85, fewest=FEW)
WARM = Goal("P7", "at least", 0.95, fewest=FEW)
MEMORY = Goal("P8", "at most", 1.0, fewest=FEW)
CHECKED = Goal("P9", "at most", 1.12, fewest=FEW)
HASHED = Goal("P9", "at most", 1.2, fewest=FEW)
HIT = Goal("P10", "at least", 20.0, fewest=FEW)
SCAN = Goal("P11", "at most", 1.0, fewest=FEW)

LAYERS, ROW = 8, (1, 8, 4096, 128)
"""Keys and values of 16 MiB each: 256 MiB."""

NAMESPACE = "bench"
IDENTITY = Identity("bench", "0" * 64, "0" * 64)
PREFIX = 16_384
"""Tokens of P10."""

ENTRIES, ENTRY_TOKENS, PROMPT_TOKENS = 10_000, 256, 32_768
"""Of P11: entries in the folder, tokens of each, and tokens of the prompt that is looked up."""

CAP = 1 << 40
"""Bytes: nothing is evicted."""


@dataclass(frozen=True, slots=True)
class Large:
    """An entry of 256 MiB."""

    entry: Entry
    read: Read

    @classmethod
    def made(cls) -> Large:
        caches: list[Any] = []
        for layer in range(LAYERS):
            cache: Any = KVCache()
            cache.keys, cache.values = (
                mx.random.normal(ROW, key=mx.random.key(2 * layer + side)) for side in (0, 1)
            )
            cache.offset = ROW[2]
            caches.append(cache)
        mx.eval([cache.state for cache in caches])
        tokens = np.arange(ROW[2], dtype=np.int32)
        return cls(*encode(Stored.of(caches, ROW[2]), NAMESPACE, tokens))


def large_entries(num_pairs: int) -> Iterator[Figure]:
    """P7, P8, P9 on an entry of 256 MiB."""
    large = Large.made()
    with tempfile.TemporaryDirectory(prefix="mlx-parity-bench-") as folder:
        yield from _large(large, Path(folder), max(FEW, num_pairs))


def _large(large: Large, folder: Path, pairs: int) -> Iterator[Figure]:
    nbytes = large.entry.nbytes
    store = Store(folder / "store", IDENTITY, cap_bytes=CAP, codec=CODEC)
    raw = folder / "raw"

    def put() -> None:
        if not store.put(large.entry, large.read):
            raise OSError(f"{folder} cannot hold {nbytes} bytes")

    def dd() -> None:
        what = ["dd", "if=/dev/zero", f"of={raw}", "bs=1M", f"count={nbytes >> 20}", "conv=fsync"]
        subprocess.run(what, check=True, capture_output=True)

    yield _figure(STORE, "256 MiB stored and synced", "dd", "store", dd, put, pairs)

    (file,) = (folder / "store").rglob("*.safetensors")
    unchecked = Store(folder / "store", IDENTITY, cap_bytes=CAP, codec=CODEC, verify=False)

    def restore(which: Store) -> list[Any]:
        found = which.find(np.append(large.entry.tokens, np.int32(0)), NAMESPACE)
        assert found is not None
        decoder = Decoder(found.entry)
        if not which.restore(found.entry, decoder.room):
            raise OSError(f"{file} cannot be read back")
        return [decoder.finish()]

    def cold(work: Callable[[], object]) -> Callable[[], object]:
        def side() -> object:
            with file.open("rb") as opened:
                os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            return Timed(work)

        return side

    def read_raw() -> None:
        buffer = bytearray(1 << 20)
        with file.open("rb", buffering=0) as opened:
            while opened.readinto(buffer):
                pass

    def restore_checked() -> object:
        return restore(store)

    def restore_unchecked() -> object:
        return restore(unchecked)

    if hasattr(os, "posix_fadvise"):
        raw_cold, checked_cold = cold(read_raw), cold(restore_checked)
        unchecked_cold = cold(restore_unchecked)
        yield _figure(COLD, "restored cold", "raw read", "restore", raw_cold, unchecked_cold, pairs)
        yield _figure(
            CHECKED, "checksums, cold", "checked", "unchecked", checked_cold, unchecked_cold, pairs
        )

    def theirs() -> list[Any]:
        caches: list[Any] = load_prompt_cache(str(file))
        mx.eval([cache.state for cache in caches])
        return caches

    yield _figure(WARM, "restored warm", "mlx-lm", "unchecked", theirs, restore_unchecked, pairs)

    data = [np.asarray(large.read(spec)) for spec in large.entry.tensors]

    def one_pass() -> None:
        for array in data:
            xxh3_128(array.data).digest()

    hashed = []
    for _ in range(pairs):
        checked_s, unchecked_s = _seconds(restore_checked), _seconds(restore_unchecked)
        hashed.append(Pair(max(0.0, checked_s - unchecked_s), _seconds(one_pass)))
    yield Figure(HASHED, "checksums, warm", "their cost", "one pass", tuple(hashed))

    tensor = max(spec.nbytes for spec in large.entry.tensors)
    if Path("/proc/self/clear_refs").exists():
        for name, work, result in (("stored", put, 0), ("restored", restore_checked, nbytes)):
            extra = tuple(Pair(max(0, peak(work) - result), tensor) for _ in range(FEW))
            yield Figure(MEMORY, f"extra memory, {name}", "peak", "one tensor", extra)


def peak(work: Callable[[], object]) -> int:
    """By how many bytes the process grows at most while `work` runs (Linux)."""
    mx.clear_cache()
    Path("/proc/self/clear_refs").write_text("5")
    before = _status("VmRSS")
    result = work()
    after = _status("VmHWM")
    del result
    return max(0, after - before)


def _status(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) << 10
    raise OSError(f"/proc/self/status has no {field}")


class Timed:
    """Work that measures itself, since what comes before it does not count."""

    def __init__(self, work: Callable[[], object]) -> None:
        start = time.perf_counter()
        self.result = work()
        self.seconds = time.perf_counter() - start


def hit(target: Target, pairs: int) -> Figure:
    """P10: a prefix of 16,384 tokens processed, beside the same restored from the disk."""
    draw = np.random.default_rng(0)
    ids = tuple(draw.integers(5, target.vocab_size, PREFIX + 1).tolist())
    with tempfile.TemporaryDirectory(prefix="mlx-parity-bench-") as folder:
        first = open_tiers(target, ram_bytes=0, ssd=folder)
        prompt = _prompt(ids)
        samplers = RowSampling([Greedy()])
        start = first.start(target, None, samplers, prompt, target.new_rows())
        cohort = Cohort(start.rows, None, samplers, [prompt])
        prefill_s = _seconds(lambda: _drain(cohort))
        first.keep(target, start.rows, None, 0, ids[:-1])
        first.flush()
        hits = []
        for _ in range(max(FEW, pairs)):
            tiers = open_tiers(target, ram_bytes=0, ssd=folder)
            prompt = _prompt(ids)

            def again(tiers: Any = tiers, prompt: Prompt = prompt) -> None:
                start = tiers.start(target, None, samplers, prompt, target.new_rows())
                mx.eval(start.rows.arrays())

            hits.append(_seconds(again))
            if prompt.cached != PREFIX:
                raise OSError(f"{prompt.cached} of {PREFIX} tokens came back")
    # Processing takes minutes: it is measured once, on the favourable side of the others.
    made = tuple(Pair(prefill_s, seconds) for seconds in hits)
    return Figure(HIT, f"{PREFIX} tokens", "processed", "restored", made)


def _prompt(ids: tuple[int, ...]) -> Prompt:
    return Prompt(ids, Row(Collector(), frozenset(), [], ids[-1], 0, 1))


def _drain(cohort: Cohort) -> None:
    while any(cohort.lacking):
        cohort.step()


def many_entries(pairs: int) -> Iterator[Figure]:
    """P11: a folder of 10,000 entries is opened, and one is found."""
    draw = np.random.default_rng(0)
    spec = TensorSpec("0.0", "F32", (16,))
    with tempfile.TemporaryDirectory(prefix="mlx-parity-bench-") as folder:

        def opened() -> Store:
            return Store(folder, IDENTITY, cap_bytes=CAP, codec=CODEC, files=Unsynced())

        store = opened()
        for _ in range(ENTRIES):
            tokens: Tokens = draw.integers(0, 256, ENTRY_TOKENS).astype(np.int32)
            entry = Entry(NAMESPACE, tokens, CODEC, ("plain:256",), Reuse(True), (spec,))
            store.put(entry, lambda spec: memoryview(bytes(64)))
        scans = tuple(Pair(_seconds(opened), 1.0) for _ in range(max(FEW, pairs)))
        yield Figure(SCAN, f"{ENTRIES} headers read", "seconds", "1 s", scans)
        prompt = np.append(tokens, draw.integers(0, 256, PROMPT_TOKENS)).astype(np.int32)
        finds = []
        for _ in range(max(FEW, pairs)):
            finds.append(Pair(_seconds(lambda: store.find(prompt, NAMESPACE)), 0.001))
            found = store.find(prompt, NAMESPACE)
            assert found is not None
            assert found.count == ENTRY_TOKENS
        yield Figure(SCAN, f"one of {ENTRIES} found", "seconds", "1 ms", tuple(finds))


def _figure(
    goal: Goal,
    name: str,
    over: str,
    under: str,
    top: Callable[[], object],
    bottom: Callable[[], object],
    pairs: int,
) -> Figure:
    return Figure(goal, name, over, under, interleave(_side(top), _side(bottom), pairs))


def _side(work: Callable[[], object]) -> Side:
    def side(_number: int) -> float:
        start = time.perf_counter()
        result = work()
        seconds = time.perf_counter() - start
        return result.seconds if isinstance(result, Timed) else seconds

    return side


def _seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start
