"""The canary: silent where results agree, and not blind."""

from __future__ import annotations

import mlx.core as mx
import pytest

from parity import canary


def test_the_cpu_agrees_with_itself() -> None:
    assert canary.disagreements(mx.Device(mx.cpu)) == []


def test_a_wrong_operation_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """An operation that gives something else the second time stands for a wrong device."""
    calls = iter([1.0, 1.01])
    wrong = [canary.Op("matmul", lambda: mx.array([next(calls)]))]
    monkeypatch.setattr(canary, "ops", lambda: wrong)
    (line,) = canary.disagreements(mx.Device(mx.cpu))
    assert line.startswith("matmul: largest difference 0.01")
