"""The journal of an unfinished generation, which goes on from it as if never interrupted.

The states of target and drafter are kept as for any prefix. Beside them stands the journal: the
rounds that were delivered. Going on replays it through the same walk that made it, so the reader,
the trace and the statistics are those of a run without interruption.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

from .errors import BadInput
from .prefill import Prompt
from .rounds import accept
from .values import Request

VERSION = 1
"""Of a journal's text: another one is not read, and the generation begins anew."""


@dataclass(frozen=True, slots=True)
class Delivered:
    """One round as it reached the reader: proposed ids, emitted ids and their log-probabilities."""

    draft: tuple[int, ...]
    emitted: tuple[int, ...]
    logprobs: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Journal:
    """All rounds of a row that has not ended, and how its prompt was processed before them.

    That took `prefill_forwards` forwards; `cached` of its tokens were processed earlier.
    """

    prefill_forwards: int
    cached: int
    rounds: tuple[Delivered, ...]

    @classmethod
    def of(cls, prompt: Prompt, logprobs: Sequence[float]) -> Journal:
        """`logprobs` are those of all tokens that the row has delivered."""
        rounds: list[Delivered] = []
        at = 0
        for trace in prompt.row.trace:
            end = at + len(trace.emitted)
            rounds.append(Delivered(trace.draft, trace.emitted, tuple(logprobs[at:end])))
            at = end
        return cls(prompt.forwards, prompt.cached, tuple(rounds))

    def to_text(self) -> str:
        """Base64 of JSON, whose numbers come back as they were."""
        rounds = [asdict(one) for one in self.rounds]
        content = [VERSION, self.prefill_forwards, self.cached, rounds]
        return base64.b64encode(json.dumps(content).encode()).decode()

    @classmethod
    def from_text(cls, text: str) -> Journal:
        """What `to_text` wrote.

        Raises:
            BadInput: it is no journal of this version.
        """
        try:
            version, prefill_forwards, cached, rounds = json.loads(
                base64.b64decode(text, validate=True)
            )
            if version != VERSION:
                raise BadInput(f"journal version is {version}, expected {VERSION}")
            delivered = tuple(_delivered(**one) for one in rounds)
            return cls(int(prefill_forwards), int(cached), delivered)
        except (TypeError, ValueError) as error:
            raise BadInput(f"a generation's journal is malformed: {error}") from error

    def require(self, prompt: Prompt, tokens: Sequence[int], pending: int) -> None:
        """Refuse a journal that does not lead a fresh row to those tokens, and that one to come.

        Raises:
            BadInput: naming what is wrong.
        """
        held = list(prompt.tokens[:-1])
        row = replace(prompt.row, consumer=_Anyone(), held=held, trace=[])
        for one in self.rounds:
            # A round that goes on emits what it accepted and one token more: all that was sampled.
            accepted = len(one.emitted) - 1
            whole = accepted >= 0 and len(one.logprobs) == len(one.emitted)
            if not whole or one.emitted[:accepted] != one.draft[:accepted]:
                raise BadInput("a generation's journal holds a round that did not go on")
            accept(row, one.draft, one.emitted, one.logprobs)
            if row.end is not None:
                raise BadInput("a generation's journal leads to its end")
        if row.held != list(tokens) or row.pending != pending:
            raise BadInput("a generation's journal leads elsewhere than to its state")

    def replay(self, prompt: Prompt) -> None:
        """Hand a fresh row's consumer what it was handed, and bring the row to where it stood."""
        prompt.forwards, prompt.cached = self.prefill_forwards, self.cached
        prompt.row.held += prompt.tokens[:-1]
        for one in self.rounds:
            accept(prompt.row, one.draft, one.emitted, one.logprobs)
            prompt.resumed += len(one.emitted)


class _Anyone:
    """Takes everything."""

    def take(self, token: int, logprob: float, *, from_draft: bool, round: int) -> bool:
        return True


def _delivered(draft: list[int], emitted: list[int], logprobs: list[float]) -> Delivered:
    return Delivered(tuple(map(int, draft)), tuple(map(int, emitted)), tuple(map(float, logprobs)))


def generation_key(request: Request, eos: frozenset[int], depth: int, namespace: str) -> str:
    """The sha256, in hex, of canonical JSON of all that decides a generation's text and trace."""
    fields = {
        "prompt": request.prompt,
        "max_tokens": request.max_tokens,
        "sampling": asdict(request.sampling),
        "eos": sorted(eos),
        "stop_strings": request.stop_strings,
        "first_step": request.first_step,
        "depth": depth,
        "namespace": namespace,
    }
    text = json.dumps(fields, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()
