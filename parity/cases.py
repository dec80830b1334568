"""What a case is: one cell of the matrix with a question and somebody to believe.

Pure data, like `matrix`, which makes the cases: nothing here imports MLX.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from typing import Literal, NamedTuple

Lane = Literal["serial", "batch"]
Drafter = Literal["off", "ngram", "two-model", "mtp", "assistant", "dspark", "deepspec"]
Mode = Literal["greedy", "positional", "sequential"]
Style = Literal["once", "stream", "together", "again"]
"""How an HTTP subject is asked: one whole answer, in pieces, beside the other requests of the run,
or a second time, when it may reuse what it remembers of the first."""

LANES: tuple[Lane, ...] = ("serial", "batch")
DRAFTERS: tuple[Drafter, ...] = ("off", "ngram", "two-model")
READERS: tuple[Drafter, ...] = ("mtp", "assistant", "dspark", "deepspec")
"""Drafters that read the target's hidden states: each is made for one target."""
DEPTHS = (0, 1, 3, 8)
MAX_TOKENS = 24


class Source(StrEnum):
    """Where the expected answer comes from."""

    SERVER = "mlx_lm.server"
    SERVER_DRAFT = "mlx_lm.server --draft-model"
    GENERATE_STEP = "mlx_lm generate_step"
    OWN_PLAIN = "engine without drafter"
    OWN_ALONE = "engine with one row"


class Message(NamedTuple):
    """One turn of a chat."""

    role: str
    content: str


Prompted = str | tuple[Message, ...]
"""A text to continue, or a chat to answer through the model's own template."""


@dataclass(frozen=True, slots=True)
class Penalties:
    """What changes logits by the tokens before them, or by id; 0 is off.

    A context size counts the last tokens that are looked at, prompt included.
    """

    repetition_penalty: float = 0.0
    repetition_context_size: int = 20
    presence_penalty: float = 0.0
    presence_context_size: int = 20
    frequency_penalty: float = 0.0
    frequency_context_size: int = 20
    logit_bias: tuple[tuple[int, float], ...] = ()


NO_PENALTIES = Penalties()


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
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1
    penalties: Penalties = NO_PENALTIES

    @property
    def penalized(self) -> bool:
        return self.penalties != NO_PENALTIES

    @property
    def label(self) -> str:
        """The name in a case id; positional, the engine's default, is not written out."""
        return f"{self.name}+sequential" if self.mode == "sequential" else self.name


GREEDY = Sampling("greedy", "greedy", seed=1)

# Different contexts, so that one size in place of another shows. The ids are a letter and the
# space of the fixtures' tokenizer; any vocabulary has them.
ALL_PENALTIES = Penalties(1.5, 40, 2.0, 6, 1.0, 12, ((106, -4.0), (37, 2.0)))

# Each under both random policies.
_SAMPLED = (
    Sampling("temperature", "positional", 11, 1.2),
    Sampling("top-p", "positional", 12, 0.8, top_p=0.9),
    Sampling("top-k", "positional", 13, 1.2, top_k=5),
    Sampling("min-p", "positional", 14, 1.6, min_p=0.02),
    Sampling("xtc", "positional", 15, 1.0, xtc_probability=0.5, xtc_threshold=0.05),
)

_MODES: tuple[Mode, ...] = ("positional", "sequential")

SAMPLINGS: tuple[Sampling, ...] = (
    GREEDY,
    *(replace(sampling, mode=mode) for mode in _MODES for sampling in _SAMPLED),
)

PENALTIES = Sampling("penalties", "greedy", 2, penalties=ALL_PENALTIES)

# One field each: a penalty that is left out cannot hide behind another. Strong enough to change
# most texts of the fixture, which is a claim of the matrix.
SINGLES: tuple[Sampling, ...] = (
    Sampling("repetition-penalty", "greedy", 3, penalties=Penalties(repetition_penalty=2.0)),
    Sampling("presence-penalty", "greedy", 4, penalties=Penalties(presence_penalty=6.0)),
    Sampling("frequency-penalty", "greedy", 5, penalties=Penalties(frequency_penalty=2.5)),
    Sampling("logit-bias", "greedy", 6, penalties=Penalties(logit_bias=((106, -12.0), (37, 6.0)))),
    *(
        Sampling("penalties-drawn", mode, 16, 0.9, top_p=0.95, penalties=ALL_PENALTIES)
        for mode in _MODES
    ),
)


@dataclass(frozen=True, slots=True)
class Row:
    """One request of a group; `kind` tells it apart there.

    It is handed in when the engine has made `turn` turns; a server is sent all rows at once.
    """

    kind: str
    prompt: Prompted
    sampling: Sampling
    max_tokens: int
    turn: int = 0


@dataclass(frozen=True, slots=True)
class Cell:
    """One point of the product. `kind` names the prompt.

    `style` is how an HTTP subject is asked, which drafts as it likes; None for the engine. `rows`
    is the size of the group that the request is a row of; None for a request alone.
    """

    model: str
    lane: Lane
    drafter: Drafter
    depth: int
    sampling: Sampling
    kind: str
    style: Style | None = None
    rows: int | None = None

    @property
    def way(self) -> str:
        """All but the prompt: what a row of a table stands for."""
        label = self.sampling.label
        if self.style is not None:
            return f"{self.model}/{self.style}/{label}"
        group = "" if self.rows is None else f"/b{self.rows}"
        return f"{self.model}/{self.lane}/{self.drafter}/d{self.depth}/{label}{group}"

    @property
    def column(self) -> str:
        """What a table says of the lane: the size of a group, too, or how a server is asked."""
        if self.style is not None:
            return self.style
        return self.lane if self.rows is None else f"{self.lane} b{self.rows}"

    @property
    def id(self) -> str:
        return f"{self.way}/{self.kind}"


@dataclass(frozen=True, slots=True)
class Case:
    """A cell to run: what is asked, whom to believe, which law it proves.

    `traced`: drafts and accepted counts are compared with mlx-lm's as well.
    `finish` is what the case claims about the reference's end; None claims nothing.
    `group` are all rows of the group that the case is one of, in order.
    """

    cell: Cell
    prompt: Prompted
    source: Source
    law: str
    traced: bool = False
    max_tokens: int = MAX_TOKENS
    stop: tuple[str, ...] = ()
    finish: Literal["stop", "length"] | None = None
    group: tuple[Row, ...] = ()

    @property
    def id(self) -> str:
        return self.cell.id

    @property
    def row(self) -> int:
        """The number of the case's row in its group."""
        return [row.kind for row in self.group].index(self.cell.kind)

    @property
    def alone(self) -> Case:
        """The same request without companions."""
        return replace(self, cell=replace(self.cell, rows=None), group=())

    @property
    def together(self) -> tuple[Case, ...]:
        """The cases of all rows of the group, in order."""
        return tuple(
            replace(
                self,
                cell=replace(self.cell, kind=row.kind, sampling=row.sampling),
                prompt=row.prompt,
                max_tokens=row.max_tokens,
            )
            for row in self.group
        )

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

    model: str
    source: Source
    lane: Lane | None
    drafter: Drafter | None
    depth: int | None
    group: tuple[Row, ...]
    sampling: Sampling
    prompt: Prompted
    max_tokens: int
    stop: tuple[str, ...]
    traced: bool


def question_of(case: Case) -> Question:
    """The question behind a case. Only a server has lanes and companions, only who drafts a depth.

    Which drafter it is, our own stream knows only.
    """
    on_server = case.source in (Source.SERVER, Source.SERVER_DRAFT)
    drafts = case.source in (Source.SERVER_DRAFT, Source.OWN_ALONE)
    return Question(
        case.cell.model,
        case.source,
        case.cell.lane if on_server else None,
        case.cell.drafter if case.source is Source.OWN_ALONE else None,
        case.cell.depth if drafts else None,
        case.group if on_server else (),
        case.cell.sampling,
        case.prompt,
        case.max_tokens,
        case.stop,
        case.traced,
    )
