"""What may stand for what: fingerprints, namespaces, artifacts."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import fixtures
from engine import BadInput, Target
from engine.cache import identity as module
from engine.cache.identity import (
    SETTLED_S,
    Artifact,
    Memo,
    canonical,
    digest,
    digest_of,
    fingerprint,
    namespace,
    tokenizer_files,
)
from engine.state.quantize import KVQuantization
from tests.engine.company import model_of
from tests.engine.families import build, target_on

FIELDS: dict[str, list[Any]] = {
    "config": [{}, {"a": 1}, {"a": "1"}, {"a": None}, {"a": [1, 2]}, {"a": [2, 1]}, {"b": 1}],
    "artifact": ["", "a", "ab", "b"],
    "tokenizer": ["", "a", "ab", "c"],
    "dtype": ["float32", "bfloat16", "float32 bfloat16"],
    "scheme": ["float32", "kv8", "kv4"],
    "layout": ["1", "2", "11"],
}
KV: list[dict[str, Any]] = [
    {},
    {"bits": 8},
    {"bits": 4},
    {"bits": 8, "start": 0},
    {"bits": 8, "start": 5000},
    {"bits": 8, "start": None},
    {"bits": 8, "start": "0"},
    {"bits": 8, "start": False},
    {"bits": 8.0},
    {"group_size": 8},
]


def test_fingerprints_of_different_fields_never_meet() -> None:
    """`identity`, R17: every combination, fields that run into each other included."""
    combinations = list(itertools.product(*FIELDS.values()))
    found = {fingerprint(**dict(zip(FIELDS, values, strict=True))) for values in combinations}
    assert len(found) == len(combinations)
    shuffled = {"artifact": "a", "tokenizer": "a", "dtype": "f", "scheme": "f"}
    nested = {"b": {"y": 1, "x": [{"q": 1, "p": 2}]}, "a": 2.5}
    same = {"a": 2.5, "b": {"x": [{"p": 2, "q": 1}], "y": 1}}
    assert fingerprint(config=nested, **shuffled) == fingerprint(config=same, **shuffled)


def test_namespaces_of_different_options_never_meet() -> None:
    """`identity`: a salt equal to an adapter's name, options that move from one to another."""
    names = [None, "", "a", "null", '","drafter":"a']
    combinations = list(itertools.product(names, names, KV))
    found = {namespace(adapter=a, drafter=d, kv=kv) for a, d, kv in combinations}
    assert len(found) == len(combinations)
    options = {"bits": 8, "start": 0, "group": 64}
    backwards = dict(reversed(list(options.items())))
    assert namespace(kv=options) == namespace(kv=backwards)
    assert namespace() == namespace(kv={}) == '{"adapter":null,"drafter":null,"kv":{}}'


@given(st.lists(st.binary(max_size=3), max_size=4), st.lists(st.binary(max_size=3), max_size=4))
def test_lists_of_fields_meet_only_if_equal(ours: list[bytes], theirs: list[bytes]) -> None:
    assert (digest(*ours) == digest(*theirs)) == (ours == theirs)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 2) | st.sampled_from([0.0, 1.0, 0.5]) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)


@given(json_values, json_values)
def test_canonical_json_is_the_value(ours: Any, theirs: Any) -> None:
    """Equal exactly if the values are, types included, whatever the order of keys."""
    assert json.loads(canonical(ours)) == ours
    assert (canonical(ours) == canonical(theirs)) == (repr(_typed(ours)) == repr(_typed(theirs)))


def _typed(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _typed(value[key]) for key in sorted(value)}
    return list(map(_typed, value)) if isinstance(value, list) else value


def test_what_is_not_json_is_refused() -> None:
    """A key 1 would become the key "1"."""
    for wrong in ({1: 2}, {"a": [{None: 1}]}, {"a": {2}}, {"a": object()}):
        with pytest.raises(BadInput):
            canonical(wrong)


def write(folder: Path, **contents: str) -> list[Path]:
    for name, content in contents.items():
        (folder / name).write_text(content)
    return [folder / name for name in contents]


def rewrite(file: Path, content: str) -> None:
    """In place, and with the time of the change put back; ctime cannot be."""
    file.write_text(content)
    os.utime(file, ns=(1, 1))


def test_artifacts_are_names_and_bytes(tmp_path: Path) -> None:
    """Order and place do not matter; names, contents and where one ends do."""
    variants = [
        {"a": "12", "b": "3"},
        {"a": "1", "b": "23"},
        {"a": "123", "b": ""},
        {"a": "123"},
        {"ab": "123"},
        {"b": "12", "a": "3"},
        {"a": "12", "c": "3"},
    ]
    found = set()
    for number, contents in enumerate(variants):
        places = [tmp_path / f"{number}{side}" for side in "xy"]
        for place in places:
            place.mkdir()
        one, other = (write(place, **contents) for place in places)
        assert digest_of(one) == digest_of(reversed(other))
        found.add(digest_of(one))
    assert len(found) == len(variants)
    # What would meet if a name, or if contents, were hashed without the length in front.
    rest = "x" * 88
    shifted = [
        {"a": "\0b" + chr(88) + "\0" * 7 + rest},
        {"ab": "", "b": rest},
        {"a": "12" + "\1" + "\0" * 7 + "b" + "3"},
        {"a": "12", "b": "3"},
    ]
    prints = set()
    for number, contents in enumerate(shifted):
        (tmp_path / f"s{number}").mkdir()
        prints.add(digest_of(write(tmp_path / f"s{number}", **contents)))
    assert len(prints) == len(shifted)
    with pytest.raises(BadInput, match="at least 1 file"):
        digest_of([])
    with pytest.raises(BadInput, match="gone is missing"):
        digest_of([tmp_path / "gone"])
    with pytest.raises(BadInput, match="cannot be read"):
        digest_of([tmp_path / "0x"])


@pytest.mark.parametrize(
    "change",
    [
        lambda file: file.write_text("abd"),
        lambda file: (file.unlink(), file.write_text("abc")),
        lambda file: file.write_text("abcd"),
        lambda file: file.unlink(),
        lambda file: rewrite(file, "abd"),
    ],
)
def test_files_that_were_replaced_since_they_were_loaded_have_no_identity(
    change: Callable[[Path], object], tmp_path: Path
) -> None:
    """`identity`: what was loaded is not what lies there now. Its times may have been put back."""
    (file,) = write(tmp_path, weights="abc")
    os.utime(file, ns=(1, 1))
    artifact, memo = Artifact.noted([file]), Memo()
    assert artifact.identity(memo) == artifact.identity() == digest_of([file])
    time.sleep(0.02)  # longer than a tick of the file system's clock
    change(file)
    with pytest.raises(BadInput, match="no identity"):
        artifact.identity(memo)


def test_a_file_that_changes_while_it_is_read_has_no_identity(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (file,) = write(tmp_path, weights="abc")
    artifact, real = Artifact.noted([file]), module._hash_file

    def slow(sha: Any, read: Path) -> None:
        real(sha, read)
        time.sleep(0.02)
        file.write_text("abd")

    monkeypatch.setattr(module, "_hash_file", slow)
    with pytest.raises(BadInput, match="no identity"):
        artifact.identity()


def test_identities_are_remembered_on_disk_by_the_state_of_the_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every part of the key counts, and a file that may still change unseen is not believed."""
    memo_file, (file,) = tmp_path / "memo.json", write(tmp_path, weights="abc")
    reads: list[Path] = []
    real = module._hash_file

    def counted(sha: Any, read: Path) -> None:
        reads.append(read)
        real(sha, read)

    monkeypatch.setattr(module, "_hash_file", counted)
    expected = digest_of([file], Memo(memo_file))
    assert not memo_file.exists()  # too young

    def memo() -> Memo:
        return Memo(memo_file, clock=lambda: time.time() + SETTLED_S + 1)

    assert digest_of([file], memo()) == expected
    assert memo_file.stat().st_mode & 0o777 == 0o600
    reads.clear()
    assert digest_of([file], memo()) == expected
    assert not reads
    other = tmp_path / "elsewhere"
    other.mkdir()
    (other / "weights").write_text("abd")
    changes: list[Callable[[], object]] = [
        lambda: os.replace(other / "weights", file),  # another inode
        lambda: rewrite(file, "abx"),
        lambda: rewrite(file, "longer"),
    ]
    for change in changes:
        change()
        assert digest_of([file], memo()) == digest_of([file]) != expected
        expected = digest_of([file])
    link = tmp_path / "link"
    link.mkdir()
    (link / "weights").symlink_to(file)
    reads.clear()
    assert digest_of([link / "weights"], memo()) == expected
    assert not reads  # the same file under another path


@pytest.mark.parametrize("damage", ["{", "[]", '{"a": 1}', '{"a": "short"}', "\xff", "[" * 100_000])
def test_a_damaged_memo_is_none(damage: str, tmp_path: Path) -> None:
    memo_file, (file,) = tmp_path / "memo.json", write(tmp_path, weights="abc")
    memo_file.write_text(damage, encoding="latin-1")
    memo = Memo(memo_file)
    assert digest_of([file], memo) == digest_of([file])
    memo.put("k", "0" * 64)
    assert Memo(memo_file).get("k") == "0" * 64


def test_memos_that_cannot_be_kept_are_no_error(tmp_path: Path) -> None:
    """R15, R16: no folder, a link, a pipe: nothing follows, hangs or fails."""
    nowhere = Memo(tmp_path / "no" / "folder" / "memo.json")
    nowhere.put("k", "0" * 64)
    assert nowhere.get("k") == "0" * 64
    os.mkfifo(tmp_path / "pipe")
    assert Memo(tmp_path / "pipe").get("k") is None
    (tmp_path / "aim").write_text(json.dumps({"k": "1" * 64}))
    (tmp_path / "link").symlink_to(tmp_path / "aim")
    linked = Memo(tmp_path / "link")
    assert linked.get("k") is None
    linked.put("k", "2" * 64)
    assert json.loads((tmp_path / "aim").read_text()) == {"k": "1" * 64}


def test_memos_of_processes_meet_and_stay_small(tmp_path: Path) -> None:
    ours, theirs = Memo(tmp_path / "memo.json"), Memo(tmp_path / "memo.json")
    ours.put("ours", "0" * 64)
    theirs.put("theirs", "1" * 64)
    found = Memo(tmp_path / "memo.json")
    assert (found.get("ours"), found.get("theirs")) == ("0" * 64, "1" * 64)
    for number in range(Memo.KEEP):
        found.put(str(number), "2" * 64)
    assert Memo(tmp_path / "memo.json").get("ours") is None
    assert Memo(tmp_path / "memo.json").get(str(Memo.KEEP - 1)) == "2" * 64


def test_targets_of_different_content_never_share(tmp_path: Path) -> None:
    """R17: other weights, config, tokenizer, bits, dtype; the same in another place is the same."""

    def target(name: str, change: Callable[[Path], object] = lambda folder: None) -> Target:
        folder = tmp_path / name
        folder.mkdir()
        for file in fixtures.target_dir("dense").iterdir():
            (folder / file.name).write_bytes(file.read_bytes())
        change(folder)
        return Target.load(folder)

    def edit(name: str, **fields: object) -> Callable[[Path], object]:
        def apply(folder: Path) -> None:
            found = json.loads((folder / name).read_text())
            (folder / name).write_text(json.dumps({**found, **fields}))

        return apply

    def flip(folder: Path) -> None:
        content = bytearray((folder / "model.safetensors").read_bytes())
        content[-3] ^= 1
        (folder / "model.safetensors").write_bytes(content)

    base, again = target("base"), target("again")
    others = [
        target("weights", flip),
        target("config", edit("config.json", rope_theta=12345.0)),
        target("tokenizer", edit("tokenizer_config.json", anything="else")),
        *(
            Target(base.model, base.tokenizer, {"vocab_size": 1}, base.path, quantization=how)
            for how in (KVQuantization(8, 32), KVQuantization(4, 32), KVQuantization(8, 64))
        ),
    ]
    assert base.store_identity.fingerprint == again.store_identity.fingerprint
    assert base.store_identity.tokenizer == again.store_identity.tokenizer
    assert base.store_identity.model == "base"
    prints = {target.store_identity.fingerprint for target in (base, *others)}
    assert len(prints) == 1 + len(others)
    tokenizers = [target.store_identity.tokenizer for target in (base, *others[:3])]
    assert tokenizers[0] == tokenizers[1] == tokenizers[2] != tokenizers[3]
    starts = [KVQuantization(8, 32, start) for start in (0, 1, 5000)]
    spaces = {base.namespace(), base.namespace("draft")}
    for how in starts:
        near = Target(base.model, base.tokenizer, {"vocab_size": 1}, base.path, quantization=how)
        spaces.add(near.namespace())
    assert len(spaces) == 5
    assert base.namespace() == again.namespace()


def test_the_dtype_of_the_state_is_part_of_the_fingerprint() -> None:
    """A cache in bfloat16 is never brought back where float16 is computed."""
    assert model_of("dense").footprint.dtypes == ("float32",)
    assert model_of("hybrid").footprint.dtypes == ("float32",)
    assert target_on(build("mamba"), model_of("dense")).footprint.dtypes == ("float32",)


def test_weights_replaced_under_a_loaded_model_have_no_identity(tmp_path: Path) -> None:
    """Else its state would be kept under the identity of weights that never computed it."""
    for file in fixtures.target_dir("dense").iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    target = Target.load(tmp_path)
    time.sleep(0.02)
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes())
    with pytest.raises(BadInput, match="has changed since it was loaded"):
        _ = target.identity
    with pytest.raises(BadInput, match="has changed since it was loaded"):
        _ = target.store_identity


def test_the_files_of_a_tokenizer() -> None:
    names = [file.name for file in tokenizer_files(fixtures.target_dir("dense"))]
    assert names == ["tokenizer.json", "tokenizer_config.json"]


def test_identities_need_no_mlx() -> None:
    """The core of the tiers starts in a fraction of the time that mlx takes."""
    code = (
        "import sys, engine.cache.identity, engine.cache.prefixes; assert 'mlx' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
