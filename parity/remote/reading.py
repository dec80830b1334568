"""What an answer says. What is not there is not told; what is there must make sense."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


class Unreadable(ValueError):
    """An answer is not of the form it should have; the message says where."""


@dataclass(frozen=True, slots=True)
class Said:
    """One answer as served. `ids` and `logprobs` may count a terminal EOS; None is not told."""

    text: str
    finish_reason: str
    ids: tuple[int, ...] | None
    logprobs: tuple[float, ...] | None
    prompt_tokens: int | None
    completion_tokens: int | None
    cached_tokens: int | None


def read_whole(body: Any) -> Said:
    """Read an answer that came in one piece."""
    return _said([_choice(body)], [body], "message")


def read_events(events: Sequence[Any], *, complete: bool) -> Said:
    """Read an answer that came in events; `complete`: they ended as they should.

    An event without a choice may carry the usage.
    """
    choices = [_choice(event) for event in events if _dict(event, "event").get("choices")]
    if not choices:
        raise Unreadable("no event holds a choice")
    if not complete and all(choice.get("finish_reason") is None for choice in choices):
        raise Unreadable("the events break off without a finish_reason")
    return _said(choices, events, "delta")


def _choice(body: Any) -> dict[str, Any]:
    choices = _dict(body, "answer").get("choices")
    if not isinstance(choices, list) or len(choices) != 1:
        raise Unreadable("the answer does not hold exactly 1 choice")
    return _dict(choices[0], "choice")


def _said(choices: Sequence[dict[str, Any]], bodies: Sequence[Any], chat: str) -> Said:
    reasons = [r for choice in choices if (r := choice.get("finish_reason")) is not None]
    if not reasons or not isinstance(reasons[-1], str):
        raise Unreadable(f"finish_reason is {reasons[-1] if reasons else None!r}, not a text")
    usages = [_dict(u, "usage") for body in bodies if (u := body.get("usage")) is not None]
    usage = usages[-1] if usages else {}
    details = usage.get("prompt_tokens_details")
    return Said(
        text="".join(_text(choice, chat) for choice in choices),
        finish_reason=reasons[-1],
        ids=_joined([_ids(choice) for choice in choices]),
        logprobs=_joined([_logprobs(choice) for choice in choices]),
        prompt_tokens=_count(usage, "prompt_tokens"),
        completion_tokens=_count(usage, "completion_tokens"),
        cached_tokens=None
        if details is None
        else _count(_dict(details, "prompt_tokens_details"), "cached_tokens"),
    )


def _text(choice: dict[str, Any], chat: str) -> str:
    text = choice["text"] if "text" in choice else _dict(choice.get(chat), chat).get("content")
    # An empty content may be null or left out.
    if text is None and "text" not in choice:
        return ""
    if not isinstance(text, str):
        raise Unreadable(f"the text is {type(text).__name__}, not a string")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise Unreadable(f"the text has no UTF-8 form: {error.reason}") from None
    return text


def _joined(parts: Sequence[tuple[Any, ...] | None]) -> tuple[Any, ...] | None:
    told = [part for part in parts if part is not None]
    return tuple(one for part in told for one in part) if told else None


def _ids(choice: dict[str, Any]) -> tuple[int, ...] | None:
    """`token_ids` (vLLM), or the `id` of each entry of `logprobs.content` (mlx_lm, llama.cpp)."""
    listed = choice.get("token_ids")
    if listed is None:
        entries = _entries(choice)
        if entries is None or not all("id" in entry for entry in entries):
            return None
        listed = [entry["id"] for entry in entries]
    if not isinstance(listed, list):
        raise Unreadable(f"token_ids is {type(listed).__name__}, not a list")
    return tuple(_number(token, "a token id") for token in listed)


def _logprobs(choice: dict[str, Any]) -> tuple[float, ...] | None:
    """One per token: of `logprobs.content` (chat), or `token_logprobs` (completions)."""
    entries = _entries(choice)
    if entries is not None:
        listed: Any = [entry.get("logprob") for entry in entries]
    else:
        listed = (choice.get("logprobs") or {}).get("token_logprobs")
    if listed is None:
        return None
    if not isinstance(listed, list):
        raise Unreadable(f"token_logprobs is {type(listed).__name__}, not a list")
    for logprob in listed:
        if not isinstance(logprob, int | float) or isinstance(logprob, bool):
            raise Unreadable(f"a log-probability is {logprob!r}, not a number")
    try:
        return tuple(map(float, listed))
    except OverflowError:
        raise Unreadable("a log-probability is beyond any float") from None


def _entries(choice: dict[str, Any]) -> list[dict[str, Any]] | None:
    logprobs = choice.get("logprobs")
    if logprobs is None:
        return None
    content = _dict(logprobs, "logprobs").get("content")
    if content is None:
        return None
    if not isinstance(content, list):
        raise Unreadable(f"logprobs.content is {type(content).__name__}, not a list")
    return [_dict(entry, "entry of logprobs.content") for entry in content]


def _count(values: dict[str, Any], name: str) -> int | None:
    value = values.get(name)
    return None if value is None else _number(value, name)


def _number(value: Any, name: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise Unreadable(f"{name} is {str(value)[:40]!r}, not a count")
    return value


def _dict(value: Any, name: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise Unreadable(f"the {name} is {type(value).__name__}, not an object")
    return value
