"""Ways to ask a grammar what it admits, on the fake core's reader of GBNF."""

from __future__ import annotations

from grammar_walk import Walk
from kvasir.model.grammar.gbnf import Node, Rules, finite, write
from kvasir.native.fake_grammar import Grammar


def admits(grammar: str, text: str) -> bool:
    place = Grammar(grammar, "root").after(text.encode())
    return place is not None and place.may_end


def gbnf_of(node: Node) -> str:
    return write(finite({"root": node}, "root"), "root")


def texts_of(rules: Rules, root: str = "root", *, n: int = 20) -> list[str]:
    walk = Walk(rules)
    return [walk.text(root, seed) for seed in range(n)]
