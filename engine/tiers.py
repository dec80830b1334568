"""Where a request's state comes from, and what of it is kept for the next request.

A request starts from the longest prefix of its prompt whose state is kept. The state is kept when
its prompt has been processed, one token before the prompt's end, and again when its row retires. A
speculative request keeps the drafter's state with the target's, as one entry. No failure here
reaches a request: it starts from nothing, or leaves nothing behind.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence

from .cache.codecs import CODEC
from .cache.durability import FlushReport
from .cache.prompt_cache import PromptCache
from .cache.ssd import FLUSH_S, SSD
from .cache.store import Store
from .cache.writer import Writer
from .drafters.source import DraftProvider, DraftRows
from .errors import BadInput
from .generations import Generations
from .kept import Start, as_tokens, captured, namespace_of, started
from .prefill import Prompt
from .rounds import TargetRows
from .sampling import RowSampling
from .state.rows import Rows
from .target import Target

log = logging.getLogger(__name__)

RAM_BYTES = 1 << 30
SSD_BYTES = 32 << 30
"""The tiers' caps for whoever names none."""


class Tiers:
    """What keeps states between requests; without a cache, nothing does.

    It belongs to the thread that runs the forwards. What was not used for `demote_after_s` leaves
    the memory for the disk, once that thread is idle. Generations in flight are written down every
    `checkpoint_tokens` tokens, for the case that the process is killed.
    """

    def __init__(
        self,
        cache: PromptCache | None = None,
        ssd: SSD | None = None,
        demote_after_s: float | None = None,
        checkpoint_tokens: int | None = None,
    ) -> None:
        self._cache = cache
        self._ssd = ssd
        self.demote_after_s = demote_after_s
        self.checkpoint_tokens = checkpoint_tokens if ssd is not None else None
        self._writer: Writer | None = None
        self.generations = Generations(ssd)
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

    def set_idle(self, idle: bool) -> None:
        """Say whether this thread has nothing else to do: what is scheduled is written then."""
        if self._writer is not None:
            self._writer.set_idle(idle)

    def demote(self) -> int:
        """Move what was not used for `demote_after_s` to the disk; how many entries that were."""
        if self._cache is None or self.demote_after_s is None:
            return 0
        return self._cache.demote(self.demote_after_s)

    def flush(self, timeout_s: float | None = FLUSH_S) -> FlushReport | None:
        """Make durable what is to be, and stop writing behind; None: nothing is durable here."""
        if self._ssd is None:
            return None
        self._writer, report = None, self._ssd.flush(timeout_s)
        if report.pending or report.missing or report.dropped:  # what failed has been said
            log.warning(
                "not everything was written: %d states were, %d not in time, %d failed, %d lost",
                report.flushed,
                report.pending,
                report.failed,
                report.missing + report.dropped,
            )
        return report

    def start(
        self,
        target: Target,
        drafter: DraftProvider | None,
        samplers: RowSampling,
        prompt: Prompt,
        empty: Rows,
    ) -> Start:
        """The states that a row starts from; `prompt` is told how many of its tokens they hold.

        With nothing kept these are the `empty` rows, and a drafter's state that holds nothing. If
        states are kept at all, the prompt is also told to pause at its boundary, for `keep`.
        """
        if self._cache is not None:
            prompt.pauses = True
            try:
                hit = self._cache.take(as_tokens(prompt.tokens), namespace_of(target, drafter))
                if hit is not None:
                    start = started(target, drafter, samplers, hit.stored, hit.checkpoints)
                    prompt.processed = prompt.cached = hit.count
                    return start
            except Exception as error:
                log.warning("a kept state is not used: %s", error)
        return Start(empty, None if drafter is None else drafter.open(samplers))

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


def open_tiers(
    target: Target,
    *,
    ram_bytes: int = RAM_BYTES,
    ssd: str | os.PathLike[str] | None = None,
    ssd_bytes: int = SSD_BYTES,
    demote_after_s: float | None = None,
    checkpoint_tokens: int | None = None,
) -> Tiers:
    """Tiers for a target and whatever is mounted on it or beside it.

    Args:
        ram_bytes: the RAM tier's cap; with 0 it keeps nothing.
        ssd: the folder of the durable tier; None is none.
        ssd_bytes: its cap.
        demote_after_s: when an unused entry leaves the memory for the folder; None: never.
        checkpoint_tokens: after how many tokens each a generation in flight is written down, so
            that it goes on after a kill; None: only when the engine is closed.

    Raises:
        BadInput: a cap that is too small, or files that are not those the target was loaded from.
    """
    if checkpoint_tokens is not None and checkpoint_tokens < 1:
        raise BadInput(f"checkpoint_tokens must be at least 1, got {checkpoint_tokens}")
    if ssd is None:
        return Tiers(PromptCache(ram_bytes))
    store = Store(ssd, target.store_identity, cap_bytes=ssd_bytes, codec=CODEC)
    tier = SSD(store)
    return Tiers(PromptCache(ram_bytes, tier), tier, demote_after_s, checkpoint_tokens)
