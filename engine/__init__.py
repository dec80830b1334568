"""A reference engine for speculative decoding on MLX.

Read in this order: `generate.py` (one request, from prompt to stream), `prefill.py`, `rounds.py`
(one round), `acceptance.py` (what counts as accepted), `sampling.py` (where tokens come from),
`processors.py` (what changes logits first), `state/` (what is remembered and how it is rolled
back), `drafters/` (who proposes), `target.py` (the model), `adapters.py` (what is mounted on
it); then `groups.py` (many requests that
share forwards) and `service.py` (the thread that serves them).
"""

import os

# Before mlx is imported: with TF32 on, GPUs that have it compute windows and single steps apart.
os.environ.setdefault("MLX_ENABLE_TF32", "0")

from .drafters.registry import open_drafter
from .drafters.source import Draft, DraftProvider, DraftRows
from .errors import BadInput, GroupError, LawError
from .generate import Live, generate, open_live
from .groups import GroupRound, Limits
from .service import Engine
from .state.quantize import KVQuantization
from .streams import Stream
from .target import Adapter, Target
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
    "TokenEvent",
    "Usage",
    "generate",
    "open_drafter",
    "open_live",
]
