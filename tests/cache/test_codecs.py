"""A row's state as an entry and bytes, and mlx-lm's files of the same state, in every kind."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import (
    ArraysCache,
    CacheList,
    ChunkedKVCache,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
    load_prompt_cache,
    save_prompt_cache,
)

from engine import BadInput
from engine.cache.arrays import DTYPES, bytes_of, empty, spec_of
from engine.cache.codecs import CODECS, Decoder, encode
from engine.cache.entry import (
    ITEM_BYTES,
    Buffer,
    Entry,
    Generation,
    Read,
    Reuse,
    TensorSpec,
    Tokens,
)
from engine.cache.foreign import CLASSES, imported
from engine.cache.stored import Stored
from engine.state.checkpoint import Attachment, Checkpoint, capture, restore
from engine.state.kinds import FORMS
from engine.state.quantize import KVQuantization
from tests.engine.company import ids
from tests.engine.families import WINDOW

from .kinds import DELAY, KINDS, fed, feed, held_by, restored, same_held, stored

LENGTHS = (1, WINDOW, 3 * WINDOW)


def tokens_of(count: int) -> Tokens:
    return np.array(ids(count, 1), np.int32)


def decode(entry: Entry, read: Read) -> tuple[Stored, tuple[Checkpoint, ...]]:
    """As a store hands the bytes over."""
    decoder = Decoder(entry)
    for spec, memory in zip(entry.tensors, decoder.room(entry.tensors), strict=True):
        if memory is not None:
            memory[:] = np.frombuffer(read(spec), np.uint8).data
    return decoder.finish()


def array_of(spec: TensorSpec, data: Buffer) -> mx.array:
    (array,), (memory,) = empty([spec])
    memory[:] = np.frombuffer(data, np.uint8).data
    return array


def write(file: Path, entry: Entry, read: Read) -> None:
    """As a safetensors file, with a field of our own as the format has some."""
    arrays = {spec.name: array_of(spec, read(spec)) for spec in entry.tensors}
    mx.save_safetensors(str(file), arrays, {"0.version": "1", **entry.foreign})


def companion(count: int) -> Checkpoint:
    """A drafter's checkpoint, with an array of each size that one could have."""
    tensors = (mx.arange(count, dtype=mx.int32), mx.zeros((1, 1, 4), mx.bfloat16), mx.array([]))
    metadata: dict[str, str | int | bool] = {"layers": "plain:3", "pending_last": False, "n": 7}
    return Checkpoint(count, Attachment("draft-v1:abc", metadata, tensors))


def same_tensors(ours: Sequence[mx.array], theirs: Sequence[mx.array]) -> bool:
    return len(ours) == len(theirs) and all(
        spec_of("", a) == spec_of("", b) and bytes(bytes_of(a)) == bytes(bytes_of(b))
        for a, b in zip(ours, theirs, strict=True)
    )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("length", LENGTHS)
def test_an_entry_gives_back_the_state(kind: str, length: int) -> None:
    """`roundtrip`: every number and byte, dtypes too, and with them the future."""
    rows = fed(kind, ids(length, 1))
    value, tokens = stored(kind, rows), tokens_of(length)
    entry, read = encode(value, "plain", tokens)
    assert (entry.namespace, entry.reuse) == ("plain", value.reuse)
    assert entry.tokens is tokens
    assert value.nbytes <= entry.nbytes <= value.nbytes + 100 * len(entry.tensors)
    again, attachments = decode(entry, read)
    assert attachments == ()
    assert same_held(again.leaves, value.leaves)
    assert again.reuse == value.reuse
    assert list(map(type, again.caches)) == list(map(type, value.caches))
    assert mx.array_equal(feed(restored(kind, again), [7]), feed(rows, [7]))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("length", LENGTHS)
def test_mlx_lm_opens_our_files_and_writes_them_alike(
    kind: str, length: int, tmp_path: Path
) -> None:
    """`roundtrip`: its loader finds the same state; saved by it, every byte is the same."""
    rows = fed(kind, ids(length, 1))
    value = stored(kind, rows)
    entry, read = encode(value, "plain", tokens_of(length), [companion(length)])
    ours, theirs = tmp_path / "ours.safetensors", tmp_path / "theirs.safetensors"
    write(ours, entry, read)
    caches, metadata = load_prompt_cache(str(ours), return_metadata=True)
    assert metadata == {"version": "1"}
    assert same_held(capture(caches), value.leaves)

    save_prompt_cache(str(theirs), caches, {"version": "1"})
    written: Any = mx.load(str(theirs), return_metadata=True)
    arrays, fields = written
    assert fields == {"0.version": "1", **entry.foreign}
    attached = {name for header in entry.attachments for name in header.tensors}
    specs = {spec.name: spec for spec in entry.tensors if spec.name not in attached}
    assert set(arrays) == set(specs)
    for name, array in arrays.items():
        assert spec_of(name, array) == specs[name]
        assert bytes(bytes_of(array)) == bytes(read(specs[name]))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("length", LENGTHS)
def test_files_of_mlx_lm_are_imported(kind: str, length: int, tmp_path: Path) -> None:
    """`roundtrip`: the same numbers and live bytes, and nothing points at the file afterwards."""
    rows = fed(kind, ids(length, 1))
    file = tmp_path / "theirs.safetensors"
    save_prompt_cache(str(file), rows.lowered(0), {"anything": "at all"})
    how = KVQuantization(8, 32, DELAY) if kind == "delayed" else None
    value = imported(file, length, how)
    file.write_bytes(b"\0" * file.stat().st_size)
    assert same_held(value.leaves, held_by(rows))
    assert value.reuse == stored(kind, rows).reuse
    assert mx.array_equal(feed(restored(kind, value), [7]), feed(rows, [7]))


def test_drafters_states_and_generations_make_an_entry_exact() -> None:
    """An attachment comes back as it was, and the entry stands for its boundary only."""
    value, tokens = stored("dense", fed("dense", ids(5, 1))), tokens_of(5)
    checkpoint = companion(5)
    entry, read = encode(value, "draft", tokens, [checkpoint, companion(5)])
    assert value.reuse.trimmable
    assert entry.reuse == Reuse(trimmable=False)
    again, attachments = decode(entry, read)
    assert same_held(again.leaves, value.leaves)
    assert len(attachments) == 2
    for found in attachments:
        assert found.processed_tokens == 5
        assert found.attachment.schema == checkpoint.attachment.schema
        assert found.attachment.metadata == checkpoint.attachment.metadata
        assert same_tensors(found.attachment.tensors, checkpoint.attachment.tensors)
    generation = Generation("key", "draft", 3, (1, 2), 9, 0, False)
    entry, _ = encode(value, "draft", tokens, generation=generation)
    assert (entry.generation, entry.reuse.trimmable) == (generation, False)
    for other in (4, 6):
        with pytest.raises(BadInput, match=f"a state of 5 tokens cannot be stored under {other}"):
            encode(value, "draft", tokens_of(other))
    with pytest.raises(BadInput, match="a state of 6 tokens cannot be stored under 5"):
        encode(value, "draft", tokens, [companion(6)])


def test_few_bits_from_a_start_on_stay_bound_to_it() -> None:
    """The minimum survives where the entry is as long as that: it must not be cut afterwards."""
    for length in (DELAY, DELAY + 3):
        value = stored("delayed", fed("delayed", ids(length, 1)))
        again, _ = decode(*encode(value, "", tokens_of(length)))
        assert again.reuse == Reuse(length > DELAY, DELAY)


@pytest.mark.parametrize("name", ITEM_BYTES)
def test_every_dtype_survives_as_bytes(name: str) -> None:
    """NaNs, negative zeros and all: bits are moved, not numbers."""
    assert set(DTYPES) == set(ITEM_BYTES)
    draw = np.random.default_rng(0)
    raw = draw.integers(0, 2 if name == "BOOL" else 256, 24 * ITEM_BYTES[name]).astype(np.uint8)
    for shape in ((2, 3, 4), (24,), (4, 1, 6)):
        spec = replace(spec_of("t", mx.zeros(shape, DTYPES[name])))
        assert (spec.dtype, spec.nbytes) == (name, raw.nbytes)
        array = array_of(spec, raw)
        assert bytes(bytes_of(array)) == raw.tobytes()
        assert spec_of("t", array) == spec
    scalar = spec_of("t", mx.zeros((), DTYPES[name]))
    assert bytes(bytes_of(array_of(scalar, raw[: scalar.nbytes]))) == raw[: scalar.nbytes].tobytes()
    columns = mx.swapaxes(array_of(spec, raw).reshape(2, 3, 4), 0, 2)  # not contiguous
    assert bytes(bytes_of(columns)) == bytes(bytes_of(mx.contiguous(columns)))


def test_reading_copies_nothing() -> None:
    """Peak memory: a tensor's bytes are its own memory."""
    array = mx.zeros((64, 1024), mx.bfloat16)
    mx.eval(array)
    before = mx.get_active_memory()
    view = np.frombuffer(bytes_of(array), np.uint8)
    assert mx.get_active_memory() - before < array.nbytes // 2
    assert view.nbytes == array.nbytes


def test_an_empty_arrays_memory_is_its_own() -> None:
    """Of arrays that are there together, filled after all were made, each has what it was given."""
    spec = TensorSpec("t", "BF16", (2, 1 << 15))
    arrays, rooms = empty([spec] * 24)
    for number, memory in enumerate(rooms):
        memory[:] = bytes([number]) * len(memory)
    for number, array in enumerate(arrays):
        assert bytes(bytes_of(array)) == bytes([number]) * spec.nbytes
        assert bytes(bytes_of(array + array)) == bytes(bytes_of(2 * array))


def test_mlx_has_let_go_of_what_it_asked_for_memory() -> None:
    """One of its threads lets go last, and aborts the process if that is at its end by then."""
    spec, ended = TensorSpec("t", "F32", (16,)), threading.Event()

    def busy() -> None:
        while not ended.is_set():
            sum(range(1000))

    thread = threading.Thread(target=busy)
    thread.start()
    try:
        for _ in range(50):
            made = empty([spec] * 4)
            assert not [one for one in gc.get_objects() if type(one).__name__ == "_Reveal"]
            del made
    finally:
        ended.set()
        thread.join()


def test_every_form_has_one_codec() -> None:
    """Exactly one matches a kind, and a class of mlx-lm's stands for one kind only."""
    assert set(CODECS) == set(FORMS)
    names = [codec.class_name for codec in CODECS.values()]
    assert sorted(names) == sorted(CLASSES)


@pytest.mark.parametrize(
    "fresh",
    [
        KVCache,
        lambda: QuantizedKVCache(32, 8),
        lambda: RotatingKVCache(8, keep=2),
        lambda: ChunkedKVCache(8),
        lambda: ArraysCache(2),
        lambda: CacheList(KVCache(), ArraysCache(1)),
    ],
)
def test_a_layer_that_is_never_used_stays_so(fresh: Callable[[], Any], tmp_path: Path) -> None:
    """`roundtrip`: with its window, bits and slots, here and in mlx-lm's files."""
    value, file = Stored.of([fresh(), fresh()], 5), tmp_path / "f.safetensors"
    assert value.arrays == []
    assert value.trimmed(3).leaves == value.leaves
    entry, read = encode(value, "", tokens_of(5))
    again, _ = decode(entry, read)
    assert same_held(again.leaves, value.leaves)
    restore([fresh(), fresh()], again.leaves, 5)
    write(file, entry, read)
    assert same_held(capture(load_prompt_cache(str(file))), value.leaves)
    save_prompt_cache(str(file), [fresh(), fresh()], {"a": "b"})
    assert same_held(imported(file, 5).leaves, value.leaves)


def test_entries_that_are_not_ours_are_refused() -> None:
    """`damage`: unknown codecs and kinds, tensors too many or too few, positions that differ."""
    for kind in ("dense", "glm_moe_dsa", "gemma4_text", "qwen3_5"):
        entry, read = encode(stored(kind, fed(kind, ids(9, 1))), "", tokens_of(9))
        assert decode(entry, read)
        for wrong, message in (
            (replace(entry, codec="other-1"), "codec 'other-1' is not read here"),
            (replace(entry, layout=("unheard:9", *entry.layout[1:])), "unheard has no"),
            (replace(entry, layout=entry.layout[1:]), "tensors are not those of its layout"),
            (replace(entry, layout=()), "tensors are not those of its layout"),
            (replace(entry, tensors=entry.tensors[1:]), "tensors are not those of its layout"),
            (replace(entry, tokens=tokens_of(8)), "stands at 9 tokens, expected 8"),
        ):
            with pytest.raises(BadInput, match=message):
                Decoder(wrong)
    for layout in (
        ("",),
        ("[plain:9",),
        ("plain:9]",),
        ("plain:9 plain:9",),
        ("[" * 99,),
        ("[]]",),
    ):
        with pytest.raises(BadInput, match=r"layout names one cache|has no checkpoint form"):
            Decoder(replace(entry, layout=layout))
    for layout in (("plain",), ("ring:9",), ("chunked:9:0:0",), ("plain:x",)):
        with pytest.raises(BadInput, match=r"malformed|tensors are not"):
            Decoder(replace(entry, layout=layout))
    decoder = Decoder(entry)
    with pytest.raises(BadInput, match="is missing"):
        decoder.finish()


def test_files_of_others_are_refused(tmp_path: Path) -> None:
    """R13: a class that is not in the table is named, never looked up; damage is one error."""
    file = tmp_path / "theirs.safetensors"
    rows = fed("dense", ids(5, 1))
    save_prompt_cache(str(file), rows.lowered(0))
    loaded: Any = mx.load(str(file), return_metadata=True)
    arrays, metadata = loaded
    with pytest.raises(BadInput, match="stands at 5 tokens, expected 6"):
        imported(file, 6)
    for field, value, message in (
        ("1.0", "BatchKVCache", "class 'BatchKVCache' is not known"),
        ("1.0", "copy", "class 'copy' is not known"),
        ("2.1.1", "tuple", "stands for a tuple"),
        ("1.99999999", "KVCache", "is named '1.99999999'"),
        ("2.1.0", "9.9", "no prompt cache"),
        ("3.0", "more", "no prompt cache"),
    ):
        mx.save_safetensors(str(file), arrays, {**metadata, field: value})
        with pytest.raises(BadInput, match=message):
            imported(file, 5)
    mx.save_safetensors(str(file), {**arrays, "0.2": mx.array(5.0)}, metadata)
    with pytest.raises(BadInput, match=r"is 5\.0, not a whole number"):
        imported(file, 5)
    mx.save_safetensors(str(file), arrays, metadata)
    whole = file.read_bytes()
    for damaged in (b"", whole[:7], whole[: len(whole) // 2], b"\xff" * 64):
        file.write_bytes(damaged)
        with pytest.raises(BadInput, match="no prompt cache of mlx-lm"):
            imported(file, 5)
    with pytest.raises(BadInput, match="no prompt cache of mlx-lm"):
        imported(tmp_path / "nowhere.safetensors", 5)
