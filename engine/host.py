"""Arrays that are evaluated, and reading them."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module


def read(array: mx.array) -> Any:
    """Nested lists of a small array's numbers; its stub promises only some scalar or list."""
    return array.tolist()


def settle(module: Module) -> None:
    """Evaluate all that a module holds, rotary tables included, which are no parameters.

    What is still lazy belongs to the thread that made it: no other thread may evaluate it.
    """
    mx.eval(module.state)
