"""A server as the subject: how cases are put to it, and its answers in the suite's words."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from oracle.inprocess import Loaded
from parity.asking import asked_of, encode
from parity.cases import Case, Drafter, Prompted
from parity.references import decodings
from parity.remote.capabilities import STREAMED, TOGETHER, Endpoint, Found
from parity.remote.http import Http, at_once
from parity.remote.reading import Said
from parity.remote.retokenize import map_onto
from parity.trace import Answer

MAX_TOGETHER = 32
"""Requests under way at one time."""

_HOW = {"stream": STREAMED, "together": TOGETHER, "again": "a second time"}


@dataclass(slots=True)
class RemoteSubject:
    """A server found to offer `found`, asked about a model that `target` is the oracle's copy of.

    `expected` gives the oracle's answers, onto which answers without ids are mapped.
    """

    http: Http
    found: Found
    target: Loaded
    expected: Callable[[Case], Answer]
    _together: tuple[Case, ...] = ()
    _came_together: dict[str, Said] = field(default_factory=dict)
    _once: dict[tuple[Prompted, int], Said] = field(default_factory=dict)

    def begin(self, cases: Sequence[Case]) -> None:
        """Say what will be asked: cases of style `together` are asked when the first of them is."""
        self._together = tuple(case for case in cases if case.cell.style == "together")

    def answer(
        self,
        case: Case,
        *,
        drafter: Drafter | None = None,
        depth: int | None = None,
        given: tuple[int, ...] = (),
    ) -> Answer | None:
        """See `runner.Subject`; a server drafts as it likes. `given` tokens are put as text.

        None where the text of prompt and given tokens is not cut into just these again.

        Raises:
            Unusable: no answer, or none that can be read.

        """
        assert drafter is None, "a server is not told how to draft"
        if given:
            return self._resumed(case, given)
        return self._answer(case, self._said(case))

    def once(self, case: Case) -> Answer:
        """The answer in one piece, whatever the case's style; each prompt is asked once."""
        return self._answer(case, self._asked_once(case))

    def _said(self, case: Case) -> Said:
        match case.cell.style:
            case "stream":
                return self._ask(case)
            case "together":
                return self._asked_together(case)
            case "again":
                self._asked_once(case)
                return self._ask(case)
        return self._asked_once(case)

    def _asked_once(self, case: Case) -> Said:
        key = (case.prompt, case.max_tokens)
        if key not in self._once:
            cell = replace(case.cell, style="once")
            self._once[key] = self._ask(replace(case, cell=cell))
        return self._once[key]

    def _asked_together(self, case: Case) -> Said:
        if not self._came_together:
            # One alone would be together with nothing.
            asked = self._together if len(self._together) > 1 else (case, case)
            for start in range(0, len(asked), MAX_TOGETHER):
                wave = asked[start : start + MAX_TOGETHER]
                came = at_once(partial(self._ask, one) for one in wave)
                self._came_together |= {one.id: said for one, said in zip(wave, came, strict=True)}
        return self._came_together[case.id]

    def _ask(self, case: Case) -> Said:
        """A request that touches neither MLX nor a tokenizer, and so may run in any thread."""
        return self.endpoint(case.prompt).ask(
            self.http,
            asked_of(case.prompt),
            case.max_tokens,
            stream=case.cell.style == "stream",
            how=_HOW.get(str(case.cell.style), ""),
        )

    def endpoint(self, prompt: Prompted) -> Endpoint:
        """Where a prompt is asked: a text is continued as it is if that is offered."""
        if isinstance(prompt, str):
            return self.found.endpoint
        assert self.found.chat is not None, "a chat that cannot be asked is not run"
        return self.found.chat

    def _resumed(self, case: Case, given: tuple[int, ...]) -> Answer | None:
        if not isinstance(case.prompt, str):
            return None
        prompt = tuple(encode(self.target, case.prompt))
        if case.max_tokens == len(given):
            return Answer(self._origin(case), given, "", "length", None, None, ())
        for text in decodings(self.target, prompt, given):
            if tuple(self.target.encode(case.prompt + text)) == prompt + given:
                break
        else:
            return None
        expected = self.expected(case)
        rest = expected.ids[len(given) :]
        texts = decodings(self.target, prompt + given, rest)
        expected = replace(expected, ids=rest, text=texts[0], decodings=texts)
        left = case.max_tokens - len(given)
        said = self._ask(replace(case, prompt=case.prompt + text, max_tokens=left))
        answer = self._as_answer(case, said, expected, prompt + given)
        return replace(answer, ids=given + answer.ids)

    def _answer(self, case: Case, said: Said) -> Answer:
        prompt = tuple(encode(self.target, case.prompt))
        return self._as_answer(case, said, self.expected(case), prompt)

    def _as_answer(
        self, case: Case, said: Said, expected: Answer, before: tuple[int, ...]
    ) -> Answer:
        """What was said after the ids `before`, as content: without a terminal EOS."""
        ids, logprobs, is_mapped = said.ids, said.logprobs, said.ids is None
        if ids is None:
            ids = map_onto(
                expected,
                said.text,
                partial(decodings, self.target, before),
                self.target.encode_bare,
            )
            is_same = expected.may_read(said.text, mapped=True)
            if logprobs is not None and said.finish_reason == "stop":
                logprobs = logprobs[:-1] if len(logprobs) == len(ids) + 1 else logprobs
            # Ids that were made up here need not be as many as were generated.
            if logprobs is not None and len(logprobs) != len(ids) and not is_same:
                logprobs = None
        elif said.finish_reason == "stop" and ids and ids[-1] in self.target.eos_ids:
            if logprobs is not None and len(logprobs) == len(ids):
                logprobs = logprobs[:-1]
            ids = ids[:-1]
        return Answer(
            self._origin(case),
            ids,
            said.text,
            said.finish_reason,
            said.prompt_tokens,
            said.completion_tokens,
            logprobs,
            mapped=is_mapped,
        )

    def _origin(self, case: Case) -> str:
        return f"subject {self.http.url}, {case.cell.style}"
