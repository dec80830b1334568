"""The benchmarks run when they are named, not along with the matrix."""

from __future__ import annotations

from pathlib import Path

import pytest

HERE = Path(__file__).parent


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Skip this folder unless an argument lies in it."""
    named = (Path(argument.partition("::")[0]).resolve() for argument in config.args)
    if any(path.is_relative_to(HERE) for path in named):
        return None
    return collection_path.is_relative_to(HERE) or None
