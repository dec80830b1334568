"""Ctrl-C and SIGTERM: the first ends a command in order, the next one ends it at once. No mlx here.

Out of order the interpreter would wind up beside a model thread, which mlx answers with an abort.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import sys
from collections.abc import Callable, Iterator

CODES = {signal.SIGINT: 130, signal.SIGTERM: 143}
"""Exit codes, as shells give them."""


def leave_at_once() -> None:
    """From now on both end the process where it stands: there is nothing to keep, or no time."""
    _handle_by(_leave)
    # Behind this the interpreter takes all handlers away before it drops its modules. What was to
    # be done has been done then, and the exit code should say that.
    atexit.register(_handle_by, signal.SIG_IGN)


@contextlib.contextmanager
def leave_in_order() -> Iterator[None]:
    """While there is something to keep, the first one raises in the main thread.

    That is KeyboardInterrupt or SystemExit. Not from the start to the end of a program: raised at
    any line of anybody's module, they are not always an end in order.
    """
    before = {number: signal.getsignal(number) for number in CODES}
    _handle_by(_raise)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _handle_by(handler: Callable[[int, object], None] | signal.Handlers) -> None:
    for number in CODES:
        # Whoever started us may not want to have us interrupted: nohup, a shell's background.
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, handler)


def _raise(number: int, _: object) -> None:
    _handle_by(_leave)
    if number == signal.SIGINT:
        raise KeyboardInterrupt
    sys.exit(CODES[signal.Signals(number)])


def _leave(number: int, _: object) -> None:
    if number == signal.SIGINT:
        with contextlib.suppress(OSError):
            os.write(2, b"interrupted\n")  # a buffered stream may be locked where we stand
    os._exit(CODES[signal.Signals(number)])
