"""Constraints of an answer: one at a time, a grammar that the sampler follows, and an object that fits."""

from __future__ import annotations

import enum
import re
from typing import Any, Literal

import pydantic
import pytest

from kvasir.chat.structured import Constraint, constraint_of
from kvasir.errors import BadGrammar, BadOption, BadSchema
from kvasir.native import fake
from tests.unit.grammar.following import admits


class Color(enum.Enum):
    RED = "red"
    DARK_BLUE = "dark blue"
    NUMBER = 7


class City(pydantic.BaseModel):
    name: str = pydantic.Field(max_length=20)
    tags: list[Literal["big", "old"]] = []
    share: float = pydantic.Field(ge=0, le=1)


def made(**options: Any) -> Constraint:
    constraint = constraint_of(fake, **options)
    assert constraint is not None
    return constraint


def test_without_an_option_there_is_no_constraint() -> None:
    assert constraint_of(fake) is None


def test_two_options_are_refused_by_name() -> None:
    with pytest.raises(BadOption, match="json_schema and regex"):
        constraint_of(fake, json_schema={}, regex="a")


def test_a_schema_gives_plain_objects() -> None:
    constraint = made(json_schema={"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]})
    assert admits(constraint.grammar, '{"n": 12}')
    assert constraint.parse('{"n": 12}') == {"n": 12}
    assert constraint.schema_json is not None
    assert constraint.unenforced == ()


def test_a_pydantic_model_gives_instances() -> None:
    constraint = made(json_schema=City)
    text = '{"name": "Oslo", "tags": ["old"], "share": 0.25}'
    assert admits(constraint.grammar, text)
    assert constraint.parse(text) == City(name="Oslo", tags=["old"], share=0.25)
    assert not admits(constraint.grammar, text.replace("0.25", "1.25"))


def test_what_the_grammar_does_not_enforce_is_named_and_checked() -> None:
    constraint = made(json_schema={"type": "array", "items": {"type": "integer"}, "uniqueItems": True})
    assert constraint.unenforced == ("uniqueItems",)
    assert admits(constraint.grammar, "[1, 1]")
    with pytest.raises(BadSchema, match="uniqueItems"):
        constraint.parse("[1, 1]")


def test_a_grammar_is_taken_as_it_is() -> None:
    constraint = made(grammar='root ::= "a"')
    assert (constraint.grammar, constraint.parse("a"), constraint.schema_json) == ('root ::= "a"', "a", None)


def test_a_regular_expression_gives_the_text_that_matches() -> None:
    constraint = made(regex=r"(?i)room \d{1,3}[a-f]?")
    assert admits(constraint.grammar, "Room 12b")
    assert not admits(constraint.grammar, "Room b")
    assert constraint.parse("room 7") == "room 7"
    with pytest.raises(BadGrammar, match="does not match"):
        constraint.parse("room")


def test_classes_of_a_regular_expression_write_ascii() -> None:
    constraint = made(regex=r"\w\d\s")
    assert admits(constraint.grammar, "a1 ")
    assert not admits(constraint.grammar, "é1 ")
    assert not admits(constraint.grammar, "a١ ")
    negated = made(regex=r"\W")
    assert admits(negated.grammar, "-")
    assert not admits(negated.grammar, "é")


@pytest.mark.parametrize("choices", [["yes", "no"], ("yes", "no"), {"yes": 1}.keys() | {"no"}, Literal["yes", "no"]])
def test_choices_give_the_text_itself(choices: Any) -> None:
    constraint = made(choices=choices)
    assert admits(constraint.grammar, "yes")
    assert not admits(constraint.grammar, "maybe")
    assert constraint.parse("no") == "no"
    with pytest.raises(BadGrammar, match="none of the choices"):
        constraint.parse("maybe")


def test_choices_may_begin_alike_and_hold_anything() -> None:
    texts = ["a", "ab", 'quote "', "back\\slash", "two\nlines", "[x]-^", "é漢😀"]
    constraint = made(choices=texts)
    assert all(admits(constraint.grammar, text) for text in texts)
    assert not admits(constraint.grammar, "abc")


def test_an_enum_gives_its_members() -> None:
    constraint = made(choices=Color)
    assert constraint.parse("dark blue") is Color.DARK_BLUE
    assert constraint.parse("NUMBER") is Color.NUMBER
    assert admits(constraint.grammar, "red")


def test_a_literal_gives_its_values() -> None:
    constraint = made(choices=Literal["a", 3, True])
    assert [constraint.parse(text) for text in ("a", "3", "True")] == ["a", 3, True]


@pytest.mark.parametrize(
    ("options", "error", "what"),
    [
        ({"choices": []}, BadOption, "not empty"),
        ({"choices": ["a", ""]}, BadOption, "not empty"),
        ({"choices": ["a", 1]}, BadOption, "not empty, got 1"),
        ({"choices": ["a", "b", "a"]}, BadOption, "differ"),
        ({"choices": "abc"}, BadOption, "list of texts"),
        ({"choices": {"a": 1}}, BadOption, "list of texts"),
        ({"choices": 5}, BadOption, "list of texts"),
        ({"regex": 5}, BadOption, "regular expression"),
        ({"regex": "("}, BadGrammar, "does not parse"),
        ({"regex": "(?=a)b"}, BadGrammar, "lookaround"),
        ({"grammar": " "}, BadOption, "GBNF"),
        ({"json_schema": 5}, BadOption, "dict or a Pydantic"),
        ({"json_schema": {"type": "x"}}, BadSchema, "not valid"),
    ],
)
def test_bad_options_say_what_was_wanted(options: dict[str, Any], error: type[Exception], what: str) -> None:
    with pytest.raises(error, match=re.escape(what)):
        constraint_of(fake, **options)
