"""Prompts from a file: lines or JSONL, refused in one line that names file and line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parity.cases import Message
from parity.errors import BadInput
from parity.prompts import read_prompts

LINES = st.lists(
    st.text(st.characters(exclude_characters="\n\r", codec="utf-8"), min_size=1).filter(
        lambda line: line.strip() and not line.lstrip().startswith(("{", "\ufeff"))
    ),
    min_size=1,
    max_size=4,
)


@given(LINES)
def test_a_line_is_a_prompt_as_it_stands(
    tmp_path_factory: pytest.TempPathFactory, lines: list[str]
) -> None:
    """Spaces, other scripts and other line breaks of Unicode are part of it."""
    file = tmp_path_factory.mktemp("prompts") / "p.txt"
    file.write_bytes("\n\n".join(lines).encode())
    assert [prompt.text for prompt in read_prompts(file)] == lines


@given(LINES)
def test_jsonl_holds_texts_and_chats(
    tmp_path_factory: pytest.TempPathFactory, lines: list[str]
) -> None:
    """A text under `prompt`, a chat under `messages`."""
    file = tmp_path_factory.mktemp("prompts") / "p.jsonl"
    entries = [
        entry
        for line in lines
        for entry in ({"prompt": line}, {"messages": [{"role": "user", "content": line}]})
    ]
    file.write_text("\n".join(map(json.dumps, entries)), encoding="utf-8")
    asked = [prompt.text for prompt in read_prompts(file)]
    assert asked == [text for line in lines for text in (line, (Message("user", line),))]


def test_prompts_are_named_by_their_line(tmp_path: Path) -> None:
    file = tmp_path / "p.txt"
    file.write_text("\none\n\nthree\r\n")
    assert [(prompt.kind, prompt.text) for prompt in read_prompts(file)] == [
        ("p2", "one"),
        ("p4", "three"),
    ]


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "holds no prompt"),
        (b"\n \n", "holds no prompt"),
        (b"ok\xff", "is not UTF-8 (byte 2)"),
        (b'{"prompt": "a"}\nplain', "line 2: not a JSON object"),
        (b'{"prompt": "a\\ud800"}', "line 1 is not UTF-8 (character 1)"),
        (b'{"messages": [{"role": "user", "content": "\\udc00"}]}', "line 1 is not UTF-8"),
        (b'{"prompt": ""}', "line 1: needs a non-empty text `prompt`"),
        (b'{"text": "a"}', "line 1: needs a non-empty text `prompt`"),
        (b'{"messages": []}', "line 1: needs a non-empty text `prompt`"),
        (b'{"prompt": "a", "messages": [{"role": "user", "content": "x"}]}', "line 1: needs"),
        (b'{"messages": [{"role": "user"}]}', "a text `role` and a text `content`"),
        (b'{"messages": [{"role": "user", "content": 3}]}', "a text `role` and a text `content`"),
    ],
)
def test_a_file_that_holds_none_is_refused(tmp_path: Path, content: bytes, says: str) -> None:
    file = tmp_path / "p"
    file.write_bytes(content)
    with pytest.raises(BadInput) as refused:
        read_prompts(file)
    assert says in str(refused.value)
    assert str(file) in str(refused.value)


def test_a_file_called_jsonl_is_not_taken_for_text(tmp_path: Path) -> None:
    """A slip in its first line would make prompts of all its lines."""
    file = tmp_path / "p.jsonl"
    file.write_text('{"prompt": "a"\n{"prompt": "b"}')
    with pytest.raises(BadInput, match="line 1: not a JSON object"):
        read_prompts(file)


def test_a_line_that_begins_with_a_brace_may_be_a_text(tmp_path: Path) -> None:
    """Code and broken JSON are texts to continue."""
    file = tmp_path / "p.txt"
    file.write_text('{ int x;\n{"a": 1}')
    assert [prompt.text for prompt in read_prompts(file)] == ["{ int x;", '{"a": 1}']
