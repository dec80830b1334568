"""Margins on the fixtures: what a dispute is worth, and what a recording rests on."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fixtures import drafter_dir, target_dir
from oracle.inprocess import Loaded, PositionalSampler, load, plain
from oracle.margins import greedy_margins, replay
from oracle.noise import Filters, as_floats
from parity.asking import encode
from parity.cases import Case
from parity.errors import Unsound
from parity.plans import catalogue
from parity.probe import Probe
from parity.trace import Answer, Round
from tests.parity.fakes import answer


@pytest.fixture(scope="module")
def target() -> Loaded:
    return load(target_dir("dense"))


@pytest.fixture(scope="module")
def draft() -> Loaded:
    return load(drafter_dir("dense-draft"))


@pytest.fixture(scope="module")
def probe(target: Loaded, draft: Loaded) -> Probe:
    return Probe(target, draft)


def find(case_id: str) -> Case:
    """The case of this id."""
    return next(case for case in catalogue() if case.id == case_id)


EARLY_STOP = "dense/serial/two-model/d3/greedy/early-stop"


def test_a_dispute_is_worth_the_distance_of_the_lower_token(target: Loaded, probe: Probe) -> None:
    """The best one against any other: how far that other lies below it."""
    case = find(EARLY_STOP)
    scores = as_floats(replay(target.model, encode(target, case.prompt), [0])[0])
    best, second, third = (int(token) for token in scores.argsort()[::-1][:3])
    for one, other in ((best, second), (second, best), (second, third)):
        measured = probe.measure(case, (), one, other)
        assert measured is not None
        lower = min(scores[one], scores[other])
        assert measured.margin == pytest.approx(scores[best] - lower, abs=1e-5)
        assert measured.delta < 1e-5, "float32 windows round alike on the CPU"


def test_a_drawn_token_is_disputed_in_the_space_of_the_draw(target: Loaded, probe: Probe) -> None:
    """Sampled: filtered log-probabilities over the temperature, plus the noise of that step."""
    case = find("dense/serial/off/d0/temperature/novel")
    prompt = encode(target, case.prompt)
    sampler = PositionalSampler(case.seed, Filters(case.cell.sampling.temperature))
    tokens = plain(target, prompt, case.max_tokens, sampler).tokens
    for position in range(6):
        prefix = tokens[:position]
        scores = as_floats(replay(target.model, [*prompt, *prefix], [0])[0])
        for token in {tokens[position], *map(int, scores.argsort()[::-1][:3])}:
            measured = probe.measure(case, prefix, token, token)
            assert measured is not None
            assert (measured.margin == 0) == (token == tokens[position])


def test_what_was_not_drawn_or_cannot_be_replayed_has_no_margin(probe: Probe) -> None:
    """A stop string's end, and draws from the global key."""
    stopped = replace(find(EARLY_STOP), stop=("x",))
    assert probe.measure(stopped, (), None, 97) is None
    assert probe.measure(stopped, (), 98, 97) is not None
    sequential = find("dense/serial/two-model/d3/top-p+sequential/novel")
    assert probe.measure(sequential, (), 98, 97) is None


def plain_answer(target: Loaded, case: Case) -> tuple[Answer, tuple[int, ...]]:
    """The plain greedy answer to a case, told as rounds of one token, and all that was decided."""
    run = plain(target, encode(target, case.prompt), case.max_tokens)
    rounds = tuple(Round((), 0, (token,)) for token in run.tokens)
    said = answer(run.tokens, finish=run.finish_reason, rounds=(*rounds, Round((), 0, ())))
    return said, run.generated


def test_the_eos_is_a_decision_like_any_other(target: Loaded, probe: Probe) -> None:
    """portable: the end of a text rests on a margin too."""
    case = find("dense/serial/ngram/d3/greedy/early-stop")
    said, generated = plain_answer(target, case)
    assert len(generated) == len(said.ids) + 1
    all_of_them = greedy_margins(target.model, encode(target, case.prompt), generated)
    # Only the EOS stays: what comes before it is part of the prompt then.
    asked = replace(case, prompt=f"{case.prompt}" + "".join(chr(token - 5) for token in said.ids))
    end = replace(said, ids=(), rounds=(Round((), 0, ()),), completion_tokens=1)
    assert probe.margins(asked, end).text == pytest.approx(all_of_them[-1], rel=1e-3)
    assert probe.margins(case, said).text == pytest.approx(min(all_of_them))
    assert probe.margins(case, said).trace is None


def test_a_trace_rests_on_the_drafts_up_to_the_first_mismatch(
    target: Loaded, draft: Loaded, probe: Probe
) -> None:
    """portable: the drafter's own margins; behind a mismatch nothing shows in the trace."""
    case = find(EARLY_STOP)
    said, _ = plain_answer(target, case)
    prompt = encode(draft, case.prompt)
    proposed = plain(draft, prompt, 3).generated
    margins = greedy_margins(draft.model, prompt, proposed)
    for accepted in (0, 1, 2):
        told = Round(proposed, accepted, said.rounds[0].emitted)
        of_first = probe.margins(case, replace(said, rounds=(told, *said.rounds[1:])))
        assert of_first.trace == pytest.approx(min(margins[: accepted + 1]))
    assert len({min(margins[: accepted + 1]) for accepted in (0, 1, 2)}) > 1


def test_a_run_that_a_replay_contradicts_is_not_recorded(target: Loaded, probe: Probe) -> None:
    """Its margins would be those of another text."""
    case = find("dense/serial/ngram/d3/greedy/early-stop")
    said, _ = plain_answer(target, case)
    other = Round((), 0, ((said.ids[0] + 1) % 256,))
    with pytest.raises(Unsound):
        probe.margins(case, replace(said, rounds=(other, *said.rounds[1:])))
