"""Grammars as values: what is repeated is never empty, what never ends is gone, and GBNF says the same."""

from __future__ import annotations

import pytest

from kvasir.model.grammar.gbnf import (
    EMPTY,
    NEVER,
    Chars,
    Node,
    Ref,
    Text,
    choice,
    finite,
    nonempty,
    nullable,
    optional,
    repeat,
    repeat_long,
    seq,
    write,
)
from tests.unit.grammar.following import admits, gbnf_of

A, B = Text("a"), Text("b")


def admitted(node: Node, texts: list[str]) -> list[str]:
    grammar = gbnf_of(node)
    return [text for text in texts if admits(grammar, text)]


def test_neighbouring_texts_are_joined_and_nothing_is_left_out() -> None:
    assert seq(A, EMPTY, seq(B, A)) == Text("aba")
    assert seq(A, NEVER) == NEVER
    assert choice(A, choice(B, A)) == choice(A, B)


def test_what_may_be_empty_is_repeated_without_its_empty_text() -> None:
    node = repeat(seq(optional(A), optional(B)), 2, None)
    assert nullable(node)
    assert admitted(node, ["", "a", "b", "ab", "ba", "bbaab", "c"]) == ["", "a", "b", "ab", "ba", "bbaab"]


def test_the_empty_text_can_be_taken_out() -> None:
    node = nonempty(seq(optional(A), repeat(B, 0, 2)))
    assert admitted(node, ["", "a", "b", "abb", "bb", "abbb"]) == ["a", "b", "abb", "bb"]
    assert nonempty(EMPTY) == NEVER


def test_rules_that_never_end_are_taken_out_with_what_needs_them() -> None:
    rules = {"root": choice(seq(A, Ref("loop")), seq(B, repeat(Ref("loop"), 0, None))), "loop": seq(A, Ref("loop"))}
    assert finite(rules, "root") == {"root": B}
    assert finite(rules, "loop") == {}


def test_rules_that_nothing_needs_are_taken_out() -> None:
    assert finite({"root": A, "other": B}, "root") == {"root": A}


@pytest.mark.parametrize(("least", "most"), [(3, 2999), (1500, 2500)])
def test_long_repetitions_count_exactly(least: int, most: int) -> None:
    grammar = gbnf_of(repeat_long(A, least, most))
    for n in {0, least - 1, least, least + 1, 999, 1000, 1001, 1999, 2000, most - 1, most, most + 1} - {-1}:
        assert admits(grammar, "a" * n) == (least <= n <= most), n


def test_every_character_can_be_written() -> None:
    text = '"\\[]-^\n\t\r\x01\x7f é漢😀#|(){}*+?.'
    assert admitted(Text(text), [text]) == [text]
    for char in text:
        assert admitted(Chars(((ord(char), ord(char)), (ord("x"), ord("z")))), [char, "y", "w"]) == [char, "y"]


def test_a_grammar_begins_at_its_root() -> None:
    assert write({"start": A, "root": B}, "root").startswith('root ::= "b"')
    assert write({"start": A}, "start").startswith("root ::= start")
