"""JSON schemas as grammars: what fits is admitted, what does not is not, and what cannot be enforced is named."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvasir.errors import BadSchema
from kvasir.model.grammar.schema import Compiled, compile_schema
from tests.unit.grammar.following import admits, texts_of
from tests.unit.grammar.schemas import EXAMPLES, Example


def compiled(schema: Any) -> Compiled:
    return compile_schema(json.dumps(schema))


def root_of(made: Compiled) -> str:
    return made.grammar.partition("::= ")[2].partition("\n")[0]


@pytest.fixture(params=EXAMPLES, ids=lambda example: example.name)
def example(request: pytest.FixtureRequest) -> Example:
    assert isinstance(request.param, Example)
    return request.param


def test_values_that_fit_are_admitted(example: Example) -> None:
    made = compiled(example.schema)
    for value in example.yes:
        assert admits(made.grammar, json.dumps(value, ensure_ascii=False)), value
        assert made.check(json.dumps(value)) == value


def test_values_that_do_not_fit_are_not_admitted_or_fail_the_check(example: Example) -> None:
    made = compiled(example.schema)
    for value in example.no:
        text = json.dumps(value, ensure_ascii=False)
        assert made.unenforced or not admits(made.grammar, text), value
        if "format" not in json.dumps(example.schema):
            with pytest.raises(BadSchema, match="does not fit"):
                made.check(text)


def test_keywords_that_are_not_enforced_are_named(example: Example) -> None:
    assert compiled(example.schema).unenforced == example.left


def test_every_text_of_a_grammar_is_valid(example: Example) -> None:
    made = compiled(example.schema)
    for text in texts_of(made.rules, root_of(made)):
        if made.document.fits(json.loads(text), made.document.root):
            continue
        assert made.unenforced, text
        with pytest.raises(BadSchema):
            made.check(text)


@pytest.mark.parametrize(
    ("schema", "why"),
    [
        ({"type": "no-such-type"}, "not valid JSON Schema"),
        ({"type": "string", "pattern": "("}, "not a 'regex'"),
        ({"properties": 3}, "not valid JSON Schema"),
        ({"$ref": "#/nowhere"}, "does not have"),
        ({"$ref": "#nowhere"}, "does not have"),
        ({"$ref": "other.json#/a"}, "outside of it"),
        ({"$dynamicRef": "#x"}, "$dynamicRef"),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"$id": "http://x.test/a", "$ref": "#/b"}}}, "$id"),
        ({"$schema": "http://json-schema.org/draft-03/schema#"}, "draft 3"),
        (False, "no value"),
        ({"type": "integer", "minimum": 5, "maximum": 4}, "no value"),
        ({"allOf": [{"type": "string"}, {"type": "integer"}]}, "no value"),
        ({"enum": [1, 2], "type": "string"}, "no value"),
        ({"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}, "no value"),
        ({"$ref": "#"}, "no value"),
        ({"not": {}}, "no value"),
        ({"type": "string", "minLength": 9000}, "counts to 2,000"),
        ({"type": "array", "minItems": 9000}, "counts to 2,000"),
        ({"allOf": [{"anyOf": [{"minimum": n} for n in range(30)]}] * 3}, "alternatives"),
        ([], "must be an object"),
        ("text", "must be an object"),
    ],
)
def test_a_schema_that_cannot_be_enforced_is_refused_with_the_reason(schema: Any, why: str) -> None:
    with pytest.raises(BadSchema) as caught:
        compiled(schema)
    assert why in str(caught.value)


def test_text_that_is_no_json_is_refused() -> None:
    for text in ("", "{", "nonsense"):
        with pytest.raises(BadSchema, match="no JSON"):
            compile_schema(text)


def test_a_schema_that_nests_or_grows_without_end_is_refused_at_once() -> None:
    deep: Any = {"type": "integer"}
    for _ in range(150):
        deep = {"type": "array", "items": deep}
    with pytest.raises(BadSchema, match="nests"):
        compiled(deep)
    with pytest.raises(BadSchema, match="KiB"):
        compiled({"enum": ["x" * 1000 + str(n) for n in range(600)]})
    with pytest.raises(BadSchema):
        compile_schema('{"items":' * 100_000)


def test_a_long_chain_of_references_is_no_matter() -> None:
    defs = {f"d{n}": {"type": "array", "items": {"$ref": f"#/$defs/d{n + 1}"}, "maxItems": 1} for n in range(1200)}
    made = compiled({"$ref": "#/$defs/d0", "$defs": {**defs, "d1200": {"type": "integer"}}})
    assert admits(made.grammar, "[[[]]]")


def test_a_large_enum_is_read() -> None:
    made = compiled({"enum": [f"value {n}" for n in range(5000)]})
    assert admits(made.grammar, '"value 4999"')


def test_optional_members_cost_rules_in_proportion() -> None:
    sizes = [len(compiled({"type": "object", "properties": {f"p{i}": {"type": "null"} for i in range(n)}}).grammar)
             for n in (50, 100)]  # fmt: skip
    assert sizes[1] < 2.6 * sizes[0]


def test_a_reply_that_breaks_a_schema_says_where_and_what() -> None:
    made = compiled({"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}, "required": ["a"]})
    with pytest.raises(BadSchema, match=r"\$\.a breaks 'uniqueItems'"):
        made.check('{"a": [1, 1]}')
    with pytest.raises(BadSchema, match="no JSON"):
        made.check('{"a": [1')
