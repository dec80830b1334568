"""Which entry serves a prompt: the longest usable prefix among many. No mlx here.

One compressed radix tree per namespace. An edge holds its ids as bytes, so that a step down costs
one comparison, however long it is. Three facts keep every answer a walk down and a walk back up:

* An entry of N tokens serves what it has in common with a prompt, or nothing: if that much is too
  short for it, anything shorter is as well.
* Every node knows, in the order they were added, the entries at or below it that can be cut back to
  *any* length along its edge. To make that the same for the whole edge, an entry with a minimum m
  keeps a node at depth m - 1.
* So the deepest node on the prompt's path that has such an entry, or one that ends there, has the
  answer.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np

from ..errors import BadInput
from .entry import Reuse, Tokens

E = TypeVar("E")

ITEM = 4
"""Bytes of a token id."""


@dataclass(frozen=True, slots=True, eq=False)
class Indexed(Generic[E]):
    """An entry in an index: what `add` returned, and what removes it. Equal only to itself.

    `length` counts its tokens; `order` grows with every `add`.
    """

    entry: E
    namespace: str
    length: int
    reuse: Reuse
    order: int

    @property
    def cut_from(self) -> int | None:
        """The shortest prefix to which it can be cut back, itself included; None: it cannot be."""
        minimum = max(1, self.reuse.minimum)
        return minimum if self.reuse.trimmable and minimum <= self.length else None


class _Node(Generic[E]):
    """The place `depth` tokens down, where `edge` leads from its parent.

    `here` are the entries that end in it, `cuttable` those at or below it that can be cut back to
    any depth on the edge; both in the order of addition, the values mean nothing. `marks` counts
    the entries that keep the node although nothing ends or branches in it.
    """

    __slots__ = ("children", "cuttable", "depth", "edge", "here", "marks", "parent")

    def __init__(self, edge: bytes, depth: int, parent: _Node[E] | None) -> None:
        self.edge, self.depth, self.parent = edge, depth, parent
        self.children: dict[bytes, _Node[E]] = {}
        self.here: dict[Indexed[E], None] = {}
        self.cuttable: dict[Indexed[E], None] = {}
        self.marks = 0

    def split(self, depth: int) -> _Node[E]:
        """A new node in the middle of the edge, this one below it."""
        assert self.parent is not None
        cut = (depth - self.parent.depth) * ITEM
        upper = _Node(self.edge[:cut], depth, self.parent)
        self.parent.children[self.edge[:ITEM]] = upper
        self.edge, self.parent = self.edge[cut:], upper
        upper.children[self.edge[:ITEM]] = self
        upper.cuttable = dict(self.cuttable)
        return upper

    def prune(self) -> None:
        """Drop the node if nothing needs it, and then its parent."""
        node = self
        while (parent := node.parent) and not node.here and not node.marks:
            if len(node.children) > 1:
                return
            for child in node.children.values():
                child.edge, child.parent = node.edge + child.edge, parent
                parent.children[child.edge[:ITEM]] = child
            if not node.children:
                del parent.children[node.edge[:ITEM]]
            node.parent = None
            node = parent

    def up(self) -> Iterator[_Node[E]]:
        """The nodes from here upwards, without the root."""
        node = self
        while node.parent is not None:
            yield node
            node = node.parent


class PrefixIndex(Generic[E]):
    """Entries by namespace and tokens. Entries with equal tokens may stand beside each other."""

    def __init__(self) -> None:
        self._roots: dict[str, _Node[E]] = {}
        self._nodes: dict[Indexed[E], _Node[E]] = {}
        self._added = 0

    def __len__(self) -> int:
        return len(self._nodes)

    def __iter__(self) -> Iterator[Indexed[E]]:
        """All entries in the order of addition."""
        return iter(self._nodes)

    def __contains__(self, indexed: Indexed[E]) -> bool:
        return indexed in self._nodes

    def add(self, namespace: str, tokens: Tokens, reuse: Reuse, entry: E) -> Indexed[E]:
        """Take up an entry.

        Raises:
            BadInput: it has no tokens, or they are not int32 [N].
        """
        path = _path(tokens)
        if not path:
            raise BadInput("an entry needs at least 1 token, got 0")
        added = Indexed(entry, namespace, len(tokens), reuse, self._added)
        node, depth = _descend(self._roots.setdefault(namespace, _Node(b"", 0, None)), path)
        if depth < node.depth:
            node = node.split(depth)
        if depth < added.length:
            leaf = _Node(path[depth * ITEM :], added.length, node)
            node.children[leaf.edge[:ITEM]] = leaf
            node = leaf
        self._nodes[added] = node
        self._added += 1
        node.here[added] = None
        if (cut_from := added.cut_from) is not None:
            if mark := _at(node, cut_from - 1):
                mark.marks += 1
            for above in _cuttable_at(node, cut_from):
                above.cuttable[added] = None
        return added

    def remove(self, indexed: Indexed[E]) -> None:
        """Forget an entry.

        Raises:
            KeyError: it is not in the index.
        """
        node = self._nodes.pop(indexed)
        del node.here[indexed]
        if (cut_from := indexed.cut_from) is not None:
            for above in _cuttable_at(node, cut_from):
                del above.cuttable[indexed]
            if mark := _at(node, cut_from - 1):
                mark.marks -= 1
                mark.prune()
        node.prune()
        if not self._roots[indexed.namespace].children:
            del self._roots[indexed.namespace]

    def longest(
        self, namespace: str, tokens: Tokens, at_most: int | None = None
    ) -> tuple[Indexed[E], int] | None:
        """The entry that serves most of `tokens`, and how many of them: 1..at_most.

        `at_most` is all but the last one if it is not given. Of several that serve as many, the one
        that was added first.
        """
        path = _path(tokens)
        limit = len(tokens) - 1 if at_most is None else at_most
        if limit < 1 or namespace not in self._roots:
            return None
        node, depth = _descend(self._roots[namespace], path[: limit * ITEM])
        for above in node.up():
            count = min(depth, above.depth)
            found = [next(iter(above.cuttable))] if above.cuttable else []
            if count == above.depth:
                found += [held for held in above.here if held.reuse.serves(count, count)][:1]
            if found:
                return min(found, key=lambda held: held.order), count
        return None

    def covers(self, namespace: str, tokens: Tokens) -> bool:
        """Whether some entry serves all of `tokens`."""
        found = self.longest(namespace, tokens, len(tokens))
        return found is not None and found[1] == len(tokens)

    def same(self, namespace: str, tokens: Tokens) -> list[Indexed[E]]:
        """The entries of exactly these tokens."""
        path = _path(tokens)
        if namespace not in self._roots:
            return []
        node, depth = _descend(self._roots[namespace], path)
        return list(node.here) if depth == node.depth == len(tokens) else []

    def beside(self, indexed: Indexed[E]) -> list[Indexed[E]]:
        """The other entries of an entry's tokens, in the order of addition."""
        return [held for held in self._nodes[indexed].here if held is not indexed]

    def superseded(self, namespace: str, tokens: Tokens, reuse: Reuse) -> list[Indexed[E]]:
        """The entries that a newcomer makes needless: strict prefixes that it serves itself.

        The shortest ones come first.
        """
        path = _path(tokens)
        if not reuse.trimmable or namespace not in self._roots:
            return []
        node, depth = _descend(self._roots[namespace], path)
        complete = [above for above in node.up() if above.depth <= depth]
        return [
            held
            for above in reversed(complete)
            if above.depth < len(tokens) and reuse.serves(above.depth, len(tokens))
            for held in above.here
        ]


def _path(tokens: Tokens) -> bytes:
    if tokens.dtype != np.int32 or tokens.ndim != 1:
        raise BadInput(f"tokens must be int32 [N], got {tokens.dtype} {list(tokens.shape)}")
    return tokens.tobytes()


def _descend(root: _Node[E], path: bytes) -> tuple[_Node[E], int]:
    """The deepest node on whose edge the path runs, and how many tokens deep it runs there."""
    node, at = root, 0
    while child := node.children.get(path[at : at + ITEM]):
        node = child
        if not path.startswith(node.edge, at):
            return node, (at + _common(node.edge, path[at : at + len(node.edge)])) // ITEM
        at += len(node.edge)
    return node, at // ITEM


def _common(a: bytes, b: bytes) -> int:
    """How many bytes of whole ids `a` and `b`, which is not longer, have in common at the front."""
    ours, theirs = np.frombuffer(a[: len(b)], np.int32), np.frombuffer(b, np.int32)
    differing = np.flatnonzero(ours != theirs)
    return int(differing[0]) * ITEM if len(differing) else len(b)


def _at(node: _Node[E], depth: int) -> _Node[E] | None:
    """The node `depth` tokens down on the way to `node`, made if need be; None: the root."""
    for above in node.up():
        assert above.parent is not None
        if above.parent.depth < depth <= above.depth:
            return above if above.depth == depth else above.split(depth)
    return None


def _cuttable_at(node: _Node[E], cut_from: int) -> Iterator[_Node[E]]:
    """The nodes on the way to `node` along whose whole edges a cut is possible."""
    for above in node.up():
        assert above.parent is not None
        if above.parent.depth + 1 < cut_from:
            return
        yield above
