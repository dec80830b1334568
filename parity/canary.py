"""A few operations on the default device against the CPU: `python -m parity.canary`.

Virtual machines have been seen to offer a GPU that computes wrongly. Where these disagree, a
verdict on the same device would speak of the machine and not of an engine.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import NamedTuple

import mlx.core as mx
import numpy as np


class Op(NamedTuple):
    """An operation on fixed inputs. Integers must be equal, floats within 1e-4."""

    name: str
    run: Callable[[], mx.array]


def ops() -> list[Op]:
    """What a decode step is made of. Inputs are drawn on the CPU, from one key."""
    with mx.stream(mx.cpu):
        keys = mx.random.split(mx.random.key(0), 4)
        x = mx.random.normal((1, 9, 128), key=keys[0])
        weight = mx.random.normal((128, 128), key=keys[1]) / 128**0.5
        queries = mx.random.normal((1, 2, 9, 64), key=keys[2])
        logits = mx.random.normal((9, 288), key=keys[3])
        mx.eval(x, weight, queries, logits)
    packed, scales, biases = _quantize(weight)
    return [
        Op("matmul, 1 row", lambda: x[:, :1] @ weight),
        Op("matmul, 9 rows", lambda: x @ weight),
        Op("quantized matmul", lambda: mx.quantized_matmul(x, packed, scales, biases)),
        Op("rms norm", lambda: mx.fast.rms_norm(x, mx.ones(128), 1e-5)),
        Op("rope", lambda: _rope(queries)),
        Op("attention", lambda: _attention(queries)),
        Op("log-softmax", lambda: logits - mx.logsumexp(logits, axis=-1, keepdims=True)),
        Op("argmax", lambda: mx.argmax(logits, axis=-1)),
        Op("argsort", lambda: mx.argsort(logits, axis=-1)),
        Op("categorical", lambda: mx.random.categorical(logits, key=mx.random.key(1))),
    ]


def disagreements(device: mx.Device) -> list[str]:
    """One line for each operation whose result on `device` is not the CPU's."""
    lines = []
    for op in ops():
        with mx.stream(mx.cpu):
            expected = np.array(op.run())
        with mx.stream(mx.default_stream(device)):
            actual = np.array(op.run())
        if np.issubdtype(expected.dtype, np.integer):
            agrees = np.array_equal(expected, actual)
        else:
            agrees = np.allclose(expected, actual, rtol=1e-4, atol=1e-4)
        if not agrees:
            worst = np.abs(expected.astype(np.float64) - actual.astype(np.float64)).max()
            lines.append(f"{op.name}: largest difference {worst:.3g}")
    return lines


def _quantize(weight: mx.array) -> tuple[mx.array, mx.array, mx.array]:
    with mx.stream(mx.cpu):
        packed, scales, biases = mx.quantize(weight, group_size=64, bits=4)
        mx.eval(packed, scales, biases)
    return packed, scales, biases


def _rope(x: mx.array) -> mx.array:
    return mx.fast.rope(x, 64, traditional=False, base=10000.0, scale=1.0, offset=300)


def _attention(x: mx.array) -> mx.array:
    return mx.fast.scaled_dot_product_attention(x, x, x, scale=0.125, mask="causal")


def main() -> None:
    """Exit 0 if everything agrees, 1 if not."""
    device = mx.default_device()
    lines = disagreements(device)
    print("\n".join(lines) or f"{len(ops())} operations on {device} agree with the CPU")
    sys.exit(1 if lines else 0)


if __name__ == "__main__":
    main()
