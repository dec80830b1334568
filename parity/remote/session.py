"""A run on a server: probed first, held to the oracle's model, and what is left open named."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace

from oracle import device
from oracle.inprocess import Loaded, load
from parity.asking import as_json
from parity.capability import Capability
from parity.cases import Case, Message, Prompted, Source
from parity.errors import BadInput, Unusable
from parity.models import Models
from parity.probe import Probe
from parity.references import References
from parity.remote.address import Address
from parity.remote.capabilities import find, first_accepted
from parity.remote.claims import (
    failure_claim,
    logprob_claim,
    prompt_claim,
    stream_claim,
    vocabulary_claim,
)
from parity.remote.http import Http
from parity.remote.process import SubjectProcess
from parity.remote.subject import RemoteSubject
from parity.report.words import Setting
from parity.runner import CaseResult, Claim
from parity.session import Session, log_folder, setting_of, tolerance_of
from parity.waiting import waiting_for


@dataclass(slots=True)
class RemoteSession:
    """What `session.Session` is for the engine."""

    inner: Session
    subject: RemoteSubject
    target: Loaded
    vocabulary: int
    _first: Case | None = None
    _left_out: dict[str, str] = field(default_factory=dict)
    _as_chat: list[str] = field(default_factory=list)

    @property
    def references(self) -> References:
        return self.inner.references

    @property
    def setting(self) -> Setting:
        return self.inner.setting

    @property
    def capabilities(self) -> tuple[Capability, ...]:
        return self.subject.found.rows

    def begin(self, cases: Sequence[Case]) -> list[Case]:
        """The cases that the subject can be asked, their prompts as both sides will be asked them.

        Raises:
            Unusable: it can be asked none of them.

        """
        asked = [self._as_asked(case) for case in cases]
        begun = [case for case in asked if self._can_be_asked(case)]
        if not begun:
            said = "; ".join(f"{style}: {why}" for style, why in self._left_out.items())
            raise Unusable(f"no case is left to run: {said}")
        self._first = begun[0]
        self.references.ask_ahead(begun)
        self.subject.begin(begun)
        return begun

    def run(self, case: Case) -> CaseResult:
        return self.inner.run(case)

    def claims(self, results: Sequence[CaseResult], /) -> tuple[Claim, ...]:
        """It is the oracle's model, as far as it tells; and its ways of answering agree."""
        assert self._first is not None, "claims follow cases"
        expected, actual = self.references.expected(self._first), self.subject.once(self._first)
        answers = [result.actual for result in results if result.actual is not None]
        setting, tolerance = self.setting, self.inner.tolerance
        return (
            *prompt_claim(self.subject.found.counts, self._count),
            *vocabulary_claim([actual, *answers], self.vocabulary),
            *logprob_claim(self._first, expected, actual, tolerance, setting),
            *stream_claim(results),
            *failure_claim(self.subject.found.failures),
        )

    def not_checked(self, results: Sequence[CaseResult], /) -> tuple[str, ...]:
        """What was not asked, not told, or could only be compared in part."""
        lines = [f"{style}: {why}" for style, why in self._left_out.items()]
        if self._as_chat:
            lines.append(
                f"chat templates: {', '.join(self._as_chat)} went to the chat endpoints of both "
                "sides, whose templates may differ"
            )
        lines += [
            f"{what}: {_WHY[what]}, in {number} of {len(results)} cases"
            for what in _WHY
            if (number := sum(what in result.comparison.unchecked for result in results))
        ]
        found, answers = self.subject.found, [r.actual for r in results if r.actual is not None]
        if not found.counts and all(a.mapped and a.logprobs is None for a in answers):
            lines.append(
                "the model: the subject tells neither token counts nor log-probabilities nor ids; "
                "that it serves the target rests on its texts alone"
            )
        if not found.tells_reuse:
            lines.append("prefix reuse: the subject does not tell whether a repeat made use of it")
        lines.append("sampling: seeded answers follow no common order of random numbers")
        return tuple(lines)

    def _can_be_asked(self, case: Case) -> bool:
        if not isinstance(case.prompt, str) and self.subject.found.chat is None:
            self._left_out[f"prompt {case.cell.kind}"] = (
                "not run, it can only be asked as a chat, and the subject answers none"
            )
            return False
        endpoint = self.subject.endpoint(case.prompt)
        lacks = {"stream": endpoint.no_stream, "together": self.subject.found.no_concurrency}
        style = str(case.cell.style)
        if not lacks.get(style):
            return True
        self._left_out[style] = f"not run, the subject does not offer it ({lacks[style]})"
        return False

    def _as_asked(self, case: Case) -> Case:
        """The case with its prompt as a text to continue if it can be one, else as a chat."""
        raw = raw_prompt(self.target, case.prompt)
        if raw is not None and self.subject.found.is_raw:
            return replace(case, prompt=raw)
        if case.cell.kind not in self._as_chat and self.subject.found.chat is not None:
            self._as_chat.append(case.cell.kind)
        if isinstance(case.prompt, str):
            return replace(case, prompt=(Message("user", case.prompt),))
        return case

    def _count(self, text: str) -> int:
        if self.subject.found.is_raw:
            return len(self.target.encode(text))
        return len(self.target.encode_chat([{"role": "user", "content": text}]))


_WHY = {
    "ids": "compared as text",
    "last ids": "hidden in text that was held back or unfinished at the end",
    "logprobs": "not told",
    "usage": "not told, or not compared after the answers parted",
    "text": "not compared after the answers parted",
}


def start_server(references: References) -> None:
    """Have the oracle's server started while the subject is still being probed."""
    references.start_ahead(Source.SERVER)


@contextmanager
def open_remote(
    models: Models,
    at: Address,
    cases: Sequence[Case],
    prepare: Callable[[References], None] = start_server,
) -> Iterator[RemoteSession]:
    """Find out what a subject offers, and `prepare` its oracle. The engine is not loaded.

    Raises:
        BadInput: a target that cannot be loaded or has no chat template where one is needed.
        Unusable: the subject does not start, is not there, or offers nothing to compare.

    """
    with ExitStack() as stack:
        log_dir = stack.enter_context(log_folder())
        process = None
        if at.command is not None:
            process = SubjectProcess(at.command, at.url, log_dir / "subject.log")
            stack.enter_context(process)
        url = at.url if process is None else process.url
        assert url is not None, "a subject has a URL or a command"
        http = Http(url, at.timeout_s, (lambda: "") if process is None else process.state)
        stack.callback(http.close)
        if process is None:
            with waiting_for(f"a connection to {http.url}", f"{at.timeout_s:g} s"):
                http.reach()  # before a model is loaded for nobody
        try:
            device.apply()
            target = load(models.target, lazy=True)
            needs_chat = any(raw_prompt(target, case.prompt) is None for case in cases)
        except ValueError as error:
            raise BadInput(str(error)) from error
        if process is not None:
            process.await_ready()
        offers = f"{http.url} to answer what it offers"
        with waiting_for(offers, f"{at.timeout_s:g} s per request"):
            accepted = first_accepted(http, at.model)
            references = stack.enter_context(References(models, target, None, None, log_dir))
            prepare(references)
            found = find(http, accepted, needs_chat=needs_chat)
        if not found.is_raw and not target.tokenizer.has_chat_template:
            raise Unusable(
                f"subject {http.url} answers nothing but chats, and the target has no chat template"
            )
        subject = RemoteSubject(http, found, target, references.expected)
        inner = Session(
            references,
            subject,
            Probe(target, None),
            tolerance_of(target),
            setting_of(target, models),
        )
        yield RemoteSession(inner, subject, target, vocabulary_of(models, target))


def raw_prompt(target: Loaded, prompt: Prompted) -> str | None:
    """A prompt as a text to continue: a chat through the target's own template.

    None if that text, encoded as a server does it, is not the ids of the chat: a server then cannot
    be asked for it without its own template.

    Raises:
        ValueError: there is no template, or it refuses the messages.

    """
    if isinstance(prompt, str):
        return prompt
    messages = as_json(prompt)
    ids, text = target.encode_chat(messages), target.render_chat(messages)
    # A first token that encoding adds must not stand in the text as well.
    bos = str(getattr(target.tokenizer, "bos_token", None) or "")
    candidates = (text, text.removeprefix(bos)) if bos else (text,)
    return next((one for one in candidates if one and target.encode(one) == ids), None)


def vocabulary_of(models: Models, target: Loaded) -> int:
    """How many ids the target can emit: the rows of its output, or more if its tokenizer has."""
    config = json.loads((models.target / "config.json").read_text(encoding="utf-8"))
    rows = (config.get("text_config") or {}).get("vocab_size") or config.get("vocab_size") or 0
    known = [int(token) for token in target.tokenizer.get_vocab().values()]
    return max(int(rows), max(known) + 1)
