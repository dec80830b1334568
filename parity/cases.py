"""What a case is: one cell of the matrix with a question and somebody to believe.

Pure data, like `matrix`, which makes the cases: nothing here imports MLX.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Literal, NamedTuple

Lane = Literal["serial", "batch"]
Drafter = Literal["off", "ngram", "two-model"]
Mode = Literal["greedy", "positional", "sequential"]

LANES: tuple[Lane, ...] = ("serial", "batch")
DRAFTERS: tuple[Drafter, ...] = ("off", "ngram", "two-model")
DEPTHS = (0, 1, 3, 8)
MAX_TOKENS = 24


class Source(StrEnum):
    """Where the expected answer comes from."""

    SERVER = "mlx_lm.server"
    SERVER_DRAFT = "mlx_lm.server --draft-model"
    GENERATE_STEP = "mlx_lm generate_step"
    OWN_PLAIN = "engine without drafter"


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are drawn; 0 is off. `seed` also picks the server's serial lane under greedy."""

    name: str
    mode: Mode
    seed: int
    temperature: float = 0.0
    top_p: float = 0.0
    top_k: int = 0
    min_p: float = 0.0

    @property
    def label(self) -> str:
        """The name in a case id; positional, the engine's default, is not written out."""
        return f"{self.name}+sequential" if self.mode == "sequential" else self.name


GREEDY = Sampling("greedy", "greedy", seed=1)

# (name, seed, temperature, top_p, top_k, min_p), each under both random policies.
_SAMPLED = (
    ("temperature", 11, 1.2, 0.0, 0, 0.0),
    ("top-p", 12, 0.8, 0.9, 0, 0.0),
    ("top-k", 13, 1.2, 0.0, 5, 0.0),
    ("min-p", 14, 1.6, 0.0, 0, 0.02),
)

_MODES: tuple[Mode, ...] = ("positional", "sequential")

SAMPLINGS: tuple[Sampling, ...] = (
    GREEDY,
    *(Sampling(row[0], mode, *row[1:]) for mode in _MODES for row in _SAMPLED),
)


@dataclass(frozen=True, slots=True)
class Cell:
    """One point of the product. `kind` names the prompt."""

    lane: Lane
    drafter: Drafter
    depth: int
    sampling: Sampling
    kind: str

    @property
    def id(self) -> str:
        label = self.sampling.label
        return f"{self.lane}/{self.drafter}/d{self.depth}/{label}/{self.kind}"


@dataclass(frozen=True, slots=True)
class Case:
    """A cell to run: what is asked, whom to believe, which law it proves.

    `traced`: drafts and accepted counts are compared with the oracle's as well.
    `finish` is what the case claims about the reference's end; None claims nothing.
    """

    cell: Cell
    prompt: str
    source: Source
    law: str
    traced: bool = False
    max_tokens: int = MAX_TOKENS
    stop: tuple[str, ...] = ()
    finish: Literal["stop", "length"] | None = None

    @property
    def id(self) -> str:
        return self.cell.id

    @property
    def seed(self) -> int:
        return self.cell.sampling.seed

    @property
    def digest(self) -> str:
        """Changes with anything that is asked; ties a stored result to the case it answers."""
        text = json.dumps(asdict(self), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


@dataclass(frozen=True, slots=True)
class Empty:
    """A cell left out on purpose."""

    cell: Cell
    reason: str


@dataclass(frozen=True, slots=True)
class Hole:
    """A cell that no rule decides: a defect of the table."""

    cell: Cell


class Question(NamedTuple):
    """All that an expected answer depends on; cases with equal questions share one run."""

    source: Source
    lane: Lane | None
    depth: int | None
    sampling: Sampling
    prompt: str
    max_tokens: int
    stop: tuple[str, ...]
    traced: bool


def question_of(case: Case) -> Question:
    """The question behind a case. Only a server has lanes, only a drafting one a depth."""
    on_server = case.source in (Source.SERVER, Source.SERVER_DRAFT)
    return Question(
        case.source,
        case.cell.lane if on_server else None,
        case.cell.depth if case.source is Source.SERVER_DRAFT else None,
        case.cell.sampling,
        case.prompt,
        case.max_tokens,
        case.stop,
        case.traced,
    )
