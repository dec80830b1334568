"""An answer is read strictly, and no answer is one line."""

from __future__ import annotations

import copy
import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from oracle.client import Client, Completion, Options, OracleError, read_completion
from oracle.noise import Filters
from oracle.processors import Processors
from oracle.server import HOST, free_port

EOS = 0
GOOD: dict[str, Any] = {
    "choices": [
        {
            "finish_reason": "length",
            "logprobs": {"content": [{"id": 7, "logprob": -0.5}, {"id": 8, "logprob": -1.5}]},
            "text": "ab",
        }
    ],
    "usage": {
        "prompt_tokens": 3,
        "completion_tokens": 2,
        "prompt_tokens_details": {"cached_tokens": 1},
    },
}


def served(ids: list[int], reason: str) -> dict[str, Any]:
    answer = copy.deepcopy(GOOD)
    answer["choices"][0]["finish_reason"] = reason
    answer["choices"][0]["logprobs"]["content"] = [{"id": i, "logprob": -float(i)} for i in ids]
    answer["usage"]["completion_tokens"] = len(ids)
    return answer


def read(answer: object, stops: tuple[tuple[int, ...], ...] = ()) -> Completion:
    return read_completion(
        answer, lambda choice: choice.get("text"), eos_ids=frozenset({EOS}), stop_sequences=stops
    )


def test_a_good_answer_is_read() -> None:
    """Every field, where the server puts it."""
    assert read(GOOD) == Completion(
        tokens=(7, 8),
        served_tokens=(7, 8),
        text="ab",
        finish_reason="length",
        prompt_tokens=3,
        completion_tokens=2,
        cached_tokens=1,
        logprobs=(-0.5, -1.5),
    )


@pytest.mark.parametrize(
    ("ids", "reason", "stops", "content"),
    [
        ([5, 6, EOS], "stop", (), (5, 6)),
        ([EOS], "stop", (), ()),
        ([5, 6, 7], "stop", ((6, 7),), (5,)),
        ([5, 6, 7], "stop", ((7,), (6, 7)), (5,)),  # the longest that ends the ids
        ([5, 6, 7], "stop", ((7,), (5, 7)), (5, 6)),
        ([6, 7], "stop", ((6, 7),), ()),
        ([6, 7, EOS], "stop", ((6, 7),), (6, 7)),  # EOS ended it
        ([5, 6, 7], "length", ((6, 7),), (5, 6, 7)),
    ],
)
def test_terminal_eos_and_stop_sequences_are_not_content(
    ids: list[int], reason: str, stops: tuple[tuple[int, ...], ...], content: tuple[int, ...]
) -> None:
    """`stop`, `logprobs`: stripped from ids and log-probabilities; usage stays as served."""
    completion = read(served(ids, reason), stops)
    assert completion.tokens == content
    assert completion.logprobs == tuple(-float(i) for i in content)
    assert completion.served_tokens == tuple(ids)
    assert completion.completion_tokens == len(ids)


def broken(path: list[str | int], value: object) -> dict[str, Any]:
    answer: Any = copy.deepcopy(GOOD)
    place = answer
    for step in path[:-1]:
        place = place[step]
    place[path[-1]] = value
    assert isinstance(answer, dict)
    return answer


CHOICE: list[str | int] = ["choices", 0]
TOKEN: list[str | int] = [*CHOICE, "logprobs", "content", 0]


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ([], "the answer is list"),
        ({}, "exactly 1 choice"),
        (broken(["choices"], []), "exactly 1 choice"),
        (broken(["choices"], [1]), "the choice is int"),
        (broken([*CHOICE, "finish_reason"], None), "finish_reason is None"),
        (broken([*CHOICE, "finish_reason"], "tool_calls"), "finish_reason is 'tool_calls'"),
        (broken([*CHOICE, "text"], None), "the text is NoneType"),
        (broken([*CHOICE, "logprobs"], None), "the logprobs is NoneType"),
        (broken([*CHOICE, "logprobs", "content"], {}), "no list of tokens"),
        (broken([*TOKEN, "id"], "7"), "id is '7', not a count"),
        (broken([*TOKEN, "id"], True), "id is True, not a count"),
        (broken([*TOKEN, "id"], -1), "id is -1, not a count"),
        (broken([*TOKEN, "logprob"], None), "token 0 has the log-probability None"),
        (broken([*TOKEN, "logprob"], float("nan")), "token 0 has the log-probability nan"),
        (broken([*TOKEN, "top_logprobs"], []), "token 0 has top_logprobs"),
        (broken([*TOKEN, "id"], EOS), "an EOS id stands inside"),
        (broken(["usage"], None), "the usage is NoneType"),
        (broken(["usage", "completion_tokens"], 3), "usage counts 3 tokens, 2 ids were served"),
        (broken(["usage", "prompt_tokens"], None), "prompt_tokens is None"),
        (broken([*CHOICE, "finish_reason"], "stop"), "neither EOS nor a stop string"),
    ],
)
def test_a_malformed_answer_is_named(answer: object, words: str) -> None:
    """Nothing is guessed: whatever contradicts itself is no answer."""
    with pytest.raises(OracleError, match=words):
        read(answer)


class Misbehaving(ThreadingHTTPServer):
    """A web server that answers every POST as it is told to."""

    mode = "good"
    seen: dict[str, Any]
    released: threading.Event


class _Handler(BaseHTTPRequestHandler):
    server: Misbehaving

    def do_POST(self) -> None:
        length = int(self.headers["Content-Length"])
        self.server.seen = json.loads(self.rfile.read(length))
        body = json.dumps(GOOD).encode()
        match self.server.mode:
            case "close":
                return
            case "garbage":
                self.wfile.write(b"\x00\xff this is no HTTP\r\n\r\n")
                return
            case "stall":
                self.server.released.wait(5)
                return
            case "not json":
                body = b"<html>\nsorry\n</html>"
            case "not utf-8":
                body = b'{"choices": "\xff"}'
        status = {"error": 404, "redirect": 302}.get(self.server.mode, 200)
        self.send_response(status)
        if self.server.mode == "redirect":
            self.send_header("Location", self.path)
        if self.server.mode == "truncated":
            self.send_header("Content-Length", str(len(body) + 9))
        self.end_headers()
        if self.server.mode == "drip":
            for byte in body:
                self.wfile.write(bytes([byte]))
                self.wfile.flush()
                if self.server.released.wait(0.02):
                    return
        else:
            self.wfile.write(b'{"error": "no"}' if self.server.mode == "error" else body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def misbehaving() -> Iterator[Misbehaving]:
    with Misbehaving((HOST, 0), _Handler) as server:
        server.released = threading.Event()
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.released.set()
        server.shutdown()


@pytest.mark.parametrize(
    ("mode", "words"),
    [
        ("close", "no answer: Server disconnected"),
        ("garbage", "no answer: "),
        ("truncated", "no answer: "),
        ("stall", r"no whole answer within 0\.4 s"),
        ("drip", r"no whole answer within 0\.4 s"),
        ("not json", "not JSON: <html> sorry </html>"),
        ("not utf-8", "not JSON: "),
        ("error", 'status 404: {"error": "no"}'),
        ("redirect", "status 302: "),
    ],
)
def test_no_usable_answer_is_one_line(misbehaving: Misbehaving, mode: str, words: str) -> None:
    """An oracle that says nothing says why, within the time it was given."""
    misbehaving.mode = mode
    url = f"http://{HOST}:{misbehaving.server_address[1]}"
    with Client(url, eos_ids={EOS}, timeout_s=0.4) as client:
        start = time.monotonic()
        with pytest.raises(OracleError, match=words) as failed:
            client.complete("x", max_tokens=2)
    assert time.monotonic() - start < 2
    assert str(failed.value).startswith(f"server at {url}: ")
    assert "\n" not in str(failed.value)


def test_a_refused_connection_is_one_line() -> None:
    """Nobody listens."""
    with (
        Client(f"http://{HOST}:{free_port()}", eos_ids={EOS}) as client,
        pytest.raises(OracleError, match=r"no answer: .*refused"),
    ):
        client.complete("x", max_tokens=2)


def test_a_request_says_what_it_must_and_no_more(misbehaving: Misbehaving) -> None:
    """The model by its default name, a boolean `logprobs`, no `top_logprobs`, any script as is."""
    misbehaving.mode = "good"
    text = 'Zażółć 日本語 🙂 "\\\u0000\u2028'
    url = f"http://{HOST}:{misbehaving.server_address[1]}/"
    with Client(url, eos_ids={EOS}, encode=lambda s: [len(s)]) as client:
        assert client.complete(text, max_tokens=2).tokens == (7, 8)
        assert misbehaving.seen == {
            "model": "default_model",
            "prompt": text,
            "max_tokens": 2,
            "logprobs": True,
            "temperature": 0.0,
            "top_p": 1.0,
            "top_k": 0,
            "min_p": 0.0,
        }
        options = Options(Filters(0.0, top_k=5), seed=0, num_draft_tokens=0)
        client.complete("x", max_tokens=2, stop=["ab"], options=options)
        assert misbehaving.seen | {
            "seed": 0,
            "stop": ["ab"],
            "num_draft_tokens": 0,
            "top_k": 5,
        } == (misbehaving.seen)


def test_a_field_is_sent_where_it_is_not_the_servers_default() -> None:
    """One by one; ids become JSON's string keys, and XTC's numbers floats, which it insists on."""
    plain = Options().body()
    for processors, sent in (
        (Processors(logit_bias=((7, -1.5), (0, 2.0))), {"logit_bias": {"7": -1.5, "0": 2.0}}),
        (Processors(repetition_penalty=1.5), {"repetition_penalty": 1.5}),
        (Processors(repetition_context_size=0), {"repetition_context_size": 0}),
        (Processors(presence_penalty=-1.0), {"presence_penalty": -1.0}),
        (Processors(presence_context_size=7), {"presence_context_size": 7}),
        (Processors(frequency_penalty=0.5), {"frequency_penalty": 0.5}),
        (Processors(frequency_context_size=21), {"frequency_context_size": 21}),
    ):
        assert Options(processors=processors).body() == plain | sent
    xtc = Options(Filters(1.0, xtc_probability=1, xtc_threshold=0, xtc_special_tokens=(3,))).body()
    assert xtc == plain | {"temperature": 1.0, "xtc_probability": 1.0, "xtc_threshold": 0.0}
    assert json.dumps(xtc["xtc_probability"]) == "1.0"
    assert json.dumps(xtc["xtc_threshold"]) == "0.0"


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"prompt": ""}, "prompt must hold at least 1 character"),
        ({"max_tokens": 0}, "max_tokens must be at least 1, got 0"),
        ({"stop": [""]}, "non-empty strings"),
        ({"stop": "ab"}, "sequence of non-empty strings"),
        ({"stop": ["ab"]}, "need a client with an encode function"),
    ],
)
def test_requests_that_would_end_the_servers_worker_are_refused(
    wrong: dict[str, Any], words: str
) -> None:
    """Bad input is named with its limit, before anything is sent (D9)."""
    with (
        Client(f"http://{HOST}:{free_port()}", eos_ids={EOS}) as client,
        pytest.raises(ValueError, match=words),
    ):
        client.complete(**{"prompt": "x", "max_tokens": 2, **wrong})


@pytest.mark.parametrize("seed", [-1, 1 << 64])
def test_a_seed_the_server_cannot_take_is_refused(seed: int) -> None:
    """Bad input is named with its limit, when the options are built (D9)."""
    with pytest.raises(ValueError, match=rf"seed must be within 0\.\.2\^64-1, got {seed}"):
        Options(seed=seed)
