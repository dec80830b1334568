"""What a server offers, found out by asking.

A refused field is not offered, and not an error. One that a server fails over (see `Reply.broke`)
may be offered: a failure at streaming or at two requests at once ends the run, since whole cases
rest on them; one at a field that not every server knows is told, and leaves a claim unmet.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from parity.capability import Capability
from parity.errors import Unusable
from parity.remote.http import Http, Reply, at_once, error_in
from parity.remote.reading import Said, Unreadable, read_events, read_whole

RAW = "/v1/completions"
CHAT = "/v1/chat/completions"
DEFAULT_MODEL = "default_model"
"""What mlx_lm.server calls the model it was started with."""

TEXTS = (
    "The miller counts 12 sacks, and then 345 more.\nThe miller",
    "Ångström, naïve, 木 = tree, Привет:  two  spaces,\ttab",
    "def f(x):\n    return {'x': x ** 2}\n\nf(",
)
"""Texts that tokenizers of different models cut into different numbers of tokens."""

STREAMED, TOGETHER = "streamed", "side by side"
"""How something is asked, in complaints."""

_NUM_PROBED = 4


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One way to ask for text, with the optional fields that the server takes there.

    `streamed` are the fields for an answer in events; None, and `no_stream` says why, if it gives
    none.
    """

    path: str
    model: str
    optional: Mapping[str, Any] = field(default_factory=dict)
    streamed: Mapping[str, Any] | None = None
    no_stream: str = ""

    def body(self, prompt: Any, max_tokens: int, **fields: Any) -> dict[str, Any]:
        """A greedy request with further `fields`."""
        name = "prompt" if self.path == RAW else "messages"
        if name == "messages" and isinstance(prompt, str):
            prompt = [{"role": "user", "content": prompt}]
        asked = {"model": self.model, name: prompt, "max_tokens": max_tokens, "temperature": 0}
        return {**asked, **fields}

    def ask(
        self, http: Http, prompt: Any, max_tokens: int, *, stream: bool = False, how: str = ""
    ) -> Said:
        """A whole answer to `prompt`, a text or messages as requests carry them.

        `how` it is asked is for complaints.

        Raises:
            Unusable: none came, or one that cannot be read.

        """
        fields = self.streamed if stream else self.optional
        assert fields is not None, "nothing is asked for in events that gives none"
        reply = _post(http, self, prompt, max_tokens, how, **fields)
        if (refusal := refused(reply)) is not None:
            raise http.complaint(reply.asked, refusal)
        return _read(http, reply, stream=stream)


@dataclass(frozen=True, slots=True)
class Accepted:
    """How a server gives any text at all: why under that model name, and why not raw, if so."""

    endpoint: Endpoint
    note: str
    no_raw: str


@dataclass(frozen=True, slots=True)
class Found:
    """What a probe found. `counts` are the prompt tokens told for each of `TEXTS`, if any are.

    `failures` are the questions that the server neither answered nor refused, and how that ended.
    """

    endpoint: Endpoint
    chat: Endpoint | None
    rows: tuple[Capability, ...]
    counts: tuple[tuple[str, int], ...]
    no_concurrency: str = ""
    tells_reuse: bool = False
    failures: tuple[str, ...] = ()

    @property
    def is_raw(self) -> bool:
        """Whether texts are continued as they are, without a chat template."""
        return self.endpoint.path == RAW


def find(http: Http, accepted: Accepted, *, needs_chat: bool) -> Found:
    """Probe a server; `needs_chat`: some prompt can only be asked as a chat.

    Raises:
        Unusable: it breaks off, or what it says cannot be read.

    """
    bare, is_raw = accepted.endpoint, accepted.endpoint.path == RAW
    failures: list[str] = []
    endpoint, said = _negotiated(http, bare, failures)
    chat, no_chat = (None, "") if is_raw else (endpoint, "")
    if is_raw:
        asked = Endpoint(CHAT, bare.model)
        # Where no prompt needs one, that it fails at chats is told and no more.
        ask = _post if needs_chat else _sent
        no_chat = refused(ask(http, asked, TEXTS[0], 1, "as a chat")) or ""
        if not no_chat:
            chat = _negotiated(http, asked, failures)[0] if needs_chat else asked
    answers = [endpoint.ask(http, text, 1) for text in TEXTS]
    counts = [(t, a.prompt_tokens) for t, a in zip(TEXTS, answers, strict=True)]
    no_seed = _refused_guess(_sent(http, endpoint, TEXTS[0], 1, "with a seed", seed=1), failures)
    no_concurrency = _two_at_once(http, endpoint)
    tells_reuse = any(answer.cached_tokens is not None for answer in (said, *answers))
    rows = (
        Capability("model", bare.model, accepted.note),
        _yes("raw completions", accepted.no_raw, "prompts are continued as they are"),
        _yes("chat", no_chat, ""),
        _told("ids in answers", said.ids, "answers are compared as text"),
        _told("log-probabilities", said.logprobs, ""),
        _told("usage", said.completion_tokens, ""),
        _yes("streaming", endpoint.no_stream, ""),
        _yes("concurrency", no_concurrency, "two requests at once"),
        _yes("seed", no_seed or "", "accepted; sampled answers are not compared"),
        Capability("prefix reuse", "told" if tells_reuse else "not told"),
    )
    told = tuple((text, count) for text, count in counts if count is not None)
    return Found(endpoint, chat, rows, told, no_concurrency, tells_reuse, tuple(failures))


def refused(reply: Reply) -> str | None:
    """Why a server did not do what was asked; None if it did."""
    if reply.refused is not None:
        return reply.refused
    for event in reply.events or ():
        if (said := error_in(event)) is not None:
            return f"an error event: {said}"
    return None


def first_accepted(http: Http, model: str | None) -> Accepted:
    """The endpoint and model name that a server accepts first, before it is asked more.

    Raises:
        Unusable: it is not there, fails, or neither continues a text nor answers a chat.

    """
    names = [(DEFAULT_MODEL, "accepted as mlx_lm.server's name of its model")]
    if model is not None:
        names = [(model, "as asked for")]
    refusals: dict[tuple[str, str], str] = {}
    failed: list[str] = []
    for path in (RAW, CHAT):
        for name, note in names:
            asked = Endpoint(path, name)
            reply = _sent(http, asked, TEXTS[0], 1)
            refusal = refused(reply)
            if refusal is None:
                no_raw = next(iter(refusals.values())) if path == CHAT else ""
                return Accepted(asked, "; ".join((note, *failed)), no_raw)
            refusals[path, name] = refusal
            if model is None and len(names) == 1:
                names += [(one, "the first of /v1/models") for one in _listed(http)[:1]]
            if reply.broke:
                # Some servers fail to load a model that they do not know, and a name may be a guess
                # of ours; what they fail at under the last name, too, they do not just refuse.
                if (name, note) == names[-1]:
                    raise http.complaint(reply.asked, f"model {name!r}: {refusal}")
                failed.append(f"as {name!r}: {refusal}")
    said = "; ".join(f"{path}, model {name!r}: {why}" for (path, name), why in refusals.items())
    raise http.complaint("asked for a text", said)


def _listed(http: Http) -> list[str]:
    """The models that a server names, if it does.

    Raises:
        Unusable: it fails at it.

    """
    try:
        reply = http.get("/v1/models")
    except Unusable:  # it need not be able to say
        return []
    if reply.broke:
        raise http.complaint(reply.asked, str(reply.refused))
    data = reply.body.get("data") if isinstance(reply.body, dict) else None
    entries = data if isinstance(data, list) else []
    names = [entry.get("id") for entry in entries if isinstance(entry, dict)]
    return [name for name in names if isinstance(name, str)]


def _refused_guess(reply: Reply, failures: list[str]) -> str | None:
    """Like `refused`, of a field that a server need not know; a failure is noted."""
    refusal = refused(reply)
    if reply.broke:
        failures.append(f"{reply.asked}: {refusal}")
    return refusal


def _negotiated(http: Http, bare: Endpoint, failures: list[str]) -> tuple[Endpoint, Said]:
    """An endpoint with every optional field it takes, and an answer to a request with them."""
    optional: dict[str, Any] = {}
    said = bare.ask(http, TEXTS[0], _NUM_PROBED)
    # A number is what older completions take, a boolean what chats and mlx_lm.server take.
    wanted: dict[str, Any]
    tries: list[str] = []
    for wanted in ({"logprobs": True}, {"logprobs": 1}):
        more = _tried(http, bare, optional, wanted, "with log-probabilities", tries)
        if more is not None and more.logprobs is not None:
            said = more
            break
    else:
        failures += tries
    if said.ids is None:
        more = _tried(
            http, bare, optional, {"return_token_ids": True}, "with ids", failures, keep_if_ids=True
        )
        said = said if more is None or more.ids is None else more
    no_stream = ""
    streams: dict[str, Any] = {"stream": True}
    for wanted, ask in (
        ({**streams, "stream_options": {"include_usage": True}}, _sent),
        (streams, _post),
    ):
        fields = {**optional, **wanted}
        reply = ask(http, bare, TEXTS[0], _NUM_PROBED, STREAMED, **fields)
        refusal = refused(reply)
        if refusal is None and reply.events is not None:
            _read(http, reply, stream=True)
            return Endpoint(bare.path, bare.model, optional, fields), said
        no_stream = refusal or "it answers in one piece"
    return Endpoint(bare.path, bare.model, optional, None, no_stream), said


def _tried(
    http: Http,
    bare: Endpoint,
    optional: dict[str, Any],
    wanted: Mapping[str, Any],
    how: str,
    failures: list[str],
    *,
    keep_if_ids: bool = False,
) -> Said | None:
    """The answer to a request with `wanted` fields too, which are kept if they got something."""
    reply = _sent(http, bare, TEXTS[0], _NUM_PROBED, how, **optional, **wanted)
    if _refused_guess(reply, failures) is not None:
        return None
    said = _read(http, reply, stream=False)
    if (said.ids if keep_if_ids else said.logprobs) is not None:
        optional.update(wanted)
    return said


def _two_at_once(http: Http, endpoint: Endpoint) -> str:
    """Why two requests at once are not served; empty if they are."""

    def ask(text: str) -> str | None:
        return refused(_post(http, endpoint, text, _NUM_PROBED, TOGETHER))

    refusals = at_once(partial(ask, text) for text in TEXTS[:2])
    return next((why for why in refusals if why is not None), "")


def _post(
    http: Http, asked: Endpoint, prompt: Any, max_tokens: int, how: str = "", **fields: Any
) -> Reply:
    """A reply that may be a refusal.

    Raises:
        Unusable: the server failed.

    """
    reply = _sent(http, asked, prompt, max_tokens, how, **fields)
    if reply.broke:
        raise http.complaint(reply.asked, str(refused(reply)))
    return reply


def _sent(
    http: Http, asked: Endpoint, prompt: Any, max_tokens: int, how: str = "", **fields: Any
) -> Reply:
    what = about(prompt) + (f", {how}" if how else "")
    return http.post(asked.path, asked.body(prompt, max_tokens, **fields), what)


def about(prompt: Any) -> str:
    """A prompt as a complaint names it."""
    text = prompt if isinstance(prompt, str) else prompt[-1]["content"]
    return f"prompt {(text[:30] + '…' if len(text) > 30 else text)!r}"


def _read(http: Http, reply: Reply, *, stream: bool) -> Said:
    try:
        if not stream:
            if reply.events is not None:
                raise Unreadable("it came in events though it was asked for in one piece")
            return read_whole(reply.body)
        if reply.events is None:
            raise Unreadable("it came in one piece though it was asked for in events")
        return read_events(reply.events, complete=reply.complete)
    except Unreadable as error:
        raise http.complaint(reply.asked, str(error)) from None


def _yes(name: str, why_not: str, note: str) -> Capability:
    return Capability(name, "no", why_not) if why_not else Capability(name, "yes", note)


def _told(name: str, value: object, without: str) -> Capability:
    return Capability(name, "no", without) if value is None else Capability(name, "yes")
