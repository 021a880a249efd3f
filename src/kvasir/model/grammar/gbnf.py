"""Grammars as values, and as GBNF text.

Owns the shapes a rule is made of, what makes one that llama.cpp reads well (nothing empty is repeated, nothing compound
is repeated in place), and the removal of rules that never end. Knows no JSON and no regular expressions.

A rule named by `Ref` holds at least one character, unless it is never repeated.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from kvasir.model.grammar.charset import Ranges

# llama.cpp refuses to read a grammar that repeats anything more often than this.
MAX_REPEAT = 2000
_BLOCK = 1000
MAX_LONG = MAX_REPEAT * _BLOCK


@dataclass(frozen=True, slots=True)
class Text:
    """These characters."""

    text: str


@dataclass(frozen=True, slots=True)
class Chars:
    """One character of a set."""

    ranges: Ranges


@dataclass(frozen=True, slots=True)
class Seq:
    """One after the other."""

    parts: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Choice:
    """One of several; without any, nothing at all."""

    parts: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Repeat:
    """The part `least` to `most` times; `most` None means without end."""

    part: Node
    least: int
    most: int | None


@dataclass(frozen=True, slots=True)
class Ref:
    """A rule by its name."""

    name: str


Node: TypeAlias = Text | Chars | Seq | Choice | Repeat | Ref
Rules: TypeAlias = dict[str, Node]

EMPTY = Text("")
NEVER = Choice(())


def seq(*parts: Node) -> Node:
    """The parts in a row, neighbouring texts joined."""
    flat: list[Node] = []
    for part in parts:
        for piece in part.parts if isinstance(part, Seq) else (part,):
            if isinstance(piece, Text) and flat and isinstance(flat[-1], Text):
                flat[-1] = Text(flat[-1].text + piece.text)
            else:
                flat.append(piece)
    kept = tuple(piece for piece in flat if piece != EMPTY)
    if NEVER in kept:
        return NEVER
    return kept[0] if len(kept) == 1 else Seq(kept) if kept else EMPTY


def choice(*parts: Node) -> Node:
    """One of the parts, each named once."""
    flat = [piece for part in parts for piece in (part.parts if isinstance(part, Choice) else (part,))]
    kept = tuple(dict.fromkeys(flat))
    return kept[0] if len(kept) == 1 else Choice(kept)


def optional(part: Node) -> Node:
    """The part, or nothing."""
    return repeat(part, 0, 1)


def repeat(part: Node, least: int, most: int | None) -> Node:
    """The part again and again. llama.cpp takes the repetition of something that may be empty for left recursion."""
    if most == 0 or part == EMPTY:
        return EMPTY
    if nullable(part):
        part, least = nonempty(part), 0
    if part == NEVER:
        return EMPTY if least == 0 else NEVER
    return part if (least, most) == (1, 1) else Repeat(part, least, most)


def repeat_long(part: Node, least: int, most: int | None) -> Node:
    """Like `repeat`, for counts above llama.cpp's limit: whole thousands, then the rest."""
    if most is None or most <= MAX_REPEAT:
        return repeat(part, least, most)
    n_free = most - least
    blocks, rest = divmod(n_free, _BLOCK)
    block = repeat(part, _BLOCK, _BLOCK)
    fewer = seq(repeat(block, 0, blocks - 1), repeat(part, 0, _BLOCK - 1)) if blocks else EMPTY
    exact = seq(repeat(block, blocks, blocks), repeat(part, 0, rest)) if blocks else repeat(part, 0, rest)
    return seq(repeat(part, least, least), choice(fewer, exact))


def nullable(node: Node) -> bool:
    """Whether the node admits the empty text."""
    if isinstance(node, Text):
        return not node.text
    if isinstance(node, Seq):
        return all(map(nullable, node.parts))
    if isinstance(node, Choice):
        return any(map(nullable, node.parts))
    return isinstance(node, Repeat) and (node.least == 0 or nullable(node.part))


def nonempty(node: Node) -> Node:
    """The node without the empty text."""
    if not nullable(node):
        return node
    if isinstance(node, Choice):
        return choice(*(nonempty(part) for part in node.parts))
    if isinstance(node, Repeat):
        return repeat(nonempty(node.part), 1, node.most)
    if isinstance(node, Seq):
        rests = (node.parts[at:] for at in range(len(node.parts)))
        return choice(*(seq(nonempty(first), *rest) for first, *rest in rests))
    return NEVER


def finite(rules: Rules, root: str) -> Rules:
    """The rules that are needed and can come to an end, with every choice that cannot taken out; {} if none can."""
    ends = _ending(rules)
    if root not in ends:
        return {}
    kept: Rules = {}
    todo = [root]
    while todo:
        name = todo.pop()
        if name not in kept:
            kept[name] = _pruned(rules[name], ends)
            todo += _names(kept[name])
    return kept


def _ending(rules: Rules) -> set[str]:
    """The rules that can come to an end. One that turns out to be such is told to those that name it, once."""
    users: dict[str, list[str]] = {}
    for name, node in rules.items():
        for used in set(_names(node)):
            users.setdefault(used, []).append(name)
    ends: set[str] = set()
    todo = list(rules)
    while todo:
        name = todo.pop()
        if name not in ends and _can_end(rules[name], ends):
            ends.add(name)
            todo += users.get(name, ())
    return ends


def _can_end(node: Node, ends: set[str]) -> bool:
    if isinstance(node, Ref):
        return node.name in ends
    if isinstance(node, Chars):
        return bool(node.ranges)
    if isinstance(node, Seq):
        return all(_can_end(part, ends) for part in node.parts)
    if isinstance(node, Choice):
        return any(_can_end(part, ends) for part in node.parts)
    return isinstance(node, Text) or node.least == 0 or _can_end(node.part, ends)


def _pruned(node: Node, ends: set[str]) -> Node:
    if isinstance(node, Seq):
        return seq(*(_pruned(part, ends) for part in node.parts))
    if isinstance(node, Choice):
        return choice(*(_pruned(part, ends) for part in node.parts if _can_end(part, ends)))
    if isinstance(node, Repeat):
        return Repeat(_pruned(node.part, ends), node.least, node.most) if _can_end(node.part, ends) else EMPTY
    return node


def _names(node: Node) -> list[str]:
    if isinstance(node, Ref):
        return [node.name]
    if isinstance(node, Repeat):
        return _names(node.part)
    return [name for part in node.parts for name in _names(part)] if isinstance(node, Seq | Choice) else []


def write(rules: Rules, root: str) -> str:
    """The grammar as GBNF; its first rule is called root."""
    return _Writer(rules).text(root)


class _Writer:
    """Spells rules, and gives what is repeated and compound a rule of its own."""

    def __init__(self, rules: Rules) -> None:
        self._rules = rules
        self._lines: list[str] = []
        self._inner: dict[Node, str] = {}

    def text(self, root: str) -> str:
        self._line("root", self._rules[root] if root == "root" else Ref(root))
        for name, node in self._rules.items():
            if name != "root":
                self._line(name, node)
        return "\n".join(self._lines) + "\n"

    def _line(self, name: str, node: Node) -> None:
        at = len(self._lines)
        self._lines.append("")
        self._lines[at] = f"{name} ::= {self._spell(node)}"

    def _spell(self, node: Node, *, inner: bool = False) -> str:
        if isinstance(node, Text):
            return f'"{"".join(map(_escaped, node.text))}"'
        if isinstance(node, Chars):
            return f"[{''.join(map(_range, node.ranges))}]"
        if isinstance(node, Ref):
            return node.name
        if isinstance(node, Repeat):
            return self._atom(node.part) + _count(node.least, node.most)
        if isinstance(node, Choice):
            spelled = " | ".join(self._spell(part) for part in node.parts)
            return f"({spelled})" if inner else spelled
        return " ".join(self._spell(part, inner=True) for part in node.parts)

    def _atom(self, node: Node) -> str:
        if isinstance(node, Chars | Ref):
            return self._spell(node)
        if node not in self._inner:
            name = self._inner[node] = f"part-{len(self._inner)}"
            self._line(name, node)
        return self._inner[node]


def _count(least: int, most: int | None) -> str:
    signs = {(0, None): "*", (1, None): "+", (0, 1): "?"}
    if (least, most) in signs:
        return signs[least, most]
    return f"{{{least}}}" if least == most else f"{{{least},{'' if most is None else most}}}"


def _range(pair: tuple[int, int]) -> str:
    low, high = pair
    return _escaped(chr(low)) if low == high else f"{_escaped(chr(low))}-{_escaped(chr(high))}"


def _escaped(char: str) -> str:
    if char in '\\"[]-':
        return "\\" + char
    if " " <= char <= "~" and char != "^":
        return char
    return f"\\U{ord(char):08X}" if ord(char) > 0xFF else f"\\x{ord(char):02X}"
