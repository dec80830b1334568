"""Turning a row's tokens into text, and ending it at a stop string.

`mlx_lm.server` ends a request when a stop string's own token sequence has been emitted, and cuts
the string from the text. Both are kept here; and where the string appears under another
tokenization, the text ends at it as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mlx_lm.generate import StopSequences


@dataclass(frozen=True, slots=True)
class Piece:
    """A token, by its index, that is certain to be content; `text` became certain with it."""

    index: int
    text: str


class TextStream:
    """One row's detokenizer and stop rules.

    Feed it generated tokens in order. It returns those that no stop string can take back any more.
    Tokens are numbered from 0.
    """

    def __init__(self, tokenizer: Any, stop_strings: Sequence[str]) -> None:
        self._tokenizer = tokenizer
        self._detokenizer = tokenizer.detokenizer
        self._stop_strings = tuple(stop_strings)
        sequences = [tuple(tokenizer.encode(s, add_special_tokens=False)) for s in stop_strings]
        self._sequences = sequences
        self._matcher = StopSequences(sequences).matcher()
        self._tokens: list[int] = []
        # Length of the text once token i's characters were shown; filled in order.
        self._ends: list[int] = []
        self._text = ""
        self._released = 0
        self._released_text = 0
        self.stopped = False

    @property
    def text(self) -> str:
        """The whole text so far; after `close`, without the stop string."""
        return self._text

    @property
    def tail(self) -> str:
        """The part of the text that belongs to no released token."""
        return self._text[self._released_text :]

    @property
    def num_content(self) -> int:
        """How many of the tokens are content; final after `close`."""
        return self._released

    def push(self, token: int) -> list[Piece]:
        """Add a generated token and return the pieces that became certain.

        Sets `stopped` when a stop string is complete; then `close` must follow.
        """
        self._tokens.append(token)
        self._detokenizer.add_token(token)
        self._take_text()
        if not self._stop_strings:
            return self._release(len(self._tokens), len(self._text))
        if self._matcher.advance(token) or self._find_stop() is not None:
            self.stopped = True
            return []
        safe = len(self._text) - self._held_back()
        count = min(sum(end <= safe for end in self._ends), len(self._tokens) - self._begun())
        return self._release(count, safe)

    def close(self) -> list[Piece]:
        """End the text: flush what was held back, cut at the stop string; the last pieces."""
        self._detokenizer.finalize()
        self._take_text()
        self._ends.extend([len(self._text)] * (len(self._tokens) - len(self._ends)))
        count = len(self._tokens)
        if self.stopped:
            cut = self._find_stop()
            if cut is None:
                # The string's own tokens came, but decode to other characters in this place.
                count -= self._matched_length()
                cut = len(self._decode(count))
            count = self._tokens_within(cut)
            self._text = self._text[:cut]
        return self._release(count, len(self._text))

    def _take_text(self) -> None:
        segment = self._detokenizer.last_segment
        self._text += segment
        if segment or not self._stop_strings:
            self._ends.extend([len(self._text)] * (len(self._tokens) - len(self._ends)))

    def _find_stop(self) -> int | None:
        positions = [p for s in self._stop_strings if (p := self._text.find(s)) >= 0]
        return min(positions, default=None)

    def _held_back(self) -> int:
        """Length of the longest end of the text that begins a stop string."""
        longest = max(map(len, self._stop_strings)) - 1
        for length in range(min(longest, len(self._text)), 0, -1):
            if any(s.startswith(self._text[-length:]) for s in self._stop_strings):
                return length
        return 0

    def _begun(self) -> int:
        """How many of the last tokens begin a stop string's own token sequence."""
        lengths = (
            length
            for s in self._sequences
            for length in range(len(s))
            if tuple(self._tokens[len(self._tokens) - length :]) == s[:length]
        )
        return max(lengths, default=0)

    def _matched_length(self) -> int:
        return max(len(s) for s in self._sequences if s and tuple(self._tokens[-len(s) :]) == s)

    def _tokens_within(self, end: int) -> int:
        """How many tokens decode to no more than the first `end` characters.

        The detokenizer shows a space only with the character behind it, so `_ends` would count a
        space in front of a stop string as part of it.
        """
        count = len(self._tokens)
        while count > self._released and len(self._decode(count)) > end:
            count -= 1
        return count

    def _decode(self, count: int) -> str:
        detokenizer = self._tokenizer.detokenizer
        for token in self._tokens[:count]:
            detokenizer.add_token(token)
        detokenizer.finalize()
        text: str = detokenizer.text
        return text

    def _release(self, count: int, end: int) -> list[Piece]:
        pieces = []
        for index in range(self._released, count):
            stop = min(self._ends[index], end)
            pieces.append(Piece(index, self._text[self._released_text : stop]))
            self._released_text = max(self._released_text, stop)
        self._released = max(self._released, count)
        return pieces
