"""The tier's promises of reliability at the counts of CI; `nox -s fuzz` goes on from there."""

from __future__ import annotations

import logging
from collections.abc import Callable
from inspect import getmembers, isfunction

import pytest

from engine.cache.files import Files
from parity.fuzz.disk.budget import Budget
from parity.fuzz.disk.faults import CALLS
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


def test_every_system_call_can_fail() -> None:
    """A call that is added to `Files` is added to the faults."""
    assert set(CALLS) == {name for name, _ in getmembers(Files, isfunction) if name[0] != "_"}
