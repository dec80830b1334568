"""A line for waits that last: whoever watches a pipe learns what is waited for."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

PATIENCE_S = 5.0
"""How long a wait is nothing to speak of."""


@contextmanager
def waiting_for(what: str, limit: str) -> Iterator[None]:
    """Say on stderr, once and only if the block takes long, what it waits for and how long at most.

    Nothing is said once the block has ended.
    """

    def say() -> None:
        # One write, which no other line can come into.
        sys.stderr.write(f"parity: waiting for {what}, for at most {limit}\n")
        sys.stderr.flush()

    timer = threading.Timer(PATIENCE_S, say)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()
