"""What a target offers to drafters beside its logits: embedding, head, hidden states.

Found by running the model's own code, so scales, soft caps and norms are the model's own: the
embedding is what the first layer is handed, and the head is the model with a backbone that hands on
what it is given. A port that the model does not have is missing, by name, before anything is
allocated for a drafter.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module

from .clone import with_classes
from .errors import BadInput

NORM = "norm"
"""The tap behind the final norm; `layer_tap(i)` names the one behind layer i, before it."""


def layer_tap(number: int) -> str:
    """The tap behind a layer, counted from 0. The last layer's is in front of the final norm."""
    return f"layers.{number}"


class _Reached(Exception):
    """What the first layer was handed."""


class Ports:
    """The ports of one model. Hidden states are [B, N, H] in the model's dtype.

    Raises:
        BadInput: the model has no one module with layers, a final norm and an embedding.
    """

    def __init__(self, model: Module) -> None:
        found = [m for m in modules(model) if isinstance(m.get("layers"), list) and "norm" in m]
        if len(found) != 1 or "embed_tokens" not in found[0]:
            raise BadInput(f"{type(model).__name__}: no backbone with layers, norm and embedding")
        self.backbone: Any = found[0]
        self._layers: list[Module] = self.backbone.layers
        self._embedding: Any = with_classes(
            model, lambda m: _stopping(m) if m is self._layers[0] else type(m)
        )
        self._head: Any = with_classes(
            model, lambda m: _passing(m) if m is self.backbone else type(m)
        )

    @property
    def layer_count(self) -> int:
        return len(self._layers)

    @property
    def last_layer(self) -> str:
        """The tap in front of the final norm."""
        return layer_tap(self.layer_count - 1)

    def embed(self, ids: mx.array) -> mx.array:
        """What the first layer is handed for ids [B, N], with the model's own scale."""
        try:
            self._embedding(ids)
        except _Reached as reached:
            hidden: mx.array = reached.args[0]
            return hidden
        raise BadInput("the model's first layer is not handed a hidden state")

    def logits(self, hidden: mx.array) -> mx.array:
        """[B, N, V] of hidden states behind the final norm, by the model's own head."""
        logits: mx.array = self._head(hidden)
        return logits

    def tapped(self, name: str) -> Module:
        """The module whose output a tap is.

        Raises:
            BadInput: there is no such tap.
        """
        if name == NORM:
            norm: Module = self.backbone.norm
            return norm
        taps = {layer_tap(i): layer for i, layer in enumerate(self._layers)}
        if name not in taps:
            raise BadInput(f"tap {name!r}: the target has {', '.join((*taps, NORM))}")
        return taps[name]


def modules(model: Module) -> Iterator[Module]:
    """A model's modules, itself first, each once."""
    seen: set[int] = set()

    def walk(node: Any) -> Iterator[Module]:
        if not isinstance(node, dict | list | tuple) or id(node) in seen:
            return
        seen.add(id(node))
        if isinstance(node, Module):
            yield node
        for child in node.values() if isinstance(node, dict) else node:
            yield from walk(child)

    return walk(model)


def _stopping(module: Module) -> type:
    def call(_self: Any, hidden: mx.array, *_args: Any, **_kwargs: Any) -> Any:
        raise _Reached(hidden)

    return type(type(module).__name__, (type(module),), {"__call__": call})


def _passing(module: Module) -> type:
    def call(_self: Any, hidden: mx.array, *_args: Any, **_kwargs: Any) -> Any:
        return hidden

    return type(type(module).__name__, (type(module),), {"__call__": call})
