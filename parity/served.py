"""The two servers: started when first asked, asked in a thread of their own, always stopped.

One request is under way at a time, so that a server sees what a single caller would send it; but
the rows of a group are sent at once, so that its batches hold them all. The threads touch no MLX
and no tokenizer; while they wait, the engine computes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
from types import TracebackType

from oracle.client import Client, Options, OracleError
from oracle.server import Server, ServerFailed
from parity.asking import asked_of
from parity.cases import Case, Question, Source, question_of
from parity.errors import Unusable
from parity.models import Models
from parity.probe import filters_of, processors_of
from parity.trace import Answer

SOURCES = frozenset({Source.SERVER, Source.SERVER_DRAFT})


class Served:
    """Answers of mlx_lm.server, with and without a draft model. A context manager."""

    def __init__(
        self,
        models: Models,
        eos_ids: Collection[int],
        encode: Callable[[str], Sequence[int]],
        log_dir: Path,
    ) -> None:
        self._models = models
        self._eos_ids = eos_ids
        self._encode = encode
        self._log_dir = log_dir
        self._stops: dict[str, Sequence[int]] = {}
        self._running: dict[Source, tuple[Server, Client]] = {}
        self._endings: list[Callable[[], None]] = []
        self._asked: dict[Question, Future[Answer]] = {}
        self._failure: Unusable | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="servers")

    def __enter__(self) -> Served:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)
        # The request under way fails with its server; a server that was just starting comes last.
        self._stop()
        self._thread.shutdown(wait=True)
        self._stop()

    def _stop(self) -> None:
        for end in list(self._endings):
            end()

    def mount(self, source: Source, server: Server, client: Client) -> None:
        """Use a server that runs already and belongs to the caller."""
        self._running[source] = (server, client)

    def start_ahead(self, source: Source) -> None:
        """Start a server before it is asked; whoever asks learns if it failed."""
        self._thread.submit(self._started, source)

    def ask(self, case: Case) -> Future[Answer]:
        """Put a case's question in the queue, unless it is there or answered already."""
        question = question_of(case)
        if question not in self._asked:
            for string in case.stop:
                self._stops[string] = self._encode(string)
            if case.group:
                self._ask_together(case.together)
            else:
                self._asked[question] = self._thread.submit(self._answer, case)
        return self._asked[question]

    def _ask_together(self, cases: Sequence[Case]) -> None:
        answers = self._thread.submit(self._answers, cases)

        def answer(row: int) -> Answer:
            return answers.result()[row]

        for row, case in enumerate(cases):
            # Behind the group in the queue of one thread, so there is nothing to wait for.
            self._asked[question_of(case)] = self._thread.submit(answer, row)

    def check_alive(self) -> None:
        """Raise `Unusable` if a server that was started is no longer there, or failed to answer."""
        if self._failure is not None:
            raise self._failure
        for source, (server, _) in list(self._running.items()):
            if not server.alive():
                raise Unusable(f"{source} (pid {server.pid}) died; its log: {self._log(source)}")

    def _started(self, source: Source) -> None:
        try:
            self._client(source)
        except Unusable as error:
            self._failure = error

    def _answer(self, case: Case) -> Answer:
        if self._failure is not None:
            raise self._failure
        try:
            return self._complete(case)
        except Unusable as error:
            # Known at once to whoever asks next, whatever they ask, and no server starts again.
            self._failure = error
            raise

    def _answers(self, cases: Sequence[Case]) -> list[Answer]:
        """The answers to requests that are under way together."""
        start = Barrier(len(cases))

        def ask(case: Case) -> Answer:
            start.wait()
            return self._answer(case)

        self._started(cases[0].source)  # once, and not by each of them
        with ThreadPoolExecutor(len(cases)) as threads:
            return list(threads.map(ask, cases))

    def _complete(self, case: Case) -> Answer:
        client = self._client(case.source)
        # A seed moves a request to the serial lane; greedy decoding does not read it.
        seed = case.cell.sampling.seed if case.cell.lane == "serial" else None
        depth = case.cell.depth if case.source is Source.SERVER_DRAFT else None
        ask = client.complete if isinstance(case.prompt, str) else client.chat
        try:
            completion = ask(
                asked_of(case.prompt),
                max_tokens=case.max_tokens,
                options=Options(filters_of(case.cell.sampling), processors_of(case), seed, depth),
                stop=case.stop,
            )
        except OracleError as error:
            self.check_alive()
            log = self._log(case.source)
            raise Unusable(
                f"{case.source} did not answer {case.id}: {error}; its log: {log}"
            ) from error
        if completion.cached_tokens:
            # Its answer would depend on what was asked before (known deviations D2 and D8).
            raise Unusable(f"{case.source} reused {completion.cached_tokens} tokens for {case.id}")
        return Answer(
            str(case.source),
            completion.tokens,
            completion.text,
            completion.finish_reason,
            completion.prompt_tokens,
            completion.completion_tokens,
            completion.logprobs,
        )

    def _client(self, source: Source) -> Client:
        if source not in self._running:
            draft = self._models.draft if source is Source.SERVER_DRAFT else None
            log = self._log(source)
            server = Server(
                self._models.target,
                draft=draft,
                prompt_cache_size=0,
                extra_args=kv_args(self._models.kv_bits),
                log_path=log,
            )
            # Known before it runs, so that it is stopped whenever the run ends.
            self._endings.append(server.stop)
            try:
                server.start()
            except ServerFailed as error:
                raise Unusable(f"{error}; its log: {log}") from error
            encode = self._stops.__getitem__
            client = Client(server, eos_ids=self._eos_ids, encode=encode)
            self._endings.append(client.close)
            self._running[source] = (server, client)
        return self._running[source][1]

    def _log(self, source: Source) -> Path:
        name = "plain" if source is Source.SERVER else "draft"
        return self._log_dir / f"server-{name}.log"


def kv_args(bits: int | None) -> tuple[str, ...]:
    """What makes mlx_lm.server quantize keys and values from the first token on."""
    return () if bits is None else ("--kv-bits", str(bits), "--quantized-kv-start", "0")
