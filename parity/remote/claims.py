"""Whether the subject serves the oracle's model, and says the same in events as in one piece."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from parity.cases import Case
from parity.compare import first_difference, logprob_failures
from parity.remote.capabilities import about
from parity.report.words import Setting
from parity.runner import CaseResult, Claim
from parity.tolerance import Tolerance
from parity.trace import Answer


def prompt_claim(
    counts: Sequence[tuple[str, int]], count: Callable[[str], int]
) -> tuple[Claim, ...]:
    """The subject cuts texts into as many tokens as we do, as far as it tells."""
    if not counts:
        return ()
    wrong = [
        f"{about(text)}: expected {count(text)} prompt tokens, got {told}"
        for text, told in counts
        if told != count(text)
    ]
    said = "the subject cuts prompts into as many tokens as the target's tokenizer"
    return (_claim("prompt-tokens", said, wrong),)


def vocabulary_claim(answers: Sequence[Answer], vocabulary: int) -> tuple[Claim, ...]:
    """Every id it tells is one of the target's."""
    told = [answer for answer in answers if not answer.mapped]
    if not told:
        return ()
    wrong = [
        f"{answer.origin}: expected ids below {vocabulary}, got {token}"
        for answer in told
        for token in answer.ids
        if token >= vocabulary
    ]
    return (_claim("vocabulary", "every id is in the target's vocabulary", wrong[:1]),)


def logprob_claim(
    case: Case, expected: Answer, actual: Answer, tolerance: Tolerance, setting: Setting
) -> tuple[Claim, ...]:
    """It gives the same tokens the same log-probabilities, if it tells any for tokens in common."""
    parted = first_difference(expected, actual, 0)
    shared = len(expected.ids) if parted is None else parted
    if actual.logprobs is None or shared == 0:
        return ()
    wrong = []
    for failure in logprob_failures(expected, actual, 0, shared, tolerance):
        where = about(case.prompt if isinstance(case.prompt, str) else case.prompt[-1].content)
        if failure.position is not None:
            token = expected.ids[failure.position]
            where += f", position {failure.position}, token {token} {setting.decode(token)!r}"
        wrong.append(f"{where}: expected {failure.expected}, got {failure.actual}")
    said = f"the same tokens have the same log-probabilities within {tolerance.logprobs:g}"
    return (_claim("logprobs", said, wrong),)


def failure_claim(failures: Sequence[str]) -> tuple[Claim, ...]:
    """It answers or refuses what it is asked about itself; nothing is claimed where it does."""
    if not failures:
        return ()
    return (_claim("failures", "what the subject does not offer it refuses", failures),)


def stream_claim(results: Sequence[CaseResult]) -> tuple[Claim, ...]:
    """What comes in events is what comes in one piece, for every prompt that was asked both ways.

    Not where a decision was too close to call: it may fall otherwise the second time.
    """
    texts: dict[str, dict[str | None, str]] = {}
    for result in results:
        if result.actual is not None and not result.comparison.ties:
            cell = result.case.cell
            texts.setdefault(cell.kind, {})[cell.style] = result.actual.text
    both = {kind: by for kind, by in texts.items() if {"once", "stream"} <= by.keys()}
    if not both:
        return ()
    wrong = [
        f"prompt {kind}: expected {by['once']!r}, got {by['stream']!r}"
        for kind, by in both.items()
        if by["once"] != by["stream"]
    ]
    return (_claim("streaming", "an answer in events has the text of the one in one piece", wrong),)


def _claim(name: str, said: str, wrong: Sequence[str]) -> Claim:
    return Claim(f"claims/subject/{name}", not wrong, "; ".join((said, *wrong)))
