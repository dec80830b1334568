"""How close decisions were: at one disputed position, and over a whole run for recording.

Measured on the oracle's own copy of the models, never on the engine's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

import mlx.core as mx
import numpy as np

from oracle.inprocess import Loaded
from oracle.margins import (
    DraftedRound,
    ReplayError,
    draft_margins,
    greedy_margins,
    sampled_margins,
    shape_delta,
)
from oracle.noise import Filters, Policy, Positional, Sequential, as_floats, draw_margins
from oracle.processors import Processors
from parity.asking import encode
from parity.cases import READERS, Case, Sampling
from parity.compare import Measure
from parity.errors import Unsound
from parity.provenance import Margins
from parity.trace import Answer


class Probe:
    """Margins by replay on a target and its draft model.

    A replay is one forward, in which keys and values are not quantized: with `kv_bits` there are no
    margins.
    """

    def __init__(self, target: Loaded, draft: Loaded | None, kv_bits: int | None = None) -> None:
        self._target = target
        self._draft = draft
        self._kv_bits = kv_bits

    def measure(
        self, case: Case, prefix: tuple[int, ...], expected: int | None, actual: int | None
    ) -> Measure | None:
        """The decision after `prefix` (content ids) between two tokens, None standing for EOS.

        None if no margin could excuse it: draws from the global key are not replayed; where a stop
        string ended an answer no EOS was drawn; and an EOS among the content was not chosen
        instead of another token, it was let through. An id outside the vocabulary has no logit.
        """
        ended = expected is None or actual is None
        if self._kv_bits is not None:
            return None
        if case.cell.sampling.mode == "sequential" or (ended and case.stop):
            return None
        if expected in self._target.eos_ids or actual in self._target.eos_ids:
            return None
        ids = [*encode(self._target, case.prompt), *prefix]
        processors = processors_of(case)
        logits = processors.apply(mx.array(ids), self._logits(ids)[None])[0]
        if any(token is not None and token >= logits.size for token in (expected, actual)):
            return None
        logprobs = logits - mx.logsumexp(logits)
        tokens = [self._best_eos(ids) if t is None else t for t in (expected, actual)]
        if case.cell.sampling.mode == "greedy":
            scores = as_floats(logprobs)
            below = [float(scores.max() - scores[token]) for token in tokens]
        else:
            filters = filters_of(case.cell.sampling, self._target.xtc_special_tokens)
            bits = Positional(case.seed).bits(len(prefix), filters)
            scaled = filters.scaled(logprobs, bits.coin)
            drawn = [max(0.0, -draw_margins(scaled, bits.key, [token])[0]) for token in tokens]
            # A draw is decided among log-probabilities divided by the temperature.
            below = [margin * filters.temperature for margin in drawn]
        width = min(case.cell.depth + 1, len(ids))
        return Measure(
            margin=max(below),
            delta=shape_delta(self._target.model, ids, width) * processors.gain,
            top_logit=float(np.abs(as_floats(logits)).max()),
        )

    def margins(self, case: Case, answer: Answer) -> Margins:
        """The smallest margins of the decisions that led to the engine's `answer`.

        Raises:
            Unsound: the replay decides otherwise; then the answer is not to be recorded.

        """
        try:
            return self._margins(case, answer)
        except ReplayError as error:
            raise Unsound(str(error)) from error

    def _margins(self, case: Case, answer: Answer) -> Margins:
        prompt = encode(self._target, case.prompt)
        rounds = [DraftedRound(one.draft, one.emitted) for one in answer.rounds]
        assert answer.completion_tokens is not None, "an engine counts its tokens"
        if answer.completion_tokens > sum(len(one.emitted) for one in rounds):
            eos = self._best_eos([*prompt, *(t for one in rounds for t in one.emitted)])
            rounds[-1] = DraftedRound(rounds[-1].draft, (*rounds[-1].emitted, eos))
        generated = [token for one in rounds for token in one.emitted]
        filters = filters_of(case.cell.sampling, self._target.xtc_special_tokens)
        policy, processors = policy_of(case), processors_of(case)
        if policy is None:
            text = greedy_margins(self._target.model, prompt, generated, processors=processors)
        else:
            windows = None
            if case.cell.sampling.mode == "sequential" and case.cell.drafter == "two-model":
                windows = [(len(one.draft), len(one.emitted)) for one in rounds]
            text = sampled_margins(
                self._target.model,
                prompt,
                generated,
                filters,
                policy,
                windows,
                processors=processors,
            )
        if case.cell.drafter in READERS:
            # How close these drafts were is not replayed: what a trace says holds here only.
            return Margins(min(text), 0.0)
        if case.cell.drafter != "two-model":
            return Margins(min(text), None)
        assert self._draft is not None, "no two-model case is run without a draft model"
        drafted = draft_margins(
            self._draft.model, prompt, rounds, None if policy is None else filters, policy
        )
        # Behind the first mismatch a draft decides nothing that the trace shows.
        decisive = [
            margin
            for one, of_round in zip(answer.rounds, drafted, strict=True)
            for margin in of_round[: one.accepted + 1]
        ]
        return Margins(min(text), min(decisive, default=None))

    def _logits(self, ids: list[int]) -> mx.array:
        """Logits [V] after `ids`, from one forward."""
        return self._target.model(mx.array([ids]))[0, -1].astype(mx.float32)

    def _best_eos(self, ids: list[int]) -> int:
        """The EOS that a model with several would choose after `ids`."""
        scores = as_floats(self._logits(ids))
        return max(self._target.eos_ids, key=lambda token: float(scores[token]))


def filters_of(sampling: Sampling, xtc_special_tokens: Sequence[int] = ()) -> Filters:
    """A sampling in the oracle's words. A server knows XTC's special tokens itself."""
    return Filters(
        sampling.temperature,
        sampling.top_p,
        sampling.top_k,
        sampling.min_p,
        sampling.xtc_probability,
        sampling.xtc_threshold,
        tuple(xtc_special_tokens),
    )


def processors_of(case: Case) -> Processors:
    """What the case's sampling does to logits, in the oracle's words."""
    return Processors(**asdict(case.cell.sampling.penalties))


def policy_of(case: Case) -> Policy | None:
    """Where the case's draws take their bits from; None under greedy, which draws nothing."""
    if case.cell.sampling.mode == "greedy":
        return None
    if case.cell.sampling.mode == "positional":
        return Positional(case.seed)
    return Sequential(case.seed)
