"""Requests to a subject: each with a deadline and a size, and one line for what goes wrong."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any, TypeVar, cast

import httpx

from parity.errors import BadInput, Unusable
from parity.remote.sse import EventReader

MAX_BYTES = 64 * 1024 * 1024
DONE = "[DONE]"
NOT_OFFERED = (501, 503)
"""What of the 5xx says that a server cannot do something, or not now; the others are faults."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Reply:
    """What came back: a JSON value, or the JSON values of a stream of events.

    `complete` is False for a stream that ended without `[DONE]`. `asked` says what was asked for,
    for whoever has to complain about the answer.
    """

    asked: str
    status: int
    body: Any = None
    events: tuple[Any, ...] | None = None
    complete: bool = True

    @property
    def broke(self) -> bool:
        """Whether the server failed at what was asked, which is not the same as refusing it.

        An error may carry its status behind one of 200. One that comes behind the beginning of an
        answer is a fault, whatever it says.
        """
        errors = [error_in(event) is not None for event in self.events or ()]
        told = [_status_in(said) for said in (self.body, *(self.events or ()))]
        return any(map(_is_fault, (self.status, *told))) or (any(errors) and not errors[0])

    @property
    def refused(self) -> str | None:
        """Why the server did not do what was asked, in its own words; None if it did."""
        said = error_in(self.body)
        # A redirect is no answer either: where the subject is, the command line says.
        if self.status < 300 and said is None:
            return None
        if said is None and self.body is not None:
            said = excerpt(json.dumps(self.body).encode())
        return f"status {self.status}" + (f": {said}" if said else "")


class Http:
    """A server at a URL. May be used by several threads.

    `state` adds to a complaint what is known about the server's process.
    """

    def __init__(self, url: str, timeout_s: float, state: Callable[[], str] = lambda: "") -> None:
        self.url = base_of(url)
        self._timeout_s = timeout_s
        self._state = state
        self._http = httpx.Client(
            # Neither a proxy from the environment nor a kept connection that the server has closed
            # may come between us and the server.
            trust_env=False,
            limits=httpx.Limits(max_keepalive_connections=0),
            timeout=timeout_s,
            headers={"Accept-Encoding": "identity"},
        )

    def close(self) -> None:
        """Close what is open; requests under way in other threads break off."""
        self._http.close()

    def reach(self) -> None:
        """Raise `Unusable` if nobody listens at the address."""
        url = httpx.URL(self.url)
        port = url.port or (443 if url.scheme == "https" else 80)
        try:
            socket.create_connection((url.host, port), timeout=self._timeout_s).close()
        except OSError as error:
            raise self.complaint("connecting", f"{error.strerror or error}") from None

    def get(self, path: str) -> Reply:
        """Fetch something; raises what `post` raises."""
        return self._within_deadline(f"GET {path}", lambda asked: self._fetch(asked, path, None))

    def post(self, path: str, body: dict[str, Any], about: str = "") -> Reply:
        """Ask something; `about` says what in a complaint.

        Raises:
            Unusable: no answer, not in time, too long, or neither JSON nor events of JSON.

        """
        asked = f"POST {path}" + (f" ({about})" if about else "")
        return self._within_deadline(asked, lambda asked: self._fetch(asked, path, body))

    def complaint(self, asked: str, what: str) -> Unusable:
        """One line: who, what was asked, what came."""
        state = self._state()
        said = f"subject {self.url}: {asked}: {what}" + (f"; {state}" if state else "")
        return Unusable(" ".join(said.split()))

    def _within_deadline(self, asked: str, fetch: Callable[[str], Reply]) -> Reply:
        """Run `fetch` beside this thread: a server that drips bytes would outlast other limits."""
        try:
            return _started(lambda: fetch(asked))(self._timeout_s)
        except Empty:
            raise self._late(asked) from None

    def _late(self, asked: str) -> Unusable:
        return self.complaint(asked, f"no whole answer within {self._timeout_s:g} s")

    def _fetch(self, asked: str, path: str, body: dict[str, Any] | None) -> Reply:
        method = "GET" if body is None else "POST"
        try:
            # In ASCII: a string may hold what has no form in UTF-8.
            content = None if body is None else json.dumps(body).encode("ascii")
            headers = {} if body is None else {"Content-Type": "application/json"}
            with self._http.stream(
                method, self.url + path, content=content, headers=headers
            ) as answer:
                kind = answer.headers.get("Content-Type", "")
                if kind.startswith("text/event-stream") and answer.status_code < 300:
                    return self._events(asked, answer)
                raw = bytearray()
                for chunk in answer.iter_bytes():
                    raw += chunk
                    self._check_size(asked, len(raw))
        except httpx.TimeoutException:
            raise self._late(asked) from None
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            said = str(error) or type(error).__name__
            raise self.complaint(asked, f"no whole answer: {said}") from None
        if answer.status_code < 300:
            return Reply(asked, answer.status_code, self._parsed(asked, raw))
        try:
            parsed = json.loads(raw)
        except (ValueError, RecursionError):
            parsed = {"error": excerpt(raw)}
        return Reply(asked, answer.status_code, parsed)

    def _events(self, asked: str, answer: httpx.Response) -> Reply:
        reader, events, size = EventReader(), list[Any](), 0
        try:
            for chunk in answer.iter_bytes():
                size += len(chunk)
                self._check_size(asked, size)
                for data in reader.feed(chunk):
                    if data.strip() == DONE:
                        return Reply(asked, answer.status_code, events=tuple(events))
                    events.append(self._parsed(asked, data.encode()))
            for data in reader.close():
                if data.strip() != DONE:
                    events.append(self._parsed(asked, data.encode()))
                else:
                    return Reply(asked, answer.status_code, events=tuple(events))
        except UnicodeDecodeError as error:
            raise self.complaint(asked, f"events that are not UTF-8: {error.reason}") from None
        return Reply(asked, answer.status_code, events=tuple(events), complete=False)

    def _check_size(self, asked: str, size: int) -> None:
        if size > MAX_BYTES:
            raise self.complaint(asked, f"an answer longer than {MAX_BYTES} bytes")

    def _parsed(self, asked: str, raw: bytes | bytearray) -> Any:
        try:
            return json.loads(raw)
        except (ValueError, RecursionError):
            raise self.complaint(asked, f"not JSON: {excerpt(raw)}") from None


def at_once(calls: Iterable[Callable[[], T]]) -> list[T]:
    """The outcomes of calls made in a thread each; raises what the first of them raised."""
    return [outcome(None) for outcome in [_started(call) for call in calls]]


def _started(call: Callable[[], T]) -> Callable[[float | None], T]:
    """Begin a call; what is returned waits for its outcome, and raises `Empty` if it is late.

    The thread holds nobody up when the run ends before it, as an executor's would.
    """
    outcome: SimpleQueue[tuple[T | None, Exception | None]] = SimpleQueue()

    def run() -> None:
        try:
            outcome.put((call(), None))
        except Exception as error:  # raised again by whoever waits
            outcome.put((None, error))

    def wait(timeout_s: float | None) -> T:
        came, error = outcome.get(timeout=timeout_s)
        if error is not None:
            raise error
        return cast("T", came)

    threading.Thread(target=run, daemon=True).start()
    return wait


def base_of(url: str) -> str:
    """A subject's address without the `/v1` that every path begins with.

    Raises:
        BadInput: not an address.

    """
    try:
        parsed = httpx.URL(url)
        port = parsed.port
        usable = (
            parsed.scheme in ("http", "https")
            and bool(parsed.host)
            and (port is None or 1 <= port <= 65535)
            and not (parsed.query or parsed.fragment or "?" in url or "#" in url)
        )
    except (httpx.InvalidURL, UnicodeError):
        usable = False
    if not usable:
        raise BadInput(
            f"--subject {url!r} is neither engine nor an address http://HOST:PORT, "
            "PORT within 1..65535"
        )
    return url.rstrip("/").removesuffix("/v1").rstrip("/")


def error_in(body: Any) -> str | None:
    """The message of an error object, in the shapes servers give it; None if there is none."""
    if not isinstance(body, dict):
        return None
    error = body.get("error")
    if isinstance(error, dict):
        error = error.get("message") or error
    if not error:
        return None
    text = error if isinstance(error, str) else json.dumps(error)
    return excerpt(text.encode(errors="backslashreplace"))


def _status_in(body: Any) -> int:
    """The status that an error object carries; 0 if there is none."""
    error = body.get("error") if isinstance(body, dict) else None
    status = error.get("code") if isinstance(error, dict) else None
    return status if isinstance(status, int) else 0


def _is_fault(status: int) -> bool:
    return status >= 500 and status not in NOT_OFFERED


def excerpt(raw: bytes | bytearray) -> str:
    """The beginning of an answer, in one line."""
    text = " ".join(bytes(raw[:2000]).decode("utf-8", errors="replace").split())
    return (text[:160] + "…" if len(text) > 160 else text) or "an empty answer"
