"""mlx-lm's own generators driven by ids: plain and two-model runs, with a trace."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import mlx.core as mx
from mlx_lm.generate import generate_step, speculative_generate_step
from mlx_lm.sample_utils import make_sampler
from mlx_lm.tokenizer_utils import TokenizerWrapper
from mlx_lm.utils import load as load_with_mlx_lm

from .models import LanguageModel
from .noise import Filters, Positional, as_floats
from .processors import NO_PROCESSORS, Processors

Sampler = Callable[[mx.array], mx.array]


@dataclass(frozen=True, slots=True)
class Loaded:
    """A model folder as mlx-lm loads it."""

    model: LanguageModel
    tokenizer: TokenizerWrapper
    eos_ids: frozenset[int]

    def encode(self, text: str) -> list[int]:
        """Ids of ``text`` as /v1/completions tokenizes a prompt."""
        return list(self.tokenizer.encode(text))

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Ids of a chat as /v1/chat/completions puts it through the model's template.

        Raises ``ValueError`` for a model without a template, or one that refuses the messages.
        """
        return [int(token) for token in self._templated(messages, tokenize=True)]

    def render_chat(self, messages: Sequence[Mapping[str, str]]) -> str:
        """The text of a chat put through the model's template; raises as ``encode_chat`` does."""
        return str(self._templated(messages, tokenize=False))

    def _templated(self, messages: Sequence[Mapping[str, str]], *, tokenize: bool) -> Any:
        if not self.tokenizer.has_chat_template:
            raise ValueError("the tokenizer has no chat template")
        try:
            return self.tokenizer.apply_chat_template(
                [dict(message) for message in messages],
                tools=None,
                add_generation_prompt=True,
                tokenize=tokenize,
            )
        except Exception as error:  # templates raise whatever they like
            said = " ".join(str(error).split())
            raise ValueError(f"the chat template refuses the messages: {said}") from error

    def encode_bare(self, text: str) -> list[int]:
        """Ids of ``text`` without special tokens, as the server tokenizes a stop string."""
        return list(self.tokenizer.encode(text, add_special_tokens=False))

    @property
    def xtc_special_tokens(self) -> tuple[int, ...]:
        """What the server keeps from XTC: the ids of a newline, special ones included, and EOS."""
        return (*self.tokenizer.encode("\n"), *sorted(self.eos_ids))


@dataclass(frozen=True, slots=True)
class Round:
    """One round of a two-model run; ``emitted`` counts accepted tokens, correction and EOS."""

    drafted: int
    accepted: int
    emitted: int


@dataclass(frozen=True, slots=True)
class Run:
    """A finished run. Only ``generated`` and ``rounds`` count a terminal EOS, the rest does not."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: Literal["stop", "length"]
    from_draft: tuple[bool, ...]
    generated: tuple[int, ...]
    rounds: tuple[Round, ...] = ()

    @property
    def accepted(self) -> tuple[int, ...]:
        """Accepted drafts per round; an accepted EOS counts, the token after a full accept not."""
        return tuple(turn.accepted for turn in self.rounds)


def load(directory: str | Path, *, lazy: bool = False) -> Loaded:
    """Load a local model folder. ``ValueError`` in one line when it is not one.

    ``lazy`` weights are read from the files when they are first used.
    """
    folder = Path(directory)
    if not (folder / "config.json").is_file():
        raise ValueError(f"model folder {folder} has no config.json")
    model, tokenizer = load_with_mlx_lm(str(folder), lazy=lazy)[:2]
    return Loaded(model, tokenizer, frozenset(tokenizer.eos_token_ids))


class PositionalSampler:
    """A sampler for ``generate_step`` with one key per position (see ``noise.Positional``).

    ``generate_step`` runs one token ahead of what it yields but calls its sampler once per
    generated token, in order and on [1, V]; so the number of calls is the step. That is not so
    under ``speculative_generate_step``, hence one sampler serves one plain run.
    """

    def __init__(self, seed: int, filters: Filters, first_step: int = 0) -> None:
        self._filters = filters
        self._keys = Positional(seed, first_step)
        self._num_calls = 0

    def __call__(self, logprobs: mx.array) -> mx.array:
        """Log-probabilities [1, V] to ids [1]."""
        if logprobs.shape[0] != 1:
            raise ValueError(f"a positional sampler draws from one row, got {logprobs.shape[0]}")
        bits = self._keys.bits(self._num_calls, self._filters)
        self._num_calls += 1
        if self._filters.greedy:
            return mx.argmax(logprobs, axis=-1)
        scaled = self._filters.scaled(logprobs, bits.coin)
        return mx.random.categorical(scaled[0], key=bits.key)[None]


def sequential_sampler(seed: int, filters: Filters) -> Sampler:
    """mlx-lm's own sampler on the global key, which is seeded NOW, as the server does.

    It is good for one run, started before anything else draws from the global key.
    """
    mx.random.seed(seed)
    return make_sampler(
        filters.temperature,
        top_p=filters.top_p,
        min_p=filters.min_p,
        top_k=filters.top_k,
        xtc_probability=filters.xtc_probability,
        xtc_threshold=filters.xtc_threshold,
        xtc_special_tokens=list(filters.xtc_special_tokens),
    )


def plain(
    target: Loaded,
    prompt: Sequence[int],
    max_tokens: int,
    sampler: Sampler | None = None,
    *,
    processors: Processors = NO_PROCESSORS,
    prefill_step_size: int = 2048,
) -> Run:
    """``generate_step`` until EOS or the budget; greedy without a sampler.

    ``logprobs`` are those of the processed logits, as the server reports them too.
    """
    _check(prompt, max_tokens)
    steps = generate_step(
        mx.array(list(prompt)),
        target.model,
        max_tokens=max_tokens,
        sampler=sampler,
        logits_processors=[processors.apply] if processors.active else None,
        prefill_step_size=prefill_step_size,
    )
    return _collect(((token, logprobs, False) for token, logprobs in steps), target.eos_ids)


def speculative(
    target: Loaded,
    draft: Loaded,
    prompt: Sequence[int],
    max_tokens: int,
    num_draft_tokens: int,
    sampler: Sampler | None = None,
    *,
    processors: Processors = NO_PROCESSORS,
    prefill_step_size: int = 2048,
) -> Run:
    """``speculative_generate_step`` until EOS or the budget, with its rounds.

    Active ``processors`` are refused: under speculation mlx-lm gives them another history than in
    plain text (deviation D5), so that no run would be the truth about anything.
    ``prefill_step_size`` defaults to the server's 2048, not to the generator's own 512.
    """
    _check(prompt, max_tokens)
    if processors.active:
        raise ValueError("logits processors are not applied as in plain text here (D5): use plain")
    if num_draft_tokens < 0:
        raise ValueError(f"num_draft_tokens must be at least 0, got {num_draft_tokens}")
    if isinstance(sampler, PositionalSampler):
        raise ValueError("a positional sampler cannot count steps under speculation")
    steps = speculative_generate_step(
        mx.array(list(prompt)),
        target.model,
        draft.model,
        num_draft_tokens=num_draft_tokens,
        max_tokens=max_tokens,
        sampler=sampler,
        prefill_step_size=prefill_step_size,
    )
    return _collect(steps, target.eos_ids, max_tokens, num_draft_tokens)


def _check(prompt: Sequence[int], max_tokens: int) -> None:
    if not prompt:
        raise ValueError("the prompt must hold at least 1 token, got 0")
    if max_tokens < 1:
        raise ValueError(f"max_tokens must be at least 1, got {max_tokens}")


def _collect(
    steps: Iterable[tuple[Any, mx.array, bool]],
    eos_ids: frozenset[int],
    max_tokens: int = 0,
    depth: int | None = None,
) -> Run:
    tokens: list[int] = []
    logprobs: list[float] = []
    flags: list[bool] = []
    eos: tuple[int, ...] = ()
    for token, distribution, from_draft in steps:
        flags.append(from_draft)
        if token in eos_ids:
            eos = (token,)
            break
        tokens.append(token)
        logprobs.append(float(as_floats(distribution[token])))
    return Run(
        tokens=tuple(tokens),
        logprobs=tuple(logprobs),
        finish_reason="stop" if eos else "length",
        from_draft=tuple(flags[: len(tokens)]),
        generated=(*tokens, *eos),
        rounds=() if depth is None else rounds_of(flags, max_tokens, depth),
    )


def rounds_of(from_draft: Sequence[bool], max_tokens: int, depth: int) -> tuple[Round, ...]:
    """Rounds from the from-draft flags of all generated tokens, EOS included.

    A token that is not from the draft ends its round; only the last round may lack one, when the
    budget or EOS fell inside the accepted run. A round drafts min(depth, what the budget leaves).
    """
    rounds: list[Round] = []
    start = 0
    for end in range(1, len(from_draft) + 1):
        if from_draft[end - 1] and end < len(from_draft):
            continue
        emitted = from_draft[start:end]
        rounds.append(Round(min(depth, max_tokens - start), sum(emitted), len(emitted)))
        start = end
    return tuple(rounds)
