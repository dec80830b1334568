"""What ends a run before it has a verdict."""

from __future__ import annotations


class BadInput(ValueError):
    """What was asked for cannot be run; the message names the value and the limit."""


class Unusable(RuntimeError):
    """A run broke off: a server died, a port was taken. No verdict follows; one line says why."""


class Unsound(ValueError):
    """A replay decides otherwise than the run did: its margins are not to be recorded."""
