"""Processing prompts: in chunks, rows of different lengths together, the drafter fed the same."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx

from .drafters.source import DraftRows
from .errors import LawError
from .host import read
from .rounds import Rounds, Row, TargetRows, accept
from .sampling import RowSampling

CHUNK = 2048
"""Tokens per forward, as in mlx_lm.server. It bounds memory; the text does not depend on it."""


@dataclass(slots=True)
class Prompt:
    """One row's prompt: `processed` of its tokens are in the states, after `forwards` forwards.

    The first `cached` of them were not processed for this request but restored with a state that
    was kept. `resumed` tokens behind it were generated before an interruption. With `pauses`, a
    forward ends one token before the prompt does, at its `boundary`.
    """

    tokens: Sequence[int]
    row: Row
    processed: int = 0
    forwards: int = 0
    cached: int = 0
    resumed: int = 0
    pauses: bool = False

    @property
    def boundary(self) -> int:
        """The last place where a request with the same prompt could still go on."""
        return len(self.tokens) - 1


class Cohort:
    """Rows whose prompts are processed together.

    All rows of a step append the same number of tokens, at most as many as the shortest of them
    lacks. Rows whose prompt is done are to be left out before the next. In `tail-split` mode a
    prompt is done without its last token, which heads the row's first window; in `full` mode the
    first token comes from its logits.
    """

    def __init__(
        self,
        target: TargetRows,
        draft: DraftRows | None,
        sampling: RowSampling,
        prompts: Sequence[Prompt],
    ) -> None:
        self.target = target
        self.draft = draft
        self.sampling = sampling
        self.prompts = prompts
        self._full = draft is not None and draft.prefill_mode == "full"

    @property
    def lacking(self) -> list[int]:
        """How many tokens each prompt still lacks."""
        return [len(p.tokens) - p.processed - (not self._full) for p in self.prompts]

    @property
    def at_boundary(self) -> list[int]:
        """The rows that stand at their prompt's boundary."""
        return [r for r, p in enumerate(self.prompts) if p.processed == p.boundary]

    def step(self, chunk: int = CHUNK) -> None:
        """One forward of at most `chunk` >= 1 tokens in all rows together, at least one in each.

        Raises:
            LawError: a prompt is done.
            Exception: whatever the model or the drafter raised. The state of all rows is lost.
        """
        if not all(lacking := self.lacking):
            raise LawError("a step over prompts of which some are done")
        width = min(*lacking, max(1, chunk // len(self.prompts)))
        for prompt in self.prompts:
            if prompt.pauses and prompt.processed < prompt.boundary:
                width = min(width, prompt.boundary - prompt.processed)
        chunks = [list(p.tokens[p.processed : p.processed + width]) for p in self.prompts]
        tokens = mx.array(chunks, dtype=mx.uint32)
        try:
            logits = self.target.forward(tokens)
            if self.draft is not None:
                self.draft.prefill(tokens, self.target.tapped)
            mx.eval(self.target.arrays())
            for prompt in self.prompts:
                prompt.processed += width
                prompt.forwards += 1
            if self._full:
                self._sample_first(logits[:, -1:])
        except BaseException as error:
            self.target.poison(error)
            raise
        mx.clear_cache()

    def rounds(self, depth: int, vocab_size: int) -> Rounds:
        """The rounds that these rows, whose prompts are done, go on with."""
        rows = [prompt.row for prompt in self.prompts]
        if not self._full:
            for prompt in self.prompts:
                prompt.row.held += prompt.tokens[:-1]
        return Rounds(
            self.target, self.draft, self.sampling, rows, depth=depth, vocab_size=vocab_size
        )

    def selected(self, keep: Sequence[int]) -> Cohort:
        """The rows `keep`, at least one, in that order."""
        draft = None if self.draft is None else self.draft.selected(keep)
        prompts = [self.prompts[r] for r in keep]
        return Cohort(self.target.selected(keep), draft, self.sampling.selected(keep), prompts)

    def joined(self, other: Cohort) -> Cohort:
        """These rows and the other's behind them."""
        draft = self.draft
        if draft is not None:
            assert other.draft is not None
            draft = draft.joined(other.draft)
        return Cohort(
            self.target.joined(other.target),
            draft,
            self.sampling.joined(other.sampling),
            [*self.prompts, *other.prompts],
        )

    def _sample_first(self, logits: mx.array) -> None:
        """The last logits [B, 1, V] of a prompt serve as a first round without a draft."""
        done = [r for r, lacking in enumerate(self.lacking) if lacking == 0]
        if not done:
            return
        rows = [self.prompts[r].row for r in done]
        for r in done:
            self.prompts[r].row.held += self.prompts[r].tokens[:-1]
        window = mx.array([[row.pending] for row in rows], dtype=mx.uint32)
        held = [row.held for row in rows]
        samples, logprobs = self.sampling.selected(done).choose(
            logits[mx.array(done)], held, window, [row.step for row in rows]
        )
        chosen = mx.take_along_axis(logprobs, samples[..., None], axis=-1)[..., 0]
        for r, ids, numbers in zip(done, read(samples), read(chosen), strict=True):
            self.prompts[r].forwards -= 1  # it was this round's
            accept(self.prompts[r].row, (), ids, numbers)
