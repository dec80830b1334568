"""The matrix: plans of lane x drafter x depth x sampling x prompt, every cell filled or explained.

A plan says which cells there are for one model. A cell is a `Case`, an `Empty` with its reason, or
a `Hole`: nobody decided. `RULES` decides, first match wins; a hole fails
`python -m parity list --coverage`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Literal, NamedTuple, Protocol

from parity.cases import (
    DEPTHS,
    DRAFTERS,
    GREEDY,
    LANES,
    MAX_TOKENS,
    READERS,
    SAMPLINGS,
    Case,
    Cell,
    Drafter,
    Empty,
    Hole,
    Lane,
    Mode,
    Prompted,
    Row,
    Sampling,
    Source,
    Style,
)


class Prompt(Protocol):
    """What is asked; several prompts may share a kind, their names then tell them apart."""

    @property
    def kind(self) -> str: ...
    @property
    def name(self) -> str: ...
    @property
    def text(self) -> Prompted: ...


class Way(NamedTuple):
    """How a prompt is run: all of a cell but its model and prompt."""

    lane: Lane
    drafter: Drafter
    depth: int
    sampling: Sampling
    style: Style | None = None


@dataclass(frozen=True, slots=True)
class Block:
    """Every prompt in every way."""

    ways: tuple[Way, ...]
    prompts: tuple[Prompt, ...]
    max_tokens: int = MAX_TOKENS


@dataclass(frozen=True, slots=True)
class Grouping:
    """Groups of the first prompts, each prompt with a budget of its own, in every way.

    `turns` has the turns at which each group's rows are handed in. Where tokens are drawn, every
    row has a seed of its own.
    """

    ways: tuple[Way, ...]
    prompts: tuple[Prompt, ...]
    max_tokens: tuple[int, ...]
    turns: tuple[tuple[int, ...], ...]

    def group(self, way: Way, turns: tuple[int, ...]) -> tuple[Row, ...]:
        """The rows of one group."""
        labels = names(self.prompts[: len(turns)]).items()
        return tuple(
            Row(kind, text, _seeded(way.sampling, number), self.max_tokens[number], turns[number])
            for number, (kind, text) in enumerate(labels)
        )


def _seeded(sampling: Sampling, number: int) -> Sampling:
    # The first row's stream is that of the other cases.
    greedy = sampling.mode == "greedy"
    return sampling if greedy else replace(sampling, seed=sampling.seed + number)


@dataclass(frozen=True, slots=True)
class Plan:
    """All cells of one model.

    `claims_ends`: its answers to some kinds of prompt must end as `FINISHES` says.
    `traced`: whether it can be afforded to run mlx-lm's generators for their rounds as well.
    `extra` are its named cases; `on_demand` plans run only when a selector names them.
    """

    model: str
    blocks: tuple[Block, ...]
    extra: tuple[Extra, ...] = ()
    groupings: tuple[Grouping, ...] = ()
    claims_ends: bool = False
    traced: bool = True
    on_demand: bool = False


@dataclass(frozen=True, slots=True)
class Rule:
    """What becomes of the cells it matches; a field that is None matches everything.

    Exactly one of `source` (with the `law` it proves) and `reason` is given.
    """

    models: frozenset[str] | None = None
    lanes: frozenset[Lane] | None = None
    drafters: frozenset[Drafter] | None = None
    depths: frozenset[int] | None = None
    modes: frozenset[Mode] | None = None
    penalized: bool | None = None
    grouped: bool | None = None
    source: Source | None = None
    law: str = ""
    traced: bool = False
    reason: str = ""

    def __post_init__(self) -> None:
        if (self.source is None) != bool(self.reason) or (self.source is None) == bool(self.law):
            raise ValueError("a rule has a source and a law, or a reason")

    def matches(self, cell: Cell) -> bool:
        return (
            (self.models is None or cell.model in self.models)
            and (self.lanes is None or cell.lane in self.lanes)
            and (self.drafters is None or cell.drafter in self.drafters)
            and (self.depths is None or cell.depth in self.depths)
            and (self.modes is None or cell.sampling.mode in self.modes)
            and (self.penalized is None or cell.sampling.penalized is self.penalized)
            and (self.grouped is None or (cell.rows is not None) is self.grouped)
        )


DRAFT_ORACLES = frozenset({"dense", "smollm2", "smollm2-f32"})
"""Models on which mlx-lm's own speculation is an oracle: of full attention, so that its rewinding
works (known deviation D1), known to be so. Others are held to plain text."""

RULES: tuple[Rule, ...] = (
    Rule(
        drafters=frozenset({"off"}),
        depths=frozenset({1, 3, 8}),
        reason="drafter off drafts nothing: depth 0 is all there is",
    ),
    Rule(
        grouped=True,
        drafters=frozenset({"off"}),
        modes=frozenset({"greedy"}),
        source=Source.SERVER,
        law="lossless, solitude",
    ),
    Rule(
        grouped=True,
        drafters=frozenset({"off"}),
        modes=frozenset({"positional"}),
        source=Source.GENERATE_STEP,
        law="lossless-sampled, solitude",
    ),
    # What a drafting row says alone, other cases compare with mlx-lm.
    Rule(
        grouped=True,
        drafters=frozenset({"ngram", "two-model", *READERS}),
        source=Source.OWN_ALONE,
        law="solitude",
    ),
    Rule(
        lanes=frozenset({"batch"}),
        modes=frozenset({"positional", "sequential"}),
        reason="the batch lane takes no seed (one would move the request to the serial lane): "
        "its sampled streams cannot be repeated",
    ),
    Rule(
        drafters=frozenset({"ngram"}),
        depths=frozenset({1, 3, 8}),
        modes=frozenset({"sequential"}),
        reason="no oracle: mlx-lm has no n-gram drafter, and in its order a stream drafted "
        "this way differs from the plain one by construction",
    ),
    Rule(
        lanes=frozenset({"batch"}),
        modes=frozenset({"greedy"}),
        source=Source.SERVER,
        law="lossless",
    ),
    Rule(
        drafters=frozenset({"off", "ngram", *READERS}),
        modes=frozenset({"greedy"}),
        source=Source.SERVER,
        law="lossless",
    ),
    # Under speculation mlx-lm hands its penalties another history (known deviation D5).
    Rule(
        drafters=frozenset({"two-model"}),
        modes=frozenset({"greedy"}),
        penalized=True,
        source=Source.OWN_PLAIN,
        law="lossless",
    ),
    Rule(
        drafters=frozenset({"two-model"}),
        modes=frozenset({"sequential"}),
        penalized=True,
        reason="no oracle: with penalties mlx-lm's speculation is wrong (D5), and in its order a "
        "stream drafted this way differs from the plain one by construction",
    ),
    Rule(
        models=DRAFT_ORACLES,
        drafters=frozenset({"two-model"}),
        modes=frozenset({"greedy"}),
        source=Source.SERVER_DRAFT,
        law="lossless, oracle-trace",
        traced=True,
    ),
    Rule(
        drafters=frozenset({"two-model"}),
        modes=frozenset({"greedy"}),
        source=Source.SERVER,
        law="lossless",
    ),
    Rule(
        drafters=frozenset({"off", "ngram"}),
        modes=frozenset({"sequential"}),
        source=Source.SERVER,
        law="oracle-sampled",
    ),
    # The trace costs a second oracle run: at one depth it shows what there is to see.
    Rule(
        models=DRAFT_ORACLES,
        drafters=frozenset({"two-model"}),
        depths=frozenset({3}),
        modes=frozenset({"sequential"}),
        source=Source.SERVER_DRAFT,
        law="oracle-sampled, oracle-trace",
        traced=True,
    ),
    Rule(
        drafters=frozenset({"two-model"}),
        modes=frozenset({"sequential"}),
        source=Source.SERVER_DRAFT,
        law="oracle-sampled",
    ),
    Rule(
        drafters=frozenset({"off"}),
        modes=frozenset({"positional"}),
        source=Source.GENERATE_STEP,
        law="lossless-sampled",
    ),
    Rule(
        drafters=frozenset({"ngram", "two-model", *READERS}),
        modes=frozenset({"positional"}),
        source=Source.OWN_PLAIN,
        law="lossless-sampled",
    ),
)


# How greedy answers to some kinds of prompt must end, or the kind is not what it is called.
FINISHES: dict[str, Literal["stop", "length"]] = {"early-stop": "stop", "repetition": "length"}


def decide(
    cell: Cell,
    prompt: Prompted,
    rules: Sequence[Rule] = RULES,
    *,
    max_tokens: int = MAX_TOKENS,
    claims_ends: bool = False,
    traced: bool = True,
) -> Case | Empty | Hole:
    """Fill one cell by the first rule that matches it."""
    for rule in rules:
        if rule.matches(cell):
            if rule.source is None:
                return Empty(cell, rule.reason)
            ends = claims_ends and cell.sampling == GREEDY
            return Case(
                cell,
                prompt,
                rule.source,
                rule.law if traced else rule.law.removesuffix(", oracle-trace"),
                rule.traced and traced,
                max_tokens,
                finish=FINISHES.get(cell.kind) if ends else None,
            )
    return Hole(cell)


def names(prompts: Iterable[Prompt]) -> dict[str, Prompted]:
    """Prompts by the last part of a case id: the kind, or kind.name where a kind has several."""
    prompts = tuple(prompts)
    kinds = [str(prompt.kind) for prompt in prompts]
    labels = [
        kind if kinds.count(kind) == 1 else f"{kind}.{prompt.name}"
        for kind, prompt in zip(kinds, prompts, strict=True)
    ]
    if len(set(labels)) != len(labels):
        raise ValueError(f"two prompts share a kind and a name: {sorted(labels)}")
    return {label: prompt.text for label, prompt in zip(labels, prompts, strict=True)}


def cells(plan: Plan, rules: Sequence[Rule] = RULES) -> tuple[Case | Empty | Hole, ...]:
    """All cells of a plan, decided, without its named cases."""
    return (*_single_cells(plan, rules), *_grouped_cells(plan, rules))


def _grouped_cells(plan: Plan, rules: Sequence[Rule]) -> Iterator[Case | Empty | Hole]:
    for grouping in plan.groupings:
        for way, turns in product(grouping.ways, grouping.turns):
            group = grouping.group(way, turns)
            for row in group:
                cell = Cell(
                    plan.model,
                    way.lane,
                    way.drafter,
                    way.depth,
                    row.sampling,
                    row.kind,
                    rows=len(group),
                )
                decided = decide(
                    cell, row.prompt, rules, max_tokens=row.max_tokens, traced=plan.traced
                )
                yield replace(decided, group=group) if isinstance(decided, Case) else decided


def _single_cells(plan: Plan, rules: Sequence[Rule]) -> tuple[Case | Empty | Hole, ...]:
    return tuple(
        decide(
            Cell(plan.model, way.lane, way.drafter, way.depth, way.sampling, kind, way.style),
            prompt,
            rules,
            max_tokens=block.max_tokens,
            claims_ends=plan.claims_ends,
            traced=plan.traced,
        )
        for block in plan.blocks
        for way in block.ways
        for kind, prompt in names(block.prompts).items()
    )


def matrix(plans: Iterable[Plan]) -> tuple[Case, ...]:
    """Every case there is: those of each plan's cells and then its named ones."""
    return tuple(
        case
        for plan in plans
        for case in (*(c for c in cells(plan) if isinstance(c, Case)), *extras(plan))
    )


def whole_product() -> tuple[Way, ...]:
    """Every lane, drafter, depth and sampling."""
    return tuple(Way(*way) for way in product(LANES, DRAFTERS, DEPTHS, SAMPLINGS))


@dataclass(frozen=True, slots=True)
class Extra:
    """A named case outside the product: one prompt with a stop string or a budget of its own."""

    kind: str
    prompt: str
    stop: tuple[str, ...] = ()
    max_tokens: int = MAX_TOKENS
    finish: Literal["stop", "length"] | None = None


# Strings and budgets are cut to what the fixtures say; one that no longer fits fails its claim.
EXTRAS: tuple[Extra, ...] = (
    # "en hen turns around and ": the string begins in one n-gram burst and ends in another.
    Extra("stop-across", "repetition", stop=("n turn",), finish="stop"),
    # "f frost at night. After ": the string ends inside a two-model burst that was accepted whole.
    Extra("stop-inside", "novel", stop=("After", "ght"), finish="stop"),
    # "森, dog = 犬, cat = ": a character of three tokens. The string takes the space in front of it
    # along, which mlx_lm.server would drop from the text otherwise (known deviation D21).
    Extra("stop-multibyte", "utf8", stop=(" = 犬",), finish="stop"),
    # The budget ends in what might have become the string, and the text is given out after all.
    Extra("stop-unmet", "repetition", stop=("and around",), finish="length"),
    Extra("budget-1", "novel", max_tokens=1, finish="length"),
    Extra("budget-1-one-token", "one-token", max_tokens=1, finish="length"),
    # " The sailor." and then EOS: the budget ends right before it, and with it.
    Extra("budget-before-eos", "early-stop", max_tokens=12, finish="length"),
    Extra("budget-with-eos", "early-stop", max_tokens=13, finish="stop"),
)

# Where the extras run: deep enough that a stop string lies inside one burst.
EXTRA_CELLS: tuple[tuple[Lane, Drafter, int], ...] = (
    ("serial", "off", 0),
    ("serial", "ngram", 8),
    ("serial", "two-model", 3),
    ("serial", "two-model", 8),
    ("batch", "ngram", 8),
    ("batch", "two-model", 3),
)


def extras(plan: Plan) -> tuple[Case, ...]:
    """The named cases of a plan, greedy, on every cell of `EXTRA_CELLS`."""
    texts = {name: text for block in plan.blocks for name, text in names(block.prompts).items()}
    cases = []
    for extra in plan.extra:
        for lane, drafter, depth in EXTRA_CELLS:
            cell = Cell(plan.model, lane, drafter, depth, GREEDY, extra.kind)
            decided = decide(cell, texts[extra.prompt])
            assert isinstance(decided, Case), f"{cell.id} has no oracle"
            cases.append(
                replace(
                    decided,
                    law=f"{decided.law}, stop" if extra.stop else decided.law,
                    # mlx-lm's generators know no stop strings.
                    traced=decided.traced and not extra.stop,
                    max_tokens=extra.max_tokens,
                    stop=extra.stop,
                    finish=extra.finish,
                )
            )
    return tuple(cases)
