"""What the same tokens are in another namespace, and how a state comes to hold them there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from engine import BadInput
from engine.state.checkpoint import restore
from engine.state.forms import Held
from engine.state.layouts import Cache
from engine.state.quantize import KVQuantization, require_quantizable
from engine.state.rows import Rows

from .history import Chunk, History
from .worlds import BITS, GROUP_SIZE, VOCAB, WINDOW, World, kinds

START = WINDOW
"""How many tokens are stored plainly before all are packed, where that is an option."""


@dataclass(frozen=True, slots=True)
class Namespace:
    """What may differ from request to request.

    `shift` is added to every id before the model sees it: an adapter, as far as states go. With
    `start`, keys and values are packed once there are so many.
    """

    name: str
    shift: int = 0
    start: int | None = None

    @property
    def packing(self) -> KVQuantization | None:
        return None if self.start is None else KVQuantization(BITS, GROUP_SIZE, self.start)

    def due(self, count: int) -> bool:
        """Whether a state of so many tokens is packed."""
        return self.start is not None and count >= self.start

    def ids(self, tokens: Sequence[int]) -> Chunk:
        """What the model is given."""
        return tuple((token + self.shift) % VOCAB for token in tokens)

    def seen(self, history: History) -> History:
        """The same for what a state holds."""
        return replace(history, chunks=tuple(map(self.ids, history.chunks)))

    def append(self, history: History, tokens: Sequence[int]) -> History:
        """What a state holds after one more forward."""
        longer = history.append(tokens)
        return longer.quantize() if self.due(len(longer)) else longer

    def first(self, history: History, n: int) -> History:
        """What a state would hold that had only been given the first `n` tokens."""
        cut = history.first(n)
        return cut if self.due(n) else History(cut.chunks)

    def rows(self, world: World, held: Sequence[Held] = (), count: int = 0) -> Rows:
        """A row that holds nothing, or what was stored of one after `count` tokens."""
        caches, packing = world.fresh(), self.packing
        if held:
            if packing is not None and self.due(count):
                packing.converted(caches)
            restore(caches, held, count)
        return Rows(world.model, caches, (count,), replayer=world.replayer, quantization=packing)

    def convert(self, caches: list[Cache], count: int) -> None:
        """Pack mlx-lm's caches of `count` tokens, if that is due."""
        if self.packing is not None:
            self.packing.convert(caches, (count,))


def namespaces_of(world: World) -> tuple[Namespace, ...]:
    """Two, and a third that packs where mlx-lm packs the model's caches."""
    two, packed = (Namespace(""), Namespace("adapter", shift=1)), Namespace("kv8", start=START)
    caches = world.fresh()
    assert packed.packing is not None
    try:
        require_quantizable(world.model, world.fresh(), packed.packing)
        packed.packing.converted(caches)
    except BadInput:
        return two
    return two if kinds(caches) == kinds(world.fresh()) else (*two, packed)
