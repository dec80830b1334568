"""A reference engine for speculative decoding on MLX.

Read in this order: `generate.py` (one request, from prompt to stream), `prefill.py`, `rounds.py`
(one round), `acceptance.py` (what counts as accepted), `sampling.py` (where tokens come from),
`processors.py` (what changes logits first), `state/` (what is remembered and how it is rolled
back), `drafters/` (who proposes), `target.py` (the model), `adapters.py` (what is mounted on it);
then `batches.py` and `groups.py` (many requests that share forwards), `service.py` (the thread that
serves them), `tiers.py`, `kept.py` and `cache/` (states that outlive their request),
`generations.py` and `journal.py` (requests that outlive their process).
"""

from __future__ import annotations

import os
import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING

# Before mlx is imported: with TF32 on, GPUs that have it compute windows and single steps apart.
os.environ.setdefault("MLX_ENABLE_TF32", "0")

if TYPE_CHECKING:
    from .drafters.registry import open_drafter
    from .drafters.source import Draft, DraftProvider, DraftRows
    from .errors import BadInput, GroupError, LawError
    from .generate import Live, generate, open_live
    from .groups import GroupRound, Limits
    from .service import Engine
    from .state.quantize import KVQuantization
    from .streams import Stream
    from .target import Adapter, Target
    from .tiers import Tiers, open_tiers
    from .values import (
        Finish,
        LogitsOptions,
        Request,
        RoundTrace,
        Sampling,
        Statistics,
        TokenEvent,
        Usage,
    )

__all__ = [
    "Adapter",
    "BadInput",
    "Draft",
    "DraftProvider",
    "DraftRows",
    "Engine",
    "Finish",
    "GroupError",
    "GroupRound",
    "KVQuantization",
    "LawError",
    "Limits",
    "Live",
    "LogitsOptions",
    "Request",
    "RoundTrace",
    "Sampling",
    "Statistics",
    "Stream",
    "Target",
    "Tiers",
    "TokenEvent",
    "Usage",
    "generate",
    "open_drafter",
    "open_live",
    "open_tiers",
]

# The module of every public name, as above.
_HOMES = {
    "open_drafter": ".drafters.registry",
    "Draft": ".drafters.source",
    "DraftProvider": ".drafters.source",
    "DraftRows": ".drafters.source",
    "BadInput": ".errors",
    "GroupError": ".errors",
    "LawError": ".errors",
    "Live": ".generate",
    "generate": ".generate",
    "open_live": ".generate",
    "GroupRound": ".groups",
    "Limits": ".groups",
    "Engine": ".service",
    "KVQuantization": ".state.quantize",
    "Stream": ".streams",
    "Adapter": ".target",
    "Target": ".target",
    "Tiers": ".tiers",
    "open_tiers": ".tiers",
    "Finish": ".values",
    "LogitsOptions": ".values",
    "Request": ".values",
    "RoundTrace": ".values",
    "Sampling": ".values",
    "Statistics": ".values",
    "TokenEvent": ".values",
    "Usage": ".values",
}


def __getattr__(name: str) -> object:
    """Import a public name when it is first asked for.

    Importing mlx takes a second, and `cache/` moves bytes without it.
    """
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_HOMES[name], __name__), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


class _Package(ModuleType):
    """`generate` is the function, although importing a submodule binds its name in the package."""

    @property
    def generate(self) -> object:
        return import_module(".generate", __name__).generate

    @generate.setter
    def generate(self, module: object) -> None:
        pass


sys.modules[__name__].__class__ = _Package
