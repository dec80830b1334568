"""Answers, cases and sides made up for tests."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from parity.cases import (
    GREEDY,
    SAMPLINGS,
    Case,
    Cell,
    Drafter,
    Lane,
    Sampling,
    Source,
)
from parity.compare import Measure
from parity.matrix import EXTRAS, Block, Plan, whole_product
from parity.report.words import Setting
from parity.tolerance import Tolerance
from parity.trace import Answer, Round, Trace

EXACT = Tolerance("float32", "cpu")
"""Ties are failures."""

LOOSE = Tolerance("float32", "gpu")
"""Ties are ties."""

SETTING = Setting(chr)
TOP_P = next(s for s in SAMPLINGS if s.label == "top-p")


@dataclass(frozen=True)
class Text:
    """A prompt."""

    kind: str
    name: str
    text: str


KINDS = ("repetition", "novel", "early-stop", "utf8", "one-token", "long")
PROMPTS = tuple(Text(kind, f"{kind}-1", f"Once {kind}") for kind in KINDS)
PLAN = Plan("dense", (Block(whole_product(), PROMPTS),), EXTRAS, claims_ends=True)


def answer(
    ids: tuple[int, ...] = (97, 98, 99),
    *,
    origin: str = "oracle",
    finish: str = "length",
    text: str | None = None,
    prompt_tokens: int = 4,
    completion_tokens: int | None = None,
    logprobs: tuple[float, ...] | None = None,
    trace: Trace | None = None,
    rounds: tuple[Round, ...] = (),
) -> Answer:
    """An answer whose fields fit each other unless said otherwise."""
    return Answer(
        origin,
        ids,
        "".join(map(chr, ids)) if text is None else text,
        finish,
        prompt_tokens,
        len(ids) + (finish == "stop") if completion_tokens is None else completion_tokens,
        tuple(-0.5 for _ in ids) if logprobs is None else logprobs,
        trace,
        rounds,
    )


def case(
    kind: str = "novel",
    *,
    lane: Lane = "serial",
    drafter: Drafter = "ngram",
    depth: int = 3,
    sampling: Sampling = GREEDY,
    source: Source = Source.SERVER,
    **fields: object,
) -> Case:
    """One case of the fake matrix."""
    cell = Cell("dense", lane, drafter, depth, sampling, kind)
    return Case(cell, "Once", source, "lossless", **fields)  # type: ignore[arg-type]


@dataclass
class FakeOracle:
    """Expects the same of every case; dies at the case named `dies_at`."""

    says: Answer
    dies_at: str | None = None
    error: Exception = field(default_factory=lambda: AssertionError("unset"))

    def expected(self, case: Case) -> Answer:
        if case.id == self.dies_at:
            raise self.error
        return self.says

    def check_alive(self) -> None:
        pass


@dataclass
class FakeSubject:
    """Answers by how many tokens it was given; an exception is raised, None is no answer."""

    answers: Mapping[int, Answer | Exception | None]
    given: list[tuple[int, ...]] = field(default_factory=list)

    def answer(
        self,
        case: Case,
        *,
        drafter: Drafter | None = None,
        depth: int | None = None,
        given: tuple[int, ...] = (),
    ) -> Answer | None:
        self.given.append(given)
        said = self.answers[len(given)]
        if isinstance(said, Exception):
            raise said
        return said


@dataclass
class FakeMeter:
    """Measures the same everywhere, and remembers where it was asked."""

    says: Measure | None
    asked: list[tuple[tuple[int, ...], int | None, int | None]] = field(default_factory=list)

    def measure(
        self, case: Case, prefix: tuple[int, ...], expected: int | None, actual: int | None
    ) -> Measure | None:
        self.asked.append((prefix, expected, actual))
        return self.says
