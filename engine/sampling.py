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
from .processors import Processors
from .values import Sampling

TOKEN_STREAM = 0
"""The stream of token draws. Target and drafter share it: at one step both see the same noise."""

XTC_STREAM = 1
"""The stream of XTC's coins."""


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
    """Draws for one row. `chain` is what earlier draws leave to later ones: a key, or nothing."""

    chain: mx.array | None

    def draw(self, logprobs: mx.array, step: int) -> mx.array:
        """Ids [N] (uint32) for log-probabilities [N, V] at steps `step` .. `step + N - 1`."""
        ...


class Greedy:
    """The most probable id; the lowest of equals."""

    chain: mx.array | None = None

    def draw(self, logprobs: mx.array, step: int) -> mx.array:
        return mx.argmax(logprobs, axis=-1)


class Positional:
    """Categorical draws, and XTC's coins, with a key per step. XTC never drops `exempt` ids."""

    chain: mx.array | None = None

    def __init__(self, sampling: Sampling, exempt: Sequence[int] = ()) -> None:
        assert sampling.seed is not None, "resolve_seed comes first"
        self._sampling = sampling
        self._seed = sampling.seed
        self._exempt = exempt

    def draw(self, logprobs: mx.array, step: int) -> mx.array:
        steps = range(step, step + logprobs.shape[0])
        coins = None
        if self._sampling.xtc_probability > 0.0:
            toss = mx.vmap(lambda key: mx.random.uniform(key=key))
            coins = toss(self._keys(steps, XTC_STREAM))[:, None]
        draw_one = mx.vmap(lambda row, key: mx.random.categorical(row, key=key))
        logits = scaled(logprobs, self._sampling, coins, self._exempt)
        return draw_one(logits, self._keys(steps, TOKEN_STREAM))

    def _keys(self, steps: Sequence[int], stream: int) -> mx.array:
        return mx.array([step_key(self._seed, step, stream) for step in steps], dtype=mx.uint32)


class Sequential:
    """Categorical draws with the keys that mlx-lm's samplers take from MLX's global state.

    After `mx.random.seed(seed)` each draw there splits the state and uses the second half. The same
    chain is kept here for one stream alone, so that streams do not disturb each other. The order
    of calls is part of the stream: one per draft step, then one for the whole window, or one per
    position if the request has logits processors. A call tosses XTC's coin first, one for all.
    """

    def __init__(self, sampling: Sampling, exempt: Sequence[int] = ()) -> None:
        assert sampling.seed is not None, "resolve_seed comes first"
        self._sampling = sampling
        self._exempt = exempt
        self.chain: mx.array | None = mx.random.key(sampling.seed)

    def draw(self, logprobs: mx.array, step: int) -> mx.array:
        if not self._sampling.logits.active:
            return self._call(logprobs)
        return mx.concatenate([self._call(row[None]) for row in logprobs])

    def _call(self, logprobs: mx.array) -> mx.array:
        coin = None
        if self._sampling.xtc_probability > 0.0:
            coin = mx.random.uniform(key=self._next_key())
        logits = scaled(logprobs, self._sampling, coin, self._exempt)
        return mx.random.categorical(logits, key=self._next_key())

    def _next_key(self) -> mx.array:
        assert self.chain is not None
        self.chain, key = mx.random.split(self.chain)
        return key


def scaled(
    logprobs: mx.array,
    sampling: Sampling,
    coins: mx.array | None = None,
    exempt: Sequence[int] = (),
) -> mx.array:
    """[N, V] after mlx-lm's filters, in `make_sampler`'s order, divided by the temperature.

    Args:
        coins: XTC's, [N, 1] or one for all; None leaves XTC out.
        exempt: ids that XTC never drops.
    """
    if 0.0 < sampling.top_p < 1.0:
        logprobs = apply_top_p(logprobs, sampling.top_p)
    if sampling.min_p > 0.0:
        logprobs = apply_min_p(logprobs, sampling.min_p)
    if coins is not None:
        kept = without_top_choices(logprobs, sampling.xtc_threshold, exempt)
        logprobs = mx.where(coins > sampling.xtc_probability, logprobs, kept)
    # A draft model may have fewer ids than the target, whose vocabulary was checked.
    if 0 < sampling.top_k < logprobs.shape[-1]:
        logprobs = apply_top_k(logprobs, sampling.top_k)
    return logprobs * (1.0 / sampling.temperature)


def without_top_choices(logprobs: mx.array, threshold: float, exempt: Sequence[int]) -> mx.array:
    """[N, V] with every id dropped that is more probable than the least one above `threshold`.

    Source: "exclude top choices" (p-e-w 2024), in the arithmetic of mlx-lm's `apply_xtc`, whose
    coin comes from the global key and cannot be handed in.
    """
    p = mx.softmax(logprobs, axis=-1)
    least = mx.where(p > threshold, p, mx.inf).min(axis=-1, keepdims=True)
    dropped = p > least
    if exempt:
        # Compared and not indexed: a draft model may have fewer ids than the target.
        dropped &= mx.all(mx.arange(p.shape[-1]) != mx.array(list(exempt))[:, None], axis=0)
    return mx.where(dropped, -mx.inf, logprobs)


def resolve_seed(sampling: Sampling) -> Sampling:
    """The same sampling with a seed: a drawn one if none was given and one is needed."""
    if sampling.greedy or sampling.seed is not None:
        return sampling
    return replace(sampling, seed=secrets.randbits(32))


def make_row_sampler(sampling: Sampling, exempt: Sequence[int] = ()) -> Sampler:
    """The sampler for one request, whose seed is resolved; `exempt` are ids XTC never drops."""
    if sampling.greedy:
        return Greedy()
    kind = Positional if sampling.rng == "positional" else Sequential
    return kind(sampling, exempt)


class RowSampling:
    """The samplers and logits processors of a group's rows. Results stay on the device."""

    def __init__(
        self, samplers: Sequence[Sampler], processors: Sequence[Processors | None] = ()
    ) -> None:
        if len(samplers) > 1 and any(isinstance(s, Sequential) for s in samplers):
            raise BadInput("rng 'sequential' draws on one chain and serves 1 row, not a group")
        self._samplers = tuple(samplers)
        self._processors = tuple(processors) or (None,) * len(self._samplers)
        self.reaches = tuple(0 if p is None else p.reach for p in self._processors)
        self._all_greedy = all(isinstance(s, Greedy) for s in samplers)

    @property
    def chains(self) -> tuple[mx.array | None, ...]:
        """Where each row's chain of keys stands."""
        return tuple(sampler.chain for sampler in self._samplers)

    @chains.setter
    def chains(self, chains: Sequence[mx.array | None]) -> None:
        """Go back to what `chains` was, or on from where another process stopped."""
        for sampler, chain in zip(self._samplers, chains, strict=True):
            sampler.chain = chain

    def selected(self, keep: Sequence[int]) -> RowSampling:
        """That of the rows `keep`, in that order."""
        return RowSampling([self._samplers[r] for r in keep], [self._processors[r] for r in keep])

    def joined(self, other: RowSampling) -> RowSampling:
        """That of these rows and of the other's behind them."""
        return RowSampling(self._samplers + other._samplers, self._processors + other._processors)

    def choose(
        self,
        logits: mx.array,
        known: Sequence[Sequence[int]],
        window: mx.array,
        steps: Sequence[int],
    ) -> tuple[mx.array, mx.array]:
        """The target's ids [B, N] (uint32) and processed log-probabilities [B, N, V].

        Args:
            logits: raw, [B, N, V].
            known: per row, ids in front of the window, at least the last `reaches[r]` of them.
            window: the ids [B, N] that the logits stand behind.
            steps: per row, the step of its first position.
        """
        if any(self._processors):
            rows = [
                logits[r] if own is None else own.apply(logits[r], known[r], window[r])
                for r, own in enumerate(self._processors)
            ]
            logits = mx.stack(rows)
        logprobs = log_softmax(logits)
        return self.sample(logprobs, steps), logprobs

    def sample(self, logprobs: mx.array, steps: Sequence[int]) -> mx.array:
        """Ids [B, N] (uint32) for log-probabilities [B, N, V]; row r starts at `steps[r]`.

        Drafters call this on their own logits, which no processor sees.
        """
        if self._all_greedy:
            return mx.argmax(logprobs, axis=-1)
        rows = [s.draw(logprobs[r], steps[r]) for r, s in enumerate(self._samplers)]
        return rows[0][None] if len(rows) == 1 else mx.stack(rows)
