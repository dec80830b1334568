"""One entry, one file: what is written is what is read, and nothing else is."""

from __future__ import annotations

import contextlib
import errno
import gc
import json
import os
import struct
import threading
import time
import tracemalloc
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from xxhash import xxh3_128_hexdigest

import engine.cache
from engine import BadInput
from engine.cache.entry import ITEM_BYTES, Buffer, Entry, Reuse, Step, TensorSpec
from engine.cache.files import Files, closing
from engine.cache.format import (
    BEGIN,
    CHUNK,
    DIGITS,
    MAX_HEADER_BYTES,
    READERS,
    _header,
    outline,
    parse,
    plan,
    read_header,
    read_tensors,
    write_entry,
)
from engine.cache.strict import MAX_PARTS, Damaged, Foreign

from .entries import (
    CODEC,
    ORIGIN,
    Image,
    Memory,
    an_entry,
    attached,
    content,
    plain,
    read_back,
    read_image,
    unfinished,
    written,
)

GOLDEN = Path(__file__).parent / "golden"

ALL_KINDS = (an_entry(), attached(), unfinished())

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
shapes = st.lists(st.integers(0, 3), max_size=4).map(tuple)
tensors = st.builds(
    TensorSpec,
    texts.filter(lambda t: t not in ("", "__metadata__")),
    st.sampled_from(list(ITEM_BYTES)),
    shapes,
)
entries = st.builds(
    Entry,
    texts,
    st.lists(st.integers(-(2**31), 2**31 - 1), min_size=1, max_size=9).map(
        lambda x: np.array(x, np.int32)
    ),
    texts,
    st.lists(texts, max_size=3).map(tuple),
    st.builds(Reuse, st.booleans(), st.integers(0, 2**31 - 1)),
    st.lists(tensors, max_size=5, unique_by=lambda t: t.name).map(tuple),
    foreign=st.dictionaries(texts.map("1.".__add__), texts, max_size=2),
)


@given(entries)
def test_roundtrip_of_any_entry(tmp_path_factory: pytest.TempPathFactory, entry: Entry) -> None:
    """Law `roundtrip`, of bytes: every dtype, scalars, empty tensors, any names."""
    path = tmp_path_factory.mktemp("one") / "file"
    header = written(path, entry)
    assert path.stat().st_size == header.size == plan(entry, ORIGIN).size
    found, data = read_back(path)
    assert found.hashes == header.hashes
    assert (plain(found.entry), found.origin) == (plain(entry), ORIGIN)
    assert found.digest == header.digest
    assert data == {t.name: bytes(content(entry, t)) for t in entry.tensors}


@pytest.mark.parametrize("entry", ALL_KINDS)
def test_roundtrip_of_attachments_and_generations(tmp_path: Path, entry: Entry) -> None:
    written(tmp_path / "file", entry)
    found, _ = read_back(tmp_path / "file")
    assert plain(found.entry) == plain(entry)
    assert not found.entry.tokens.flags.writeable


@pytest.mark.parametrize("kind", ["entry", "attached", "unfinished"])
def test_the_bytes_of_version_1_are_what_they_were(tmp_path: Path, kind: str) -> None:
    """Files outlive releases: what version 1 wrote stays readable, and is written the same."""
    entry = dict(zip(["entry", "attached", "unfinished"], ALL_KINDS, strict=True))[kind]
    golden = GOLDEN / f"{kind}-1.mlxkv.safetensors"
    written(tmp_path / "file", entry)
    assert (tmp_path / "file").read_bytes() == golden.read_bytes()
    assert plain(read_back(golden)[0].entry) == plain(entry)


def test_any_safetensors_reader_can_open_it(tmp_path: Path) -> None:
    entry = an_entry()
    written(tmp_path / "file", entry)
    with safe_open(tmp_path / "file", "numpy") as opened:
        assert set(opened.keys()) == {"0.0", "0.1"}
        assert opened.get_tensor("0.0").tobytes() == bytes(content(entry, entry.tensors[0]))
        assert opened.metadata()["0.namespace"] == "plain"


@pytest.mark.parametrize("entry", ALL_KINDS)
def test_a_file_cut_anywhere_is_damaged(tmp_path: Path, entry: Entry) -> None:
    """Law `damage`: every shorter length, and every tail of zeros."""
    written(tmp_path / "file", entry)
    whole = (tmp_path / "file").read_bytes()
    read_image(whole)
    for length in range(len(whole)):
        for rest in (b"", bytes(len(whole) - length), bytes(1)):
            with pytest.raises(Damaged):
                read_image(whole[:length] + rest)
    with pytest.raises(Damaged):
        read_image(whole + b"x")


@pytest.mark.parametrize("entry", ALL_KINDS)
def test_every_flipped_bit_is_noticed(tmp_path: Path, entry: Entry) -> None:
    """Law `damage`: header and tensors, bit by bit."""
    written(tmp_path / "file", entry)
    whole = bytearray((tmp_path / "file").read_bytes())
    for bit in range(8 * len(whole)):
        whole[bit // 8] ^= 1 << bit % 8
        with pytest.raises(Damaged):
            read_image(bytes(whole))
        whole[bit // 8] ^= 1 << bit % 8


@pytest.mark.parametrize("wanted", [set(), {"0.0"}, {"0.1", "0.3"}, {f"0.{n}" for n in range(6)}])
def test_tensors_of_many_pieces_are_whole_in_any_order_of_threads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wanted: set[str]
) -> None:
    """Pieces of 7 bytes here, of 5 where nobody wants them: a tensor ends with one, or inside."""
    for name, value in {"PIECE": 7, "CHUNK": 20, "AHEAD": 3}.items():
        monkeypatch.setattr(f"engine.cache.format.{name}", value)
    sizes = (0, 1, 7, 8, 20, 50)
    entry = an_entry(tensors=[TensorSpec(f"0.{n}", "U8", (size,)) for n, size in enumerate(sizes)])
    header = written(tmp_path / "file", entry)
    whole = (tmp_path / "file").read_bytes()

    def read(image: bytes, *, verify: bool = True) -> dict[str, bytes]:
        memory = Memory()

        def room(tensors: Sequence[TensorSpec]) -> list[memoryview | None]:
            given = zip(tensors, memory(tensors), strict=True)
            return [into if tensor.name in wanted else None for tensor, into in given]

        read_tensors(Image(image=image), 0, header, room, verify=verify)
        return {name: data for name, data in memory.found.items() if name in wanted}

    expected = {t.name: bytes(content(entry, t)) for t in entry.tensors if t.name in wanted}
    assert read(whole) == read(whole, verify=False) == expected
    for bit in range(8 * header.data_start, 8 * len(whole)):
        image = bytearray(whole)
        image[bit // 8] ^= 1 << bit % 8
        with pytest.raises(Damaged, match="are not what was written"):
            read(bytes(image))
    for length in range(header.data_start, len(whole)):
        for verify in (False, True):
            with pytest.raises(Damaged, match="the file ends inside"):
                read(whole[:length], verify=verify)


def test_without_verification_only_the_header_is_certain(tmp_path: Path) -> None:
    path = tmp_path / "file"
    header = written(path, an_entry())
    whole = bytearray(path.read_bytes())
    whole[header.data_start] ^= 1
    path.write_bytes(whole)
    read_back(path, verify=False)
    with pytest.raises(Damaged, match=r"the bytes of 0\.0 are not what was written"):
        read_back(path)


def rehashed(text: str | bytes) -> bytes:
    """A header with the right hash, whatever it says otherwise; its own begins with zeros."""
    data = text if isinstance(text, bytes) else text.encode()
    assert data.startswith(BEGIN + b"0" * DIGITS)
    return data.replace(b"0" * DIGITS, xxh3_128_hexdigest(data).encode(), 1)


def fields_of(entry: Entry) -> dict[str, Any]:
    """The JSON of a header whose hash is blank."""
    header = rehashed_header(entry)
    fields: dict[str, Any] = json.loads(header)
    fields["__metadata__"]["0.header_hash"] = "0" * DIGITS
    return fields


def rehashed_header(entry: Entry) -> bytes:
    return _header(entry, ORIGIN, ("a" * DIGITS,) * len(entry.tensors)).text


def told(fields: dict[str, Any]) -> bytes:
    return rehashed(json.dumps(fields, separators=(",", ":")))


def refuses(header: bytes, data: int = 25) -> str:
    with pytest.raises(Damaged) as refused:
        parse(header, 8 + len(header) + data)
    return str(refused.value)


def edit(*path: str, to: Any) -> Callable[[dict[str, Any]], None]:
    def apply(fields: dict[str, Any]) -> None:
        for key in path[:-1]:
            fields = fields[key]
        if to is None:
            del fields[path[-1]]
        else:
            fields[path[-1]] = to

    return apply


HOSTILE = (
    {
        "dtype": edit("0.0", "dtype", to="F8_E4M3"),
        "dtype of another size": edit("0.0", "dtype", to="F16"),
        "dtype that is no text": edit("0.0", "dtype", to=["F32"]),
        "negative shape": edit("0.0", "shape", to=[-2, -3]),
        "huge shape": edit("0.0", "shape", to=[2**31, 2**31, 2**62]),
        "huge shape of no bytes": edit("0.1", "shape", to=[0, 2**62]),
        "shape of many dimensions": edit("0.0", "shape", to=[1] * 31 + [2, 3]),
        "shape of endless dimensions": edit("0.0", "shape", to=[10**60] * 200_000),
        "shape that is no list": edit("0.0", "shape", to=6),
        "shape of booleans": edit("0.1", "shape", to=[True]),
        "hole": edit("0.1", "data_offsets", to=[25, 26]),
        "overlap": edit("0.1", "data_offsets", to=[23, 24]),
        "not from the start": edit("0.0", "data_offsets", to=[1, 25]),
        "offsets of booleans": edit("0.0", "data_offsets", to=[False, 24]),
        "one offset": edit("0.0", "data_offsets", to=[0]),
        "one offset of the last": edit("0.1", "data_offsets", to=[24]),
        "no offsets of the last": edit("0.1", "data_offsets", to=None),
        "another field": edit("0.0", "module", to="os"),
        "no tensor": edit("0.1", to=None),
        "one more tensor": edit("0.2", to={"dtype": "I8", "shape": [1], "data_offsets": [25, 26]}),
        "an empty name": lambda fields: fields.update({"": fields.pop("0.1")}),
        "tensor that is no object": edit("0.1", to=7),
        "metadata that is no text": edit("__metadata__", "0.model", to=7),
        "our field that nobody knows": edit("__metadata__", "0.class", to="os.system"),
        "a field that mlx-lm refuses": edit("__metadata__", "3.0", to="x"),
        "hashes too few": edit("__metadata__", "0.tensor_hashes", to="a" * 32),
        "hashes too short": edit("__metadata__", "0.tensor_hashes", to="a b"),
        "created": edit("__metadata__", "0.created", to="-1"),
        "tokens of no base64": edit("__metadata__", "0.tokens", to="AAAAAAAA*AAAAAAAA"),
        "tokens of half a number": edit("__metadata__", "0.tokens", to="AAA="),
        "no tokens": edit("__metadata__", "0.tokens", to=""),
        "layout that is no list": edit("__metadata__", "0.layout", to='{"a":1}'),
        "layout that is no JSON": edit("__metadata__", "0.layout", to="[,"),
        "layout of numbers": edit("__metadata__", "0.layout", to="[1]"),
        "reuse that lacks a key": edit("__metadata__", "0.reuse", to='{"trimmable":true}'),
        "reuse of numbers": edit("__metadata__", "0.reuse", to='{"trimmable":1,"minimum":1}'),
        "reuse of booleans": edit(
            "__metadata__", "0.reuse", to='{"trimmable":true,"minimum":true}'
        ),
        "negative minimum": edit("__metadata__", "0.reuse", to='{"trimmable":true,"minimum":-1}'),
        "a key twice inside": edit(
            "__metadata__", "0.reuse", to='{"trimmable":true,"trimmable":true,"minimum":1}'
        ),
        "namespace of a generation": edit(
            "__metadata__", "0.namespace", to="__generation_checkpoint__:k"
        ),
        "half a character": edit("__metadata__", "0.namespace", to="\ud800"),
        "half a character of a model": edit("__metadata__", "0.model", to="\udc00"),
        "attachment without its tensor": edit(
            "__metadata__", "0.attachments", to='[{"schema":"s","metadata":{},"tensors":["9.9"]}]'
        ),
        "attachment that is trimmable": edit(
            "__metadata__", "0.attachments", to='[{"schema":"s","metadata":{},"tensors":["0.1"]}]'
        ),
        "attachment with a list": edit(
            "__metadata__", "0.attachments", to='[{"schema":"s","metadata":{"a":[]},"tensors":[]}]'
        ),
        "attachment that is no object": edit("__metadata__", "0.attachments", to="[7]"),
        "generation that is no object": edit("__metadata__", "0.generation", to="[7]"),
        "floating point": edit("__metadata__", "0.attachments", to="[1.5]"),
        "not a number": edit("__metadata__", "0.attachments", to="[NaN]"),
        "a long number": edit("__metadata__", "0.attachments", to="[" + "9" * 5000 + "]"),
        "depth inside": edit("__metadata__", "0.layout", to="[" * 100_000),
    }
    | {
        f"no {key}": edit("__metadata__", f"0.{key}", to=None)
        for key in ("created", "model", "fingerprint", "tokenizer", "codec", "namespace")
    }
    | {
        f"without {key}": edit("__metadata__", f"0.{key}", to=None)
        for key in ("tokens", "layout", "reuse", "tensor_hashes")
    }
)


@pytest.mark.parametrize("what", HOSTILE)
def test_a_header_that_says_what_we_never_write_is_damaged(what: str) -> None:
    """Law `damage`: the hash is right, so that only validation stands between it and us."""
    fields = fields_of(an_entry())
    parse(told(fields), 8 + len(told(fields)) + 25)
    HOSTILE[what](fields)
    started = time.process_time()
    assert refuses(told(fields))
    with contextlib.suppress(Damaged):
        outline(told(fields), 8 + len(told(fields)) + 25)
    assert time.process_time() - started < 1


def test_headers_that_are_no_json_of_ours_are_damaged() -> None:
    begin = BEGIN + b"0" * DIGITS
    whole = told(fields_of(an_entry())).replace(b'"0.0":', b'"0.1":')
    assert "twice" in refuses(rehashed(whole[: len(BEGIN)] + b"0" * DIGITS + whole[len(begin) :]))
    assert "not JSON" in refuses(rehashed(begin + b'"' + b',"a":' + b"[" * 100_000))
    assert "parts" in refuses(rehashed(begin + b'"}' + b",[]" * MAX_PARTS + b"}"))
    assert "ASCII" in refuses(rehashed(begin + b'","a":"\xff"}}'))
    assert "ASCII" in refuses(rehashed(begin + '","a":"é"}}'.encode()))
    assert "another length" in refuses(rehashed(begin + b'00"}}'))
    assert "not JSON" in refuses(rehashed(begin + b'"}}{}'))
    assert "not JSON" in refuses(rehashed(begin + b'"}}\0'))
    assert "not what was written" in refuses(b"{}")


@pytest.mark.parametrize("length", [0, 7, 65, 2**23, 2**24 + 1, 2**31, 2**63, 2**64 - 1])
@pytest.mark.parametrize("size", [0, 1, 7, 8, 200])
def test_a_length_that_cannot_be_is_refused_before_anything_is_allocated(
    tmp_path: Path, length: int, size: int
) -> None:
    path = tmp_path / "file"
    path.write_bytes((struct.pack("<Q", length) + BEGIN + bytes(200))[:size])
    read_small(path)


def test_a_header_longer_than_the_cap_is_refused_although_the_file_is_as_long(
    tmp_path: Path,
) -> None:
    path = tmp_path / "file"
    with path.open("wb") as file:
        file.write(struct.pack("<Q", MAX_HEADER_BYTES + 1) + BEGIN)
        file.truncate(MAX_HEADER_BYTES + 4096)
    read_small(path)


def read_small(path: Path) -> None:
    """The file is damaged, and finding that out takes no memory to speak of."""
    files = Files()
    folder = files.open_folder(str(path.parent))
    tracemalloc.start()
    file = files.open(path.name, folder)
    with closing(files, folder), closing(files, file), pytest.raises(Damaged):
        read_header(files, file, path.stat().st_size)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 200_000


@pytest.mark.parametrize("entry", ALL_KINDS)
def test_an_outline_is_part_of_the_entry(entry: Entry) -> None:
    planned = plan(entry, ORIGIN)
    found, digest = outline(planned.text, planned.size, CODEC)
    assert digest == planned.digest
    assert (found.origin, found.codec, found.namespace) == (ORIGIN, CODEC, entry.namespace)
    assert found.tokens.tolist() == entry.tokens.tolist()
    assert (found.reuse, found.generation) == (entry.reuse, entry.generation)
    for size in (planned.size - 1, planned.size + 1):
        with pytest.raises(Damaged, match="tensors up to"):
            outline(planned.text, size)


def test_an_outline_is_of_a_proven_header_of_text() -> None:
    begin = BEGIN + b"0" * DIGITS
    for header in (b'","a":7}}', b'"},"__metadata__":[]}', b'","0.version":"1"},"a":[]}', b'"}'):
        with pytest.raises(Damaged):
            outline(rehashed(begin + header), 100)
    with pytest.raises(Damaged, match="not what was written"):
        outline(begin + b'"}}', 100)


def test_other_versions_and_codecs_are_foreign_and_not_damaged() -> None:
    fields = fields_of(an_entry())
    with pytest.raises(Foreign, match="codec 'test-v1', not 'mine'"):
        outline(told(fields), 8 + len(told(fields)) + 25, "mine")
    fields["__metadata__"]["0.version"] = "2"
    fields["__metadata__"]["0.what else"] = "2"
    with pytest.raises(Foreign, match="another version"):
        parse(told(fields), 8 + len(told(fields)) + 25)


BAD = {
    "a tensor of another dtype": lambda: an_entry(tensors=[TensorSpec("0.0", "F8", (1,))]),
    "two tensors of a name": lambda: an_entry(tensors=[TensorSpec("0.0", "I8", ())] * 2),
    "a nameless tensor": lambda: an_entry(tensors=[TensorSpec("", "I8", ())]),
    "a reserved name": lambda: an_entry(tensors=[TensorSpec("__metadata__", "I8", ())]),
    "a negative dimension": lambda: an_entry(tensors=[TensorSpec("0.0", "I8", (-1,))]),
    "no tokens": lambda: an_entry([]),
    "a top-level key that mlx-lm refuses": lambda: an_entry(foreign={"3.0": ""}),
    "half a character": lambda: an_entry(namespace="\ud800"),
    "a generation's namespace": lambda: an_entry(namespace="__generation_checkpoint__:k"),
    "a generation elsewhere": lambda: an_entry(generation=unfinished().generation),
    "a trimmable attachment": lambda: an_entry(attachments=attached().attachments),
    "a header over the cap": lambda: an_entry(foreign={"1.0": "x" * MAX_HEADER_BYTES}),
    "too many parts": lambda: an_entry(foreign={"1.0": "," * MAX_PARTS}),
}


@pytest.mark.parametrize("what", BAD)
def test_what_could_not_be_read_back_is_not_written(what: str) -> None:
    with pytest.raises(BadInput):
        plan(BAD[what](), ORIGIN)


def write_with(tmp_path: Path, read: Any, run_step: Any) -> None:
    files = Files()
    folder = files.open_folder(str(tmp_path))
    with closing(files, folder), closing(files, files.create("file", folder)) as file:
        write_entry(files, file, plan(an_entry(), ORIGIN), read, run_step)


def test_every_tensor_is_read_in_a_step_of_its_own(tmp_path: Path) -> None:
    """Law `exclusive`: the owner of forwards runs each read, and nothing reads beside it."""
    inside: list[bool] = []
    reads: list[tuple[str, bool]] = []

    def run_step(step: Step) -> None:
        inside.append(True)
        step()
        inside.pop()

    def read(tensor: TensorSpec) -> Buffer:
        reads.append((tensor.name, bool(inside)))
        return content(an_entry(), tensor)

    write_with(tmp_path, read, run_step)
    assert reads == [("0.0", True), ("0.1", True)]


def test_a_step_that_is_not_run_and_bytes_of_another_number_fail_the_write(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="ran a step 0 times"):
        write_with(tmp_path, lambda t: content(an_entry(), t), lambda step: None)
    (tmp_path / "file").unlink()
    with pytest.raises(BadInput, match=r"0\.0: 3 bytes, not 24"):
        write_with(tmp_path, lambda t: memoryview(b"abc"), lambda step: step())


def test_memory_beside_the_entry_stays_at_one_tensor(tmp_path: Path) -> None:
    """P8, of what Python allocates: 16 tensors of 1 MiB are never two at a time."""
    size = 1 << 20
    entry = an_entry(tensors=[TensorSpec(f"{n}.0", "U8", (size,)) for n in range(16)])
    path = tmp_path / "file"
    files = Files()
    folder = files.open_folder(str(tmp_path))
    tracemalloc.start()
    with closing(files, folder), closing(files, files.create("file", folder)) as file:
        write_entry(files, file, plan(entry, ORIGIN), lambda t: memoryview(bytes(t.nbytes)))
        stored = tracemalloc.get_traced_memory()[1]
        tracemalloc.reset_peak()
    folder = files.open_folder(str(tmp_path))
    with closing(files, folder), closing(files, files.open("file", folder)) as file:
        header = read_header(files, file, path.stat().st_size)
        read_tensors(files, file, header)
    restored = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert stored < 1.2 * size
    assert restored < 1.2 * size


LONG = an_entry(tensors=[TensorSpec(f"{n}.0", "U8", (CHUNK + 5,)) for n in range(READERS + 2)])


def test_a_failing_read_of_many_tensors_ends_after_the_others_do(tmp_path: Path) -> None:
    """Whoever gave the memory may use it for something else then."""
    path = tmp_path / "file"
    header = written(path, LONG)

    @dataclass(frozen=True)
    class Slow(Image):
        failing: int = 0
        reading: set[int] = field(default_factory=set)

        def read(self, file: int, into: memoryview, offset: int) -> int:
            if offset == self.failing:
                raise OSError(errno.EIO, "this one")
            self.reading.add(offset)
            time.sleep(0.05)
            count = super().read(file, into, offset)
            self.reading.remove(offset)
            return count

    for at in range(READERS):  # each of those that begin together
        failing = header.data_start + at * (CHUNK + 5)
        files, memory = Slow(image=path.read_bytes(), failing=failing), Memory()
        with pytest.raises(OSError, match="this one"):
            read_tensors(files, 0, header, memory)
        assert not files.reading


def test_without_a_thread_to_be_had_it_reads_by_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As once the main thread has returned, or where the system has no more of them."""

    def submit(*_: object) -> None:
        raise RuntimeError("cannot schedule new futures after interpreter shutdown")

    monkeypatch.setattr(ThreadPoolExecutor, "submit", submit)
    written(tmp_path / "file", LONG)
    assert read_back(tmp_path / "file")[1] == {
        t.name: bytes(content(LONG, t)) for t in LONG.tensors
    }


def test_threads_that_nobody_waits_for_hold_on_to_what_they_touch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A Ctrl-C may come while they are waited for: their memory and their file stay theirs."""
    path = tmp_path / "file"
    header = written(path, LONG)
    going, reads, descriptors = threading.Event(), [0], set[int]()

    @dataclass(frozen=True)
    class Slow(Files):
        def read(self, file: int, into: memoryview, offset: int) -> int:
            going.wait(10)
            descriptors.add(file)
            reads[0] += 1
            return Files.read(self, file, into, offset)

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    files, memory, before = Slow(), Memory(), set(threading.enumerate())
    owner = weakref.ref(memory)
    file = os.open(path, os.O_RDONLY)
    with monkeypatch.context() as patch:
        patch.setattr(Future, "result", interrupted)
        patch.setattr(ThreadPoolExecutor, "__exit__", interrupted)
        with contextlib.suppress(KeyboardInterrupt):
            read_tensors(files, file, header, memory)
    os.close(file)
    del memory
    gc.collect()
    assert owner() is not None
    going.set()
    for thread in set(threading.enumerate()) - before:
        thread.join()
    gc.collect()
    assert reads[0] > 0
    assert owner() is None
    for descriptor in descriptors:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(descriptor)


def test_room_for_other_tensors_is_refused(tmp_path: Path) -> None:
    header = written(tmp_path / "file", an_entry())
    image, memory = Image(image=(tmp_path / "file").read_bytes()), Memory()
    with pytest.raises(BadInput, match=r"0\.0: room for 23 bytes, not 24"):
        read_tensors(image, 0, header, lambda tensors: [room[:23] for room in memory(tensors)])
    with pytest.raises(ValueError, match="shorter"):
        read_tensors(image, 0, header, lambda tensors: memory(tensors)[:1])
    assert not any(b"".join(memory.found.values()))


def test_the_page_about_the_format_shows_a_files_bytes() -> None:
    page = (Path(engine.cache.__file__).parent / "FORMAT.md").read_text()
    length, *header, data = page.split("```")[3].strip("\n").split("\n")
    shown = bytes.fromhex(length) + "".join(header).encode() + bytes.fromhex(data)
    assert shown == (GOLDEN / "entry-1.mlxkv.safetensors").read_bytes()
