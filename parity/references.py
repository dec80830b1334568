"""The expected answers: each question is put to its oracle once, whoever needs the answer."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType

from oracle.client import Client
from oracle.inprocess import (
    Loaded,
    PositionalSampler,
    plain,
    sequential_sampler,
    speculative,
)
from oracle.server import Server
from parity.asking import encode
from parity.cases import Case, Question, Source, question_of
from parity.errors import Unusable
from parity.models import Models
from parity.probe import filters_of, processors_of
from parity.runner import Subject
from parity.served import SOURCES, Served
from parity.trace import Answer, Trace


class References:
    """Oracles on one target: two servers, and mlx-lm in process.

    `subject` answers as an engine's plain stream, or its stream of one row, which only the cases of
    an engine are compared with. A context manager; leaving it stops the servers.
    """

    def __init__(
        self,
        models: Models,
        target: Loaded,
        draft: Loaded | None,
        subject: Subject | None,
        log_dir: Path,
    ) -> None:
        self._target = target
        self._draft = draft
        self._subject = subject
        self._served = Served(models, target.eos_ids, target.encode_bare, log_dir)
        self._answers: dict[Question, Answer] = {}

    def __enter__(self) -> References:
        self._served.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._served.__exit__(kind, error, trace)

    def mount(self, source: Source, server: Server, client: Client) -> None:
        """Use a server that runs already; it is the caller's to stop."""
        self._served.mount(source, server, client)

    def start_ahead(self, source: Source) -> None:
        """Let a server start before anybody asks it."""
        self._served.start_ahead(source)

    def ask_ahead(self, cases: Iterable[Case]) -> None:
        """Let the servers work on what `cases` will need, in this order."""
        for case in cases:
            if case.source in SOURCES:
                self._served.ask(case)

    def expected(self, case: Case) -> Answer:
        """The answer that `case` is to be judged by.

        Raises:
            Unusable: its server does not start, has died or does not answer.

        """
        self.check_alive()
        question = question_of(case)
        if question not in self._answers:
            self._answers[question] = self._ask(case)
        return self._answers[question]

    def check_alive(self) -> None:
        """Raise `Unusable` if a server that was started is no longer there."""
        self._served.check_alive()

    def _ask(self, case: Case) -> Answer:
        if case.source is Source.GENERATE_STEP:
            return self._generate_step(case)
        if case.source is Source.OWN_PLAIN:
            return self._own_plain(case)
        if case.source is Source.OWN_ALONE:
            return self._own_alone(case)
        answer = self._decoded(case, self._served.ask(case).result())
        return self._traced(case, answer) if case.traced else answer

    def _decoded(self, case: Case, answer: Answer) -> Answer:
        """Add what the served ids decode to, of which the server may have lost some (D21)."""
        prompt = encode(self._target, case.prompt)
        return replace(answer, decodings=decodings(self._target, prompt, answer.ids))

    def _own_plain(self, case: Case) -> Answer:
        assert self._subject is not None, "only an engine is compared with its own plain stream"
        answer = self._subject.answer(case, drafter="off", depth=0)
        if answer is None:
            raise RuntimeError("no answer without a drafter")
        # What a drafter would have done is no part of the plain stream.
        return replace(answer, trace=None, rounds=())

    def _own_alone(self, case: Case) -> Answer:
        assert self._subject is not None, "only an engine is compared with its own streams"
        answer = self._subject.answer(case.alone)
        if answer is None:
            raise RuntimeError("no answer without companions")
        return answer

    def _traced(self, case: Case, answer: Answer) -> Answer:
        """Add the rounds of mlx-lm's generator, which must have said what the server said."""
        filters = filters_of(case.cell.sampling, self._target.xtc_special_tokens)
        sampler = None if filters.greedy else sequential_sampler(case.seed, filters)
        prompt = encode(self._target, case.prompt)
        assert self._draft is not None, "no two-model case is run without a draft model"
        run = speculative(
            self._target, self._draft, prompt, case.max_tokens, case.cell.depth, sampler
        )
        if run.tokens != answer.ids or run.finish_reason != answer.finish_reason:
            raise Unusable(
                f"{case.id}: mlx-lm disagrees with itself: the server said {answer.ids}, "
                f"speculative_generate_step {run.tokens}"
            )
        rounds = tuple((one.drafted, one.accepted) for one in run.rounds)
        return replace(answer, trace=Trace(run.from_draft, rounds))

    def _generate_step(self, case: Case) -> Answer:
        filters = filters_of(case.cell.sampling, self._target.xtc_special_tokens)
        prompt = encode(self._target, case.prompt)
        run = plain(
            self._target,
            prompt,
            case.max_tokens,
            PositionalSampler(case.seed, filters),
            processors=processors_of(case),
        )
        return Answer(
            str(case.source),
            run.tokens,
            decode(self._target, run.tokens),
            run.finish_reason,
            len(prompt),
            len(run.generated),
            run.logprobs,
        )


def decode(loaded: Loaded, ids: Sequence[int]) -> str:
    """The text of `ids`, put together as mlx-lm's generators stream it."""
    detokenizer = loaded.tokenizer.detokenizer
    for token in ids:
        detokenizer.add_token(token)
    detokenizer.finalize()
    return str(detokenizer.text)


def decodings(loaded: Loaded, prompt: Sequence[int], ids: Sequence[int]) -> tuple[str, ...]:
    """The texts of all of `ids`: as mlx-lm streams them, and as they continue the prompt's text.

    The second keeps a first space, which mlx-lm's detokenizers drop.
    """
    streamed = decode(loaded, ids)
    before, whole = (str(loaded.tokenizer.decode(list(t))) for t in (prompt, (*prompt, *ids)))
    if not whole.startswith(before):
        return (streamed,)
    return tuple(dict.fromkeys((streamed, whole[len(before) :])))
