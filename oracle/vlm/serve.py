"""The protocol: a greeting, then one line of JSON for each line of JSON.

The first line on standard output holds the versions of mlx and mlx-vlm, or ``{"failed": why}``.
Each line of standard input names an ``operation``, a ``kind``, ``target`` and ``drafter`` folders
and ``norm_values``; its answer is ``{"answer": ...}``, ``{"refused": why}`` for what mlx-vlm or the
request rules out, or ``{"failed": why}`` for an exception of mlx-vlm. It ends with its standard
input. All is greedy, one row, the prompt in one piece, the block size pinned.
"""

import contextlib
import json
import os
import sys
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import mlx.core as mx

from .arrays import Json, Refused, pack

if TYPE_CHECKING:
    from .pair import Pair


class Worker:
    """Answers requests; keeps the pair of the last one, as long as its files stay the same."""

    def __init__(self) -> None:
        self._key: Any = None
        self._pair: Pair | None = None

    def answer(self, request: Json) -> Json:
        pair = self._pair_for(request)
        operations: dict[str, Callable[[Json], Json]] = {
            "describe": lambda _: pair.describe(),
            "module": pair.module,
            "first_round": pair.first_round,
            "trace": pair.trace,
        }
        return {"answer": pack(operations[request["operation"]](request))}

    def _pair_for(self, request: Json) -> "Pair":
        from .pair import Pair  # imports mlx-vlm, which takes seconds

        folders = [Path(request["target"]), Path(request["drafter"])]
        files = [
            (str(file), file.stat().st_mtime_ns)
            for folder in folders
            for file in sorted(folder.glob("*"))
            if file.is_file()
        ]
        key = (request["kind"], request["norm_values"], files)
        if self._pair is None or key != self._key:
            self._pair = None  # two at once need not fit into memory
            self._pair = Pair(request["kind"], *folders, norm_values=request["norm_values"])
            self._key = key
        return self._pair


def main() -> None:
    # What mlx-vlm prints must not end up between the answers.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def say(line: Json) -> None:
        answers.write(json.dumps(line) + "\n")
        answers.flush()

    try:
        say({name: version(name) for name in ("mlx", "mlx-vlm")})
    except PackageNotFoundError as error:
        say({"failed": f"{error.name} is not installed"})
        return
    if device := os.environ.get("MLX_PARITY_DEVICE"):  # as everywhere in the project
        mx.set_default_device({"cpu": mx.cpu, "gpu": mx.gpu}[device])
    worker = Worker()
    with contextlib.suppress(BrokenPipeError):
        for line in sys.stdin:
            try:
                answer = worker.answer(json.loads(line))
            except Refused as why:
                answer = {"refused": str(why)}
            except Exception as error:  # mlx-vlm raises whatever it likes
                text = " ".join(str(error).split())
                answer = {"failed": f"{type(error).__name__}: {text}"}
            say(answer)
