"""What an mlx_lm.server says: ids, text and log-probabilities of a completion, strictly read.

Ids come from non-streaming answers with ``logprobs: true`` and without ``top_logprobs``, with which
the server reports other ids than it emitted (deviation D19). A seed in the request, or a draft
model in the server, selects the serial lane; every other request goes through the batch lane.

The served text is what the server's detokenizer had released when generation stopped. A stop,
unlike the end of the budget, drops what it still held: the start of a possible stop string, a space
at the end, the bytes of an unfinished character. So ``text`` may be shorter than ``tokens`` decode.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, fields
from types import TracebackType
from typing import Any, Literal, Protocol

import httpx

from .noise import GREEDY, Filters
from .processors import NO_PROCESSORS, Processors

MAX_ANSWER_BYTES = 64 * 1024 * 1024


class OracleError(RuntimeError):
    """The server gave no usable answer; one line says why."""


class Running(Protocol):
    """What the client needs of a ``server.Server``."""

    @property
    def url(self) -> str: ...

    def alive(self) -> bool: ...


@dataclass(frozen=True, slots=True)
class Options:
    """What a request asks for besides its prompt, its budget and its stop strings.

    XTC's special tokens are the server's own choice and not sent. ``top_k`` and the ids of
    ``logit_bias`` must stay below the vocabulary's size, which is not known here: else the first
    ends the server's worker (D9), and the second the whole server (D27).
    """

    filters: Filters = GREEDY
    processors: Processors = NO_PROCESSORS
    seed: int | None = None
    """Selects the serial lane, greedy or not."""
    num_draft_tokens: int | None = None

    def __post_init__(self) -> None:
        if self.seed is not None and not 0 <= self.seed < 1 << 64:
            raise ValueError(f"seed must be within 0..2^64-1, got {self.seed}")

    def body(self) -> dict[str, Any]:
        """The JSON fields; beyond the first four only what differs from the server's default."""
        filters = self.filters
        body: dict[str, Any] = {
            "temperature": filters.temperature,
            "top_p": filters.top_p or 1.0,
            "top_k": filters.top_k,
            "min_p": filters.min_p,
        }
        if filters.xtc_probability > 0:  # of these two the server takes floats only
            body["xtc_probability"] = float(filters.xtc_probability)
            body["xtc_threshold"] = float(filters.xtc_threshold)
        for field in fields(self.processors):
            if (value := getattr(self.processors, field.name)) != field.default:
                body[field.name] = value
        if self.processors.logit_bias:
            body["logit_bias"] = {str(token): bias for token, bias in self.processors.logit_bias}
        optional = {"seed": self.seed, "num_draft_tokens": self.num_draft_tokens}
        return body | {name: value for name, value in optional.items() if value is not None}


PLAIN = Options()


@dataclass(frozen=True, slots=True)
class Completion:
    """One finished answer. Content excludes a terminal EOS and a stop sequence that ended it."""

    tokens: tuple[int, ...]
    """Content ids."""
    served_tokens: tuple[int, ...]
    """Ids as served, terminal EOS and stop sequence included."""
    text: str
    finish_reason: Literal["stop", "length"]
    prompt_tokens: int
    completion_tokens: int
    """As served: counts ``served_tokens``."""
    cached_tokens: int | None
    """How much of the prompt came from the server's prompt cache; None when it does not say."""
    logprobs: tuple[float, ...]
    """One per content id."""


class Client:
    """Completions from one server, one connection each.

    ``eos_ids`` are the target's EOS ids. ``encode`` gives a stop string's ids, WITHOUT special
    tokens; only requests with stop strings need it. ``timeout_s`` bounds a whole request.
    """

    def __init__(
        self,
        server: Running | str,
        *,
        eos_ids: Collection[int],
        encode: Callable[[str], Sequence[int]] | None = None,
        timeout_s: float = 60.0,
    ) -> None:
        self._server = None if isinstance(server, str) else server
        self.url = (server if isinstance(server, str) else server.url).rstrip("/")
        self._eos_ids = frozenset(eos_ids)
        self._encode = encode
        self._timeout_s = timeout_s
        # Neither a proxy from the environment nor a redirect may come between us and the server.
        self._http = httpx.Client(trust_env=False, timeout=timeout_s)

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        self._http.close()

    def complete(
        self,
        prompt: str,
        *,
        max_tokens: int,
        options: Options = PLAIN,
        stop: Sequence[str] = (),
    ) -> Completion:
        """Complete ``prompt``, which the server tokenizes.

        Raises ``ValueError`` for requests that are known to end the server's worker (D9), and
        ``OracleError`` when the answer is missing, malformed or contradicts itself.
        """
        if not prompt:
            raise ValueError("the prompt must hold at least 1 character, got 0")
        body = {
            "prompt": prompt,
            **options.body(),
            **self._limits(max_tokens, stop),
        }
        return self._ask("/v1/completions", body, stop, lambda choice: choice.get("text"))

    def chat(
        self,
        messages: Sequence[Mapping[str, str]],
        *,
        max_tokens: int,
        options: Options = PLAIN,
        stop: Sequence[str] = (),
    ) -> Completion:
        """Answer ``messages``, which the server puts through the tokenizer's chat template."""
        if not messages:
            raise ValueError("a chat must hold at least 1 message, got 0")
        body = {
            "messages": [dict(message) for message in messages],
            **options.body(),
            **self._limits(max_tokens, stop),
        }
        return self._ask("/v1/chat/completions", body, stop, _message_text)

    def _limits(self, max_tokens: int, stop: Sequence[str]) -> dict[str, Any]:
        if max_tokens < 1:
            raise ValueError(f"max_tokens must be at least 1, got {max_tokens}")
        if isinstance(stop, str) or not all(stop):
            raise ValueError(f"stop must be a sequence of non-empty strings, got {stop!r}")
        if stop and self._encode is None:
            raise ValueError("stop strings need a client with an encode function")
        stops = {"stop": list(stop)} if stop else {}
        return {"model": "default_model", "max_tokens": max_tokens, "logprobs": True, **stops}

    def _ask(
        self,
        path: str,
        body: dict[str, Any],
        stop: Sequence[str],
        text_of: Callable[[dict[str, Any]], object],
    ) -> Completion:
        answer = self._post(path, body)
        encode = self._encode or (lambda _: ())
        try:
            return read_completion(
                answer,
                text_of,
                eos_ids=self._eos_ids,
                stop_sequences=[tuple(encode(string)) for string in stop],
            )
        except OracleError as error:
            raise self._failed(str(error)) from None

    def _post(self, path: str, body: dict[str, Any]) -> object:
        deadline = time.monotonic() + self._timeout_s
        raw = bytearray()
        try:
            with self._http.stream("POST", self.url + path, json=body) as answer:
                for chunk in answer.iter_bytes():
                    raw += chunk
                    if time.monotonic() > deadline:
                        raise self._failed(f"no whole answer within {self._timeout_s:g} s")
                    if len(raw) > MAX_ANSWER_BYTES:
                        raise self._failed(f"an answer longer than {MAX_ANSWER_BYTES} bytes")
        except httpx.TimeoutException:
            raise self._failed(f"no whole answer within {self._timeout_s:g} s") from None
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            what = str(error) or type(error).__name__
            raise self._failed(f"no answer: {what}") from None
        if answer.status_code != 200:
            raise self._failed(f"status {answer.status_code}: {_excerpt(raw)}")
        try:
            return json.loads(raw)
        except ValueError:
            raise self._failed(f"not JSON: {_excerpt(raw)}") from None

    def _failed(self, what: str) -> OracleError:
        died = self._server is not None and not self._server.alive()
        state = "mlx_lm.server died" if died else "server"
        return OracleError(f"{state} at {self.url}: {what}")


def read_completion(
    answer: object,
    text_of: Callable[[dict[str, Any]], object],
    *,
    eos_ids: frozenset[int],
    stop_sequences: Sequence[tuple[int, ...]] = (),
) -> Completion:
    """Check a decoded answer and strip what is not content; ``OracleError`` names what is wrong."""
    body = _dict(answer, "answer")
    choices = body.get("choices")
    if not isinstance(choices, list) or len(choices) != 1:
        raise OracleError("the answer does not hold exactly 1 choice")
    choice = _dict(choices[0], "choice")
    reason: Literal["stop", "length"]
    match choice.get("finish_reason"):
        case "stop":
            reason = "stop"
        case "length":
            reason = "length"
        case other:
            raise OracleError(f"finish_reason is {other!r}, neither 'stop' nor 'length'")
    text = text_of(choice)
    if not isinstance(text, str):
        raise OracleError(f"the text is {type(text).__name__}, not a string")
    served, logprobs = _served(choice)
    usage = _dict(body.get("usage"), "usage")
    completion_tokens = _count(usage, "completion_tokens")
    if completion_tokens != len(served):
        raise OracleError(f"usage counts {completion_tokens} tokens, {len(served)} ids were served")
    details = usage.get("prompt_tokens_details")
    num_content = len(served) - _terminal_length(served, reason, eos_ids, stop_sequences)
    if not eos_ids.isdisjoint(served[:num_content]):
        raise OracleError("an EOS id stands inside the served ids: are these the target's EOS ids?")
    return Completion(
        tokens=served[:num_content],
        served_tokens=served,
        text=text,
        finish_reason=reason,
        prompt_tokens=_count(usage, "prompt_tokens"),
        completion_tokens=completion_tokens,
        cached_tokens=None if details is None else _count(_dict(details, "d"), "cached_tokens"),
        logprobs=logprobs[:num_content],
    )


def _served(choice: dict[str, Any]) -> tuple[tuple[int, ...], tuple[float, ...]]:
    content = _dict(choice.get("logprobs"), "logprobs").get("content")
    if not isinstance(content, list):
        raise OracleError("logprobs hold no list of tokens")
    ids: list[int] = []
    logprobs: list[float] = []
    for pos, raw in enumerate(content):
        entry = _dict(raw, f"token {pos}")
        if "top_logprobs" in entry:
            raise OracleError(f"token {pos} has top_logprobs, so its id may not be the emitted one")
        logprob = entry.get("logprob")
        if not isinstance(logprob, int | float) or not -math.inf < logprob < math.inf:
            raise OracleError(f"token {pos} has the log-probability {logprob!r}")
        ids.append(_count(entry, "id"))
        logprobs.append(float(logprob))
    return tuple(ids), tuple(logprobs)


def _terminal_length(
    served: tuple[int, ...],
    reason: str,
    eos_ids: frozenset[int],
    stop_sequences: Sequence[tuple[int, ...]],
) -> int:
    """How many ids at the end are not content: EOS, else the longest stop sequence there."""
    if reason != "stop":
        return 0
    if served and served[-1] in eos_ids:
        return 1
    ends = [len(stop) for stop in stop_sequences if stop and served[-len(stop) :] == stop]
    if not ends:
        raise OracleError(
            "finish_reason is 'stop', but the ids end in neither EOS nor a stop string"
        )
    return max(ends)


def _message_text(choice: dict[str, Any]) -> object:
    """The server writes null for an answer without text."""
    content = _dict(choice.get("message"), "message").get("content")
    return "" if content is None else content


def _dict(value: object, name: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise OracleError(f"the {name} is {type(value).__name__}, not an object")
    return value


def _count(values: dict[str, Any], name: str) -> int:
    value = values.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise OracleError(f"{name} is {value!r}, not a count")
    return value


def _excerpt(raw: bytes | bytearray) -> str:
    """The beginning of an answer, in one line."""
    text = " ".join(bytes(raw[:2000]).decode("utf-8", errors="replace").split())
    return (text[:160] + "…" if len(text) > 160 else text) or "an empty answer"
