"""Which random bits decide a sampled token: filters, key policies, and how mlx spends a key.

Tried on mlx 0.32.4: ``mx.random.categorical`` turns a key into a token in two ways. A vector [V]
and a window of R > 1 rows take the argmax of logits + Gumbel noise of that whole shape, so a row's
noise depends on R. One row [1, V] draws a single uniform number and inverts the cumulative
distribution. ``single_row_draw`` asks the installed mlx which of the two it does, because a release
that adds Gumbel noise to one row as well is just as right.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib.metadata import version
from typing import Literal, NamedTuple

import mlx.core as mx
import numpy as np
from mlx_lm.sample_utils import apply_min_p, apply_top_k, apply_top_p
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Stream = Literal[0, 1]
TOKEN_DRAW: Stream = 0
XTC_COIN: Stream = 1

_WORD = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class Filters:
    """What happens to log-probabilities before the draw; 0 (and top_p 1) means off.

    XTC does something where its coin, uniform in [0, 1), is at most ``xtc_probability``.
    """

    temperature: float
    top_p: float = 0.0
    top_k: int = 0
    min_p: float = 0.0
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1
    xtc_special_tokens: tuple[int, ...] = ()
    """Ids that XTC never excludes. A server chooses them: ``Loaded.xtc_special_tokens``."""

    def __post_init__(self) -> None:
        if not self.temperature >= 0:
            raise ValueError(f"temperature must be at least 0, got {self.temperature}")
        if not 0 <= self.top_p <= 1:
            raise ValueError(f"top_p must be within 0..1, got {self.top_p}")
        if self.top_k < 0:
            raise ValueError(f"top_k must be at least 0, got {self.top_k}")
        if not 0 <= self.min_p <= 1:
            raise ValueError(f"min_p must be within 0..1, got {self.min_p}")
        if not 0 <= self.xtc_probability <= 1:
            raise ValueError(f"xtc_probability must be within 0..1, got {self.xtc_probability}")
        if not 0 <= self.xtc_threshold <= 0.5:
            raise ValueError(f"xtc_threshold must be within 0..0.5, got {self.xtc_threshold}")
        if min(self.xtc_special_tokens, default=0) < 0:
            raise ValueError(
                f"xtc_special_tokens must be at least 0, got {self.xtc_special_tokens}"
            )

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    @property
    def xtc(self) -> bool:
        """Whether every call of the sampler tosses XTC's coin."""
        return not self.greedy and self.xtc_probability > 0

    def stages(self, logprobs: mx.array, coin: mx.array | None = None) -> tuple[mx.array, ...]:
        """Log-probabilities [..., V] as given, then after each filter in make_sampler's order.

        ``coin`` is for XTC alone: one number [], as a sampler call tosses it, or [..., 1].
        """
        stages = [logprobs]
        if 0 < self.top_p < 1:
            stages.append(apply_top_p(stages[-1], self.top_p))
        if self.min_p > 0:
            stages.append(apply_min_p(stages[-1], self.min_p))
        if self.xtc:
            excluded = exclude_top_choices(stages[-1], self.xtc_threshold, self.xtc_special_tokens)
            stages.append(mx.where(self.excludes(coin), excluded, stages[-1]))
        if self.top_k > 0:
            stages.append(apply_top_k(stages[-1], self.top_k))
        return tuple(stages)

    def excludes(self, coin: mx.array | None) -> mx.array:
        """Whether XTC acts, for each coin."""
        if coin is None:
            raise ValueError(f"XTC with probability {self.xtc_probability:g} needs a coin")
        return coin <= self.xtc_probability

    def scaled(self, logprobs: mx.array, coin: mx.array | None = None) -> mx.array:
        """What ``categorical`` is given: the filtered log-probabilities times 1/temperature."""
        return self.stages(logprobs, coin)[-1] * (1.0 / self.temperature)


GREEDY = Filters(0.0)


def exclude_top_choices(
    logprobs: mx.array, threshold: float, special_tokens: Sequence[int] = ()
) -> mx.array:
    """Of the candidates more probable than ``threshold`` only the least probable ones stay.

    Probabilities are those of what earlier filters left [..., V]. ``special_tokens`` stay too, but
    count as candidates. Source: apply_xtc in mlx-lm's sample_utils.py.
    """
    probabilities = mx.softmax(logprobs, axis=-1)
    candidates = mx.where(probabilities > threshold, probabilities, mx.inf)
    stays = probabilities <= candidates.min(axis=-1, keepdims=True)
    if special_tokens:
        ids = mx.arange(logprobs.shape[-1])
        stays = stays | mx.any(ids[:, None] == mx.array(list(special_tokens)), axis=-1)
    return mx.where(stays, logprobs, -mx.inf)


class Bits(NamedTuple):
    """What one call of a sampler sees: the key of its draw and, if it tosses one, XTC's coin []."""

    key: mx.array
    coin: mx.array | None = None


@dataclass(frozen=True, slots=True)
class Positional:
    """One key per position: the i-th generated token is drawn with step ``first_step + i``.

    A terminal EOS has a step too. Target and draft share the token stream, so an equal prediction
    draws an equal token.
    """

    seed: int
    first_step: int = 0

    def words(self, step: int, stream: Stream = TOKEN_DRAW) -> tuple[int, int]:
        """The key as its two 32-bit words, high first; ``step`` counts from ``first_step``."""
        mixed = _splitmix64(_splitmix64(self.seed) + 2 * (self.first_step + step) + stream)
        return mixed >> 32, mixed & 0xFFFFFFFF

    def key(self, step: int, stream: Stream = TOKEN_DRAW) -> mx.array:
        return mx.array(self.words(step, stream), dtype=mx.uint32)

    def bits(self, step: int, filters: Filters) -> Bits:
        """The draw and the coin of one step have streams of their own."""
        coin = mx.random.uniform(key=self.key(step, XTC_COIN)) if filters.xtc else None
        return Bits(self.key(step), coin)


@dataclass(frozen=True, slots=True)
class Sequential:
    """mlx-lm's own order: ``mx.random.seed(seed)``, then every draw splits the global key once."""

    seed: int

    def keys(self) -> Iterator[mx.array]:
        state = mx.random.key(self.seed)
        while True:
            halves = mx.random.split(state)
            state = halves[0]
            yield halves[1]

    def bits(self, filters: Filters) -> Iterator[Bits]:
        """Call by call, whatever its number of rows: first XTC's coin, then the draw."""
        keys = self.keys()
        while True:
            coin = mx.random.uniform(key=next(keys)) if filters.xtc else None
            yield Bits(next(keys), coin)


Policy = Positional | Sequential


def _splitmix64(value: int) -> int:
    """splitmix64's step and finaliser (Steele, Lea, Flood 2014)."""
    z = (value + 0x9E3779B97F4A7C15) & _WORD
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _WORD
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _WORD
    return z ^ (z >> 31)


@lru_cache(maxsize=1)
def single_row_draw() -> Literal["gumbel", "cdf"]:
    """How the installed mlx draws from one row [1, V].

    Raises ``RuntimeError`` when it does neither of the two, since no margin would mean anything.
    """
    logits = mx.sin(mx.arange(64, dtype=mx.float32) * 7.0)[None]
    keys = [mx.random.key(seed) for seed in range(32)]
    drawn = [int(as_floats(mx.random.categorical(logits, key=key))[0]) for key in keys]
    if drawn == [int(np.argmax(gumbel_scores(logits, key)[0])) for key in keys]:
        return "gumbel"
    if drawn == [_cdf_token(logits[0], key) for key in keys]:
        return "cdf"
    release = version("mlx")
    raise RuntimeError(f"mlx {release} draws a token from one row in an unknown way")


def draw_margins(scaled: mx.array, key: mx.array, tokens: Sequence[int]) -> list[float]:
    """How far each row of one ``categorical`` call is from drawing another token than ``tokens``.

    ``scaled`` is [V] or [R, V]; ``tokens`` holds one id per leading row and may stop before R. A
    margin m means: no change of every entry of ``scaled`` by less than m/2 draws another token, and
    some change by m/2 does. Negative: the row draws another token already.
    """
    if scaled.ndim == 2 and scaled.shape[0] == 1 and single_row_draw() == "cdf":
        return [_cdf_margin(scaled[0], key, token) for token in tokens]
    scores = gumbel_scores(scaled, key).reshape(-1, scaled.shape[-1])
    return [_gap(row, token) for row, token in zip(scores, tokens, strict=False)]


def gumbel_scores(scaled: mx.array, key: mx.array) -> Floats:
    """The numbers whose argmax is the drawn token."""
    return as_floats(scaled + mx.random.gumbel(scaled.shape, key=key))


def as_floats(values: mx.array) -> Floats:
    return np.array(values.astype(mx.float32)).astype(np.float64)


def _gap(scores: Floats, token: int) -> float:
    return float(scores[token] - np.delete(scores, token).max())


def _cdf(scaled: mx.array, key: mx.array) -> tuple[Floats, float]:
    """The unnormalised cumulative distribution, in mlx's own float32, and what is looked up."""
    mass = mx.cumsum(mx.exp(scaled - mx.max(scaled)))
    target = mx.random.uniform(shape=(1,), key=key) * mass[-1]
    return as_floats(mass), float(as_floats(target)[0])


def _cdf_token(scaled: mx.array, key: mx.array) -> int:
    mass, target = _cdf(scaled, key)
    return int(np.searchsorted(mass, target))


def _cdf_margin(scaled: mx.array, key: mx.array, token: int) -> float:
    """Log-odds distance of the uniform draw from the nearer edge of the token's interval.

    Raising every log-probability left of an edge by δ and lowering every other one by δ moves the
    edge's log-odds by 2δ, and nothing of size δ moves it further.
    """
    mass, target = _cdf(scaled, key)
    total = mass[-1]
    tiny = total * 2.0**-33  # below one step of the 32-bit draw
    low = mass[token - 1] if token > 0 else 0.0
    parts = np.array([low, min(max(target, tiny), total - tiny), mass[token]])
    edge_low, drawn, edge_high = log_odds(parts, total)
    return float(min(drawn - edge_low, edge_high - drawn))


def log_odds(part: Floats, total: Floats | float) -> Floats:
    """log(part / (total - part)): -inf for nothing, inf for all of it."""
    with np.errstate(divide="ignore"):
        return np.asarray(np.log(part) - np.log(np.maximum(total - part, 0.0)))
