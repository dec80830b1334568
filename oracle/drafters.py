"""mlx-vlm's drafters, the second oracle: a worker in their own environment, and what it answers.

mlx-vlm and this project cannot share an environment, so the modules in ``vlm`` run under another
Python and speak JSON lines with this one. They are given the same folders as an engine. Everything
is greedy, one row, the prompt in one piece, the number of drafts pinned to ``depth``.

Hidden states and positions are given and told by mlx-vlm's conventions (docs/oracles.md).
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from .vlm_process import Process

Kind = Literal["assistant", "qwen_mtp", "glm_mtp", "dspark", "dflash", "deepspec"]
Array = npt.NDArray[np.float32]
KeysValues = Mapping[str, tuple[Array, Array]]

VARIABLE = "MLX_PARITY_MLX_VLM_PYTHON"


@dataclass(frozen=True, slots=True)
class Description:
    """A pair as mlx-vlm loaded it; ``tensors`` are shapes under mlx-vlm's own names.

    ``block_size`` is mlx-vlm's: the verify window's width, the pending token included.
    """

    drafter_class: str
    target_class: str
    caches: tuple[str, ...]
    block_size: int
    tap_layers: tuple[int, ...]
    tensors: Mapping[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True, eq=False)
class Chain:
    """Rows of an MTP head on an empty cache: ``ids`` [N], and the ``hidden`` [N, H] before each.

    They stand at positions 0..N-1; another start would turn all keys and queries alike.
    """

    ids: Sequence[int]
    hidden: Array


@dataclass(frozen=True, slots=True, eq=False)
class Borrowed:
    """Steps of an assistant, each on its own: ``ids`` [N], ``hidden`` [N, H], one ``position``.

    ``keys_values`` holds, for each kind of layer, the donor's keys and values [1, heads, T, D] in
    order of time; ``num_valid`` is the length of the text that they end.
    """

    ids: Sequence[int]
    hidden: Array
    keys_values: KeysValues
    position: int
    num_valid: int


@dataclass(frozen=True, slots=True, eq=False)
class Block:
    """A block behind a context: ``taps`` [S, layers * H] at positions 0..S-1, ``anchor`` at S."""

    anchor: int
    taps: Array
    depth: int


@dataclass(frozen=True, slots=True, eq=False)
class ModuleOutput:
    """Logits [N, V] and hidden states [N, H] for each row; for a block, for each draft.

    ``hidden`` is what chains (MTP, assistant) or what the head reads (block). Only blocks have
    ``drafts``, ``base_logits`` [N, V] (before the Markov head), and ``confidence`` [N] if they
    have that head.
    """

    logits: Array
    hidden: Array
    drafts: tuple[int, ...] = ()
    base_logits: Array | None = None
    confidence: Array | None = None


@dataclass(frozen=True, slots=True, eq=False)
class FirstRound:
    """The first drafts after a prompt, their ``logits`` [K, V], and what they were made from.

    ``first_token`` is the target's. ``hidden`` is [N, H] of the whole prompt for an MTP head,
    [1, H] of its last token for an assistant, [N, layers * H] taps for a block drafter. The rest
    is for an assistant only, as in ``Borrowed``.
    """

    first_token: int
    drafts: tuple[int, ...]
    logits: Array
    hidden: Array
    keys_values: KeysValues
    position: int | None
    num_valid: int | None


@dataclass(frozen=True, slots=True, eq=False)
class DraftRound:
    """One round: the token it started from, its drafts, how many the target took."""

    pending: int
    drafts: tuple[int, ...]
    accepted: int
    logits: Array | None


@dataclass(frozen=True, slots=True, eq=False)
class Trace:
    """A whole run: its ids, an EOS that ended it included, and its rounds.

    The first id comes from the prompt; each round then gives accepted + 1, the last perhaps fewer.
    """

    generated: tuple[int, ...]
    rounds: tuple[DraftRound, ...]


INPUTS: Mapping[Kind, type[Chain] | type[Borrowed] | type[Block]] = {
    "assistant": Borrowed,
    "qwen_mtp": Chain,
    "glm_mtp": Chain,
    "dspark": Block,
    "dflash": Block,
    "deepspec": Block,
}


class Drafters:
    """mlx-vlm's drafters under ``python``, that of its environment, for a ``with`` block.

    Raises ``WorkerFailed`` as ``vlm_process`` says.
    """

    def __init__(self, python: str | Path, *, timeout_s: float = 120.0) -> None:
        self.process = Process(python, timeout_s=timeout_s)

    def __enter__(self) -> Drafters:
        self.process.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.process.stop()

    def pair(
        self, kind: Kind, target: str | Path, drafter: str | Path, *, norm_values: bool = False
    ) -> Pair:
        """Load two folders; for ``glm_mtp`` both are the target's.

        ``ValueError`` in one line for a pair that mlx-vlm cannot draft with. ``norm_values`` mends
        ``deepspec``: values get the norm that its reference has and mlx-vlm 0.7.10 leaves out.
        """
        if kind not in get_args(Kind):
            raise ValueError(f"kind must be one of {', '.join(get_args(Kind))}, got {kind!r}")
        for folder in (Path(target), Path(drafter)):
            if not (folder / "config.json").is_file():
                raise ValueError(f"model folder {folder} has no config.json")
        pair = Pair(self.process, kind, Path(target), Path(drafter), norm_values)
        pair.describe()
        return pair


@dataclass(frozen=True, slots=True)
class Pair:
    """A target and its drafter; each request names both, the worker keeps the last pair loaded."""

    process: Process
    kind: Kind
    target: Path
    drafter: Path
    norm_values: bool

    def describe(self) -> Description:
        """What mlx-vlm made of the two folders."""
        answer = self._ask("describe")
        return Description(
            drafter_class=answer["drafter_class"],
            target_class=answer["target_class"],
            caches=tuple(answer["caches"]),
            block_size=answer["block_size"],
            tap_layers=tuple(answer["tap_layers"]),
            tensors={name: tuple(shape) for name, shape in answer["tensors"].items()},
        )

    def module(self, inputs: Chain | Borrowed | Block) -> ModuleOutput:
        """One forward of the drafter alone on given inputs. ``ValueError`` if they do not fit."""
        wanted = INPUTS[self.kind]
        if not isinstance(inputs, wanted):
            got = type(inputs).__name__
            raise ValueError(f"{self.kind} takes {wanted.__name__} inputs, got {got}")
        if isinstance(inputs, Block):
            _check([inputs.anchor], inputs.depth)
        else:
            _check_rows(inputs)
        fields = {field.name: getattr(inputs, field.name) for field in dataclasses.fields(inputs)}
        answer = self._ask("module", **fields)
        return ModuleOutput(
            logits=answer["logits"],
            hidden=answer["hidden"],
            drafts=tuple(answer.get("drafts", ())),
            base_logits=answer.get("base_logits"),
            confidence=answer.get("confidence"),
        )

    def first_round(self, prompt: Sequence[int], depth: int) -> FirstRound:
        """The first ``depth`` drafts after ``prompt``."""
        _check(prompt, depth)
        answer = self._ask("first_round", prompt=list(prompt), depth=depth)
        kv = answer.get("keys_values", {})
        return FirstRound(
            first_token=answer["first_token"],
            drafts=tuple(answer["drafts"]),
            logits=answer["logits"],
            hidden=answer["hidden"],
            keys_values={name: (keys, values) for name, (keys, values) in kv.items()},
            position=answer.get("position"),
            num_valid=answer.get("num_valid"),
        )

    def trace(
        self,
        prompt: Sequence[int],
        max_tokens: int,
        depth: int,
        *,
        eos_ids: Collection[int] = (),
        with_logits: bool = False,
    ) -> Trace:
        """Generate by mlx-vlm's own round loop until one of ``eos_ids`` or the budget.

        A round drafts min(``depth``, what the budget leaves) tokens.
        """
        _check(prompt, depth)
        if max_tokens < 1:
            raise ValueError(f"max_tokens must be at least 1, got {max_tokens}")
        answer = self._ask(
            "trace",
            prompt=list(prompt),
            max_tokens=max_tokens,
            depth=depth,
            eos_ids=sorted(eos_ids),
            with_logits=with_logits,
        )
        rounds = tuple(
            DraftRound(turn["pending"], tuple(turn["drafts"]), turn["accepted"], turn["logits"])
            for turn in answer["rounds"]
        )
        return Trace(tuple(answer["generated"]), rounds)

    def _ask(self, operation: str, **fields: Any) -> dict[str, Any]:
        request = {
            "operation": operation,
            "kind": self.kind,
            "target": str(self.target.resolve()),
            "drafter": str(self.drafter.resolve()),
            "norm_values": self.norm_values,
            **fields,
        }
        return self.process.ask(request)


def python_in_environment() -> Path | None:
    """The Python that the environment variable ``VARIABLE`` names."""
    named = os.environ.get(VARIABLE)
    return Path(named) if named else None


def _check(prompt: Sequence[int], depth: int) -> None:
    if not prompt:
        raise ValueError("the prompt must hold at least 1 token, got 0")
    if depth < 1:
        raise ValueError(f"depth must be at least 1, got {depth}")


def _check_rows(inputs: Chain | Borrowed) -> None:
    if not inputs.ids or inputs.hidden.shape[:-1] != (len(inputs.ids),):
        raise ValueError(
            f"hidden must be [N, H] for N >= 1 ids, got {inputs.hidden.shape} for {len(inputs.ids)}"
        )
