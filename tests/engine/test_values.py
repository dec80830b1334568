"""Values: frozen, small, and checked when they are built."""

from __future__ import annotations

import dataclasses
import importlib
import pkgutil
from typing import Any

import pytest

import engine
from engine import BadInput, Request, RoundTrace, Statistics

STATEFUL = {
    *("Row", "Live", "History", "_Transaction", "_Round", "Lag"),
    *("Place", "Prompt", "Member"),
    *("_Dirty", "_Use", "_Waiting", "Temporary", "Record", "_Item"),
}
"""The dataclasses that are state and not values."""


def dataclasses_of_the_engine() -> list[Any]:
    found: dict[str, Any] = {}
    for info in pkgutil.walk_packages(engine.__path__, "engine."):
        if info.name.endswith("__main__"):
            continue
        module = importlib.import_module(info.name)
        for kind in vars(module).values():
            is_value = isinstance(kind, type) and dataclasses.is_dataclass(kind)
            if is_value and kind.__module__.startswith("engine."):
                found[kind.__name__] = kind
    return list(found.values())


@pytest.mark.parametrize("kind", dataclasses_of_the_engine(), ids=lambda c: c.__name__)
def test_values_are_frozen_and_have_slots(kind: Any) -> None:
    """State is named; everything else cannot change behind anybody's back."""
    assert "__slots__" in vars(kind)
    assert kind.__dataclass_params__.frozen == (kind.__name__ not in STATEFUL)


def test_the_stateful_ones_exist() -> None:
    assert {c.__name__ for c in dataclasses_of_the_engine()} >= STATEFUL | {"Walk", "Flight"}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"prompt": ()}, "the prompt is empty"),
        ({"prompt": (1,), "max_tokens": 0}, "max_tokens must be at least 1, got 0"),
        ({"prompt": (1,), "stop_strings": ("a", "")}, "a stop string is empty"),
        ({"prompt": (1,), "stop_strings": "ab"}, "must be a tuple of strings, got 'ab'"),
        ({"prompt": (1,), "stop_strings": ("\ud800",)}, "a stop string is not UTF-8"),
        ({"prompt": (1,), "first_step": -1}, "first_step must be at least 0, got -1"),
    ],
)
def test_bad_requests_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(BadInput, match=message):
        Request(**values)


def test_statistics_come_from_the_rounds() -> None:
    rounds = [
        RoundTrace((1, 2, 3), 3, (1, 2, 3, 4), 3),
        RoundTrace((5, 6), 1, (5, 9), 1),
        RoundTrace((), 0, (7,), 0),
    ]
    assert Statistics.of(rounds, prefill_forwards=2) == Statistics(
        rounds=3,
        target_forwards=5,
        drafted=5,
        accepted=4,
        rejected=1,
        acceptance_lengths=(3, 1, 0),
        drafted_by_position=(2, 2, 1),
        accepted_by_position=(2, 1, 1),
        tokens_per_forward=7 / 3,
        forwards_saved=4,
    )
    empty = Statistics.of([], prefill_forwards=0)
    assert (empty.tokens_per_forward, empty.forwards_saved) == (0.0, 0)
