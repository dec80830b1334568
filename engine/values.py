"""Frozen values that enter and leave the loop, checked when they are built."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from .errors import BadInput

FinishReason = Literal["stop", "length"]
Rng = Literal["positional", "sequential"]

SMALLEST, LARGEST = 1e-30, 1e30
"""Beyond these, what a number divides, multiplies or is added to may be none in float32."""


def require_utf8(text: str, what: str) -> None:
    """Refuse text that has no UTF-8 form, such as undecodable bytes from a command line."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise BadInput(f"{what} is not UTF-8 (character {error.start}): {text!r}") from error


def require_zero_or_scale(name: str, value: float) -> None:
    """Refuse what is neither 0, which turns an option off, nor usable as a divisor."""
    if value != 0.0 and not SMALLEST <= value <= LARGEST:
        raise BadInput(f"{name} must be at least 0, and 0 or within 1e-30..1e30, got {value}")


@dataclass(frozen=True, slots=True)
class LogitsOptions:
    """What changes the target's logits before a token is chosen, greedily or not.

    Names and meaning are mlx_lm.server's, in the order of use. `logit_bias` holds (id, bias) pairs
    to add; a bias of -inf bans the id. `repetition_penalty` divides a positive logit and multiplies
    a negative one, `presence_penalty` is subtracted once and `frequency_penalty` once for each
    time, from the ids among the last `..._context_size` tokens of prompt and text. A penalty of 0
    is off. A context size of 0 is everything: the server accepts it, and `tokens[-0:]` is that.
    """

    repetition_penalty: float = 0.0
    repetition_context_size: int = 20
    presence_penalty: float = 0.0
    presence_context_size: int = 20
    frequency_penalty: float = 0.0
    frequency_context_size: int = 20
    logit_bias: tuple[tuple[int, float], ...] = ()

    def __post_init__(self) -> None:
        require_zero_or_scale("repetition_penalty", self.repetition_penalty)
        for name in ("presence_penalty", "frequency_penalty"):
            penalty = getattr(self, name)
            if not -LARGEST <= penalty <= LARGEST:
                raise BadInput(f"{name} must be within -1e30..1e30, got {penalty}")
        for name in ("repetition_context_size", "presence_context_size", "frequency_context_size"):
            size = getattr(self, name)
            if not 0 <= size < 2**31:  # MLX slices with 32-bit integers
                raise BadInput(f"{name} must be between 0 and 2**31 - 1, got {size}")
        self._check_bias()

    def _check_bias(self) -> None:
        pairs: object = self.logit_bias
        if not isinstance(pairs, tuple) or not all(
            isinstance(pair, tuple) and len(pair) == 2 for pair in pairs
        ):
            raise BadInput(f"logit_bias must be a tuple of (id, bias) pairs, got {pairs!r}")
        named: set[int] = set()
        for token, bias in self.logit_bias:
            if token < 0:
                raise BadInput(f"logit_bias ids must be at least 0, got {token}")
            if not bias <= LARGEST:  # NaN among them
                raise BadInput(
                    f"logit_bias of id {token} must be a number of at most 1e30, got {bias}"
                )
            if token in named:
                raise BadInput(f"logit_bias names id {token} more than once")
            named.add(token)

    @property
    def active(self) -> bool:
        """Whether any logit can change."""
        return bool(self.logit_bias) or any(amount for amount, _ in self._penalties())

    @property
    def reach(self) -> int | None:
        """How many of the last tokens are looked at; None is all of them."""
        sizes = [size for amount, size in self._penalties() if amount]
        return None if 0 in sizes else max(sizes, default=0)

    def _penalties(self) -> tuple[tuple[float, int], ...]:
        return (
            (self.repetition_penalty, self.repetition_context_size),
            (self.presence_penalty, self.presence_context_size),
            (self.frequency_penalty, self.frequency_context_size),
        )


@dataclass(frozen=True, slots=True)
class Sampling:
    """How a token is chosen from logits.

    `temperature` 0 is greedy, and then only `logits` matters beside it. `top_p` 0 or 1, `top_k` 0,
    `min_p` 0 and `xtc_probability` 0 are off. XTC: with that probability, drop all tokens above
    `xtc_threshold` but the least probable of them. `seed` None: `generate` draws one and reports it
    in `Finish.seed`. `rng` says where a draw's randomness comes from; see `engine.sampling`.
    """

    temperature: float = 0.0
    top_p: float = 0.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    rng: Rng = "positional"
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1
    logits: LogitsOptions = LogitsOptions()

    def __post_init__(self) -> None:
        require_zero_or_scale("temperature", self.temperature)
        if not 0.0 <= self.top_p <= 1.0:
            raise BadInput(f"top_p must be between 0 and 1, got {self.top_p}")
        if self.top_k < 0:
            raise BadInput(f"top_k must be at least 0, got {self.top_k}")
        if not 0.0 <= self.min_p <= 1.0:
            raise BadInput(f"min_p must be between 0 and 1, got {self.min_p}")
        if self.rng not in ("positional", "sequential"):
            raise BadInput(f"rng must be 'positional' or 'sequential', got {self.rng!r}")
        if self.seed is not None and not 0 <= self.seed < 2**64:
            raise BadInput(f"seed must be between 0 and 2**64 - 1, got {self.seed}")
        if not 0.0 <= self.xtc_probability <= 1.0:
            raise BadInput(f"xtc_probability must be between 0 and 1, got {self.xtc_probability}")
        if not 0.0 <= self.xtc_threshold <= 0.5:
            raise BadInput(f"xtc_threshold must be between 0 and 0.5, got {self.xtc_threshold}")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    def check_vocabulary(self, vocab_size: int) -> None:
        """Refuse, before anything runs, a `top_k` or a biased id that the vocabulary rules out."""
        if not self.greedy and self.top_k >= vocab_size:
            raise BadInput(
                f"top_k must be below the vocabulary size {vocab_size}, got {self.top_k}"
            )
        for token, _ in self.logits.logit_bias:
            if token >= vocab_size:
                raise BadInput(
                    f"logit_bias ids must be below the vocabulary size {vocab_size}, got {token}"
                )


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt and what is wanted of it.

    `prompt` holds token ids, `max_tokens` counts generated tokens with a terminal EOS.
    `stop_ids` end the text like the model's own EOS ids, to which they are added.
    `stop_strings` end it where the string begins. `first_step` is the step number of the first
    generated token: above 0 when `prompt` already holds that many generated tokens, so that a
    continued positional stream draws what the uninterrupted one would have drawn.
    """

    prompt: tuple[int, ...]
    max_tokens: int = 100
    sampling: Sampling = Sampling()
    stop_ids: frozenset[int] = frozenset()
    stop_strings: tuple[str, ...] = ()
    first_step: int = 0

    def __post_init__(self) -> None:
        if not self.prompt:
            raise BadInput("the prompt is empty; at least 1 token is needed")
        if self.max_tokens < 1:
            raise BadInput(f"max_tokens must be at least 1, got {self.max_tokens}")
        stops: object = self.stop_strings
        if isinstance(stops, str):  # which is a sequence of strings, too
            raise BadInput(f"stop_strings must be a tuple of strings, got {self.stop_strings!r}")
        if "" in self.stop_strings:
            raise BadInput("a stop string is empty; at least 1 character is needed")
        for stop in self.stop_strings:
            require_utf8(stop, "a stop string")
        if self.first_step < 0:
            raise BadInput(f"first_step must be at least 0, got {self.first_step}")


@dataclass(frozen=True, slots=True)
class TokenEvent:
    """One content token, in order.

    `text` is what became certain with it: empty while a character is incomplete or a stop string
    may have begun. `logprob` is the target's own, after logits processors and before filters and
    temperature.
    `round` counts from 0.
    """

    token: int
    text: str
    logprob: float
    from_draft: bool
    round: int


@dataclass(frozen=True, slots=True)
class RoundTrace:
    """What one round did for one row.

    `draft` are the proposed ids; `accepted` counts those the target confirmed, an EOS among them
    included; `emitted` are the ids delivered, EOS excluded, tokens of a stop string included;
    `retained` counts the draft tokens that stayed in the state.
    """

    draft: tuple[int, ...]
    accepted: int
    emitted: tuple[int, ...]
    retained: int


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts as served: a terminal EOS and the tokens of a stop string count once each.

    `cached_tokens` of the prompt were not processed when the generation began: their state was
    kept. `resumed_tokens` of the completion were generated before an interruption.
    """

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0
    resumed_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Statistics:
    """What speculation did for one row. Counts come from the accept walk, not from retention."""

    rounds: int
    target_forwards: int
    drafted: int
    accepted: int
    rejected: int
    acceptance_lengths: tuple[int, ...]
    drafted_by_position: tuple[int, ...]
    accepted_by_position: tuple[int, ...]
    tokens_per_forward: float
    forwards_saved: int

    @classmethod
    def of(cls, rounds: Sequence[RoundTrace], *, prefill_forwards: int) -> Statistics:
        """Sum up a row's rounds. `prefill_forwards` counts the target forwards before them."""
        widest = max((len(r.draft) for r in rounds), default=0)
        drafted = sum(len(r.draft) for r in rounds)
        accepted = sum(r.accepted for r in rounds)
        generated = sum(len(r.emitted) for r in rounds)
        return cls(
            rounds=len(rounds),
            target_forwards=prefill_forwards + len(rounds),
            drafted=drafted,
            accepted=accepted,
            rejected=drafted - accepted,
            acceptance_lengths=tuple(r.accepted for r in rounds),
            drafted_by_position=tuple(sum(len(r.draft) > p for r in rounds) for p in range(widest)),
            accepted_by_position=tuple(sum(r.accepted > p for r in rounds) for p in range(widest)),
            tokens_per_forward=generated / len(rounds) if rounds else 0.0,
            forwards_saved=max(0, generated - len(rounds)),
        )


@dataclass(frozen=True, slots=True)
class Finish:
    """The last event of a stream.

    `tokens`, `logprobs` and `text` are the whole content; `tail` is the part of the text that no
    `TokenEvent` carried. `seed` is the one used, None for greedy.
    """

    reason: FinishReason
    tokens: tuple[int, ...]
    text: str
    tail: str
    logprobs: tuple[float, ...]
    usage: Usage
    rounds: tuple[RoundTrace, ...]
    statistics: Statistics
    seed: int | None
