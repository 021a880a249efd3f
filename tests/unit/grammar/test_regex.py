"""Regular expressions as grammars: the same texts, in both directions."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvasir.errors import BadGrammar
from kvasir.model.grammar import regex, strings
from kvasir.model.grammar.gbnf import finite
from tests.unit.grammar.following import admits, gbnf_of, texts_of

ALPHABET = 'ab01_- .\n"\\é漢'

sets = st.sampled_from(
    ["a", "b", "0", "_", r"\.", ".", r"\d", r"\w", r"\s", r"\D", r"\W", r"\S", "[ab]", "[^a]", "[a-z0-9]", r"[\d_]",
     r"[^\s\w]", r"[\]\-]", "é", "[à-ü]", r"\u6f22", r"\n", '"', r"\\", "[\"\\\\]"]
)  # fmt: skip
counts = st.sampled_from(["", "", "", "*", "+", "?", "*?", "+?", "??", "{2}", "{1,3}", "{0,2}", "{2,}", "{,2}"])


def _groups(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    several = st.lists(inner, min_size=1, max_size=3)
    grouped = st.builds("({}{}){}".format, st.sampled_from(["", "?:"]), several.map("|".join), counts)
    return st.one_of(grouped, several.map("".join))


patterns = st.recursive(st.builds("{}{}".format, sets, counts), _groups, max_leaves=6)


@settings(max_examples=40, deadline=None)
@given(patterns, st.lists(st.text(ALPHABET, max_size=6), max_size=20))
def test_the_grammar_admits_a_text_exactly_if_the_pattern_matches_it(pattern: str, texts: list[str]) -> None:
    grammar = gbnf_of(regex.full_match(pattern))
    for text in texts:
        assert admits(grammar, text) == bool(re.fullmatch(pattern, text)), (pattern, text)


@settings(max_examples=40, deadline=None)
@given(patterns)
def test_what_the_grammar_writes_matches_the_pattern(pattern: str) -> None:
    for text in texts_of(finite({"root": regex.full_match(pattern)}, "root")):
        assert re.fullmatch(pattern, text), (pattern, text)


@settings(max_examples=40, deadline=None)
@given(st.data(), patterns)
def test_what_matches_the_pattern_is_admitted(data: st.DataObject, pattern: str) -> None:
    text = data.draw(st.from_regex(pattern, fullmatch=True, alphabet=ALPHABET) | st.just(""))
    if re.fullmatch(pattern, text):
        assert admits(gbnf_of(regex.full_match(pattern)), text)


anchored = st.builds(
    "{}{}{}".format, st.sampled_from(["", "^", r"\A"]), patterns, st.sampled_from(["", "$", r"\Z"])
) | st.builds("(?:^{}|{}$)".format, sets, sets)


@settings(max_examples=50, deadline=None)
@given(anchored, st.lists(st.text("ab0_ ", max_size=5), max_size=15))
def test_a_search_finds_what_re_finds(pattern: str, texts: list[str]) -> None:
    grammar = gbnf_of(regex.search(pattern))
    for text in texts:
        assert admits(grammar, text) == bool(re.search(pattern, text)), (pattern, text)


@settings(max_examples=50, deadline=None)
@given(anchored)
def test_a_search_in_a_json_string_writes_json_that_re_finds(pattern: str) -> None:
    import json

    node = strings.quoted(regex.search(pattern, spelling=strings.in_json, narrow=True))
    for text in texts_of(finite({"root": node}, "root")):
        assert re.search(pattern, json.loads(text)), (pattern, text)


@pytest.mark.parametrize(
    ("pattern", "texts"),
    [
        ("(?i)ja|nein", ["ja", "JA", "Nein"]),
        ("(?i)straße", ["STRAßE", "straße"]),
        ("(?i)[^k]", ["a", "Z"]),
        ("(?s)a.b", ["a\nb", "axb"]),
        ("(?a)\\w+", ["abc_1"]),
        ("(?x) a  b # both", ["ab"]),
        ("(?P<year>\\d{4})", ["2024", "٢٠٢٤"]),
        ("^(yes|no)$", ["yes", "no"]),
        ("\\bword\\b", ["word"]),
        ("", [""]),
        ("[\\U0001F600-\\U0001F64F]{2}", ["😀😁"]),
        ("(a*)*b", ["b", "aab"]),
        ("(a|)(b|)(c|)", ["", "ac", "abc"]),
    ],
)
def test_flags_anchors_and_scripts(pattern: str, texts: list[str]) -> None:
    grammar = gbnf_of(regex.full_match(pattern))
    for text in texts:
        assert re.fullmatch(pattern, text)
        assert admits(grammar, text)


@pytest.mark.parametrize("text", ["k", "K", "\N{KELVIN SIGN}", "s", "\N{LATIN SMALL LETTER LONG S}"])
@pytest.mark.parametrize("pattern", ["(?i)[ks]", "(?i)[^ks]", "(?i)K", "(?i)S", "(?ai)[^ks]"])
def test_case_is_ignored_as_re_ignores_it(pattern: str, text: str) -> None:
    assert admits(gbnf_of(regex.full_match(pattern)), text) == bool(re.fullmatch(pattern, text))


@pytest.mark.parametrize(
    ("pattern", "what", "where"),
    [
        ("ab(?=c)c", "lookaround", "character 3"),
        ("(?<!a)b", "negative lookaround", "character 1"),
        (r"(a)\1", "backreference", "character 4"),
        (r"(?P<x>a)(?P=x)", "backreference", "character 9"),
        (r"a\bb", "word boundary", "character 2"),
        ("a^b", "anchor", "character 2"),
        ("a$b", "anchor", "character 2"),
        ("(a)(?(1)b|c)", "conditional", "character 4"),
        ("a{3000}", "repetition", "character 2"),
        (r"[(?=)]\\(?=a)", "lookaround", "character 9"),
    ],
)
def test_what_no_grammar_expresses_is_refused_with_its_place(pattern: str, what: str, where: str) -> None:
    with pytest.raises(BadGrammar) as caught:
        regex.full_match(pattern)
    assert what in str(caught.value)
    assert where in str(caught.value)


@pytest.mark.parametrize("pattern", ["(", "[a", "a**", "*", "\\", "(?P<1>a)", "a{2,1}"])
def test_a_broken_pattern_is_refused(pattern: str) -> None:
    with pytest.raises(BadGrammar, match="does not parse"):
        regex.full_match(pattern)


def test_a_pattern_is_cut_to_the_length_it_may_have() -> None:
    node = regex.search_sized("^[a-z][a-z0-9]*$", 3, 5, spelling=strings.as_text, narrow=True)
    assert node is not None
    grammar = gbnf_of(node)
    assert [admits(grammar, "a" * n) for n in range(1, 8)] == [False, False, True, True, True, False, False]
    assert regex.search_sized("(a|b)*c+", 3, 5, spelling=strings.as_text, narrow=True) is None
