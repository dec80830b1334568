"""A matrix of made-up outcomes, run by pytest in a folder of its own; see test_snapshots.py.

What is said comes from the JSON file that MINI names: `backend`, `version`, and for each prompt
kind the ids, the accepted counts of rounds of 2 drafts, the two margins and the verdict.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from syrupy.assertion import SnapshotAssertion

from parity.cases import Case
from parity.collect import Outcome, Outcomes, Shelf
from parity.compare import Verdict
from parity.provenance import Margins
from parity.runner import Claim
from parity.trace import Round
from tests.parity.fakes import answer, case

SAID: dict[str, Any] = json.loads(Path(os.environ["MINI"]).read_text())
CASES = [case(kind) for kind in SAID["kinds"]]


class Said:
    """Outcomes as MINI has them."""

    def floor(self, case: Case, /) -> float:
        return 1e-2

    def of(self, case: Case) -> Outcome:
        said = SAID["kinds"][case.cell.kind]
        rounds = tuple(Round((1, 2), accepted, (3,)) for accepted in said["accepted"])
        actual = answer(tuple(said["ids"]), rounds=rounds)
        return Outcome(Verdict(said.get("verdict", "equal")), ("said so",), actual)

    def margins(self, case: Case, /) -> Margins:
        return Margins(*SAID["kinds"][case.cell.kind]["margins"])

    def claims(self, _: Sequence[Case], /) -> Sequence[Claim] | str:
        return "none here"


@pytest.fixture(scope="session")
def outcomes() -> Outcomes:
    return Said()


@pytest.fixture(scope="session")
def shelf(request: pytest.FixtureRequest) -> Iterator[Shelf]:
    recording = bool(request.config.option.update_snapshots)
    folder = Path(os.environ["MINI"]).parent / "__snapshots__"
    environment = {"mlx": SAID["version"]}
    with Shelf.open(folder, environment, SAID["backend"], CASES, recording=recording) as opened:
        yield opened


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_text(case: Case, outcomes: Outcomes, shelf: Shelf, snapshot: SnapshotAssertion) -> None:
    shelf.check(case, "text", outcomes, snapshot)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_trace(case: Case, outcomes: Outcomes, shelf: Shelf, snapshot: SnapshotAssertion) -> None:
    shelf.check(case, "trace", outcomes, snapshot)
