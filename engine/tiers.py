"""Where a request's state comes from, and what of it is kept for the next request.

A request starts from the longest prefix of its prompt whose state is kept. The state is kept when
its prompt has been processed, one token before the prompt's end, and again when its row retires. A
speculative request keeps the drafter's state with the target's, as one entry. A generation that is
interrupted is kept as well, and goes on where it was. No failure here reaches a request: it starts
from nothing, or leaves nothing behind.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import mlx.core as mx
import numpy as np

from .cache.codecs import CODEC
from .cache.durability import FlushReport
from .cache.entry import Generation, Tokens
from .cache.prompt_cache import Kept, PromptCache
from .cache.ssd import FLUSH_S, SSD
from .cache.store import Store
from .cache.stored import Stored
from .cache.writer import Writer
from .drafters.source import DraftProvider, DraftRows
from .errors import BadInput
from .host import read
from .prefill import Prompt
from .requests import make_row_sampling
from .resume import Journal, generation_key
from .rounds import Rounds, TargetRows
from .sampling import Greedy, RowSampling
from .state.rows import Rows
from .target import Target
from .values import Request, Sampling

log = logging.getLogger(__name__)

RAM_BYTES = 1 << 30
SSD_BYTES = 32 << 30
"""Caps for whoever names none."""


@dataclass(frozen=True, slots=True)
class Start:
    """The states of one row that hold the same tokens: none, or a prefix of its prompt."""

    rows: Rows
    draft: DraftRows | None


@dataclass(frozen=True, slots=True)
class Unfinished:
    """A generation that was interrupted: where it goes on, and how it came there.

    `sampling` has the seed that it began with, `samplers` are where they stood.
    """

    start: Start
    sampling: Sampling
    samplers: RowSampling
    journal: Journal


class Tiers:
    """What keeps states between requests; without a cache, nothing does.

    It belongs to the thread that runs the forwards.
    """

    def __init__(self, cache: PromptCache | None = None, ssd: SSD | None = None) -> None:
        self._cache = cache
        self._ssd = ssd
        self._writer: Writer | None = None
        if cache is not None and ssd is not None:
            ssd.serve_from(cache.holding)

    def write_behind(self, wake: Callable[[], None]) -> None:
        """Write in a thread of its own from now on; `wake` is called when `serve` has work."""
        if self._ssd is not None:
            self._writer = self._ssd.start(wake)

    @property
    def asks(self) -> bool:
        """Whether a write step waits for this thread."""
        return self._writer is not None and self._writer.asks

    def serve(self) -> bool:
        """Run one write step, if one waits."""
        return self._writer is not None and self._writer.serve()

    def idle(self, now: bool) -> None:
        """Whether this thread has nothing else to do."""
        if self._writer is not None:
            self._writer.idle(now)

    def flush(self, timeout_s: float | None = FLUSH_S) -> FlushReport | None:
        """Make durable what is to be, and stop writing behind. None: nothing is durable here."""
        if self._ssd is None:
            return None
        self._writer, report = None, self._ssd.flush(timeout_s)
        if report is not None and not report.durable:
            log.warning("not everything was written: %s", report)
        return report

    def start(
        self,
        target: Target,
        drafter: DraftProvider | None,
        samplers: RowSampling,
        prompt: Prompt,
    ) -> Start:
        """The states that a row starts from; `prompt` is told what they hold of it."""
        taps = () if drafter is None else drafter.taps
        draft = None if drafter is None else drafter.open(samplers)
        if self._cache is None:
            return Start(target.new_rows(taps), draft)
        prompt.pauses = True
        hit = self._cache.take(as_tokens(prompt.tokens), namespace_of(target, draft))
        if hit is not None:
            kept = Kept("", as_tokens(prompt.tokens[: hit.count]), hit.stored, hit.checkpoints)
            try:
                start = started(target, drafter, samplers, kept)
                prompt.processed = prompt.cached = hit.count
                return start
            except BadInput as error:
                log.warning("a kept state is not used: %s", error)
        return Start(target.new_rows(taps), draft)

    def keep(
        self,
        target: Target,
        rows: TargetRows,
        draft: DraftRows | None,
        row: int,
        tokens: Sequence[int],
    ) -> None:
        """Keep what one row's settled states hold, which is `tokens`."""
        if self._cache is None or not tokens:
            return
        try:
            kept = captured(target, rows, draft, row, tokens)
            self._cache.put(kept.tokens, kept.namespace, kept.stored, kept.checkpoints)
            if self._ssd is not None:
                self._ssd.schedule(kept.tokens, kept.namespace)
        except Exception as error:
            log.warning("a state of %d tokens is not kept: %s", len(tokens), error)

    def suspend(
        self,
        target: Target,
        request: Request,
        seed: int | None,
        rounds: Rounds,
        row: int,
        prompt: Prompt,
        logprobs: Sequence[float],
    ) -> bool:
        """Keep a generation that has begun and not ended, as it is between two rounds.

        True if it can go on later, whatever happens to this process.
        """
        going = rounds.rows[row]
        if self._ssd is None or going.end is not None or len(going.held) <= len(request.prompt):
            return False
        rounds.close()
        try:
            kept = captured(target, rounds.target, rounds.draft, row, going.held)
            chain = rounds.sampling.chains[row]
            generated = [*going.held[len(request.prompt) :], going.pending]
            generation = Generation(
                key=_key(target, request, rounds.depth, kept.namespace),
                namespace=kept.namespace,
                prompt_tokens=len(request.prompt),
                generated=tuple(generated),
                pending=going.pending,
                seed=seed or 0,
                seed_was_explicit=request.sampling.seed is not None,
                rng=None if chain is None else tuple(read(chain)),
                journal=Journal.of(prompt, logprobs).to_text(),
            )
            return self._ssd.suspend(kept, generation)
        except Exception as error:
            log.warning("an unfinished generation is not kept: %s", error)
            return False

    def unfinished(
        self,
        target: Target,
        drafter: DraftProvider | None,
        depth: int,
        request: Request,
        prompt: Prompt,
    ) -> Unfinished | None:
        """The generation that this request began earlier, if it was interrupted."""
        if self._ssd is None:
            return None
        where = _namespace(target, drafter)
        found = self._ssd.unfinished(
            as_tokens(request.prompt), _key(target, request, depth, where), where
        )
        if found is None:
            return None
        kept, generation = found
        sampling = request.sampling
        try:
            journal = Journal.from_text(generation.journal)
            journal.require(prompt, kept.tokens.tolist(), generation.pending)
            if not sampling.greedy:
                sampling = replace(sampling, seed=generation.seed)
            samplers = make_row_sampling(target, sampling)
            if sampling.rng == "sequential" and not sampling.greedy:
                if generation.rng is None:
                    raise BadInput("a sequential generation was kept without its chain of keys")
                samplers.chains = (mx.array(generation.rng, dtype=mx.uint32),)
            start = started(target, drafter, samplers, kept)
        except BadInput as error:
            log.warning("an unfinished generation begins anew: %s", error)
            return None
        return Unfinished(start, sampling, samplers, journal)

    def finished(
        self, target: Target, drafter: DraftProvider | None, depth: int, request: Request
    ) -> None:
        """That generation has ended: nothing of it is to go on."""
        if self._ssd is not None:
            where = _namespace(target, drafter)
            self._ssd.finished(_key(target, request, depth, where))


def started(
    target: Target, drafter: DraftProvider | None, samplers: RowSampling, kept: Kept
) -> Start:
    """States of one row from what was kept of one.

    Raises:
        BadInput: it does not fit.
    """
    taps = () if drafter is None else drafter.taps
    rows = target.rows_holding(kept.stored.leaves, len(kept.tokens), taps)
    if drafter is None:
        return Start(rows, None)
    if len(kept.checkpoints) != 1:
        raise BadInput(f"a drafter's state has 1 checkpoint, got {len(kept.checkpoints)}")
    return Start(rows, drafter.open(samplers, kept.checkpoints[0]))


def captured(
    target: Target, rows: TargetRows, draft: DraftRows | None, row: int, tokens: Sequence[int]
) -> Kept:
    """What one row's settled states hold, which is `tokens`, as a value."""
    stored = Stored.of(rows.lowered(row), len(tokens), target.quantization)
    checkpoints = () if draft is None else (draft.capture(row),)
    return Kept(namespace_of(target, draft), as_tokens(tokens), stored, checkpoints)


def namespace_of(target: Target, draft: DraftRows | None) -> str:
    """What states must agree on, beside the tokens, for one to stand for the other."""
    return target.namespace(None if draft is None else draft.namespace)


def as_tokens(tokens: Sequence[int]) -> Tokens:
    """Ids as the tiers hold them."""
    return np.asarray(tokens, dtype=np.int32)


def _namespace(target: Target, drafter: DraftProvider | None) -> str:
    draft = None if drafter is None else drafter.open(RowSampling([Greedy()]))
    return namespace_of(target, draft)


def _key(target: Target, request: Request, depth: int, where: str) -> str:
    return generation_key(request, target.eos_ids | request.stop_ids, depth, where)


def open_tiers(
    target: Target,
    *,
    ram_bytes: int = RAM_BYTES,
    ssd: str | os.PathLike[str] | None = None,
    ssd_bytes: int = SSD_BYTES,
) -> Tiers:
    """Tiers for a target and whatever is mounted on it or beside it.

    Args:
        ram_bytes: the RAM tier's cap; with 0 it keeps nothing.
        ssd: the folder of the durable tier; None is none.
        ssd_bytes: its cap.

    Raises:
        BadInput: a cap that is too small, or files that are not those the target was loaded from.
    """
    if ssd is None:
        return Tiers(PromptCache(ram_bytes))
    store = Store(ssd, target.store_identity, cap_bytes=ssd_bytes, codec=CODEC)
    tier = SSD(store)
    return Tiers(PromptCache(ram_bytes, tier), tier)
