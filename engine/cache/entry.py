"""What the tiers keep: one prefix of tokens and the state of a model behind it. No mlx here."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from ..errors import BadInput

T = TypeVar("T")

Tokens: TypeAlias = npt.NDArray[np.int32]
"""Token ids [N], read-only."""

Buffer: TypeAlias = "memoryview | npt.NDArray[np.uint8]"
"""A tensor's bytes, C-contiguous and little-endian."""

ITEM_BYTES: Mapping[str, int] = {
    "BOOL": 1,
    "U8": 1,
    "I8": 1,
    "U16": 2,
    "I16": 2,
    "F16": 2,
    "BF16": 2,
    "U32": 4,
    "I32": 4,
    "F32": 4,
    "U64": 8,
    "I64": 8,
    "F64": 8,
    "C64": 8,
}
"""The safetensors dtype names that mlx arrays have, and the bytes of an element."""


@dataclass(frozen=True, slots=True)
class Identity:
    """What a store's entries were computed by; see `identity.py`.

    `model` is for people to read; the others are hex digests.
    """

    model: str
    fingerprint: str
    tokenizer: str


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A tensor by name; `dtype` is one of `ITEM_BYTES`."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class Reuse:
    """Which prefixes an entry of N tokens can serve.

    All N; and, if `trimmable`, any shorter one of at least `minimum` tokens.
    """

    trimmable: bool
    minimum: int = 1

    def serves(self, count: int, of: int) -> bool:
        """Whether the first `count` tokens of an entry of `of` tokens can be handed out."""
        return 0 < count <= of and count >= self.minimum and (count == of or self.trimmable)


@dataclass(frozen=True, slots=True)
class AttachmentHeader:
    """A drafter's state at exactly the entry's last token; its tensors are named in the entry."""

    schema: str
    metadata: Mapping[str, str | int | bool]
    tensors: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Generation:
    """An unfinished generation. The entry's tokens are what its state holds.

    `key` stands for all that decides the text; `namespace` is the one its prompt is cached under;
    `generated` are the tokens emitted so far; `pending` is the one that the state does not hold;
    `rng` is the state of a sequential sampler's generator, if there is one; `journal` is what the
    engine writes down of its rounds, and reads alone.
    """

    key: str
    namespace: str
    prompt_tokens: int
    generated: tuple[int, ...]
    pending: int
    seed: int
    seed_was_explicit: bool
    rng: tuple[int, ...] | None = None
    journal: str = ""


@dataclass(frozen=True, slots=True)
class Entry:
    """A prefix and, by name, the tensors of its state.

    `codec` says who wrote it and `layout` how the tensors make up its caches: one line for each,
    which only that codec reads. `foreign` is the metadata under which mlx-lm finds the same caches.
    """

    namespace: str
    tokens: Tokens
    codec: str
    layout: tuple[str, ...]
    reuse: Reuse
    tensors: tuple[TensorSpec, ...]
    attachments: tuple[AttachmentHeader, ...] = ()
    generation: Generation | None = None
    foreign: Mapping[str, str] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors)


Read: TypeAlias = Callable[[TensorSpec], Buffer]
"""Gives a tensor's bytes. It is called once for each, in order, and only inside a write step."""

Room: TypeAlias = Callable[[Sequence[TensorSpec]], Sequence[memoryview | None]]
"""Gives memory for an entry's tensors, as many bytes as each has; None: it is not wanted.

The memory is good for as long as it or the `Room` is there.
"""


def no_room(tensors: Sequence[TensorSpec]) -> list[None]:
    """A `Room` for whoever wants none of them."""
    return [None] * len(tensors)


Step: TypeAlias = Callable[[], None]

RunStep: TypeAlias = Callable[[Step], None]
"""Owns a write step: runs it, exclusively of any forward, or raises to reject it."""


class CalledOff(Exception):
    """What a `RunStep` raises where nobody wants any more what is being written: no failure."""


def at_once(step: Step) -> None:
    """A `RunStep` for owners without forwards."""
    step()


def in_step(run_step: RunStep, make: Callable[[], T]) -> T:
    """What `make` returns in a write step.

    Raises:
        BadInput: `run_step` returned, and has not run its step once.
        Exception: whatever `make` or `run_step` raised.
    """
    made: list[T] = []
    run_step(lambda: made.append(make()))
    if len(made) != 1:
        raise BadInput(f"run_step ran a step {len(made)} times, not once")
    return made[0]
