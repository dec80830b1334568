"""Chat requests: the ids that mlx_lm.server makes of messages, or one line why not."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

import fixtures
from engine import BadInput, Target

MESSAGES = st.lists(
    st.fixed_dictionaries(
        {
            "role": st.sampled_from(["system", "user", "assistant"]),
            "content": st.text(st.characters(exclude_categories=["Cs"]), max_size=12),
        }
    ),
    min_size=1,
    max_size=4,
)


def without_template(folder: Path) -> Target:
    """The tiny target, its chat template removed."""
    shutil.copytree(fixtures.target_dir("dense"), folder)
    file = folder / "tokenizer_config.json"
    config = json.loads(file.read_text())
    del config["chat_template"]
    file.write_text(json.dumps(config))
    return Target.load(folder)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    """The tokenizer without mlx-lm around it."""
    return AutoTokenizer.from_pretrained(str(fixtures.target_dir("dense")))


@given(messages=MESSAGES)
def test_a_chat_is_what_the_template_makes_of_it(
    target: Target, tokenizer: Any, messages: list[dict[str, str]]
) -> None:
    """With the start of the assistant's turn at the end; the caller's messages stay as they are."""
    before = [dict(message) for message in messages]
    assert target.encode_chat(messages) == tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, tokenize=True, return_dict=False
    )
    assert messages == before


def test_a_chat_in_full(target: Target) -> None:
    """The template of the tiny target, written out."""
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    text = "Be brief.\n<|user|>Hi<|assistant|>"
    assert target.encode_chat(messages) == target.tokenizer.encode(text, add_special_tokens=False)


@pytest.mark.parametrize(
    ("messages", "said"),
    [
        ([], "the chat has no messages"),
        (["Hi"], "message 0 must hold role and content, got 'Hi'"),
        ([{"role": "user", "content": "a"}, {"role": "user"}], "message 1: content must be text"),
        ([{"content": "a"}], "message 0: role must be text, got None"),
        ([{"role": "user", "content": 5}], "message 0: content must be text, got 5"),
        ([{"role": "user", "content": "\ud800"}], "message 0: content is not UTF-8"),
        (
            [{"role": "poet", "content": "a"}],
            "refuses the messages: TemplateError: unknown role: poet",
        ),
    ],
)
def test_bad_messages_are_refused(target: Target, messages: Any, said: str) -> None:
    with pytest.raises(BadInput, match=said) as refused:
        target.encode_chat(messages)
    assert len(str(refused.value).splitlines()) == 1


def test_a_model_without_a_template_is_refused(tmp_path: Path) -> None:
    """mlx_lm.server would make up a format of its own; that is no chat of this model's."""
    bare = without_template(tmp_path / "bare")
    with pytest.raises(BadInput, match="bare has no chat template"):
        bare.encode_chat([{"role": "user", "content": "Hi"}])
