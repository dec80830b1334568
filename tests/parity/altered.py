"""A server that passes completions on to another one and changes what comes back, or breaks off."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx

Body = dict[str, Any]
CANNED = {
    "choices": [{"index": 0, "text": "x", "finish_reason": "length"}],
    "usage": {"prompt_tokens": 1, "completion_tokens": 1},
}


@dataclass
class Script:
    """What an altered server does.

    `change(request, answer)` edits an answer in place; `fails(request)` names a way to break off:
    stall, drip, close, garbage, shape, events, cut (an error in the middle of events), coded (an
    error of 500 behind a status of 200), error; or a status. Fields in `refuses` and paths in
    `lacks` get an error, `busy_status` who comes second to a server that does one thing at a time.
    `models` are listed, or it is a `list_status`. Without `upstream` every answer is the same.
    """

    upstream: str | None = None
    change: Callable[[Body, Body], None] = lambda _, __: None
    fails: Callable[[Body], str | None] = lambda _: None
    refuses: tuple[str, ...] = ()
    lacks: tuple[str, ...] = ()
    streams: bool = True
    one_at_a_time: bool = False
    busy_status: int = 429
    models: tuple[str, ...] = ()
    list_status: int = 404
    seen: list[tuple[str, Body]] = field(default_factory=list)
    most_at_once: int = 0
    under_way: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)
    done: threading.Event = field(default_factory=threading.Event)


def drop_ids(_: Body, answer: Body) -> None:
    """Tell no ids and no log-probabilities."""
    for choice in answer["choices"]:
        choice.pop("logprobs", None)


def tell_only_text(request: Body, answer: Body) -> None:
    """Tell no usage either."""
    drop_ids(request, answer)
    answer.pop("usage", None)


@contextmanager
def altered(script: Script) -> Iterator[str]:
    """Serve by `script`; yields the URL."""

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

        def do_POST(self) -> None:
            request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with script.lock:
                script.seen.append((self.path, request))
                script.under_way += 1
                script.most_at_once = max(script.most_at_once, script.under_way)
                is_second = script.under_way > 1
            try:
                self.answer(request, is_second=is_second)
            finally:
                with script.lock:
                    script.under_way -= 1

        def answer(self, request: Body, *, is_second: bool) -> None:
            refused = [name for name in script.refuses if name in request]
            if self.path in script.lacks:
                self.send(404, b'{"error": "no such path"}')
            elif refused:
                self.send(400, json.dumps({"error": f"unknown field {refused[0]}"}).encode())
            elif script.one_at_a_time and is_second:
                self.send(script.busy_status, b'{"error": {"message": "one at a time"}}')
            elif (way := script.fails(request)) is not None:
                self.break_off(way)
            else:
                self.pass_on(request)

        def pass_on(self, request: Body) -> None:
            if script.one_at_a_time:
                time.sleep(0.2)  # long enough to be met by another
            answer = json.loads(json.dumps(CANNED))
            if script.upstream is not None:
                asked = {k: v for k, v in request.items() if k not in ("stream", "stream_options")}
                url = script.upstream + self.path
                came = httpx.post(url, json=asked, trust_env=False, timeout=60)
                if came.status_code != 200:
                    self.send(came.status_code, came.content)
                    return
                answer = came.json()
            script.change(request, answer)
            if not (request.get("stream") and script.streams):
                self.send(200, json.dumps(answer).encode())
                return
            choice = answer["choices"][0]
            text = choice.get("text") or choice["message"]["content"]
            parts: list[Body] = [{"text": text[:3], "finish_reason": None}]
            parts.append({"text": text[3:], "finish_reason": choice["finish_reason"]})
            lines = [f"data: {json.dumps({'choices': [part]})}\n\n" for part in parts]
            self.send(200, "".join((": hello\n\n", *lines, "data: [DONE]\n\n")).encode(), "event")

        def break_off(self, way: str) -> None:
            if way == "stall":
                script.done.wait(60)
            elif way == "drip":
                self.head(200, 1000, "application/json")
                while not script.done.wait(0.1):
                    self.wfile.write(b" ")
            elif way == "close":
                self.head(200, 1000, "application/json")
                self.wfile.write(b'{"choices": [')
            elif way == "garbage":
                self.send(200, b"<html>It works!</html>")
            elif way == "shape":
                self.send(200, b'{"choices": 3}')
            elif way == "events":
                self.send(200, b'data: {"choices": []}\n\ndata: {oops\n\n', "event")
            elif way == "cut":
                began = json.dumps({"choices": [{"text": "a", "finish_reason": None}]})
                self.send(200, f'data: {began}\n\ndata: {{"error": "gone"}}\n\n'.encode(), "event")
            elif way == "coded":
                self.send(200, b'{"error": {"message": "out of memory", "code": 500}}')
            else:
                status = int(way) if way.isdecimal() else 500
                self.send(status, b'{"error": {"message": "out of memory"}}')

        def send(self, status: int, body: bytes, kind: str = "json") -> None:
            types = {"json": "application/json", "event": "text/event-stream"}
            self.head(status, len(body), types[kind])
            self.wfile.write(body)

        def head(self, status: int, length: int, kind: str) -> None:
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(length))
            self.end_headers()

        def do_GET(self) -> None:
            listed = {"data": [{"id": name} for name in script.models]}
            self.send(200 if script.models else script.list_status, json.dumps(listed).encode())

    class Quiet(ThreadingHTTPServer):
        daemon_threads = True

        def handle_error(self, *_: object) -> None:
            pass  # whoever asked has gone

    server = Quiet(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        script.done.set()
        server.shutdown()
        server.server_close()
