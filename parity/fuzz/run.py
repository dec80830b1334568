"""Batches of sequences, one seed each, until the time is over."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import count

from hypothesis import HealthCheck, Phase, Verbosity, seed, settings
from hypothesis.errors import Flaky
from hypothesis.stateful import RuleBasedStateMachine, run_state_machine_as_test

from .batches import batch_machine
from .rows import row_machine
from .setup import Difference, Setup
from .tiers import tier_machine

SEQUENCES, STEPS = 8, 10
"""Of one batch: fixed, so that a seed does the same wherever it runs, for however long."""


@dataclass(frozen=True, slots=True)
class Batch:
    """What one seed gave: None, or the difference at the end of the shortest sequence found."""

    seed: int
    difference: Difference | None


def batches(setup: Setup, first_seed: int, until: float) -> Iterator[Batch]:
    """Consecutive seeds, each on every world; at least one seed, then until `time.monotonic()`."""
    for number in count(first_seed):
        for position, machine in enumerate(machines(setup)):
            if number > first_seed and time.monotonic() > until:
                return
            yield replace(run(machine, _draws(number, position)), seed=number)


def machines(setup: Setup) -> Iterator[type[RuleBasedStateMachine]]:
    """For each world, of its rows, of its batches if it has them, and of tiers."""
    for reference in setup.references:
        alone = replace(setup, references=[reference])
        yield row_machine(alone)
        if reference.world.batched:
            yield batch_machine(alone)
        yield tier_machine(alone)


def run(
    machine: type[RuleBasedStateMachine],
    number: int,
    sequences: int = SEQUENCES,
    *,
    shrink: bool = True,
) -> Batch:
    """`sequences` random sequences; a failing one is shrunk, which may take many more."""
    try:
        run_state_machine_as_test(seed(number)(machine), settings=_settings(sequences, shrink))
    except Difference as difference:
        return Batch(number, difference)
    except Flaky as error:
        return Batch(number, _not_again(error))
    return Batch(number, None)


def discover(setup: Setup, first_seed: int, until: float) -> Iterator[Batch]:
    """With no explanations: each kind of difference once, by its shortest sequence.

    What was found is explained by its seed from then on, so that the next kind can show.
    """
    found = dict(setup.explanations)
    for number in count(first_seed):
        for position, _ in enumerate(list(machines(setup))):
            if number > first_seed and time.monotonic() > until:
                return
            while True:
                now = replace(setup, explanations=dict(found))
                batch = run(list(machines(now))[position], _draws(number, position))
                if batch.difference is None:
                    break
                yield replace(batch, seed=number)
                if batch.difference.key is None:
                    return
                found[batch.difference.key] = f"seed {number}"


def _draws(number: int, position: int) -> int:
    """Another generator seed for each machine, or all worlds would see the same operations."""
    return 32 * number + position


def _not_again(error: Flaky) -> Difference:
    """A difference that was there once and not when its sequence was tried again."""
    inside = error.exceptions if isinstance(error, BaseExceptionGroup) else ()
    for found in inside:
        if isinstance(found, Difference):
            return Difference(f"only sometimes: {found.text}", found.steps, found.key)
    return Difference(f"a sequence does not replay: {error}", ())


def _settings(sequences: int, shrink: bool) -> settings:
    return settings(
        max_examples=sequences,
        stateful_step_count=STEPS,
        deadline=None,
        database=None,
        phases=(Phase.generate, Phase.shrink) if shrink else (Phase.generate,),
        report_multiple_bugs=False,
        verbosity=Verbosity.quiet,
        # Forwards are slow, and the first of each shape compiles.
        suppress_health_check=tuple(HealthCheck),
    )
