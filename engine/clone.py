"""Clones of a model: other modules over the same arrays. The model itself is never touched."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mlx.nn.layers.base import Module

from .errors import BadInput

ClassOf = Callable[[Module], type]
"""The class that a module's copy is to have; its own class where nothing is to change."""


def with_classes(model: Module, class_of: ClassOf) -> Module:
    """`model` with other classes for some modules.

    Only the modules on the way to such a one are copied; all others, and all arrays, are shared.
    A module that stands in several places stays one module.
    """
    return _clone(model, class_of, everything=False)


def detached(model: Module) -> Module:
    """`model` with modules, lists and dicts of its own: changing them does not change `model`.

    Arrays are shared, and so is what modules hold outside their tree: configurations and numbers.
    A module that stands in several places stays one module.

    Raises:
        BadInput: a module keeps a function bound to a module, as a step compiled in use: the clone
            would go on calling the model's own.
    """
    return _clone(model, type, everything=True)


def _clone(model: Module, class_of: ClassOf, *, everything: bool) -> Module:
    copies: dict[int, Any] = {}

    def built(node: Any) -> Any:
        if not isinstance(node, dict | list | tuple):
            return node
        if id(node) not in copies:
            copies[id(node)] = copied(node)
        return copies[id(node)]

    def copied(node: Any) -> Any:
        if isinstance(node, dict):
            children = {key: built(child) for key, child in node.items()}
            kind: Any = class_of(node) if isinstance(node, Module) else type(node)
            same = kind is type(node) and all(children[key] is node[key] for key in node)
            if same and not everything:
                return node
            new = kind.__new__(kind)
            dict.update(new, children)
            if isinstance(node, Module):
                vars(new).update(_own_attributes(node) if everything else vars(node))
            return new
        items = [built(child) for child in node]
        same = all(new is old for new, old in zip(items, node, strict=True))
        if same and not (everything and isinstance(node, list)):
            return node
        return items if isinstance(node, list) else tuple(items)

    clone: Module = built(model)
    return clone


def _own_attributes(module: Module) -> dict[str, Any]:
    """What a module holds beside its tree; sets, such as the names of frozen arrays, as copies."""
    for name, value in vars(module).items():
        if isinstance(getattr(value, "__self__", None), Module):
            raise BadInput(f"{type(module).__name__} keeps a function bound to a module ({name})")
    return {n: set(v) if isinstance(v, set) else v for n, v in vars(module).items()}
