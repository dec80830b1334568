"""`python -m parity.fuzz`."""

from __future__ import annotations

from parity.fuzz.cli import main

if __name__ == "__main__":
    main()
