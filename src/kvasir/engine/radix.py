"""A radix tree over the ledgers: which live sequences begin like this prompt, and how far.

Owns the tree and nothing else: no slots, no memory. A holder enters with the tokens it has then; what it grows by later
is compared directly, so that a tick which appends one token to each of thirty sequences does not touch the tree.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, NamedTuple, Protocol, TypeVar


class Holder(Protocol):
    """Something with a list of tokens that only grows at its end while it is in the tree."""

    @property
    def tokens(self) -> list[int]:
        """The tokens, prefix first."""


H = TypeVar("H", bound=Holder)


class Match(NamedTuple, Generic[H]):
    """A holder that begins with the first `n_tokens` of what was asked for, and differs after them."""

    holder: H
    n_tokens: int


class _Node(Generic[H]):
    """An edge of tokens, the holders that pass along it, and where they go on or end."""

    __slots__ = ("children", "edge", "ends", "members")

    def __init__(self, edge: list[int]) -> None:
        self.edge = edge
        self.children: dict[int, _Node[H]] = {}
        self.members: dict[int, H] = {}  # by identity: holders need not be hashable
        self.ends: dict[int, H] = {}


class RadixTree(Generic[H]):
    """Finds common prefixes in time proportional to the prompt, however many holders there are."""

    def __init__(self) -> None:
        self._root: _Node[H] = _Node([])
        self._entered: dict[int, int] = {}  # holder -> tokens it entered with

    def __len__(self) -> int:
        return len(self._root.members)

    def insert(self, holder: H) -> None:
        """Enter a holder with the tokens it has now."""
        tokens = holder.tokens
        self._entered[id(holder)] = len(tokens)
        node, at = self._root, 0
        node.members[id(holder)] = holder
        while at < len(tokens):
            child = node.children.get(tokens[at])
            if child is None:
                child = node.children[tokens[at]] = _Node(tokens[at:])
            n_common = common_prefix(child.edge, tokens, offset=at)
            if n_common < len(child.edge):
                child = _split(node, child, n_common)
            child.members[id(holder)] = holder
            node, at = child, at + n_common
        node.ends[id(holder)] = holder

    def remove(self, holder: H) -> None:
        """Take a holder out; what only it had goes with it."""
        left, at = self._entered.pop(id(holder)), 0
        tokens, node = holder.tokens, self._root
        del node.members[id(holder)]
        while at < left:
            child = node.children[tokens[at]]
            at += len(child.edge)
            del child.members[id(holder)]
            if not child.members:
                del node.children[child.edge[0]]
                return
            node = child
        del node.ends[id(holder)]

    def matches(self, tokens: Sequence[int]) -> list[Match[H]]:
        """Every holder with a common prefix, longest first."""
        found: dict[int, Match[H]] = {}
        node, at = self._root, 0
        while True:
            for key, holder in node.ends.items():
                found[key] = Match(holder, common_prefix(holder.tokens, tokens, start=at))
            child = node.children.get(tokens[at]) if at < len(tokens) else None
            deeper = child.members if child is not None else {}
            for key, holder in node.members.items():
                if key not in deeper and key not in found:
                    found[key] = Match(holder, at)
            if child is None:
                break
            n_common = common_prefix(child.edge, tokens, offset=at)
            if n_common < len(child.edge):
                for key, holder in child.members.items():
                    found[key] = Match(holder, at + n_common)
                break
            node, at = child, at + n_common
        return sorted((match for match in found.values() if match.n_tokens), key=lambda match: -match.n_tokens)


def common_prefix(a: Sequence[int], b: Sequence[int], *, start: int = 0, offset: int = 0) -> int:
    """Count equal tokens from `start` on, `a` against `b[offset:]`; returns an index into `a`.

    Compares slices, which the interpreter does in C, and looks at single tokens only where a slice differs.
    """
    end = min(len(a), len(b) - offset)
    at = start
    while at < end:
        stop = min(at + 512, end)
        if a[at:stop] != b[at + offset : stop + offset]:
            while a[at] == b[at + offset]:
                at += 1
            return at
        at = stop
    return max(at, start)


def _split(parent: _Node[H], child: _Node[H], n_tokens: int) -> _Node[H]:
    """Cut an edge in two; returns the upper part, which all of its members pass."""
    upper: _Node[H] = _Node(child.edge[:n_tokens])
    upper.members = dict(child.members)
    child.edge = child.edge[n_tokens:]
    upper.children[child.edge[0]] = child
    parent.children[upper.edge[0]] = upper
    return upper
