"""Prompts from a file: one per line, or JSONL with `prompt` or `messages`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from parity.cases import Message, Prompted
from parity.errors import BadInput, require_utf8
from parity.plans import Text


def read_prompts(file: Path) -> tuple[Text, ...]:
    """The prompts of a file, named p1, p2 … by their line. Blank lines are left out.

    A file named *.jsonl, or whose first prompt is a JSON object, is JSONL: every line must be one.

    Raises:
        BadInput: naming the file, the line, and what is wrong.

    """
    try:
        text = file.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise BadInput(f"--prompts {file} is not UTF-8 (byte {error.start})") from error
    except OSError as error:
        raise BadInput(f"--prompts {file} cannot be read: {error.strerror}") from error
    # Only newlines end a prompt: other line breaks of Unicode may stand in one.
    lines = [(n, line.removesuffix("\r")) for n, line in enumerate(text.split("\n"), start=1)]
    lines = [(n, line) for n, line in lines if line.strip()]
    if not lines:
        raise BadInput(f"--prompts {file} holds no prompt; at least 1 line is needed")
    jsonl = file.suffix == ".jsonl" or isinstance(_parsed(lines[0][1]), dict)
    return tuple(
        Text(f"p{n}", _prompted(line, f"--prompts {file}, line {n}") if jsonl else line)
        for n, line in lines
    )


def _parsed(line: str) -> Any:
    try:
        return json.loads(line)
    except ValueError:
        return None


def _prompted(line: str, where: str) -> Prompted:
    entry = _parsed(line)
    if not isinstance(entry, dict):
        raise BadInput(f"{where}: not a JSON object")
    match entry:
        case {"prompt": str(text)} if text and "messages" not in entry:
            require_utf8(text, where)
            return text
        case {"messages": [*turns]} if turns and "prompt" not in entry:
            return tuple(_message(turn, where) for turn in turns)
    raise BadInput(f"{where}: needs a non-empty text `prompt` or a list `messages`")


def _message(turn: Any, where: str) -> Message:
    match turn:
        case {"role": str(role), "content": str(content)} if len(turn) == 2:
            require_utf8(role + content, where)
            return Message(role, content)
    raise BadInput(f"{where}: a message holds a text `role` and a text `content`, got {turn!r}")
