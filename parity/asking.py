"""Putting a case's prompt to a model: a text as it is, a chat through the model's template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from parity.cases import Message, Prompted


class Encoder(Protocol):
    """A model's tokenizer, of either side."""

    def encode(self, text: str, /) -> list[int]: ...

    def encode_chat(self, messages: Sequence[Mapping[str, str]], /) -> list[int]: ...


def encode(side: Encoder, prompt: Prompted) -> list[int]:
    """Token ids of a prompt."""
    return side.encode(prompt) if isinstance(prompt, str) else side.encode_chat(as_json(prompt))


def asked_of(prompt: Prompted) -> Any:
    """A prompt as requests carry it."""
    return prompt if isinstance(prompt, str) else as_json(prompt)


def as_json(messages: Sequence[Message]) -> list[dict[str, str]]:
    """A chat as requests carry it."""
    return [message._asdict() for message in messages]
