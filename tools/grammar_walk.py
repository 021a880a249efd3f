"""Random texts of a grammar: what the tests and the coverage of schemas are made of.

Owns a walk through a grammar's rules that always ends: past a number of steps it takes the shortest way out.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from kvasir.model.grammar.charset import Ranges
from kvasir.model.grammar.gbnf import Chars, Choice, Node, Ref, Repeat, Rules, Seq, Text

FAR = 10**6
LONG = 64
# Characters that break careless JSON or careless classes; tried first where a set has them.
ODD = [ord(c) for c in '"\\/{}[]:, \n\tA09-_^$é漢😀\x7f']


class Walk:
    """Walks through the rules of one grammar."""

    def __init__(self, rules: Rules, *, n_steps: int = 1000) -> None:
        self._rules = rules
        self._random = random.Random(0)
        self._n_steps = n_steps
        self._cost = _costs(rules)

    def text(self, root: str, seed: int) -> str:
        """Return one text that the rule admits."""
        self._random.seed(seed)
        left = self._n_steps
        out: list[str] = []
        todo: list[Node] = [Ref(root)]
        while todo:
            left -= 1
            node = todo.pop()
            if isinstance(node, Text):
                out.append(node.text)
            elif isinstance(node, Chars):
                out.append(self._char(node.ranges))
            elif isinstance(node, Ref):
                todo.append(self._rules[node.name])
            elif isinstance(node, Seq):
                todo += reversed(node.parts)
            elif isinstance(node, Choice):
                todo.append(self._one_of(node.parts, hurry=left < 0))
            else:
                todo += [node.part] * self._count(node, hurry=left < 0)
        return "".join(out)

    def _one_of(self, parts: Sequence[Node], *, hurry: bool) -> Node:
        ways = [part for part in parts if _cost(part, self._cost) < FAR]
        if hurry:
            return min(ways, key=lambda part: _cost(part, self._cost))
        return self._random.choice(ways)

    def _count(self, node: Repeat, *, hurry: bool) -> int:
        if hurry or _cost(node.part, self._cost) >= FAR:
            return node.least
        most = node.most if node.most is not None else FAR
        most = min(most, node.least + 4) if most > LONG else most
        return min(node.least + self._random.choice((0, 0, 1, 1, 2, 3, most)), most)

    def _char(self, ranges: Ranges) -> str:
        odd = [point for point in ODD if any(low <= point <= high for low, high in ranges)]
        if odd and self._random.random() < 0.3:
            return chr(self._random.choice(odd))
        low, high = self._random.choice(ranges[:2] if self._random.random() < 0.8 else ranges)
        return chr(self._random.randint(low, min(high, low + 90) if self._random.random() < 0.9 else high))


def _costs(rules: Rules) -> dict[str, int]:
    """How short the shortest text of each rule is, counted in steps."""
    costs = dict.fromkeys(rules, FAR)
    changed = True
    while changed:
        changed = False
        for name, node in reversed(rules.items()):
            cost = min(1 + _cost(node, costs), FAR)
            if cost < costs[name]:
                costs[name], changed = cost, True
    return costs


def _cost(node: Node, costs: dict[str, int]) -> int:
    if isinstance(node, Ref):
        return costs[node.name]
    if isinstance(node, Seq):
        return min(sum(_cost(part, costs) for part in node.parts), FAR)
    if isinstance(node, Choice):
        return min((_cost(part, costs) for part in node.parts), default=FAR)
    if isinstance(node, Repeat):
        return min(node.least * _cost(node.part, costs), FAR)
    return 1
