"""Grammars of schemas and of regular expressions, followed alike by both cores."""

from __future__ import annotations

import json
import random

import pytest

from kvasir.errors import BadGrammar
from kvasir.model.grammar import gbnf, regex
from kvasir.model.grammar.schema import compile_schema
from tests.contract.core import Core
from tests.unit.grammar.following import admits, texts_of
from tests.unit.grammar.schemas import EXAMPLES, Example

SHORT = [example for example in EXAMPLES if example.name != "long"]  # two thousand rules, read at every text
PATTERNS = [r"(?i)yes|no", r"\w+@\w+\.(?:com|org)", r"[^\s\"]{2,5}\d?", r"(a?b*)+c{0,3}", r"[é-ü漢😀]+x", r".\n?\\\""]


def follows(core: Core, grammar: str, text: str) -> bool:
    """Whether a sampler takes the text, byte by byte, and then an end."""
    sampler = core.sampler(grammar=grammar)
    try:
        for token in [*core.tokens(text), core.model().vocab.eos]:
            sampler.accept(token)
    except BadGrammar:
        return False
    return True


def damaged(text: str, seed: int) -> str:
    draw = random.Random(seed)
    at = draw.randrange(len(text) + 1)
    return text[:at] + draw.choice(["", '"', "1", "}", ",", "x", "\n", "é"]) + text[at + draw.choice([0, 1]) :]


@pytest.mark.parametrize("example", SHORT, ids=lambda example: example.name)
def test_a_core_admits_what_the_grammar_of_a_schema_writes(core: Core, example: Example) -> None:
    made = compile_schema(json.dumps(example.schema))
    root = made.grammar.partition("::= ")[2].partition("\n")[0]
    for text in texts_of(made.rules, root, n=4):
        assert follows(core, made.grammar, text), text
        for seed in range(4):
            other = damaged(text, seed)
            assert follows(core, made.grammar, other) == admits(made.grammar, other), other


@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_core_admits_what_a_regular_expression_matches(core: Core, pattern: str) -> None:
    rules = gbnf.finite({"root": regex.full_match(pattern)}, "root")
    grammar = gbnf.write(rules, "root")
    for text in texts_of(rules, n=10):
        assert follows(core, grammar, text), text
        for seed in range(4):
            other = damaged(text, seed)
            assert follows(core, grammar, other) == admits(grammar, other), other
