"""pytest's side of the matrix: one engine and one set of servers per session."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from parity.cases import Case
from parity.collect import FromFile, Live, Outcomes, Shelf, keep_all_snapshots
from parity.errors import BadInput, Unusable
from parity.models import known_models
from parity.report.document import StoredRun, read
from parity.report.environment import backend, environment, sources_digest
from parity.report.words import UNUSABLE
from parity.runner import CaseResult
from parity.session import Sessions
from parity.snapshots import FOLDER

STORED = pytest.StashKey[StoredRun]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--parity-results",
        metavar="FILE",
        type=Path,
        help="judge the run that `python -m parity run --json FILE` stored, instead of running",
    )


def pytest_configure(config: pytest.Config) -> None:
    keep_all_snapshots(config)
    if config.option.update_new_snapshots_only:
        raise pytest.UsageError("record with --snapshot-update: only then are margins measured")
    path = config.getoption("--parity-results")
    if path is None:
        return
    if config.option.update_snapshots:
        raise pytest.UsageError("a stored run has no margins: record without --parity-results")
    try:
        stored = read(path)
    except BadInput as error:
        raise pytest.UsageError(str(error)) from error
    if stored.options:
        raise pytest.UsageError(f"results {path} are not of the fixtures: {stored.options}")
    if stored.backend != backend():
        raise pytest.UsageError(f"results {path} are from {stored.backend}, this is {backend()}")
    if stored.sources != sources_digest():
        raise pytest.UsageError(f"results {path} were made by other sources or fixtures than these")
    config.stash[STORED] = stored


@pytest.fixture(scope="session")
def outcomes(request: pytest.FixtureRequest) -> Iterator[Outcomes]:
    """What became of each case: read from a stored run, or run here when first asked for."""
    stored = request.config.stash.get(STORED, None)
    if stored is not None:
        yield FromFile(stored)
        return
    with Sessions(known_models) as sessions:
        yield Live(lambda case: _run(sessions, case), sessions.of)


@pytest.fixture(scope="session")
def shelf(request: pytest.FixtureRequest) -> Iterator[Shelf]:
    """The stored snapshots; a recording run writes their provenance at its end."""
    from parity.test_matrix import CASES

    recording = bool(request.config.option.update_snapshots)
    with Shelf.open(FOLDER, environment(), backend(), CASES, recording=recording) as shelf:
        yield shelf


def _run(sessions: Sessions, case: Case) -> CaseResult:
    try:
        return sessions.of(case.cell.model).run(case)
    except Unusable as error:
        pytest.exit(str(error), returncode=UNUSABLE)
