"""What changes logits: seen by each processor, done to no other row, equal to mlx-lm's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import mlx.core as mx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlx_lm.generate import generate_step, speculative_generate_step
from mlx_lm.sample_utils import make_logits_processors, make_sampler

import fixtures
from engine import BadInput, DraftProvider, LogitsOptions, Request, Sampling, Target, generate
from engine.acceptance import walk
from engine.drafters.source import PrefillMode
from engine.host import read
from engine.processors import Processors, make_processors
from engine.rounds import Rounds, Row
from engine.sampling import Greedy, RowSampling, log_softmax

from .conftest import finish_of
from .puppet import Puppet, scripted
from .samplings import LOGITS
from .samplings import V as TARGET_V
from .test_rounds import Rows, Taker, ToyRows, V, groups, successor


class Recorder:
    """A processor that changes nothing and remembers the ids of each call."""

    def __init__(self) -> None:
        self.calls: list[mx.array] = []

    def __call__(self, tokens: mx.array, logits: mx.array) -> mx.array:
        self.calls.append(tokens)
        return logits

    def histories(self) -> list[list[int]]:
        return [read(tokens) for tokens in self.calls]


REACH = st.one_of(st.none(), st.integers(1, 9))


def assert_enough(seen: list[int], whole: list[int], reach: int | None) -> None:
    """The end of the whole history is there: all of it, or at least `reach` ids."""
    assert seen == whole[len(whole) - len(seen) :]
    assert len(seen) >= (len(whole) if reach is None else min(reach, len(whole)))


@given(groups(), REACH)
def test_a_processor_sees_the_prompt_and_what_was_emitted(
    rows: list[tuple[list[int], list[int], int, int]], reach: int | None
) -> None:
    """`lossless-sampled` (mlx-lm #1175): call i of a window gets prompt + emitted[:i].

    That holds wherever the walk arrives, for each row of the group.
    """
    target = ToyRows([known[:-1] for known, *_ in rows])
    recorders = [Recorder() for _ in rows]
    records = [
        Row(Taker(stop), frozenset(), known[:-1], known[-1], 0, budget)
        for known, _, budget, stop in rows
    ]
    sampling = RowSampling(
        [Greedy()] * len(rows), [Processors([recorder], reach) for recorder in recorders]
    )
    drafts = Rows([draft for _, draft, _, _ in rows])
    Rounds(target, drafts, sampling, records, depth=7, vocab_size=V).step()
    for (known, draft, budget, _), recorder in zip(rows, recorders, strict=True):
        samples = [successor([*known, *draft[:i]]) for i in range(len(draft) + 1)]
        emitted = walk(draft, samples, budget, frozenset()).emitted
        seen = recorder.histories()
        for i in range(len(emitted)):
            assert_enough(seen[i], [*known, *emitted[:i]], reach)


@given(st.lists(st.integers(0, V - 1), min_size=1, max_size=5), st.integers(1, 8), REACH)
def test_a_round_launched_ahead_sees_the_token_in_flight(
    known: list[int], budget: int, reach: int | None
) -> None:
    """`lossless`: without a drafter the next round is launched before this one is read."""
    recorder = Recorder()
    sampling = RowSampling([Greedy()], [Processors([recorder], reach)])
    row = Row(Taker(99), frozenset(), known[:-1], known[-1], 0, budget)
    rounds = Rounds(ToyRows([known[:-1]]), None, sampling, [row], depth=0, vocab_size=V)
    while not rounds.done:
        rounds.step()
    assert isinstance(row.consumer, Taker)
    assert len(row.consumer.tokens) == len(recorder.calls) == budget
    for i, seen in enumerate(recorder.histories()):
        assert_enough(seen, [*known, *row.consumer.tokens[:i]], reach)


@pytest.mark.parametrize("mode", ["tail-split", "full"])
def test_the_first_token_is_chosen_behind_the_whole_prompt(
    target: Target, prompt: tuple[int, ...], mode: PrefillMode
) -> None:
    """Penalties over everything count each prompt token, in both ways of starting."""
    options = LogitsOptions(frequency_penalty=3.0, frequency_context_size=0)
    got = finish_of(
        target, prompt, Puppet(lambda *_: [], mode), max_tokens=1, sampling=Sampling(logits=options)
    )
    logits = target.new_rows().forward(mx.array([prompt]))[0, -1]
    counts = mx.array([float(prompt.count(token)) for token in range(target.vocab_size)])
    expected = log_softmax(logits - 3.0 * counts)
    assert got.tokens == (int(mx.argmax(expected)),)
    assert got.logprobs == pytest.approx((float(mx.max(expected)),), abs=1e-3)


@given(
    options=LOGITS,
    known=st.lists(st.integers(0, TARGET_V - 1), max_size=30),
    window=st.lists(st.integers(0, TARGET_V - 1), min_size=1, max_size=4),
    seed=st.integers(0, 99),
)
def test_a_window_is_processed_as_its_positions_are(
    options: LogitsOptions, known: list[int], window: list[int], seed: int
) -> None:
    """mlx-lm's processors on the whole text, one position at a time; the input stays as it was.

    The last `reach` known ids are enough.
    """
    logits = mx.random.normal((len(window), TARGET_V), key=mx.random.key(seed))
    before = read(logits)
    processors = make_processors(options)
    assert (processors is None) == (not options.active)
    if processors is None:
        return
    enough = known if processors.reach is None else known[max(0, len(known) - processors.reach) :]
    got = processors.apply(logits, enough, mx.array(window, dtype=mx.uint32))
    assert read(logits) == before
    for i, row in enumerate(before):
        expected = mx.array([row])
        for function in theirs(options):
            expected = function(mx.array([*known, *window[: i + 1]]), expected)
        assert read(got[i]) == read(expected[0])


def test_rows_have_their_own_processors() -> None:
    """`solitude`: what one row asks for happens to that row; a row without pays nothing."""
    logits = mx.random.normal((3, 2, V), key=mx.random.key(1))
    options = [LogitsOptions(logit_bias=((4, 9.0),)), LogitsOptions(), LogitsOptions(2.0)]
    sampling = RowSampling([Greedy()] * 3, [make_processors(o) for o in options])
    window = mx.array([[1, 2], [1, 2], [1, 2]], dtype=mx.uint32)
    known = [[5, 6], [5, 6], [5, 6]]
    ids, logprobs = sampling.choose(logits, known, window, [0, 0, 0])
    assert sampling.reaches == (0, 0, 20)
    assert read(ids)[0] == [4, 4]
    for r, option in enumerate(options):
        alone = RowSampling([Greedy()], [make_processors(option)])
        own_ids, own = alone.choose(logits[r : r + 1], known[:1], window[:1], [0])
        assert read(own_ids[0]) == read(ids[r])
        assert read(own[0]) == read(logprobs[r])


def theirs(options: LogitsOptions) -> list[Any]:
    """mlx-lm's processors for the same request."""
    processors: list[Any] = make_logits_processors(
        logit_bias=dict(options.logit_bias),
        repetition_penalty=options.repetition_penalty,
        repetition_context_size=options.repetition_context_size,
        presence_penalty=options.presence_penalty,
        presence_context_size=options.presence_context_size,
        frequency_penalty=options.frequency_penalty,
        frequency_context_size=options.frequency_context_size,
    )
    return processors


def their_sampler(target: Target, sampling: Sampling) -> Any:
    """mlx-lm's sampler on the global key, seeded now, with the ids the server exempts from XTC."""
    if sampling.seed is not None:
        mx.random.seed(sampling.seed)
    newline = target.tokenizer.encode("\n")
    return make_sampler(
        sampling.temperature,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        top_k=sampling.top_k,
        xtc_probability=sampling.xtc_probability,
        xtc_threshold=sampling.xtc_threshold,
        xtc_special_tokens=newline + list(target.tokenizer.eos_token_ids),
    )


def until_eos(target: Target, steps: Any) -> tuple[list[int], list[float]]:
    ids, logprobs = [], []
    for token, distribution, *_ in steps:
        if token in target.eos_ids:
            break
        ids.append(int(token))
        logprobs.append(float(distribution[token]))
    return ids, logprobs


def assert_equal_to_mlx_lm(target: Target, prompt: Sequence[int], sampling: Sampling) -> None:
    """Our plain stream is `generate_step`'s: ids and log-probabilities of processed logits."""
    got = finish_of(target, prompt, sampling=sampling)
    steps = generate_step(
        mx.array(list(prompt)),
        target.model,
        max_tokens=24,
        sampler=their_sampler(target, sampling),
        logits_processors=theirs(sampling.logits),
    )
    ids, logprobs = until_eos(target, steps)
    assert list(got.tokens) == ids
    assert got.logprobs == pytest.approx(logprobs, abs=1e-5)


ONE_BY_ONE = [
    LogitsOptions(1.5),
    LogitsOptions(0.8, repetition_context_size=3),
    LogitsOptions(1.5, repetition_context_size=0),
    LogitsOptions(presence_penalty=2.0),
    LogitsOptions(presence_penalty=-1.0, presence_context_size=2),
    LogitsOptions(frequency_penalty=0.7),
    LogitsOptions(frequency_penalty=0.7, frequency_context_size=0),
    LogitsOptions(logit_bias=((37, 6.0), (101, -float("inf")), (0, -4.0))),
    LogitsOptions(1.2, 7, 0.5, 0, -0.3, 9, ((40, 2.0), (41, -2.0))),
]


@pytest.mark.parametrize("options", ONE_BY_ONE)
def test_plain_greedy_with_processors_is_mlx_lms(
    target: Target, prompt: tuple[int, ...], options: LogitsOptions
) -> None:
    """`oracle-greedy`: and none of these leaves the text as it was without them."""
    assert_equal_to_mlx_lm(target, prompt, Sampling(logits=options))
    changed = finish_of(target, prompt, sampling=Sampling(logits=options))
    assert changed.logprobs != finish_of(target, prompt).logprobs


XTC = Sampling(1.0, seed=3, rng="sequential", xtc_probability=0.5, xtc_threshold=0.05)
DRAWN = [
    XTC,
    replace(XTC, xtc_probability=1.0, xtc_threshold=0.0),
    replace(XTC, top_p=0.9, min_p=0.02, top_k=6),
    replace(XTC, temperature=1.5, seed=2**63, xtc_probability=0.3, xtc_threshold=0.2),
]


@pytest.mark.parametrize("options", [LogitsOptions(), *ONE_BY_ONE[-2:]])
@pytest.mark.parametrize("sampling", DRAWN)
def test_plain_sequential_is_mlx_lms(
    target: Target, prompt: tuple[int, ...], sampling: Sampling, options: LogitsOptions
) -> None:
    """`oracle-sampled`: coin, then token, both from the global key."""
    assert_equal_to_mlx_lm(target, prompt, replace(sampling, logits=options))


@pytest.mark.parametrize("depth", [1, 3, 5])
@pytest.mark.parametrize("sampling", DRAWN)
def test_two_model_sequential_with_xtc_is_mlx_lms(
    target: Target,
    two_model: DraftProvider,
    prompt: tuple[int, ...],
    sampling: Sampling,
    depth: int,
) -> None:
    """`oracle-sampled`: one coin for each draft step and one for a whole window."""
    request = Request(prompt, 24, sampling)
    events = list(generate(target, request, two_model, depth=depth))
    draft = Target.load(fixtures.drafter_dir("dense-draft"))
    steps = speculative_generate_step(
        mx.array(list(prompt)),
        target.model,
        draft.model,
        num_draft_tokens=depth,
        max_tokens=24,
        sampler=their_sampler(target, sampling),
        prefill_step_size=2048,
    )
    ids, logprobs = until_eos(target, steps)
    finish = events[-1]
    assert list(finish.tokens) == ids  # type: ignore[union-attr]
    assert finish.logprobs == pytest.approx(logprobs, abs=1e-5)  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"repetition_penalty": -0.1}, "repetition_penalty must be at least 0, .* got -0.1"),
        ({"repetition_penalty": float("nan")}, "repetition_penalty must be .* got nan"),
        ({"repetition_penalty": 1e31}, "repetition_penalty must be .* 1e-30..1e30, got 1e[+]31"),
        ({"presence_penalty": float("inf")}, "presence_penalty must be within .* got inf"),
        ({"frequency_penalty": float("nan")}, "frequency_penalty must be within .* got nan"),
        ({"repetition_context_size": -1}, "repetition_context_size must be between 0 .* got -1"),
        ({"presence_context_size": 2**31}, "presence_context_size must be .* got 2147483648"),
        ({"frequency_context_size": -2}, "frequency_context_size must be between 0 .* got -2"),
        (
            {"logit_bias": ((5, float("nan")),)},
            "logit_bias of id 5 must be a number of at most .* got nan",
        ),
        (
            {"logit_bias": ((5, float("inf")),)},
            "logit_bias of id 5 must be a number of at most .* got inf",
        ),
        ({"logit_bias": ((-5, 1.0),)}, "logit_bias ids must be at least 0, got -5"),
        ({"logit_bias": ((5, 1.0), (5, 2.0))}, "logit_bias names id 5 more than once"),
        ({"logit_bias": {5: 1.0}}, "must be a tuple of .* pairs, got {5: 1.0}"),
        ({"logit_bias": (5, 1.0)}, "must be a tuple of .* pairs"),
    ],
)
def test_bad_options_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(BadInput, match=message):
        LogitsOptions(**values)


def test_a_biased_id_must_be_in_the_vocabulary(target: Target) -> None:
    """Greedy requests too: the bias acts on them."""
    for token in (target.vocab_size - 1, target.vocab_size):
        request = Request((5,), 1, Sampling(logits=LogitsOptions(logit_bias=((token, 1.0),))))
        if token < target.vocab_size:
            list(generate(target, request))
        else:
            with pytest.raises(BadInput, match="below the vocabulary size 288, got 288"):
                generate(target, request)


def test_two_model_drafts_see_no_processor(
    target: Target, two_model: DraftProvider, prompt: tuple[int, ...]
) -> None:
    """A bias that forces one id on the target leaves the draft model's proposals alone."""
    forced = Sampling(logits=LogitsOptions(logit_bias=((37, 1000.0),)))
    got = finish_of(target, prompt, two_model, max_tokens=1, sampling=forced, depth=1)
    plain = finish_of(target, prompt, two_model, max_tokens=1, depth=1)
    assert got.tokens == (37,)
    assert got.rounds[0].draft == plain.rounds[0].draft != (37,)


def test_right_drafts_are_accepted_under_processors(
    target: Target, prompt: tuple[int, ...]
) -> None:
    """Not lossless by rejecting everything: drafts of the penalised text are all accepted."""
    sampling = Sampling(logits=LogitsOptions(1.3, presence_penalty=0.5, frequency_penalty=0.2))
    plain = finish_of(target, prompt, sampling=sampling)
    puppet = Puppet(scripted(plain.tokens, [[True] * 5]))
    got = finish_of(target, prompt, puppet, sampling=sampling, depth=5)
    assert got.tokens == plain.tokens
    assert got.statistics.rejected == 0
    assert got.statistics.accepted >= 5
