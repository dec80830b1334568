"""One line of what a subject was found to offer."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Capability:
    """A row of the capability table: what, whether, and how that was seen."""

    name: str
    value: str
    note: str = ""
