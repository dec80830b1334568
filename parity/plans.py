"""Which cases there are for which model: the fixtures, the real model, and whatever is named."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import fixtures
from fixtures import smollm2_prompts
from parity.cases import (
    GREEDY,
    PENALTIES,
    SAMPLINGS,
    SINGLES,
    Case,
    Drafter,
    Message,
    Prompted,
    Sampling,
    Style,
)
from parity.matrix import (
    EXTRAS,
    Block,
    Grouping,
    Plan,
    Prompt,
    Way,
    matrix,
    whole_product,
)

DENSE = "dense"
# Every other kind of state: a ring of window columns, recurrent layers.
FAMILIES = ("sliding", "hybrid", "mla")
# Tokens that a layer of `sliding` sees.
WINDOW = 32
# The dense fixture with quantized keys and values, by bits.
KV_BITS = {"dense-kv8": 8, "dense-kv4": 4}
SMOLLM2, SMOLLM2_F32 = "smollm2", "smollm2-f32"
GIVEN = "target"
"""How a model from the command line is called in case ids."""

TOP_P = next(sampling for sampling in SAMPLINGS if sampling.label == "top-p")

READERS_OF: Mapping[str, tuple[Drafter, ...]] = {
    DENSE: ("dspark",),
    "sliding": ("assistant", "deepspec"),
    "hybrid": ("mtp",),
    "mla": ("mtp",),
}
"""Which drafters that read hidden states each fixture has."""

GROUP_TURNS = ((0,), (0, 3), (0, 0, 1, 4), (0, 0, 1, 1, 3, 4, 5, 6))
"""When the rows of groups of 1, 2, 4 and 8 are handed in: some into a cohort whose prompts are
being processed, some when others decode."""

GROUP_DRAFTERS: tuple[tuple[Drafter, int], ...] = (("off", 0), ("ngram", 3), ("two-model", 3))
"""Drafter and depth of a group."""

GROUP_KINDS = (
    *("novel", "utf8", "repetition", "early-stop"),
    *("three-windows", "one-token", "scripts", "chat-like"),
)
"""Rows in this order, where a fixture has such a prompt: the first two accept different counts."""

GROUP_TOKENS = (24, 15, 20, 9, 12, 16, 7, 11)
"""Each row's budget, so that rows leave at different times."""


READER_TOKENS = (24, 6, *GROUP_TOKENS[2:])
READER_TURNS = ((0, 1), *GROUP_TURNS[2:])
"""For drafters that read hidden states, which are so often right that rows end together."""


@dataclass(frozen=True, slots=True)
class Text:
    """A prompt outside the fixtures."""

    kind: str
    text: Prompted

    @property
    def name(self) -> str:
        return self.kind


CHAT = (
    Text("chat", (Message("user", "Name: Anna. Say it again."),)),
    Text(
        "chat-turns",
        (
            Message("system", "Answer in one line."),
            Message("user", "cat = 猫, dog = ?"),
            Message("assistant", "犬"),
            Message("user", "And a bird?"),
        ),
    ),
)

# Short ones, in several scripts, that most models continue with some certainty.
BUILT_IN = (
    Text("counting", "1, 2, 3, 4, 5, 6,"),
    Text("capital", "The capital of France is"),
    Text("json", '{"name": "Anna", "age": 31, "city": "Oslo"}\n{"name": "Boris", "age"'),
    Text("translation", "cat = 猫, dog = 犬, bird ="),
    Text("code", "def add(a, b):\n    return a + b\n\ndef sub(a, b):\n"),
)


# Of a real model a token costs much: two short prompts of which each drafter guesses something.
PAIR = (Text("words", "one two three, one two"), Text("numbers", "1, 2, 3,"))
PAIR_TOKENS = (5, 3)
PAIR_TURNS = (0, 1)


def ways_of(sampling: Sampling, depth: int = 3) -> tuple[Way, ...]:
    """One way for each drafter and lane."""
    return (
        Way("serial", "off", 0, sampling),
        Way("serial", "ngram", depth, sampling),
        Way("serial", "two-model", depth, sampling),
        Way("batch", "off", 0, sampling),
        Way("batch", "ngram", depth, sampling),
        Way("batch", "two-model", depth, sampling),
    )


def groupings(model: str) -> tuple[Grouping, ...]:
    """Groups of a fixture's prompts with every drafter; drawn ones of every size on one model.

    How tokens are drawn knows nothing of the kind of state, and time is short.
    """
    by_kind = {str(prompt.kind): prompt for prompt in fixtures.prompts(model)}
    named: list[Prompt] = [by_kind[kind] for kind in GROUP_KINDS if kind in by_kind]
    prompts = (*named, *BUILT_IN)[: len(GROUP_TOKENS)]
    sizes = {GREEDY: GROUP_TURNS, TOP_P: GROUP_TURNS if model == DENSE else GROUP_TURNS[2:3]}
    readers = tuple(
        Way("batch", drafter, 3, sampling)
        for drafter in READERS_OF[model]
        for sampling in (GREEDY, TOP_P)
    )
    return (
        *(
            Grouping(group_ways(sampling), prompts, GROUP_TOKENS, turns)
            for sampling, turns in sizes.items()
        ),
        Grouping(readers, prompts, READER_TOKENS, READER_TURNS),
    )


def readers(model: str) -> tuple[Way, ...]:
    """A fixture's drafters that read its hidden states, with one row."""
    return tuple(
        Way("serial", drafter, 3, sampling)
        for drafter in READERS_OF[model]
        for sampling in (GREEDY, TOP_P)
    )


def group_ways(sampling: Sampling) -> tuple[Way, ...]:
    """One way for each drafter of a group."""
    return tuple(Way("batch", drafter, depth, sampling) for drafter, depth in GROUP_DRAFTERS)


def dense() -> Plan:
    """The fixture on which everything is tried."""
    prompts = fixtures.prompts()
    singles = tuple(way for sampling in SINGLES for way in ways_of(sampling)[:4])
    penalties = tuple(way for depth in (1, 8) for way in ways_of(PENALTIES, depth)[:4])
    return Plan(
        DENSE,
        (
            Block(whole_product(), prompts),
            Block(tuple(dict.fromkeys(penalties)), prompts),
            Block(singles, prompts),
            Block(ways_of(GREEDY), CHAT),
            Block(readers(DENSE), prompts),
        ),
        EXTRAS,
        groupings(DENSE),
        claims_ends=True,
    )


def family(model: str) -> Plan:
    """A fixture with another kind of state: both lanes, every drafter, shallow and deep."""
    greedy = (*ways_of(GREEDY), Way("serial", "ngram", 8, GREEDY), *two_model(GREEDY, 1, 8))
    sampled = ways_of(TOP_P)[:3]
    prompts = fixtures.prompts(model)
    blocks = (Block(greedy, prompts), Block(sampled, prompts), Block(readers(model), prompts))
    return Plan(model, blocks, groupings=groupings(model), claims_ends=True)


def two_model(sampling: Sampling, *depths: int) -> tuple[Way, ...]:
    """The two-model drafter in the serial lane, at several depths."""
    return tuple(Way("serial", "two-model", depth, sampling) for depth in depths)


def quantized(model: str) -> Plan:
    """The dense fixture as `mlx_lm.server --kv-bits` runs it, which is serially."""
    prompts = fixtures.prompts(DENSE)
    return Plan(model, (Block((*ways_of(GREEDY)[:3], *two_model(GREEDY, 8)), prompts),))


def smollm2(model: str = SMOLLM2, *, on_demand: bool = False) -> Plan:
    """A real model: few tokens, because one takes a fifth of a second on two cores."""
    kept = smollm2_prompts()
    texts = tuple(Text(one["name"], one["text"]) for one in kept["prompts"])
    chats = tuple(
        Text(one["name"], tuple(Message(**turn) for turn in one["messages"]))
        for one in kept["chat"]
    )
    tokens = len(kept["prompts"][0]["ids"])
    plain = (Way("serial", "off", 0, GREEDY),)
    blocks = (Block(ways_of(GREEDY), texts, tokens), Block(plain, chats, tokens))
    pair = Grouping(group_ways(GREEDY), PAIR, PAIR_TOKENS, (PAIR_TURNS,))
    return Plan(model, blocks, groupings=(pair,), traced=False, on_demand=on_demand)


def given(prompts: Sequence[Prompt], max_tokens: int, depth: int) -> Plan:
    """A model from the command line: few cases, because it may be large."""
    # Sampled streams of the batch lane cannot be repeated; matrix.RULES says so.
    sampled = tuple(way for way in ways_of(TOP_P, depth) if way.lane == "serial")
    ways = (*ways_of(GREEDY, depth), *sampled)
    return Plan(GIVEN, (Block(ways, tuple(prompts), max_tokens),))


def served(prompts: Sequence[Prompt], max_tokens: int) -> Plan:
    """An HTTP subject that serves a model from the command line."""
    styles: tuple[Style, ...] = ("once", "stream", "together", "again")
    ways = tuple(Way("batch", "off", 0, GREEDY, style) for style in styles)
    return Plan(GIVEN, (Block(ways, tuple(prompts), max_tokens),))


def known() -> tuple[Plan, ...]:
    """The plans of the models this project brings along."""
    return (
        dense(),
        *map(family, FAMILIES),
        *map(quantized, KV_BITS),
        smollm2(),
        smollm2(SMOLLM2_F32, on_demand=True),
    )


def catalogue(expression: str | None = None) -> tuple[Case, ...]:
    """The cases that a selector looks at: plans on demand only where it names their model."""
    named = expression or ""
    return matrix(plan for plan in known() if not plan.on_demand or plan.model in named)
