"""Generations that are interrupted, and go on as if they had not been."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace

import mlx.core as mx

from .cache.entry import Generation
from .cache.ssd import SSD
from .drafters.source import DraftProvider
from .errors import BadInput
from .host import read
from .journal import Journal, generation_key
from .kept import Start, as_tokens, captured, namespace_of, started
from .prefill import Prompt
from .requests import make_row_sampling
from .rounds import Rounds, Row
from .sampling import RowSampling
from .target import Target
from .values import Request, Sampling

log = logging.getLogger(__name__)

KEY_WORDS = 2
"""Of 32 bits, in one of mlx's random keys."""


@dataclass(frozen=True, slots=True)
class Unfinished:
    """A generation that was interrupted: where it goes on, and how it came there.

    `sampling` has the seed that it began with; `samplers` draw what would have been drawn next.
    """

    start: Start
    sampling: Sampling
    samplers: RowSampling
    journal: Journal


class Generations:
    """The unfinished generations of a durable tier; without one, none is kept."""

    def __init__(self, ssd: SSD | None) -> None:
        self._ssd = ssd

    def suspend(
        self,
        target: Target,
        request: Request,
        seed: int | None,
        rounds: Rounds,
        row: int,
        prompt: Prompt,
        logprobs: Sequence[float],
        *,
        at_once: bool = True,
    ) -> bool:
        """Keep a generation that has begun and not ended, as it is between two rounds.

        It is row `row` of `rounds`; `seed` is the one it draws with, None if it is greedy, and
        `logprobs` are those of all tokens that it has delivered. True if it can go on later,
        whatever happens to this process; if not `at_once`, once that has been written.
        """
        going = rounds.rows[row]
        if self._ssd is None or not goes_on(going) or len(going.held) <= len(request.prompt):
            return False
        try:
            rounds.close()
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
            if at_once:
                return self._ssd.suspend(kept, generation)
            return self._ssd.checkpoint(kept, generation, lambda: goes_on(going))
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
        namespace = namespace_of(target, drafter)
        key = _key(target, request, depth, namespace)
        try:
            found = self._ssd.unfinished(as_tokens(request.prompt), key, namespace)
            if found is None:
                return None
            kept, generation = found
            sampling = request.sampling
            journal = Journal.from_text(generation.journal)
            journal.require(prompt, kept.tokens.tolist(), generation.pending)
            if not sampling.greedy:
                if sampling.seed not in (None, generation.seed):
                    raise BadInput(f"it draws with seed {generation.seed}, not {sampling.seed}")
                sampling = replace(sampling, seed=generation.seed)
            samplers = make_row_sampling(target, sampling)
            if sampling.rng == "sequential" and not sampling.greedy:
                if generation.rng is None or len(generation.rng) != KEY_WORDS:
                    raise BadInput("a sequential generation was kept without its chain of keys")
                samplers.chains = (mx.array(generation.rng, dtype=mx.uint32),)
            start = started(target, drafter, samplers, kept.stored, kept.checkpoints)
        except Exception as error:
            log.warning("an unfinished generation begins anew: %s", error)
            if not isinstance(error, OSError | MemoryError):
                self._ssd.finished(key)
            return None
        return Unfinished(start, sampling, samplers, journal)

    def finished(
        self, target: Target, drafter: DraftProvider | None, depth: int, request: Request
    ) -> None:
        """Forget what is stored of that generation: it has ended."""
        if self._ssd is not None:
            namespace = namespace_of(target, drafter)
            self._ssd.finished(_key(target, request, depth, namespace))


def goes_on(row: Row) -> bool:
    """Whether it has begun or will, and neither ended nor been cancelled."""
    return row.end is None and not row.cancelled


def _key(target: Target, request: Request, depth: int, namespace: str) -> str:
    return generation_key(request, target.eos_ids | request.stop_ids, depth, namespace)
