"""The matrix as pytest cases: a verdict and up to two snapshots each, and the claims of it all."""

from __future__ import annotations

import pytest
from syrupy.assertion import SnapshotAssertion

from parity.cases import Case
from parity.collect import PASSING, Outcomes, Shelf
from parity.plans import catalogue
from parity.snapshots import parts_of, strangers

CASES = catalogue()
RECORDED = [case for case in CASES if parts_of(case)]
TRACED = [case for case in CASES if "trace" in parts_of(case)]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_verdict(case: Case, outcomes: Outcomes) -> None:
    """The engine says what the oracle says."""
    outcome = outcomes.of(case)
    if outcome.verdict not in PASSING:
        pytest.fail("\n".join(outcome.sentences), pytrace=False)


@pytest.mark.parametrize("case", RECORDED, ids=lambda case: case.id)
def test_text(case: Case, outcomes: Outcomes, shelf: Shelf, snapshot: SnapshotAssertion) -> None:
    """Ids, text and finish reason are the recorded ones."""
    shelf.check(case, "text", outcomes, snapshot)


@pytest.mark.parametrize("case", TRACED, ids=lambda case: case.id)
def test_trace(case: Case, outcomes: Outcomes, shelf: Shelf, snapshot: SnapshotAssertion) -> None:
    """Drafted and accepted per round are the recorded ones."""
    shelf.check(case, "trace", outcomes, snapshot)


def test_claims(outcomes: Outcomes) -> None:
    """Zero, partial and full accepts all occurred, for both drafters, in the whole matrix."""
    claims = outcomes.claims(CASES)
    if isinstance(claims, str):
        pytest.skip(claims)
    unmet = [f"{claim.id}: {claim.text}" for claim in claims if not claim.met]
    assert not unmet


def test_every_snapshot_belongs_to_a_case(shelf: Shelf) -> None:
    """An entry whose case has left the matrix would never be compared again."""
    ids = {case.id for case in CASES}
    assert strangers(shelf.folder, ids) == []
