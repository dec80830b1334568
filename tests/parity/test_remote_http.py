"""How answers of a subject come and are read, and that what goes wrong is one line."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parity.errors import BadInput, Unusable
from parity.remote import http as limits
from parity.remote.address import Address, address
from parity.remote.capabilities import RAW, Endpoint, Found, find, first_accepted
from parity.remote.claims import failure_claim
from parity.remote.http import Http, base_of, error_in
from parity.remote.reading import Unreadable, read_events, read_whole
from parity.remote.sse import EventReader
from tests.parity.altered import Body, Script, altered

SAID = {"choices": [{"text": "ab", "finish_reason": "stop"}]}


def events_of(chunks: list[bytes]) -> list[str]:
    reader = EventReader()
    return [event for chunk in chunks for event in reader.feed(chunk)] + reader.close()


@st.composite
def streams(draw: st.DrawFn) -> tuple[list[str], bytes]:
    """Events of some lines each, and bytes that carry them with comments and any line ends."""
    line = st.text(st.characters(exclude_characters="\r\n", codec="utf-8"), max_size=5)
    events = draw(st.lists(st.lists(line, min_size=1, max_size=3), max_size=4))
    text, end = "", draw(st.sampled_from(("\n", "\r\n", "\r")))
    for lines in events:
        for one in lines:
            text += draw(st.sampled_from(("", f": comment{end}", f"id: 7{end}", f":{end}")))
            # One space behind the colon belongs to the format, and may be missing.
            space = " " if one.startswith(" ") else draw(st.sampled_from(("", " ")))
            text += f"data:{space}{one}{end}"
        text += end * draw(st.integers(1, 2))
    return ["\n".join(lines) for lines in events], text.encode()


@given(streams(), st.data())
def test_events_are_the_same_however_the_bytes_are_cut(
    stream: tuple[list[str], bytes], data: st.DataObject
) -> None:
    """Characters, line ends and events may all come apart."""
    expected, raw = stream
    cuts = sorted(data.draw(st.lists(st.integers(0, len(raw)), max_size=8)))
    chunks = [raw[a:b] for a, b in zip([0, *cuts], [*cuts, len(raw)], strict=True)]
    assert events_of(chunks) == expected
    assert events_of([bytes([one]) for one in raw]) == expected


def test_an_event_that_nothing_ends_is_given_out_at_the_close() -> None:
    """Some servers leave out the last empty line."""
    assert events_of([b"data: a\n\ndata: b"]) == ["a", "b"]


def test_what_is_not_there_is_not_told() -> None:
    """Lenient about what a server offers."""
    said = read_whole(SAID)
    assert (said.text, said.finish_reason) == ("ab", "stop")
    told = (said.ids, said.logprobs, said.prompt_tokens, said.completion_tokens)
    assert told == (None, None, None, None)


@pytest.mark.parametrize(
    ("choice", "ids", "logprobs"),
    [
        ({"logprobs": {"content": [{"id": 7, "logprob": -1}]}}, (7,), (-1.0,)),
        ({"logprobs": {"content": [{"token": "a", "logprob": -1}]}}, None, (-1.0,)),
        ({"logprobs": {"token_logprobs": [-2.5]}, "token_ids": [9]}, (9,), (-2.5,)),
        ({"logprobs": None}, None, None),
    ],
)
def test_ids_and_log_probabilities_are_read_where_servers_put_them(
    choice: dict[str, Any], ids: object, logprobs: object
) -> None:
    """mlx_lm and llama.cpp, OpenAI's chat, vLLM's completions."""
    said = read_whole({"choices": [{**SAID["choices"][0], **choice}]})
    assert (said.ids, said.logprobs) == (ids, logprobs)


@pytest.mark.parametrize(
    ("body", "names"),
    [
        ([], "the answer is list"),
        ({"choices": 3}, "exactly 1 choice"),
        ({"choices": []}, "exactly 1 choice"),
        ({"choices": [7]}, "the choice is int"),
        ({"choices": [{"finish_reason": "stop"}]}, "the message is NoneType"),
        ({"choices": [{"text": 5, "finish_reason": "stop"}]}, "the text is int"),
        ({"choices": [{"text": "\ud800", "finish_reason": "stop"}]}, "no UTF-8 form"),
        ({"choices": [{"text": "a"}]}, "finish_reason is None"),
        ({"choices": [{"text": "a", "finish_reason": 3}]}, "finish_reason is 3"),
        ({**SAID, "usage": {"prompt_tokens": -1}}, "prompt_tokens is '-1'"),
        ({**SAID, "usage": {"completion_tokens": True}}, "completion_tokens is 'True'"),
        ({**SAID, "usage": []}, "the usage is list"),
        ({"choices": [{**SAID["choices"][0], "token_ids": 4}]}, "token_ids is int"),
        ({"choices": [{**SAID["choices"][0], "token_ids": ["a"]}]}, "a token id is 'a'"),
        ({"choices": [{**SAID["choices"][0], "logprobs": []}]}, "the logprobs is list"),
        ({"choices": [{**SAID["choices"][0], "logprobs": {"content": 1}}]}, "content is int"),
        (
            {"choices": [{**SAID["choices"][0], "logprobs": {"token_logprobs": ["x"]}}]},
            "a log-probability is 'x'",
        ),
        (
            {"choices": [{**SAID["choices"][0], "logprobs": {"token_logprobs": [10**400]}}]},
            "beyond any float",
        ),
    ],
)
def test_what_is_there_must_make_sense(body: Any, names: str) -> None:
    """Strict about what it says."""
    with pytest.raises(Unreadable, match=names):
        read_whole(body)


def test_events_without_an_end_are_no_answer() -> None:
    """A connection that closes in the middle is not an answer that ended there."""
    part = {"choices": [{"text": "a", "finish_reason": None}]}
    with pytest.raises(Unreadable, match="break off"):
        read_events([part], complete=False)
    whole = [part, {"choices": [{"text": "b", "finish_reason": "length"}]}]
    assert read_events(whole, complete=False).text == "ab"
    with pytest.raises(Unreadable, match="finish_reason is None"):
        read_events([part], complete=True)


WAYS = {
    "stall": "no whole answer within 0.5 s",
    "drip": "no whole answer within 0.5 s",
    "close": "no whole answer",
    "garbage": "not JSON: <html>It works!</html>",
    "shape": "does not hold exactly 1 choice",
    "events": "not JSON: {oops",
    "error": "status 500: out of memory",
}


@pytest.mark.parametrize("way", WAYS)
def test_what_goes_wrong_is_one_line_with_url_question_and_answer(way: str) -> None:
    """The whole request has one deadline: a server that drips bytes does not outlast it."""
    with altered(Script(fails=lambda _: way)) as url:
        asked_s = time.monotonic()
        with pytest.raises(Unusable) as raised:
            Endpoint(RAW, "m").ask(Http(url, 0.5), "Once", 3)
        took_s = time.monotonic() - asked_s
    line = str(raised.value)
    assert "\n" not in line
    assert line.startswith(f"subject {url}: POST /v1/completions (prompt 'Once'): ")
    assert WAYS[way] in line
    assert took_s < 3.0


def test_an_answer_has_a_largest_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody fills our memory."""
    monkeypatch.setattr(limits, "MAX_BYTES", 20)
    with altered(Script()) as url, pytest.raises(Unusable, match="longer than 20 bytes"):
        Endpoint(RAW, "m").ask(Http(url, 5.0), "Once", 3)


def test_nobody_at_the_address_is_one_line() -> None:
    """Before any model is loaded."""
    with pytest.raises(Unusable, match=r"subject http://127\.0\.0\.1:1: connecting: .*refused"):
        Http("http://127.0.0.1:1", 5.0).reach()


def test_text_without_a_utf8_form_is_said_and_asked_as_it_is() -> None:
    """Half of a surrogate pair, in what a server says and in what it is asked."""
    assert error_in({"error": "bad \ud800 thing"}) == "bad \\ud800 thing"
    script = Script()
    with altered(script) as url:
        Endpoint(RAW, "x\ud800").ask(Http(url, 5.0), "Once", 3)
    assert script.seen[0][1]["model"] == "x\ud800"
    with pytest.raises(BadInput, match="--subject-model is not UTF-8"):
        address("http://h:1", None, "x\udcff", None)


def test_refused_fields_are_not_asked_for_again() -> None:
    """A 4xx for an optional field means that it is not offered."""
    script = Script(refuses=("logprobs", "return_token_ids", "stream", "seed"))
    with altered(script) as url:
        http = Http(url, 5.0)
        found = find(http, first_accepted(http, None), needs_chat=False)
        script.seen.clear()
        found.endpoint.ask(http, "Once", 3)
    rows = {row.name: (row.value, row.note) for row in found.rows}
    assert rows["streaming"] == ("no", "status 400: unknown field stream")
    assert rows["seed"] == ("no", "status 400: unknown field seed")
    assert rows["log-probabilities"][0] == rows["ids in answers"][0] == "no"
    assert {"model", "prompt", "max_tokens", "temperature"} == script.seen[0][1].keys()


QUESTIONS: dict[str, Callable[[Body], object]] = {
    "streamed": lambda request: request.get("stream"),
    "with log-probabilities": lambda request: request.get("logprobs"),
    "with ids": lambda request: request.get("return_token_ids"),
    "with a seed": lambda request: request.get("seed"),
    "as a chat": lambda request: "messages" in request,
}


def probed(script: Script, *, needs_chat: bool = False) -> Found:
    """What a server that follows a script is found to offer."""
    with altered(script) as url:
        http = Http(url, 60.0)
        return find(http, first_accepted(http, None), needs_chat=needs_chat)


@pytest.mark.parametrize("status", ["500", "502"])
@pytest.mark.parametrize("how", QUESTIONS)
def test_a_server_that_fails_over_a_question_does_not_just_lack_it(how: str, status: str) -> None:
    """mutants: a 5xx is taken for a refusal, its cases are left out and the run ends in 0."""
    asks = QUESTIONS[how]
    script = Script(fails=lambda request: status if asks(request) else None)
    complaint = rf"prompt .*, {how}\): status {status}: out of memory$"
    if how == "streamed":
        with pytest.raises(Unusable, match=complaint):
            probed(script)
        return
    found = probed(script)
    if how == "as a chat":  # which nobody asked for here
        rows = {row.name: (row.value, row.note) for row in found.rows}
        assert rows["chat"] == ("no", f"status {status}: out of memory")
        with pytest.raises(Unusable, match=complaint):
            probed(script, needs_chat=True)
        return
    (claim,) = failure_claim(found.failures[:1])
    assert not claim.met
    assert re.search(complaint, claim.text)


def test_a_field_that_a_server_takes_in_another_form_has_not_failed() -> None:
    """Options of streams may be more than it knows."""
    found = probed(Script(fails=lambda request: "500" if "stream_options" in request else None))
    assert (found.failures, found.endpoint.no_stream) == ((), "")
    assert failure_claim(found.failures) == ()


@pytest.mark.parametrize("status", ["400", "501", "503"])
@pytest.mark.parametrize("how", QUESTIONS)
def test_a_server_that_says_it_cannot_is_taken_at_its_word(how: str, status: str) -> None:
    """Whatever it refuses, it is asked for the rest."""
    asks = QUESTIONS[how]
    found = probed(Script(fails=lambda request: status if asks(request) else None))
    rows = {row.name: (row.value, row.note) for row in found.rows}
    names = {"streamed": "streaming", "with a seed": "seed", "as a chat": "chat"}
    if how in names:
        assert rows[names[how]] == ("no", f"status {status}: out of memory")


def test_a_server_that_fails_at_two_requests_at_once_does_not_just_lack_it() -> None:
    """It crashed, and 429 and 503 are there to be said."""
    with pytest.raises(Unusable, match=r"prompt .*, side by side\): status 500: one at a time"):
        probed(Script(one_at_a_time=True, busy_status=500))
    for status in (429, 503):
        found = probed(Script(one_at_a_time=True, busy_status=status))
        assert found.no_concurrency == f"status {status}: one at a time"


@pytest.mark.parametrize(
    ("way", "says"), [("cut", "an error event: gone"), ("coded", "status 200: out of memory")]
)
def test_a_failure_may_come_behind_a_status_of_200(way: str, says: str) -> None:
    """Events that began are offered; and an error may carry the status that it would have had."""
    with pytest.raises(Unusable, match=rf", streamed\): {says}"):
        probed(Script(fails=lambda request: way if request.get("stream") else None))


def test_a_server_that_fails_at_texts_is_not_asked_for_chats_instead() -> None:
    """Only a name that was a guess of ours may fail, and that is told."""
    with pytest.raises(Unusable, match=r"POST /v1/completions .*'default_model': status 500"):
        probed(Script(fails=lambda request: "500" if "prompt" in request else None))
    script = Script(
        fails=lambda request: "500" if request["model"] == "default_model" else None,
        models=("llama",),
    )
    (row, *_) = probed(script).rows
    assert (row.name, row.value) == ("model", "llama")
    assert row.note == "the first of /v1/models; as 'default_model': status 500: out of memory"


@pytest.mark.parametrize(("status", "ends"), [(500, True), (404, False), (503, False)])
def test_a_server_may_lack_a_list_of_models_but_not_fail_at_it(status: int, ends: bool) -> None:
    script = Script(lacks=("/v1/completions",), list_status=status)
    if ends:
        with pytest.raises(Unusable, match="GET /v1/models: status 500"):
            probed(script)
    else:
        assert not probed(script).is_raw


@pytest.mark.parametrize("status", ["429", "503"])
def test_a_server_that_changes_its_mind_about_a_plain_text_is_one_line(status: str) -> None:
    """It is no defect of ours."""
    script = Script()
    script.fails = lambda _: status if len(script.seen) > 1 else None
    with pytest.raises(Unusable, match=f"status {status}: out of memory"):
        probed(script)


def test_a_model_that_is_unknown_everywhere_ends_the_run() -> None:
    """Both endpoints are tried, and both reasons are given."""
    script = Script(lacks=("/v1/completions", "/v1/chat/completions"))
    with altered(script) as url, pytest.raises(Unusable) as raised:
        first_accepted(Http(url, 5.0), "llama")
    assert str(raised.value).count("model 'llama': status 404: no such path") == 2


@pytest.mark.parametrize(
    "url",
    [
        "localhost:80",
        "ftp://x",
        "",
        "http://",
        "http://[::1",
        "http://h:65536",
        "http://h:84313",
        "http://h:0",
        "http://h:1/v1?x=1",
        "http://h:1?",
        "http://h:1/#f",
    ],
)
def test_an_address_is_an_address(url: str) -> None:
    with pytest.raises(BadInput, match="--subject"):
        base_of(url)


def test_an_address_may_end_in_v1() -> None:
    """As SDKs write it."""
    assert base_of("http://h:1/v1/") == base_of("http://h:1") == "http://h:1"


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        (("engine", "x", None, None), "--subject-command is for a subject that is a server"),
        ((None, None, "m", None), "--subject-model is for"),
        ((None, None, None, 3.0), "--timeout is for"),
        (("http://h:1", None, None, 0.0), "--timeout must be a number of seconds above 0, got 0"),
        (("http://h:1", None, None, float("nan")), "got nan"),
        ((None, "python x", None, None), r"without \{port\} needs --subject URL"),
        ((None, "no-such-program {port}", None, None), "no program 'no-such-program'"),
        ((None, "python '{port}", None, None), "No closing quotation"),
        ((None, " ", None, None), "is empty"),
    ],
)
def test_options_of_a_subject_go_together(arguments: tuple[Any, ...], names: str) -> None:
    with pytest.raises(BadInput, match=names):
        address(*arguments)


def test_the_engine_is_the_default_subject() -> None:
    assert address(None, None, None, None) is address("engine", None, None, None) is None
    at = address("http://h:1/v1", "python {port}", "m", 3.0)
    assert at == Address("http://h:1", "python {port}", "m", 3.0)
    assert json.dumps(at.options) == (
        '["--subject", "http://h:1", "--subject-command", "python {port}", '
        '"--subject-model", "m", "--timeout", "3"]'
    )
