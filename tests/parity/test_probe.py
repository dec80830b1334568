"""Margins at a disputed position, measured on the trained fixture."""

from __future__ import annotations

import pytest

import fixtures
from oracle.inprocess import Loaded, load, plain
from parity.asking import encode
from parity.cases import Case
from parity.plans import catalogue
from parity.probe import Probe


@pytest.fixture(scope="module")
def target() -> Loaded:
    return load(fixtures.target_dir("dense"))


def ending() -> Case:
    """The greedy case whose answer ends in an EOS."""
    wanted = "dense/serial/off/d0/greedy/early-stop"
    return next(case for case in catalogue() if case.id == wanted)


def test_the_chosen_token_has_no_distance_to_itself(target: Loaded) -> None:
    """The margin is how far the lower of two tokens lies below the best one."""
    case = ending()
    run = plain(target, encode(target, case.prompt), case.max_tokens)
    measured = Probe(target, None).measure(case, run.tokens[:2], run.tokens[2], run.tokens[2] + 1)
    assert measured is not None
    assert measured.margin > 0.1
    assert measured.delta == 0.0


def test_an_eos_given_out_as_content_is_no_tie(target: Loaded) -> None:
    """mutants: the decision was the same on both sides, and still one of them is wrong."""
    case = ending()
    run = plain(target, encode(target, case.prompt), case.max_tokens)
    probe = Probe(target, None)
    for eos in target.eos_ids:
        assert probe.measure(case, run.tokens, None, eos) is None
        assert probe.measure(case, run.tokens, eos, None) is None
    assert probe.measure(case, run.tokens, None, run.tokens[0]) is not None
