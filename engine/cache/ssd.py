"""The SSD tier as the RAM tier and the engine see it: states in, states out, no failure in between.

All of this is for the thread of the forwards. What is written behind its back is written in steps
on that thread; see `writer.py`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

from .codecs import Decoder, encode
from .durability import Durability, FlushReport
from .entry import CalledOff, Entry, Generation, RunStep, Step, Tokens, at_once, in_step
from .header import generation_namespace
from .prompt_cache import Kept, served_by
from .spill import SpillQueue
from .store import Store
from .writer import Writer

log = logging.getLogger(__name__)

SPILL_BYTES = 1 << 30
"""How much of what was evicted may wait for the disk."""

FLUSH_S = 30.0
"""How long the end of the process may wait for the disk."""


@dataclass(slots=True, eq=False)
class _Item:
    """What waits to be written: a prefix, or the state of a generation while it is `going`."""

    kept: Kept
    generation: Generation | None = None
    going: Callable[[], bool] = lambda: True
    called_off: bool = False

    @property
    def key(self) -> str | None:
        """The generation's."""
        return None if self.generation is None else self.generation.key


class SSD:
    """`ColderTier` over a store, and what is to become durable in it.

    Until `start`, everything is written in the caller's thread.
    """

    def __init__(self, store: Store) -> None:
        self.store = store
        self._spill_queue: SpillQueue[_Item] = SpillQueue(
            SPILL_BYTES, self._write_item, self._is_stored
        )
        self._durability = Durability(
            store.would_find,
            self._write_dirty,
            run_step=self._run_step,
            spill=self._spill_queue,
        )
        self._writer: Writer | None = None
        self._source: Callable[[Tokens, str], Kept | None] = lambda tokens, namespace: None

    def serve_from(self, source: Callable[[Tokens, str], Kept | None]) -> None:
        """Read scheduled prefixes there: `source` gives a state that serves all of the tokens."""
        self._source = source

    def promises(self, tokens: Tokens, namespace: str) -> int:
        waiting, _ = self._waiting(tokens, namespace)
        found = self.store.find(tokens, namespace)
        return max(waiting, 0 if found is None else found.count)

    def fetch(self, tokens: Tokens, namespace: str) -> Kept | None:
        waiting, kept = self._waiting(tokens, namespace)
        tried: Entry | None = None
        # What is found and of no use is removed, and the next one found; what cannot be read stays.
        while (found := self.store.find(tokens, namespace)) is not None:
            if found.count <= waiting or found.entry is tried:
                break
            tried = found.entry
            if (restored := self._restore(tried)) is not None:
                return restored
        return kept

    def _waiting(self, tokens: Tokens, namespace: str) -> tuple[int, Kept | None]:
        """Of the states that are not written yet, the one that serves most of the tokens.

        To be asked before the store: a state goes from here to there.
        """
        best: tuple[int, Kept | None] = (0, None)
        for item in self._spill_queue.items:
            if item.generation is None:
                count = served_by(item.kept, tokens, namespace)
                if count > best[0]:
                    best = (count, item.kept)
        return best

    def spill(self, kept: Kept) -> bool:
        """Queue a state, or before `start` write it at once: False if that failed."""
        return self._offer(_Item(kept))

    def schedule(self, tokens: Tokens, namespace: str) -> None:
        """Have a state of those tokens made durable, once there is time."""
        self._durability.schedule(tokens, namespace)
        if self._writer is not None:
            self._writer.tell()

    def suspend(self, kept: Kept, generation: Generation) -> bool:
        """Store an unfinished generation; earlier checkpoints of it go."""
        self._call_off(generation.key)
        return self._put(kept, generation_namespace(generation.key), generation, at_once)

    def checkpoint(self, kept: Kept, generation: Generation, going: Callable[[], bool]) -> bool:
        """The same, when there is time, and only if the generation is still `going` then.

        Of those that wait for their time the latest one is enough.
        """
        self._spill_queue.withdraw(lambda item: item.key == generation.key)
        return self._offer(_Item(kept, generation, going))

    def unfinished(
        self, prompt: Tokens, key: str, namespace: str
    ) -> tuple[Kept, Generation] | None:
        """The state of that generation, if it was interrupted."""
        entry = self.store.find_generation_checkpoint(prompt, key, namespace)
        if entry is None or entry.generation is None:
            return None
        kept = self._restore(entry)
        return None if kept is None else (kept, entry.generation)

    def finished(self, key: str) -> None:
        """Remove what is stored of that generation: it has ended."""
        self._call_off(key)
        self.store.remove_generation_checkpoints(key)

    def start(self, wake: Callable[[], None]) -> Writer:
        """Write in a thread from now on, whose steps the caller's thread is to serve."""
        self._writer = Writer(self._spill_queue, self._durability, wake)
        self._writer.start()  # once its steps find their way
        return self._writer

    def flush(self, timeout_s: float | None = FLUSH_S) -> FlushReport:
        """Make everything durable, and end the writing thread if there is one."""
        report = None if self._writer is None else self._writer.close(timeout_s)
        self._writer = None
        return report or self._durability.flush(timeout_s)

    def _offer(self, item: _Item) -> bool:
        """Taken, if not written yet; False if it was to be written at once and could not be."""
        failed = self._spill_queue.counts.failed
        self._spill_queue.offer(item, item.kept.nbytes)
        if self._writer is None:
            self._spill_queue.run_one(at_once)
            return self._spill_queue.counts.failed == failed
        self._writer.tell()
        return True

    def _call_off(self, key: str) -> None:
        """No checkpoint that waits or is being written is to take the place of what is next."""
        for item in self._spill_queue.withdraw(lambda item: item.key == key):
            item.called_off = True

    def _is_stored(self, item: _Item) -> bool:
        kept = item.kept
        return item.key is None and self.store.has_durable_prefix(kept.tokens, kept.namespace)

    def _write_item(self, item: _Item, run_step: RunStep, /) -> bool | None:
        generation = item.generation
        if generation is None:
            return self._write(item.kept, run_step)

        def wanted() -> bool:
            return item.going() and not item.called_off

        def run_wanted(step: Step) -> None:
            # On the thread that ends generations: what is wanted now is until the step is over.
            def checked() -> None:
                if not wanted():
                    raise CalledOff
                step()

            run_step(checked)

        namespace = generation_namespace(generation.key)
        written = self._put(item.kept, namespace, generation, run_wanted)
        return written or (False if wanted() else None)

    def _run_step(self, step: Step) -> None:
        if self._writer is None:
            step()
        else:
            self._writer.run_step(step)

    def _write_dirty(self, tokens: Tokens, namespace: str, run_step: RunStep, /) -> bool | None:
        kept = in_step(run_step, lambda: self._source(tokens, namespace))
        return None if kept is None else self._write(kept, run_step)

    def _write(self, kept: Kept, run_step: RunStep, /) -> bool:
        """Store a state for good, unless a stored one serves all its tokens."""
        if self.store.would_find(kept.tokens, kept.namespace):
            return True
        return self._put(kept, kept.namespace, None, run_step)

    def _put(
        self, kept: Kept, namespace: str, generation: Generation | None, run_step: RunStep
    ) -> bool:
        stored, tokens, drafts = kept.stored, kept.tokens, kept.checkpoints
        try:
            entry, read = in_step(
                run_step, lambda: encode(stored, namespace, tokens, drafts, generation)
            )
        except CalledOff:
            return False
        except Exception as error:
            log.warning("a state of %d tokens cannot be stored: %s", len(kept.tokens), error)
            return False
        return self.store.put(entry, read, run_step)

    def _restore(self, entry: Entry) -> Kept | None:
        try:
            decoder = Decoder(entry)
            if not self.store.restore(entry, decoder.room):
                return None
            stored, checkpoints = decoder.finish()
            return Kept(entry.namespace, entry.tokens, stored, checkpoints)
        except (OSError, MemoryError):
            raise
        except Exception as error:
            self.store.reject(entry, error)
            return None
