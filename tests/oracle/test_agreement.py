"""The oracles agree with each other: the server in both lanes, and mlx-lm in process."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from oracle.client import Client, Completion, Options, OracleError
from oracle.inprocess import Loaded, load, plain, sequential_sampler, speculative
from oracle.noise import Filters
from oracle.server import Server

TEXTS = ["a", "The quick brown fox", "Zażółć gęślą 日本語 🙂", "0123456789 " * 30]
NUM_TOKENS = 12
EACH_FILTER = [
    Filters(0.8),
    Filters(0.8, top_p=0.9),
    Filters(1.0, top_k=5),
    Filters(1.0, min_p=0.05),
]


@pytest.fixture
def plain_client(target_server: Server, target: Loaded) -> Client:
    return Client(target_server, eos_ids=target.eos_ids, encode=target.encode_bare)


@pytest.fixture
def draft_client(draft_server: Server, target: Loaded) -> Client:
    return Client(draft_server, eos_ids=target.eos_ids, encode=target.encode_bare)


@pytest.mark.parametrize("text", TEXTS, ids=["one", "ascii", "scripts", "long"])
def test_both_lanes_say_what_generate_step_says(
    plain_client: Client, target: Loaded, text: str
) -> None:
    """`lossless`, `logprobs`: greedy, both lanes; a seed forces the serial one, nothing else."""
    prompt = target.encode(text)
    run = plain(target, prompt, NUM_TOKENS)
    batch = plain_client.complete(text, max_tokens=NUM_TOKENS)
    serial = plain_client.complete(text, max_tokens=NUM_TOKENS, options=Options(seed=7))
    assert batch.tokens == serial.tokens == run.tokens
    assert batch.logprobs == pytest.approx(run.logprobs, abs=1e-5)
    assert serial.logprobs == pytest.approx(run.logprobs, abs=1e-5)
    assert batch.prompt_tokens == len(prompt)
    assert batch.cached_tokens == serial.cached_tokens == 0
    assert batch.text == serial.text


@pytest.mark.parametrize("filters", EACH_FILTER, ids=str)
def test_the_serial_lane_samples_as_mlx_lm_does_in_process(
    plain_client: Client, target: Loaded, filters: Filters
) -> None:
    """`oracle-sampled`: same seed, same tokens, for every filter."""
    run = plain(target, target.encode(TEXTS[1]), NUM_TOKENS, sequential_sampler(5, filters))
    answer = _ask(plain_client, filters)
    assert answer.tokens == run.tokens
    assert answer.finish_reason == run.finish_reason


@pytest.mark.parametrize("depth", [0, 1, 3])
@pytest.mark.parametrize("filters", [Filters(0.0), EACH_FILTER[1]], ids=str)
def test_a_draft_server_says_what_speculative_generate_step_says(
    draft_client: Client, target: Loaded, draft: Loaded, depth: int, filters: Filters
) -> None:
    """`lossless`, `oracle-sampled`: two models, greedy and sampled, at the request's depth."""
    prompt = target.encode(TEXTS[1])
    sampler = sequential_sampler(5, filters)
    run = speculative(target, draft, prompt, NUM_TOKENS, depth, sampler)
    answer = _ask(draft_client, filters, depth)
    assert answer.tokens == run.tokens
    assert answer.logprobs == pytest.approx(run.logprobs, abs=1e-5)
    assert answer.finish_reason == run.finish_reason


def test_asked_again_a_draft_server_without_prompt_cache_says_the_same(
    draft_client: Client,
) -> None:
    """`honest-gap`: `--prompt-cache-size 0` avoids D2, so a case may be asked repeatedly."""
    answers = {draft_client.complete(TEXTS[1], max_tokens=NUM_TOKENS).tokens for _ in range(3)}
    assert len(answers) == 1


def test_asked_again_a_draft_server_with_prompt_cache_says_something_else(
    pair: tuple[Path, Path], target: Loaded, draft: Loaded
) -> None:
    """`honest-gap`: D2 as its users meet it, exactly where the answer ended in a correction."""
    num_corrections = 0
    with Server(pair[0], draft=pair[1], prompt_cache_size=10) as server:
        client = Client(server, eos_ids=target.eos_ids)
        for max_tokens, salt in enumerate("ABCDEF", 6):  # no prompt finds another one's entry
            text = salt + TEXTS[1]
            run = speculative(target, draft, target.encode(text), max_tokens, 3)
            first, second = (
                client.complete(text, max_tokens=max_tokens, options=Options(num_draft_tokens=3))
                for _ in range(2)
            )
            assert (first.cached_tokens, second.cached_tokens) == (0, len(text) - 1)
            assert first.tokens == run.tokens
            assert (second.tokens == first.tokens) == run.from_draft[-1]
            num_corrections += not run.from_draft[-1]
    assert num_corrections


def test_a_chat_goes_through_the_template(plain_client: Client, target: Loaded) -> None:
    """The template of the test models only joins contents."""
    messages = [{"role": "user", "content": "The quick"}, {"role": "user", "content": " brown fox"}]
    answer = plain_client.chat(messages, max_tokens=NUM_TOKENS)
    assert answer.tokens == plain(target, target.encode(TEXTS[1]), NUM_TOKENS).tokens


@pytest.mark.parametrize("seed", [None, 1], ids=["batch", "serial"])
@pytest.mark.parametrize(
    ("prompt", "stop", "content", "text"),
    [
        ("J", [], "kél", "kél"),
        ("J", ["é"], "k", "k"),
        ("F", ["UV"], "g", "g"),
        ("F", ["gUV", "V"], "", ""),
        # What a stop makes the server drop: a space, half a character, the start of a stop string.
        ("A", [], "b ", "b"),
        ("C", [], "d�", "d"),
        ("F", ["UVW"], "gUV", "g"),
        ("F", ["UVW", "V"], "gU", "g"),
    ],
)
def test_where_a_stop_cuts_ids_and_text(
    chains_server: Server,
    chains: Path,
    seed: int | None,
    prompt: str,
    stop: list[str],
    content: str,
    text: str,
) -> None:
    """`stop`: the ids are whole where the served text is not (mlx-lm 0.32.2, both lanes)."""
    model = load(chains)
    client = Client(chains_server, eos_ids=model.eos_ids, encode=model.encode_bare)
    answer = client.complete(prompt, max_tokens=20, stop=stop, options=Options(seed=seed))
    assert model.tokenizer.decode(list(answer.tokens)) == content
    assert answer.text == text
    assert answer.finish_reason == "stop"
    assert len(answer.logprobs) == len(answer.tokens)


def test_a_first_space_is_never_served(chains_server: Server, chains: Path) -> None:
    """`stop`: mlx-lm's byte-level detokenizer drops it even at the end of the budget."""
    model = load(chains)
    client = Client(chains_server, eos_ids=model.eos_ids)
    answer = client.complete("b", max_tokens=1)
    assert (model.tokenizer.decode(list(answer.tokens)), answer.text) == (" ", "")
    assert answer.finish_reason == "length"


def test_a_dead_server_is_named_as_such(stand_in: dict[str, str], tmp_path: Path) -> None:
    """`mutants`: nobody takes a dead server for a silent one."""
    with Server(tmp_path, env=stand_in) as server:
        client = Client(server, eos_ids={0})
        os.kill(server.pid, signal.SIGKILL)
        while server.alive():
            time.sleep(0.01)
        with pytest.raises(OracleError, match=f"^mlx_lm.server died at {server.url}: "):
            client.complete("A", max_tokens=2)


def _ask(client: Client, filters: Filters, depth: int | None = None) -> Completion:
    options = Options(filters, seed=5, num_draft_tokens=depth)
    return client.complete(TEXTS[1], max_tokens=NUM_TOKENS, options=options)
