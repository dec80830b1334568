"""START HERE. One request, from prompt to stream.

Prefill, then rounds of draft, verify, accept, resolve and commit, then the tokens.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass, field

from .collector import Collector
from .drafters.source import DraftProvider, DraftRows
from .errors import BadInput
from .prefill import CHUNK, Cohort, Prompt
from .requests import check, drafter_for, make_row, make_row_sampling
from .rounds import Row
from .sampling import resolve_seed
from .state.rows import Rows
from .target import Target
from .tiers import Tiers
from .values import Finish, Request, Sampling, TokenEvent


@dataclass(slots=True)
class Live:
    """What stays behind a stream, settled whenever the caller has control.

    `owner` is the only target whose streams may take it. `held` are the tokens in `target`, in
    order; `draft` covers them as its contract says. One stream takes it, at the call and for good.
    """

    owner: Target
    target: Rows
    draft: DraftRows | None = None
    held: list[int] = field(default_factory=list)
    in_use: bool = False


def open_live(target: Target) -> Live:
    """An empty state for one request."""
    return Live(target, target.new_rows())


def generate(
    target: Target,
    request: Request,
    drafter: DraftProvider | None = None,
    *,
    depth: int | None = None,
    live: Live | None = None,
    prefill_chunk: int = CHUNK,
    tiers: Tiers | None = None,
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
        tiers: what keeps states between requests; nothing does if None.

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
    if prefill_chunk < 1:
        raise BadInput(f"prefill_chunk must be at least 1, got {prefill_chunk}")
    depth = check(target, live.target, request, drafter, depth)
    live.in_use = True
    sampling = resolve_seed(request.sampling)
    return _stream(target, request, sampling, drafter, depth, live, prefill_chunk, tiers or Tiers())


def _stream(
    target: Target,
    request: Request,
    sampling: Sampling,
    drafter: DraftProvider | None,
    depth: int,
    live: Live,
    prefill_chunk: int,
    tiers: Tiers,
) -> Generator[TokenEvent | Finish, None, None]:
    samplers = make_row_sampling(target, sampling)
    text = Collector(target, request, sampling.seed)
    row = make_row(target, request, text, live.held)
    prompt = Prompt(request.prompt, row)
    if drafter is not None and drafter.taps:
        live.target = target.new_rows(drafter.taps)
    start = tiers.start(target, drafter, samplers, prompt, live.target)
    live.target, live.draft = start.rows, start.draft
    cohort = Cohort(live.target, live.draft, samplers, [prompt])
    while any(cohort.lacking):
        cohort.step(prefill_chunk)
        if cohort.at_boundary:
            tiers.keep(target, live.target, live.draft, 0, prompt.tokens[:-1])
    yield from _ready(row, text)
    rounds = cohort.rounds(depth, target.vocab_size)
    try:
        while not rounds.done:
            rounds.step()
            yield from _ready(row, text)
    finally:
        rounds.close()
    tiers.keep(target, live.target, live.draft, 0, row.held)
    events, finish = text.finish(row, prompt)
    yield from events
    yield finish


def _ready(row: Row, text: Collector) -> list[TokenEvent]:
    """The events that became certain since the last call, or what the row failed with, raised."""
    if row.error is not None:
        raise row.error
    return text.ready()
