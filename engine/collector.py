"""From a row's tokens to what its reader sees: events in order, then the whole."""

from __future__ import annotations

from .prefill import Prompt
from .rounds import Row
from .stops import Piece, TextStream
from .target import Target
from .values import Finish, Request, Statistics, TokenEvent, Usage


class Collector:
    """The consumer of one request's row."""

    def __init__(self, target: Target, request: Request, seed: int | None) -> None:
        self.request = request
        self.seed = seed
        self._stream = TextStream(target.tokenizer, request.stop_strings)
        self._taken: list[tuple[int, float, bool, int]] = []
        self._ready: list[TokenEvent] = []

    def take(self, token: int, logprob: float, *, from_draft: bool, round: int) -> bool:
        self._taken.append((token, logprob, from_draft, round))
        self._add(self._stream.push(token))
        return not self._stream.stopped

    def ready(self) -> list[TokenEvent]:
        """The events that became certain since the last call."""
        events, self._ready = self._ready, []
        return events

    @property
    def logprobs(self) -> list[float]:
        """Of all tokens taken."""
        return [logprob for _, logprob, *_ in self._taken]

    def finish(self, row: Row, prompt: Prompt) -> tuple[list[TokenEvent], Finish]:
        """The last events, with what was held back for a stop string that did not come; the end."""
        self._add(self._stream.close())
        content = self._taken[: self._stream.num_content]
        ended_by_eos = row.end == "stop" and not self._stream.stopped
        completed = len(self._taken) + ended_by_eos
        finish = Finish(
            reason="length" if row.end == "length" else "stop",
            tokens=tuple(token for token, *_ in content),
            text=self._stream.text,
            tail=self._stream.tail,
            logprobs=tuple(logprob for _, logprob, *_ in content),
            usage=Usage(len(prompt.tokens), completed, prompt.cached, prompt.resumed),
            rounds=tuple(row.trace),
            statistics=Statistics.of(row.trace, prefill_forwards=prompt.forwards),
            seed=self.seed,
        )
        return self.ready(), finish

    def _add(self, pieces: list[Piece]) -> None:
        for piece in pieces:
            token, logprob, from_draft, number = self._taken[piece.index]
            self._ready.append(TokenEvent(token, piece.text, logprob, from_draft, number))
