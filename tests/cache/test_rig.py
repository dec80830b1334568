"""The tier's promises of reliability at the counts of CI; `nox -s fuzz` goes on from there."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest

from parity.fuzz.disk.budget import Budget
from parity.fuzz.disk.full_disk import Unmountable
from parity.fuzz.disk.rows import ALL, ROWS, Row


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
