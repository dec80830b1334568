"""What the host waits for, and where its time goes: an instrument for the process it runs in.

MLX is lazy: the host builds graphs and waits only where it asks for numbers. Python's own call
hooks do not see the calls of MLX's binding, so for the time of a `metered` block the functions and
methods through which an array can be waited for are wrapped. An array's buffer has no method to
wrap: numpy's `array` and `asarray` are covered, a bare `memoryview` is not.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten

READERS = (
    "item",
    "tolist",
    "__array__",
    "__bool__",
    "__bytes__",
    "__complex__",
    "__dlpack__",
    "__float__",
    "__format__",
    "__index__",
    "__int__",
    "__reduce__",
    "__reduce_ex__",
    "__repr__",
    "__str__",
)
"""Methods of an array that need its numbers."""


@dataclass(slots=True)
class Meter:
    """What happened in a metered block.

    `waits` names every call that had to wait for the device, in order. Reading an array that has
    been waited for already is not one of them. `wait_s` are the seconds in those calls, `queue_s`
    those in `async_eval`, which hands graphs to the device and blocks while it is far behind.
    """

    waits: list[str] = field(default_factory=list)
    wait_s: float = 0.0
    queue_s: float = 0.0
    # By identity, and held, so that no identity is used twice.
    landed: dict[int, mx.array] = field(default_factory=dict)

    def wait(self, name: str, arrays: list[mx.array], call: Callable[[], Any]) -> Any:
        """Run a call that returns once `arrays` are there; it is a wait if one of them was not."""
        if all(id(array) in self.landed for array in arrays):
            return call()
        start = time.perf_counter()
        try:
            return call()
        finally:
            self.wait_s += time.perf_counter() - start
            self.waits.append(name)
            self.landed.update((id(array), array) for array in arrays)

    def queue(self, call: Callable[[], Any]) -> Any:
        start = time.perf_counter()
        try:
            return call()
        finally:
            self.queue_s += time.perf_counter() - start


@contextmanager
def metered() -> Iterator[Meter]:
    """Wrap MLX's ways to wait, and put them back at the end."""
    meter = Meter()
    changed: list[tuple[Any, str, Any]] = []

    def wrap(owner: Any, name: str, make: Callable[[Any], Any]) -> None:
        original = getattr(owner, name)
        changed.append((owner, name, original))
        setattr(owner, name, make(original))

    def evaluates(original: Any) -> Any:
        return lambda *trees: meter.wait("eval", _arrays(trees), lambda: original(*trees))

    def synchronizes(original: Any) -> Any:
        # Whatever has been queued: no list of arrays says that it is there already.
        return lambda *args: meter.wait("synchronize", [mx.array(0)], lambda: original(*args))

    def queues(original: Any) -> Any:
        return lambda *trees: meter.queue(lambda: original(*trees))

    def reads(name: str) -> Callable[[Any], Any]:
        return lambda original: (
            lambda array, *args, **options: meter.wait(
                name, [array], lambda: original(array, *args, **options)
            )
        )

    def converts(name: str) -> Callable[[Any], Any]:
        return lambda original: (
            lambda thing, *args, **options: meter.wait(
                name, _arrays(thing), lambda: original(thing, *args, **options)
            )
        )

    try:
        wrap(mx, "eval", evaluates)
        wrap(mx, "synchronize", synchronizes)
        wrap(mx, "async_eval", queues)
        for name in READERS:
            wrap(mx.array, name, reads(name))
        for name in ("array", "asarray"):
            wrap(np, name, converts(f"numpy.{name}"))
        yield meter
    finally:
        for owner, name, original in reversed(changed):
            setattr(owner, name, original)


def _arrays(tree: Any) -> list[mx.array]:
    flat: Any = tree_flatten(tree) if isinstance(tree, tuple | list | dict) else [("", tree)]
    return [leaf for _, leaf in flat if isinstance(leaf, mx.array)]
