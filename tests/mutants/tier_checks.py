"""What must fail in a world whose durable tier is wrong: a little of each row of its rig."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .world import World


def _holds(world: World, module: str, row: str, count: int) -> None:
    """Some of a row of the tier's rig, in that world."""
    budget = world["parity.fuzz.disk.budget"].Budget(count, 60.0)
    run: Callable[[Any], None] = getattr(world[f"parity.fuzz.disk.{module}"], row)
    run(budget)
    assert not budget.violations, budget.violations
    assert budget.done


def crash_images(world: World) -> None:
    """`atomic`, `durable`: what was acknowledged outlives a loss of power."""
    _holds(world, "crashes", "crash_images", 400)


def flipped_bits(world: World) -> None:
    """`damage`: bytes that are not what was written are not used."""
    _holds(world, "damage", "flips", 20)


def flipped_header_bits(world: World) -> None:
    """`damage`: a header that is not what was written is not believed."""
    _holds(world, "damage", "header_flips", 1)


def files_mixed_up(world: World) -> None:
    """`damage`: a whole file in another's place is not used for it."""
    _holds(world, "damage", "mixed_up", 40)


def model_beside_the_store(world: World) -> None:
    """`longest-prefix`, `supersede`, `cap`: every operation answers as a list would."""
    _holds(world, "sequences", "sequences", 25)


def identities(world: World) -> None:
    """`identity`: nothing is used under another identity."""
    _holds(world, "names", "identities", 90)


def temporaries(world: World) -> None:
    """`atomic`: orphans go, what a writer holds stays."""
    _holds(world, "intruders", "temporaries", 20)


def failing_syncs(world: World) -> None:
    """`durable`: what was not synced is not published."""
    _holds(world, "failing", "failing_syncs", 40)


def races_of_processes(world: World) -> None:
    """`tier-agree`: others on the folder cost a miss at most."""
    _holds(world, "races", "processes", 300)
