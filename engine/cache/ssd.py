"""The SSD tier as the RAM tier and the engine see it: states in, states out, no failure in between.

All of this runs on the thread of the forwards, but for the writing itself; see `writer.py`.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

from ..errors import BadInput
from .codecs import Decoder, encode
from .entry import Entry, Generation, RunStep, Tokens, at_once
from .header import generation_namespace
from .prompt_cache import Kept
from .store import Store

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SSD:
    """`Cold` over a store."""

    store: Store

    def promises(self, tokens: Tokens, namespace: str) -> int:
        found = self.store.find(tokens, namespace)
        return 0 if found is None else found.count

    def fetch(self, tokens: Tokens, namespace: str) -> Kept | None:
        found = self.store.find(tokens, namespace)
        return None if found is None else self._restored(found.entry)

    def spill(self, kept: Kept) -> None:
        self.write(kept)

    def write(self, kept: Kept, run_step: RunStep = at_once) -> bool:
        """Store a state for good, unless a stored one serves all its tokens."""
        if self.store.has_durable_prefix(kept.tokens, kept.namespace):
            return True
        return self._put(kept, kept.namespace, None, run_step)

    def suspend(self, kept: Kept, generation: Generation, run_step: RunStep = at_once) -> bool:
        """Store an unfinished generation; earlier checkpoints of it go."""
        return self._put(kept, generation_namespace(generation.key), generation, run_step)

    def unfinished(
        self, prompt: Tokens, key: str, namespace: str
    ) -> tuple[Kept, Generation] | None:
        """The state of that generation, if it was interrupted."""
        entry = self.store.find_generation_checkpoint(prompt, key, namespace)
        if entry is None or entry.generation is None:
            return None
        kept = self._restored(entry)
        return None if kept is None else (kept, entry.generation)

    def finished(self, key: str) -> None:
        """That generation has ended."""
        self.store.remove_generation_checkpoints(key)

    def _put(
        self, kept: Kept, namespace: str, generation: Generation | None, run_step: RunStep
    ) -> bool:
        try:
            entry, read = encode(kept.stored, namespace, kept.tokens, kept.checkpoints, generation)
        except BadInput as error:
            log.warning("a state of %d tokens cannot be stored: %s", len(kept.tokens), error)
            return False
        return self.store.put(entry, read, run_step)

    def _restored(self, entry: Entry) -> Kept | None:
        try:
            decoder = Decoder(entry)
            if not self.store.restore(entry, decoder.build):
                return None
            stored, checkpoints = decoder.finish()
            return Kept(entry.namespace, entry.tokens, stored, checkpoints)
        except BadInput as error:
            log.warning("a stored state is not used: %s", error)
            return None
