"""Where a subject is, from the command line."""

from __future__ import annotations

import math
from dataclasses import dataclass

from parity.errors import BadInput, require_utf8

TIMEOUT_S = 120.0
START_S = 600.0
"""How long a server that we start may take to load its model."""

ENGINE = "engine"


@dataclass(frozen=True, slots=True)
class Address:
    """A server at a URL, or started by a command that listens there or where it is told to.

    `model` is the name it is asked for, None for what it serves anyway. `timeout_s` is for each
    request.
    """

    url: str | None
    command: str | None = None
    model: str | None = None
    timeout_s: float = TIMEOUT_S

    @property
    def options(self) -> tuple[str, ...]:
        """What names this address on the command line."""
        named = {
            "--subject": self.url,
            "--subject-command": self.command,
            "--subject-model": self.model,
            "--timeout": None if self.timeout_s == TIMEOUT_S else f"{self.timeout_s:g}",
        }
        return tuple(word for name, value in named.items() if value for word in (name, value))


def address(
    subject: str | None, command: str | None, model: str | None, timeout_s: float | None
) -> Address | None:
    """The address that options name; None for the engine in process.

    Raises:
        BadInput: options that do not go together, a URL or a command that is none.

    """
    url = None if subject == ENGINE else subject
    further = {"--subject-command": command, "--subject-model": model, "--timeout": timeout_s}
    if url is None and (command is None or subject == ENGINE):
        for name, value in further.items():
            if value is not None:
                raise BadInput(f"{name} is for a subject that is a server, not the engine")
        return None
    if timeout_s is not None and not 0 < timeout_s < math.inf:
        raise BadInput(f"--timeout must be a number of seconds above 0, got {timeout_s:g}")
    if model is not None:
        require_utf8(model, "--subject-model")
    if url is not None:
        from parity.remote.http import base_of

        url = base_of(url)
    if command is not None:
        from parity.remote.process import has_port, split

        if url is None and not has_port(split(command)):
            raise BadInput("--subject-command without {port} needs --subject URL")
    return Address(url, command, model, TIMEOUT_S if timeout_s is None else timeout_s)
