"""What ends a run before it has a verdict."""

from __future__ import annotations


class BadInput(ValueError):
    """What was asked for cannot be run; the message names the value and the limit."""


class Unusable(RuntimeError):
    """A run broke off: a server died, a port was taken. No verdict follows; one line says why."""


class Unsound(ValueError):
    """A replay decides otherwise than the run did: its margins are not to be recorded."""


def require_utf8(text: str, what: str) -> None:
    """Refuse text that has no UTF-8 form, such as half of a surrogate pair.

    Raises:
        BadInput: naming `what` and the character.

    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise BadInput(f"{what} is not UTF-8 (character {error.start}): {text!r}") from error
