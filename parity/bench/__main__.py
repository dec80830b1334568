"""`python -m parity.bench`."""

from __future__ import annotations

from parity.bench.cli import main

if __name__ == "__main__":
    main()
