"""The promises of reliability, a row each: who holds it, how often in CI, how often at night."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from . import (
    crashes,
    damage,
    failing,
    flushes,
    full_disk,
    intruders,
    kills,
    names,
    races,
    sequences,
)
from .budget import Budget

ALL = 1 << 62
"""However many there are."""


@dataclass(frozen=True, slots=True)
class Row:
    """`ci` of them within `ci_s` seconds of a CI run; `nightly` of them in all, over the nights.

    `unit` is what is counted. `share` weighs a row's part of the time of a nightly run. A row that
    has an end (`ALL`) is run once a night, from the case whose turn it is. `night` is what runs
    then, if it is not the same.
    """

    id: str
    what: str
    unit: str
    run: Callable[[Budget], None]
    ci: int
    ci_s: float
    nightly: int
    share: float = 1.0
    night: Callable[[Budget], None] | None = None

    def line(self, budget: Budget, goal: int, seconds: float) -> str:
        """What ran, for a table."""
        of = "all" if goal == ALL else f"{goal:,}"
        notes = "".join(f"; {note}" for note in budget.notes[-1:])
        return (
            f"{self.id:<4} {self.what}: {budget.done:,} {self.unit} of {of}, "
            f"{budget.took_s:.1f} s of {seconds:g} s{notes}"
        )


ROWS: tuple[Row, ...] = (
    Row("R1", "beside a model", "sequences", sequences.sequences, 2_000, 240, 100_000, 4),
    Row("R2", "the power is lost", "images", crashes.crash_images, 5_000, 90, 1_000_000, 6),
    Row("R2", "and lost again", "images", crashes.crashes_of_recovery, 1_000, 45, 200_000, 2),
    Row("R3", "writers killed", "kills", kills.writers, 300, 60, 10_000, 2),
    Row("R4", "recoveries killed", "kills", kills.recoveries, 100, 30, 2_000),
    Row("R5", "bits of long tensors", "bits", damage.flips, 2_000, 20, 1_000_000, 2),
    Row("R5", "every bit of headers", "headers", damage.header_flips, ALL, 20, ALL),
    Row("R6", "whole files in wrong places", "cases", damage.mixed_up, ALL, 20, ALL),
    Row(
        "R7",
        "each call fails",
        "faults",
        failing.failing_calls,
        ALL,
        60,
        ALL,
        2,
        failing.every_error,
    ),
    Row(
        "R7",
        "short writes",
        "faults",
        failing.short_writes,
        ALL,
        30,
        ALL,
        1,
        failing.shorter_writes,
    ),
    Row("R7", "a real disk is full", "disks", full_disk.full_disk, 5, 20, 500),
    Row("R8", "a sync fails", "faults", failing.failing_syncs, ALL, 20, ALL),
    Row("R9", "processes share a folder", "seconds", kills.two, 30, 45, 600, 4, kills.eight),
    Row("R10", "two processes at each step", "steps", races.processes, ALL, 90, ALL, 2),
    Row("R10", "two threads at each step", "steps", races.threads, ALL, 90, ALL, 2),
    Row("R10", "three threads held up", "actions", races.interleavings, 1_000, 30, 1_000_000, 2),
    Row("R11", "hostile headers", "headers", damage.headers, 5_000, 60, 10_000_000, 3),
    Row("R13", "hostile folders", "files", damage.hostile_folders, 500, 20, 100_000),
    Row("R14", "hostile names", "names", names.names, 500, 30, 100_000),
    Row("R15", "links, pipes and devices", "cases", intruders.replaced, ALL, 30, ALL),
    Row("R16", "modes under any umask", "files", names.modes, ALL, 10, ALL),
    Row("R17", "pairs of identities", "pairs", names.identities, ALL, 20, ALL),
    Row("R18", "temporaries", "folders", intruders.temporaries, 200, 20, 5_000),
    Row("R19", "accounts and odd clocks", "sequences", sequences.accounts, 50, 20, 1_000),
    Row("R20", "told to end", "processes", flushes.flushes, 50, 30, 1_000),
)
