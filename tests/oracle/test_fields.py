"""Every sampling field of a request, through the server and in process, on the trained fixture.

Its greedy text comes back to what it said before, which a penalty then takes away.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from fixtures import drafter_dir, target_dir
from oracle.client import Client, Completion, Options
from oracle.inprocess import Loaded, Run, load, plain, sequential_sampler, speculative
from oracle.noise import GREEDY, Filters
from oracle.processors import NO_PROCESSORS, Processors
from oracle.server import Server

TEXT = "The quick brown fox jumps over the lazy dog and " * 3
NUM_TOKENS = 20
SEED = 5
EACH_PROCESSOR = [
    Processors(logit_bias=((40, 20.0), (103, -30.0))),
    Processors(repetition_penalty=1.5),
    Processors(repetition_penalty=1.5, repetition_context_size=12),
    Processors(repetition_penalty=1.5, repetition_context_size=0),
    Processors(repetition_penalty=0.6, repetition_context_size=4),
    Processors(presence_penalty=2.5, presence_context_size=12),
    Processors(presence_penalty=6.0, presence_context_size=0),
    Processors(frequency_penalty=1.5),
    Processors(frequency_penalty=0.7, frequency_context_size=0),
    Processors(((37, 1.5),), 1.2, 5, 0.5, 30, -0.25, 0),
]
ALL = EACH_PROCESSOR[-1]
XTC = [
    Filters(1.2, xtc_probability=0.5, xtc_threshold=0.05),
    Filters(1.0, 0.95, 6, 0.01, xtc_probability=1.0, xtc_threshold=0.02),
]
each_xtc = pytest.mark.parametrize("filters", XTC, ids=["coin", "every filter"])


@pytest.fixture(scope="module")
def trained() -> Loaded:
    return load(target_dir("dense"))


@pytest.fixture(scope="module")
def trained_draft() -> Loaded:
    return load(drafter_dir("dense-draft"))


@pytest.fixture(scope="module")
def client(trained: Loaded) -> Iterator[Client]:
    with Server(target_dir("dense")) as server, Client(server, eos_ids=trained.eos_ids) as client:
        yield client


@pytest.fixture(scope="module")
def drafting_client(trained: Loaded) -> Iterator[Client]:
    with (
        Server(target_dir("dense"), draft=drafter_dir("dense-draft")) as server,
        Client(server, eos_ids=trained.eos_ids) as client,
    ):
        yield client


def _assert_same(answer: Completion, run: Run) -> None:
    assert answer.tokens == run.tokens
    assert answer.logprobs == pytest.approx(run.logprobs, abs=1e-5)
    assert answer.finish_reason == run.finish_reason


@pytest.mark.parametrize("seed", [None, SEED], ids=["batch", "serial"])
@pytest.mark.parametrize("processors", EACH_PROCESSOR, ids=range(len(EACH_PROCESSOR)))
def test_both_lanes_process_logits_as_in_process(
    client: Client, trained: Loaded, processors: Processors, seed: int | None
) -> None:
    """`lossless`, `logprobs`: both see prompt and answer, and report the processed distribution."""
    prompt = trained.encode(TEXT)
    run = plain(trained, prompt, NUM_TOKENS, processors=processors)
    assert run.tokens != plain(trained, prompt, NUM_TOKENS).tokens
    options = Options(processors=processors, seed=seed)
    _assert_same(client.complete(TEXT, max_tokens=NUM_TOKENS, options=options), run)


@pytest.mark.parametrize("processors", [NO_PROCESSORS, ALL], ids=["alone", "processors"])
@each_xtc
def test_the_serial_lane_excludes_top_choices_as_in_process(
    client: Client, trained: Loaded, filters: Filters, processors: Processors
) -> None:
    """`oracle-sampled`: the coin comes before the draw."""
    prompt = trained.encode(TEXT)
    filters = replace(filters, xtc_special_tokens=trained.xtc_special_tokens)
    options = Options(filters, processors, SEED)
    answer = client.complete(TEXT, max_tokens=NUM_TOKENS, options=options)

    def run(filters: Filters) -> Run:
        sampler = sequential_sampler(SEED, filters)
        return plain(trained, prompt, NUM_TOKENS, sampler, processors=processors)

    _assert_same(answer, run(filters))
    assert answer.tokens != run(replace(filters, xtc_probability=0.0)).tokens


def test_the_server_spares_a_newline_and_eos(client: Client, trained: Loaded) -> None:
    """`oracle-sampled`: a newline that XTC would exclude at every step is said at every step."""
    (newline,) = trained.encode_bare("\n")
    processors = Processors(logit_bias=((newline, 12.0), (40, 10.0)))
    filters = Filters(0.2, xtc_probability=1.0, xtc_threshold=0.001)
    answer = client.complete(TEXT, max_tokens=4, options=Options(filters, processors, SEED))
    assert newline in answer.tokens
    spared = replace(filters, xtc_special_tokens=trained.xtc_special_tokens)
    for described, same in ((spared, True), (filters, False)):
        sampler = sequential_sampler(SEED, described)
        run = plain(trained, trained.encode(TEXT), 4, sampler, processors=processors)
        assert (run.tokens == answer.tokens) == same


@pytest.mark.parametrize("depth", [0, 3])
@each_xtc
def test_a_draft_server_tosses_one_coin_for_each_call(
    drafting_client: Client, trained: Loaded, trained_draft: Loaded, filters: Filters, depth: int
) -> None:
    """`oracle-sampled`: one for each draft step, one for the whole window."""
    filters = replace(filters, xtc_special_tokens=trained.xtc_special_tokens)
    sampler = sequential_sampler(SEED, filters)
    run = speculative(trained, trained_draft, trained.encode(TEXT), NUM_TOKENS, depth, sampler)
    options = Options(filters, seed=SEED, num_draft_tokens=depth)
    _assert_same(drafting_client.complete(TEXT, max_tokens=NUM_TOKENS, options=options), run)


def test_a_chat_takes_the_same_fields(client: Client, trained: Loaded) -> None:
    """The prompt that penalties see is what the template made."""
    messages = [{"role": "user", "content": TEXT}]
    prompt = trained.tokenizer.apply_chat_template(messages, add_generation_prompt=True)
    run = plain(trained, prompt, NUM_TOKENS, processors=ALL)
    answer = client.chat(messages, max_tokens=NUM_TOKENS, options=Options(processors=ALL))
    _assert_same(answer, run)


def test_greedy_reads_no_xtc(client: Client, trained: Loaded) -> None:
    """`lossless`: at temperature 0 no coin is tossed."""
    filters = replace(GREEDY, xtc_probability=1.0, xtc_threshold=0.0)
    answer = client.complete(TEXT, max_tokens=NUM_TOKENS, options=Options(filters, seed=SEED))
    _assert_same(answer, plain(trained, trained.encode(TEXT), NUM_TOKENS))
