"""What an import costs: the tier's core moves bytes, and its processes do not wait for mlx."""

from __future__ import annotations

import subprocess
import sys

import pytest

import engine

CORE = (
    "entry",
    "prefixes",
    "files",
    "strict",
    "tensors",
    "header",
    "format",
    "catalog",
    "shelf",
    "keeper",
    "store",
    "spill",
    "durability",
    "gate",
    "writer",
    "identity",
    "inspect",
    "cli",
)


def run(program: str) -> str:
    """What a fresh process prints."""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("module", CORE)
def test_the_core_of_the_tier_imports_without_mlx(module: str) -> None:
    """A process that only moves entries must not pay for a model's library."""
    loaded = run(f"import sys, engine.cache.{module}; print(*sys.modules, sep='\\n')").split()
    assert f"engine.cache.{module}" in loaded
    assert not {name for name in loaded if name.partition(".")[0] in ("mlx", "mlx_lm")}


def test_every_public_name_is_there_and_the_package_knows_no_other() -> None:
    for name in engine.__all__:
        assert getattr(engine, name).__name__ == name
        assert name in dir(engine)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        engine.nothing  # noqa: B018
    assert set(engine._HOMES) == set(engine.__all__)


@pytest.mark.parametrize("first", ["engine.generate", "engine.groups", "engine"])
def test_generate_is_the_function_whatever_was_imported_before(first: str) -> None:
    """Importing the module `engine.generate` would bind its name in the package."""
    said = run(f"import {first}\nfrom engine import generate\nprint(type(generate).__name__)")
    assert said.strip() == "function"


def test_arithmetic_is_pinned_before_mlx_can_be_imported() -> None:
    program = "import os, engine; print(os.environ['MLX_ENABLE_TF32'])"
    assert run(f"import os; os.environ.pop('MLX_ENABLE_TF32', 0)\n{program}").strip() == "0"
