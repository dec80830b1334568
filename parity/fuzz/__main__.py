"""`python -m parity.fuzz`."""

from __future__ import annotations

from engine.signals import leave_at_once

leave_at_once()  # imports take a while

from parity.fuzz.cli import main  # noqa: E402

main()
