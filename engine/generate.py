"""START HERE. One request, from prompt to stream.

Prefill, then rounds of draft, verify, accept, resolve and commit, then the tokens.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass, field

import mlx.core as mx

from .drafters.source import DraftProvider, DraftRows
from .errors import BadInput
from .host import read
from .prefill import CHUNK, prefill
from .processors import make_processors
from .rounds import Rounds, Row, accept
from .sampling import RowSampling, make_row_sampler, resolve_seed
from .state.native import NativeRows
from .stops import Piece, TextStream
from .target import Target
from .values import Finish, Request, Sampling, Statistics, TokenEvent, Usage


@dataclass(slots=True)
class Live:
    """What stays behind a stream, settled whenever the caller has control.

    `owner` is the only target whose streams may take it. `held` are the tokens in `target`, in
    order; `draft` covers them as its contract says. One stream takes it, at the call and for good.
    """

    owner: Target
    target: NativeRows
    draft: DraftRows | None = None
    held: list[int] = field(default_factory=list)
    in_use: bool = False


def open_live(target: Target) -> Live:
    """An empty state for one request."""
    return Live(target, target.new_rows())


def drafter_for(target: Target, drafter: DraftProvider | None) -> DraftProvider | None:
    """`drafter`, or None where an adapter is mounted on the target that it does not support."""
    if drafter is None or target.adapter is None or drafter.supports_target_adapters:
        return drafter
    return None


def generate(
    target: Target,
    request: Request,
    drafter: DraftProvider | None = None,
    *,
    depth: int | None = None,
    live: Live | None = None,
    prefill_chunk: int = CHUNK,
) -> Generator[TokenEvent | Finish, None, None]:
    """Generate one request's tokens: `TokenEvent`s in order, then one `Finish`.

    Resolve and commit come before the tokens of a round are yielded: closing the generator at any
    yield leaves `live` settled, holding the prompt and the tokens of whole rounds.

    A drafter that does not support the adapter mounted on the target is not opened: the request is
    decoded as if none had been given.

    Args:
        depth: drafts per round, at least 0; the drafter's default if None. Unused without one.
        live: an empty state from `open_live(target)`, for callers who want it afterwards.
        prefill_chunk: prompt tokens per forward, at least 1.

    Raises:
        BadInput: at the call, for options that cannot be served, or a drafter on a target whose
            caches cannot be rolled back.
    """
    drafter = drafter_for(target, drafter)
    live = live or open_live(target)
    if live.owner is not target:
        raise BadInput("the live state was opened for another target")
    if live.in_use:
        raise BadInput("the live state belongs to another stream; open one for each")
    if depth is not None and depth < 0:
        raise BadInput(f"depth must be at least 0, got {depth}")
    if prefill_chunk < 1:
        raise BadInput(f"prefill_chunk must be at least 1, got {prefill_chunk}")
    if max(request.prompt) >= target.vocab_size or min(request.prompt) < 0:
        raise BadInput(f"prompt ids must be between 0 and {target.vocab_size - 1}")
    if drafter is not None and (names := live.target.cannot_roll_back):
        raise BadInput(
            f"drafter {drafter.id} cannot serve this target: cache kind {', '.join(names)} "
            "has no rollback (it decodes without a drafter)"
        )
    if depth is None:
        depth = 0 if drafter is None else drafter.default_depth
    sampling = resolve_seed(request.sampling)
    sampling.check_vocabulary(target.vocab_size)
    live.in_use = True
    return _stream(target, request, sampling, drafter, depth, live, prefill_chunk)


def _stream(
    target: Target,
    request: Request,
    sampling: Sampling,
    drafter: DraftProvider | None,
    depth: int,
    live: Live,
    prefill_chunk: int,
) -> Generator[TokenEvent | Finish, None, None]:
    samplers = RowSampling(
        [make_row_sampler(sampling, target.xtc_exempt_ids)], [make_processors(sampling.logits)]
    )
    if drafter is not None:
        live.draft = drafter.open(samplers)
        live.draft.append(None)
    text = _Collector(TextStream(target.tokenizer, request.stop_strings))
    row = Row(
        consumer=text,
        eos=target.eos_ids | request.stop_ids,
        held=live.held,
        pending=request.prompt[-1],
        step=request.first_step,
        remaining=request.max_tokens,
    )
    forwards, logits = prefill(live.target, live.draft, request.prompt, chunk=prefill_chunk)
    row.held += request.prompt[:-1]
    if logits is not None:
        _accept_first(row, samplers, logits)
        forwards -= 1  # the last of them was this round's
        yield from text.ready()
    rounds = Rounds(
        live.target, live.draft, samplers, [row], depth=depth, vocab_size=target.vocab_size
    )
    try:
        while not rounds.done:
            rounds.step()
            yield from text.ready()
    finally:
        rounds.close()
    yield from text.close()
    yield text.finish(request, row, forwards, sampling.seed)


def _accept_first(row: Row, samplers: RowSampling, logits: mx.array) -> None:
    """After a `full` prefill: its logits [1, V] serve as a first round without a draft."""
    window = mx.array([[row.pending]], dtype=mx.uint32)
    samples, logprobs = samplers.choose(logits[:, None], [row.held], window, [row.step])
    (token,) = read(samples)[0]
    accept(row, (), [token], [read(logprobs)[0][0][token]])


class _Collector:
    """Takes one row's tokens and turns them into events."""

    def __init__(self, stream: TextStream) -> None:
        self._stream = stream
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

    def close(self) -> list[TokenEvent]:
        """The last events: what was held back for a stop string that did not come."""
        self._add(self._stream.close())
        return self.ready()

    def finish(self, request: Request, row: Row, forwards: int, seed: int | None) -> Finish:
        content = self._taken[: self._stream.num_content]
        ended_by_eos = row.end == "stop" and not self._stream.stopped
        return Finish(
            reason="length" if row.end == "length" else "stop",
            tokens=tuple(token for token, *_ in content),
            text=self._stream.text,
            tail=self._stream.tail,
            logprobs=tuple(logprob for _, logprob, *_ in content),
            usage=Usage(len(request.prompt), len(self._taken) + ended_by_eos),
            rounds=tuple(row.trace),
            statistics=Statistics.of(row.trace, prefill_forwards=forwards),
            seed=seed,
        )

    def _add(self, pieces: list[Piece]) -> None:
        for piece in pieces:
            token, logprob, from_draft, number = self._taken[piece.index]
            self._ready.append(TokenEvent(token, piece.text, logprob, from_draft, number))
