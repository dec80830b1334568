"""The engine under test, in process."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path

from engine import (
    DraftProvider,
    Finish,
    LogitsOptions,
    Request,
    Sampling,
    Target,
    TokenEvent,
    generate,
    open_drafter,
)
from parity.asking import encode
from parity.cases import Case, Drafter
from parity.grouped import Events, Gathering, gather
from parity.runner import Subject
from parity.trace import Answer, Round, Trace


class EngineSubject:
    """The reference engine on one target."""

    def __init__(self, target: Target, drafters: Mapping[Drafter, DraftProvider | None]) -> None:
        self._target = target
        self._drafters = drafters
        self._gatherings: dict[tuple[object, ...], Gathering] = {}

    @classmethod
    def open(
        cls,
        target: Target,
        draft_dir: Path | None,
        readers: Mapping[Drafter, Path | None] | None = None,
    ) -> EngineSubject:
        """The engine with the matrix's drafters; without `draft_dir` there is no two-model one.

        `readers` are the folders of those that read the target; None is a layer of its own.
        """
        drafters: dict[Drafter, DraftProvider | None] = {
            "off": None,
            "ngram": open_drafter("ngram", target),
        }
        if draft_dir is not None:
            drafters["two-model"] = open_drafter(f"two-model:{draft_dir}", target)
        for kind, folder in (readers or {}).items():
            drafters[kind] = open_drafter(kind if folder is None else f"{kind}:{folder}", target)
        return cls(target, drafters)

    def answer(
        self,
        case: Case,
        *,
        drafter: Drafter | None = None,
        depth: int | None = None,
        given: tuple[int, ...] = (),
    ) -> Answer | None:
        drafter = case.cell.drafter if drafter is None else drafter
        depth = case.cell.depth if depth is None else depth
        origin = f"engine, drafter {drafter}, depth {depth}"
        prompt = tuple(encode(self._target, case.prompt))
        budget = case.max_tokens - len(given)
        # Neither the global random state nor a half-seen stop string can be handed over.
        if given and (case.cell.sampling.mode == "sequential" or case.stop):
            return None
        if budget == 0:
            return Answer(origin, given, "", "length", len(prompt), len(given), ())
        if case.group:
            gathering = self._gather(case, drafter, depth, given)
            events = gathering.rows[case.row]
            if isinstance(events, Exception):
                raise events
            answer = _answer(f"{origin}, {len(case.group)} rows", len(prompt), given, events)
            return replace(answer, company=gathering.company)
        request = self._request(case, given)
        events = tuple(generate(self._target, request, self._drafters[drafter], depth=depth))
        return _answer(origin, len(prompt), given, events)

    def _gather(
        self, case: Case, drafter: Drafter, depth: int, given: tuple[int, ...]
    ) -> Gathering:
        """Run a case's group, which is one run for all its rows, unless one starts elsewhere."""
        key = (case.group, drafter, depth, given and (case.row, given))
        if key not in self._gatherings:
            requests = [
                (row.turn, self._request(one, given if one.id == case.id else ()))
                for row, one in zip(case.group, case.together, strict=True)
            ]
            provider = self._drafters[drafter]
            self._gatherings[key] = gather(self._target, provider, depth, requests)
        return self._gatherings[key]

    def _request(self, case: Case, given: tuple[int, ...]) -> Request:
        return Request(
            prompt=tuple(encode(self._target, case.prompt)) + given,
            max_tokens=case.max_tokens - len(given),
            sampling=_engine_sampling(case),
            stop_strings=case.stop,
            first_step=len(given),
        )


class Once:
    """A subject that is asked each question once.

    An engine in process knows no lanes: the cases of both lanes judge one and the same run of it,
    each by its own oracle. A row of a group is another question than the same request alone.
    """

    def __init__(self, subject: Subject) -> None:
        self._subject = subject
        self._answers: dict[tuple[object, ...], Answer | None] = {}

    def answer(
        self,
        case: Case,
        *,
        drafter: Drafter | None = None,
        depth: int | None = None,
        given: tuple[int, ...] = (),
    ) -> Answer | None:
        drafter = case.cell.drafter if drafter is None else drafter
        depth = case.cell.depth if depth is None else depth
        asked = (case.cell.sampling, case.prompt, case.max_tokens, case.stop, case.group)
        key = (*asked, drafter, depth, given)
        if key not in self._answers:
            self._answers[key] = self._subject.answer(
                case, drafter=drafter, depth=depth, given=given
            )
        return self._answers[key]


def _engine_sampling(case: Case) -> Sampling:
    sampling = case.cell.sampling
    logits = LogitsOptions(**asdict(sampling.penalties))
    if sampling.mode == "greedy":
        return Sampling(logits=logits)
    return Sampling(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        seed=sampling.seed,
        rng=sampling.mode,
        xtc_probability=sampling.xtc_probability,
        xtc_threshold=sampling.xtc_threshold,
        logits=logits,
    )


def _answer(
    origin: str,
    prompt_tokens: int,
    given: tuple[int, ...],
    seen: Events,
) -> Answer:
    """What a consumer of the stream saw, which must be what its `Finish` sums up."""
    finish = seen[-1] if seen else None
    if not isinstance(finish, Finish):
        raise RuntimeError(f"{origin}: the stream ended without a Finish")
    events = [event for event in seen if isinstance(event, TokenEvent)]
    streamed = "".join(event.text for event in events) + finish.tail
    if streamed != finish.text:
        raise RuntimeError(f"{origin}: streamed {streamed!r} but finished with {finish.text!r}")
    if tuple(event.token for event in events) != finish.tokens:
        raise RuntimeError(f"{origin}: streamed other tokens than it finished with")
    return Answer(
        origin,
        given + finish.tokens,
        finish.text,
        finish.reason,
        prompt_tokens,
        finish.usage.completion_tokens + len(given),
        finish.logprobs,
        Trace(
            tuple(event.from_draft for event in events),
            tuple((len(one.draft), one.accepted) for one in finish.rounds),
        ),
        tuple(Round(one.draft, one.accepted, one.emitted) for one in finish.rounds),
    )
