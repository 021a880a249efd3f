"""Small schemas, one or more for every keyword: values that fit, values that do not, and what is not enforced."""

from __future__ import annotations

from typing import Any, NamedTuple


class Example(NamedTuple):
    """`yes` must be admitted by the grammar; `no` must not, or fail the check where `left` names a keyword."""

    name: str
    schema: Any
    yes: list[Any]
    no: list[Any]
    left: tuple[str, ...] = ()


def obj(properties: dict[str, Any], *required: str, **more: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(required), **more}


INT, STR, BOOL = {"type": "integer"}, {"type": "string"}, {"type": "boolean"}
TREE = {
    "$defs": {"node": obj({"v": INT, "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]}}, "v", "next")},
    "$ref": "#/$defs/node",
}
KINDS = {"oneOf": [obj({"kind": {"const": "a"}, "x": INT}, "kind"), obj({"kind": {"const": "b"}, "x": STR}, "kind")]}

EXAMPLES = [
    Example("anything", {}, [1, "x", None, [1, {"a": []}], {"a": 1.5}], []),
    Example("true", True, [1, "x"], []),
    Example("type", {"type": "string"}, ["", "a\"b\\c\n漢😀"], [1, None, ["a"]]),
    Example("types", {"type": ["integer", "null"]}, [1, None], ["x", 1.5, True]),
    Example("boolean", BOOL, [True, False], [0, None, "true"]),
    Example("null", {"type": "null"}, [None], [0, False]),
    Example("number", {"type": "number"}, [0, -1.5, 12, 3.25e-7], ["1", None]),
    Example("integer", INT, [0, -7, 123456789], [1.5, "1"]),
    Example("const", {"const": {"a": [1, "é"]}}, [{"a": [1, "é"]}], [{"a": [1]}, {}]),
    Example("enum", {"enum": [1, "two", None, [3], "q\"\\"]}, [1, "two", None, [3], "q\"\\"], [2, "one", []]),
    Example("enum with a type", {"type": "string", "enum": ["a", 1, None]}, ["a"], [1, None]),
    Example("enum with a pattern", {"enum": ["ab", "cd"], "pattern": "^a"}, ["ab"], ["cd"]),
    Example("two enums", {"allOf": [{"enum": [1, 2, 3]}, {"enum": [2, 3, 4]}]}, [2, 3], [1, 4]),
    Example("minimum", {"type": "integer", "minimum": -2, "maximum": 11}, [-2, 0, 9, 10, 11], [-3, 12, 20, -10]),
    Example("exclusive", {"type": "integer", "exclusiveMinimum": 1.5, "exclusiveMaximum": 4}, [2, 3], [1, 4, 5]),
    Example("draft 4 exclusive", {"type": "integer", "minimum": 1, "exclusiveMinimum": True}, [2, 10], [0, 1]),
    Example("number bounds", {"type": "number", "minimum": 0, "maximum": 1}, [0, 1, 0.5, 0.125], [-0.1, 1.01, 2, 10]),
    Example("open number bounds", {"type": "number", "exclusiveMinimum": 0}, [0.1, 1, 27.5], [0, -1, 0.0]),
    Example("multipleOf", {"type": "integer", "multipleOf": 3}, [0, 9], [10], ("multipleOf",)),
    Example("multipleOf 1", {"type": "integer", "multipleOf": 1}, [0, 9], [1.5]),
    Example("minLength", {"type": "string", "minLength": 2, "maxLength": 3}, ["ab", "\n\"", "漢é"], ["", "a", "abcd"]),
    Example("long", {"type": "string", "maxLength": 2100}, ["", "a" * 2100], ["a" * 2101]),
    Example("pattern", {"type": "string", "pattern": "b.d"}, ["bcd", "a b\"d e"], ["bd", "b\nd"]),
    Example("anchored", {"type": "string", "pattern": "^[a-z]{2}\\d$"}, ["ab1"], ["ab", "xab1", "ab12"]),
    Example("half anchored", {"type": "string", "pattern": "^x-|y$"}, ["x-abc", "aby"], ["ax-", "yb", ""]),
    Example("quotes in a pattern", {"type": "string", "pattern": "^[^a]\"\\\\$"}, ["b\"\\", "\"\"\\"], ["a\"\\", "b"]),
    Example("pattern with a length", {"type": "string", "pattern": "^[a-z]+$", "maxLength": 2}, ["a", "ab"],
            ["abc", ""]),
    Example("lookahead", {"type": "string", "pattern": "^(?!no)"}, ["yes"], ["no", "none"], ("pattern",)),
    Example("two patterns", {"allOf": [{"pattern": "a"}, {"pattern": "b"}], "type": "string"}, ["ab"],
            ["a"], ("pattern",)),
    Example("date", {"type": "string", "format": "date"}, ["2024-02-28", "1999-12-31"], ["2024-02-31", "x", "24-1-1"]),
    Example("date-time", {"type": "string", "format": "date-time"}, ["2024-01-02T03:04:05Z"], ["2024-01-02", "x"]),
    Example("uuid", {"type": "string", "format": "uuid"}, ["3d6a0d4c-07f0-4d4a-9ac6-1b0c2f0e6b7a"], ["3d6a"]),
    Example("unknown format", {"type": "string", "format": "no-such"}, ["anything"], [1]),
    Example("properties", obj({"a": INT, "b": STR}, "a"), [{"a": 1}, {"a": 1, "b": "x"}], [{}, {"b": "x"}, {"a": "1"}]),
    Example("required elsewhere", {"type": "object", "required": ["z"]}, [{"z": 1}, {"z": [None]}], [{}]),
    Example("order", obj({"b": INT, "a": INT}), [{}, {"b": 1}, {"a": 1}, {"b": 1, "a": 2}], [{"b": "x"}]),
    Example("closed", obj({"a": INT}, additionalProperties=False), [{}, {"a": 1}], [{"b": 1}]),
    Example("others", obj({"ab": INT}, additionalProperties=BOOL), [{"a": True}, {"ab": 1, "abc": True, "b": False}],
            [{"ab": True}, {"a": 1}]),
    Example("a map", {"type": "object", "additionalProperties": INT}, [{}, {"x y": 1, "": 2}], [{"x": "1"}]),
    Example("names", {"type": "object", "propertyNames": {"pattern": "^[a-z]+$"}}, [{"ab": 1}], [{"A": 1}, {"": 1}]),
    Example("patternProperties", {"type": "object", "patternProperties": {"^x-": INT}, "additionalProperties": False},
            [{}, {"x-a": 1}], [{"x-a": "1"}, {"y": 1}]),
    Example("patternProperties of a name", obj({"x-a": {"minimum": 5}}, "x-a", patternProperties={"^x-": INT}),
            [{"x-a": 5}], [{"x-a": 4}, {"x-a": 5.5}]),
    Example("several patternProperties", {"type": "object", "patternProperties": {"a": INT, "b": {"maximum": 9}}},
            [{"a": 1}], [{"ab": 10}], ("patternProperties",)),
    Example("minProperties", obj({"a": INT, "b": INT}, minProperties=1), [{"a": 1}, {"b": 1}], [{}]),
    Example("maxProperties", obj({"a": INT, "b": INT}, maxProperties=1), [{}, {"a": 1}, {"b": 1}], [{"a": 1, "b": 1}]),
    Example("items", {"type": "array", "items": INT}, [[], [1], [1, 2, 3]], [["x"], [1, None], {}]),
    Example("minItems", {"type": "array", "items": INT, "minItems": 1, "maxItems": 2}, [[1], [1, 2]], [[], [1, 2, 3]]),
    Example("any items", {"type": "array", "minItems": 1}, [[1], ["a", None]], [[]]),
    Example("prefixItems", {"type": "array", "prefixItems": [INT, STR], "items": False}, [[1, "a"]],
            [["a", 1], [1, "a", 2]]),
    Example("prefix and items", {"type": "array", "prefixItems": [INT], "items": STR}, [[1], [1, "a", "b"]],
            [["a"], [1, 2]]),
    Example("draft 7 tuple", {"type": "array", "items": [INT, STR], "additionalItems": BOOL}, [[1, "a"],
            [1, "a", True]],
            [[1, 2], [1, "a", 3]]),
    Example("uniqueItems", {"type": "array", "items": INT, "uniqueItems": True}, [[1, 2]], [[1, 1]], ("uniqueItems",)),
    Example("uniqueItems of one", {"type": "array", "items": INT, "uniqueItems": True, "maxItems": 1}, [[],
            [1]], [[1, 1]]),
    Example("contains", {"type": "array", "contains": {"const": 1}}, [[1], [2, 1]], [[2]], ("contains",)),
    Example("anyOf", {"anyOf": [INT, {"type": "string", "maxLength": 1}]}, [1, "a"], ["ab", None]),
    Example("anyOf with others", obj({"a": INT, "b": INT}, anyOf=[{"required": ["a"]}, {"required": ["b"]}]),
            [{"a": 1}, {"b": 1}, {"a": 1, "b": 1}], [{}]),
    Example("oneOf by required", obj({"a": INT, "b": INT}, oneOf=[{"required": ["a"]}, {"required": ["b"]}]),
            [{"a": 1}, {"b": 1}], [{}, {"a": 1, "b": 1}]),
    Example("oneOf by kind", KINDS, [{"kind": "a", "x": 1}, {"kind": "b", "x": "1"}],
            [{"kind": "a", "x": "1"}, {"x": 1}]),
    Example("oneOf that overlaps", {"oneOf": [{"type": "integer"}, {"type": "number", "minimum": 5}]}, [1],
            [7], ("oneOf",)),
    Example("allOf", {"allOf": [obj({"a": INT}, "a"), obj({"b": STR}, "b")]}, [{"a": 1, "b": "x"}],
            [{"a": 1}, {"b": "x"}]),
    Example("allOf narrows", {"allOf": [obj({"a": {"minimum": 2}}, "a"), obj({"a": INT}, "a")]}, [{"a": 2}],
            [{"a": 1}]),
    Example("$ref beside others", {"$defs": {"n": INT}, "$ref": "#/$defs/n", "minimum": 3}, [3, 10], [2]),
    Example("recursion", TREE, [{"v": 1, "next": None}, {"v": 1, "next": {"v": 2, "next": None}}],
            [{"v": 1}, {"v": 1, "next": 2}]),
    Example("names that look alike", {"$defs": {"a_b": INT, "a-b": STR}, "type": "array",
            "prefixItems": [{"$ref": "#/$defs/a_b"}, {"$ref": "#/$defs/a-b"}]}, [[1, "x"]], [["x", 1], [1, 1]]),
    Example("escaped pointers", {"$defs": {"a/b~c d": INT}, "$ref": "#/$defs/a~1b~0c%20d"}, [1], ["x"]),
    Example("anchor", {"$defs": {"n": {"$anchor": "num", "type": "integer"}}, "$ref": "#num"}, [1], ["x"]),
    Example("not", {"not": {"type": "string"}, "type": ["string", "integer"]}, [1], ["x"], ("not",)),
    Example("not of a type", {"not": {"type": "string"}, "type": "integer"}, [1], ["x"]),
    Example("not required", obj({"a": INT, "b": INT}, "b", **{"not": {"required": ["a"]}}), [{"b": 1}],
            [{"a": 1, "b": 1}]),
    Example("if", obj({"k": {"enum": ["a", "b"]}, "x": INT}, "k",
            **{"if": {"properties": {"k": {"const": "a"}}}, "then": {"required": ["x"]}}),
            [{"k": "a", "x": 1}, {"k": "b"}], [{"k": "a"}]),
    Example("dependentRequired", obj({"a": INT, "b": INT}, dependentRequired={"a": ["b"]}),
            [{}, {"b": 1}, {"a": 1, "b": 1}], [{"a": 1}]),
    Example("dependencies", obj({"a": INT, "b": INT}, dependencies={"a": {"required": ["b"]}},
            **{"$schema": "http://json-schema.org/draft-07/schema#"}), [{"b": 1}], [{"a": 1}]),
    Example("unevaluatedProperties", obj({"a": INT}, unevaluatedProperties=False), [{}, {"a": 1}], [{"b": 1}]),
    Example("notes", {"type": "integer", "title": "n", "x-note": {"type": "nonsense"}, "default": "?"}, [1], ["x"]),
]  # fmt: skip
