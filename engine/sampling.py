"""Drawing tokens: one sampler per row, two policies for where randomness comes from.

`positional`: every step of a request has its own key, made from (seed, step). A draw depends on
nothing else, so the stream is the same with and without speculation, alone or in a group.

`sequential`: mlx-lm's own order of draws on one chain of keys. The stream is the one
`mlx_lm.server` serves for the same seed; plain and speculative streams differ, as they do there.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

import mlx.core as mx
from mlx_lm.sample_utils import apply_min_p, apply_top_k, apply_top_p

from .errors import BadInput
from .values import Sampling

TOKEN_STREAM = 0
"""The stream of token draws. Target and drafter share it: at one step both see the same noise."""


def log_softmax(logits: mx.array) -> mx.array:
    """Log-probabilities over the last axis, in the arithmetic of mlx-lm's decode loops.

    Greedy choice is made on these and not on the logits: the subtraction can round two different
    logits to one value, and then the lower id wins.
    """
    return logits - mx.logsumexp(logits, axis=-1, keepdims=True)


def _mix(z: int) -> int:
    """splitmix64's finaliser (Steele, Lea, Flood 2014) on 64-bit integers."""
    mask = 2**64 - 1
    z = (z + 0x9E3779B97F4A7C15) & mask
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    return z ^ (z >> 31)


def step_key(seed: int, step: int, stream: int = TOKEN_STREAM) -> tuple[int, int]:
    """The two 32-bit words of the key for one step. Steps count from 0."""
    z = _mix((_mix(seed) + 2 * step + stream) & (2**64 - 1))
    return z >> 32, z & 0xFFFFFFFF


class Sampler(Protocol):
    """Draws for one row."""

    def draw(self, logprobs: mx.array, step: int) -> mx.array:
        """Ids [N] (uint32) for log-probabilities [N, V] at steps `step` .. `step + N - 1`."""
        ...


class Greedy:
    """The most probable id; the lowest of equals."""

    def draw(self, logprobs: mx.array, step: int) -> mx.array:
        return mx.argmax(logprobs, axis=-1)


class Positional:
    """Categorical draws with a key per step."""

    def __init__(self, sampling: Sampling) -> None:
        assert sampling.seed is not None, "resolve_seed comes first"
        self._sampling = sampling
        self._seed = sampling.seed

    def draw(self, logprobs: mx.array, step: int) -> mx.array:
        keys = mx.array(
            [step_key(self._seed, step + n) for n in range(logprobs.shape[0])], dtype=mx.uint32
        )
        draw_one = mx.vmap(lambda row, key: mx.random.categorical(row, key=key))
        return draw_one(scaled(logprobs, self._sampling), keys)


class Sequential:
    """Categorical draws with the keys that mlx-lm's samplers take from MLX's global state.

    After `mx.random.seed(seed)` each draw there splits the state and uses the second half. The same
    chain is kept here for one stream alone, so that streams do not disturb each other. The order
    of calls is part of the stream: one per draft step, then one for the whole window.
    """

    def __init__(self, sampling: Sampling) -> None:
        assert sampling.seed is not None, "resolve_seed comes first"
        self._sampling = sampling
        self._state = mx.random.key(sampling.seed)

    def draw(self, logprobs: mx.array, step: int) -> mx.array:
        self._state, key = mx.random.split(self._state)
        return mx.random.categorical(scaled(logprobs, self._sampling), key=key)


def scaled(logprobs: mx.array, sampling: Sampling) -> mx.array:
    """[N, V] after mlx-lm's filters, in `make_sampler`'s order, divided by the temperature."""
    if 0.0 < sampling.top_p < 1.0:
        logprobs = apply_top_p(logprobs, sampling.top_p)
    if sampling.min_p > 0.0:
        logprobs = apply_min_p(logprobs, sampling.min_p)
    if sampling.top_k > 0:
        logprobs = apply_top_k(logprobs, sampling.top_k)
    return logprobs * (1.0 / sampling.temperature)


def resolve_seed(sampling: Sampling) -> Sampling:
    """The same sampling with a seed: a drawn one if none was given and one is needed."""
    if sampling.greedy or sampling.seed is not None:
        return sampling
    return replace(sampling, seed=secrets.randbits(32))


def make_row_sampler(sampling: Sampling) -> Sampler:
    """The sampler for one request, whose seed is resolved."""
    if sampling.greedy:
        return Greedy()
    return Positional(sampling) if sampling.rng == "positional" else Sequential(sampling)


class RowSampling:
    """The samplers of a group's rows. Results stay on the device."""

    def __init__(self, samplers: Sequence[Sampler]) -> None:
        if len(samplers) > 1 and any(isinstance(s, Sequential) for s in samplers):
            raise BadInput("rng 'sequential' draws on one chain and serves 1 row, not a group")
        self._samplers = tuple(samplers)
        self._all_greedy = all(isinstance(s, Greedy) for s in samplers)

    def sample(self, logprobs: mx.array, steps: Sequence[int]) -> mx.array:
        """Ids [B, N] (uint32) for log-probabilities [B, N, V]; row r starts at `steps[r]`."""
        if self._all_greedy:
            return mx.argmax(logprobs, axis=-1)
        rows = [s.draw(logprobs[r], steps[r]) for r, s in enumerate(self._samplers)]
        return rows[0][None] if len(rows) == 1 else mx.stack(rows)
