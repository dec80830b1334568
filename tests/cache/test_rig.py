"""The tier's promises of reliability at the counts of CI; `nox -s fuzz` goes on from there."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import pytest

from engine.cache.entry import Reuse
from parity.fuzz.disk.budget import Budget
from parity.fuzz.disk.contract import broken
from parity.fuzz.disk.full_disk import Unmountable
from parity.fuzz.disk.model import Kept, Model, size_of
from parity.fuzz.disk.rows import ALL, ROWS, Row
from parity.fuzz.disk.small import small


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """Thousands of warnings are as they should be here."""
    monkeypatch.setattr(logging.getLogger("engine.cache"), "propagate", False)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.id}-{row.what.replace(' ', '-')}")
def test_the_promise_holds(row: Row, record_property: Callable[[str, object], None]) -> None:
    """Laws `atomic`, `damage`, `cap`, `longest-prefix`, `identity`, `durable`: see each row.

    A row that is not done within its time fails as well: its time is several times what it takes.
    """
    budget = Budget(row.ci, row.ci_s)
    try:
        row.run(budget)
    except Unmountable as error:
        pytest.skip(str(error))
    record_property("row", row.line(budget, row.ci, row.ci_s))
    assert not budget.violations
    assert budget.done
    assert budget.whole if row.ci == ALL else budget.done >= row.ci


@pytest.mark.parametrize("too_short", [True, False])
def test_one_file_that_may_be_missing_takes_along_what_it_alone_served(
    too_short: bool, tmp_path: Path
) -> None:
    """The rig does not cry wolf: seed 497 of the second loss of power had such a pair.

    An entry below its own minimum serves nothing; one that serves its tokens is owed by itself.
    """
    long = small((2, 1, 0), reuse=Reuse(True, 1))
    short = small((2,), reuse=Reuse(True, 2 if too_short else 1))
    cap = 1 << 20
    model = Model(cap, [Kept(entry, size_of(entry), 0) for entry in (short, long)])
    said = broken(tmp_path, model, model, excess=1)
    assert (said is None) == too_short
