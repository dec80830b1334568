"""Quantized keys and values, from a given position on, as mlx-lm's `generate_step` does it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import mlx.core as mx
from mlx_lm.generate import maybe_quantize_kv_cache

from ..errors import BadInput
from .columns import Columns, quantized
from .layouts import RING, Cache, layout_of

BITS = (2, 3, 4, 5, 6, 8)
GROUP_SIZES = (32, 64, 128)


@dataclass(frozen=True, slots=True)
class KVQuantization:
    """How keys and values are stored; the defaults are mlx-lm's.

    A cache is converted after the forward with which it reaches `start` tokens. What is attended
    to by then was seen unquantized, so the prefill chunk is part of the definition.
    """

    bits: int
    group_size: int = 64
    start: int = 5000

    def __post_init__(self) -> None:
        if self.bits not in BITS:
            raise BadInput(f"kv_bits must be one of {_words(BITS)}, got {self.bits}")
        if self.group_size not in GROUP_SIZES:
            raise BadInput(
                f"kv_group_size must be one of {_words(GROUP_SIZES)}, got {self.group_size}"
            )
        if self.start < 0:
            raise BadInput(f"quantized_kv_start must be at least 0, got {self.start}")

    def due(self, processed: int) -> bool:
        """Whether a row of that many tokens is stored in few bits, which one without any is not."""
        return processed >= max(1, self.start)

    def converted(self, caches: list[Cache]) -> None:
        """Replace a row's empty native caches by those that it has once it is due."""
        maybe_quantize_kv_cache(caches, 0, self.group_size, self.bits)

    def convert(self, caches: list[Cache], processed: Sequence[int]) -> None:
        """Replace the list's entries that have reached `start`.

        Rows of one cache are converted together, when all of them are due.
        """
        if not any(isinstance(cache, Columns) for cache in caches):
            maybe_quantize_kv_cache(caches, self.start, self.group_size, self.bits)
        elif all(map(self.due, processed)):
            for number, cache in enumerate(caches):
                if type(cache) is Columns:
                    caches[number] = quantized(cache, self.group_size, self.bits)

    def longest_windows(
        self, caches: Sequence[Cache], processed: Sequence[int]
    ) -> tuple[int | None, ...]:
        """Per row, how many tokens may be verified at once and each see what it would see alone.

        None: any number, since nothing is left to convert.
        """
        if any(type(cache) is Columns or hasattr(cache, "to_quantized") for cache in caches):
            return tuple(max(1, self.start - count) for count in processed)
        return (None,) * len(processed)


def require_quantizable(
    model: Callable[..., mx.array], caches: list[Cache], quantization: KVQuantization
) -> None:
    """Try two tokens on the model's own empty caches.

    Raises:
        BadInput: mlx-lm cannot quantize a cache of this model, or not with this group size.
    """
    if any(layout_of(cache) is RING for cache in caches):
        raise BadInput("kv_bits cannot serve this model: mlx-lm does not quantize ring caches")
    now = KVQuantization(quantization.bits, quantization.group_size, start=0)
    try:
        for token in (1, 2):
            mx.eval(model(mx.array([[token]]), cache=caches))
            now.convert(caches, (now.start,))
    except Exception as error:
        # Raised by whichever layer meets the quantized cache first.
        said = " ".join(str(error).split())
        raise BadInput(f"kv_bits cannot serve this model: {said}") from error


def _words(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))
