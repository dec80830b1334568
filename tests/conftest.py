"""How hard property tests try: `HYPOTHESIS_PROFILE` is `ci` (default), `nightly` or `mutation`."""

from __future__ import annotations

import os
import signal

import pytest
from hypothesis import settings

from oracle import device

device.apply()

# A shell that runs the tests in the background has Ctrl-C ignored, and what they start inherits it.
signal.signal(signal.SIGINT, signal.default_int_handler)

# No deadline: the first call of each shape compiles kernels.
settings.register_profile("ci", deadline=None, max_examples=40)
settings.register_profile("nightly", deadline=None, max_examples=2_000)
# The same few examples for every mutant, so that a survivor is not luck.
settings.register_profile("mutation", deadline=None, max_examples=12, derandomize=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """What the rows of the durable tier's rig did, in how much of their time."""
    reports = [r for kind in ("passed", "failed") for r in terminalreporter.getreports(kind)]
    lines = [line for report in reports for name, line in report.user_properties if name == "row"]
    if lines:
        terminalreporter.section("the durable tier")
        terminalreporter.write_line("\n".join(map(str, lines)))
