"""What an engine answered, in the words of neither side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

UNFINISHED = "\ufffd"
"""What decoders show for the bytes of a character that has not come to its end."""


@dataclass(frozen=True, slots=True)
class Round:
    """One round: the drafted ids, how many of them were accepted, and the ids delivered.

    An accepted EOS counts in `accepted` and is not in `emitted`; the tokens of a stop string are.
    """

    draft: tuple[int, ...]
    accepted: int
    emitted: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Trace:
    """Where the content came from: a flag per content token, (drafted, accepted) per round."""

    from_draft: tuple[bool, ...]
    rounds: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Company:
    """What a group did as a whole.

    `ragged` counts the rounds in which rows accepted different counts, `joined` the rows that came
    when others had begun to decode, `left` those that ended while others went on.
    """

    rows: int
    rounds: int
    ragged: int
    joined: int
    left: int


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer. `ids` are content: without a terminal EOS and without a stop string's tokens.

    `origin` names the run that gave it, so that no run is ever compared with itself.
    `logprobs` has one entry per content token. What the source does not tell is None, or empty for
    `rounds`; only ids are always there: those of an answer without are `mapped` from its text onto
    the expected ids (see `remote.retokenize`), and say no more than the text does.

    `decodings` are further texts of the very same ids: a server may lose text it holds back when a
    stop ends an answer, or leave out a first space (known deviation D21 of mlx_lm.server).

    `company` is what became of the group that the answer was a row of.
    """

    origin: str
    ids: tuple[int, ...]
    text: str
    finish_reason: str
    prompt_tokens: int | None
    completion_tokens: int | None
    logprobs: tuple[float, ...] | None
    trace: Trace | None = None
    rounds: tuple[Round, ...] = ()
    decodings: tuple[str, ...] = ()
    mapped: bool = False
    company: Company | None = None

    def may_read(self, text: str, *, mapped: bool) -> bool:
        """Whether an answer of the same ids may have this text.

        Where nothing but the text is known, a character that the budget cut in two may be left out.
        """
        whole = (self.text, *self.decodings)
        return text in whole or (mapped and text in {one.rstrip(UNFINISHED) for one in whole})

    def shows_all(self, text: str) -> bool:
        """Whether `text`, which this answer may read, shows the last of the ids too."""
        whole = self.decodings or (self.text,)
        return text in whole and not text.endswith(UNFINISHED)


def round_of(rounds: Sequence[Round], position: int) -> int | None:
    """The round (from 0) that emitted position `position`; the last one for the end."""
    emitted = 0
    for number, one in enumerate(rounds):
        emitted += len(one.emitted)
        if position < emitted:
            return number
    return len(rounds) - 1 if rounds else None


def company_of(rows: int, rounds: Sequence[Mapping[int, int]]) -> Company:
    """What a group of `rows` requests did in rounds of accepted counts by request.

    Requests that never shared a round neither joined nor left one another.
    """
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    for number, accepted in enumerate(rounds):
        for request in accepted:
            first.setdefault(request, number)
            last[request] = number
    return Company(
        rows,
        len(rounds),
        ragged=sum(len(set(accepted.values())) > 1 for accepted in rounds),
        joined=sum(
            any(first[mate] < number for mate in rounds[number]) for number in first.values()
        ),
        left=sum(any(last[mate] > number for mate in rounds[number]) for number in last.values()),
    )
