"""Structured output on real llama.cpp: a model with random weights can write nothing but what fits."""

from __future__ import annotations

import json

import pytest

import kvasir
from kvasir import errors
from kvasir.model.grammar.schema import compile_schema
from tests.unit.grammar.schemas import EXAMPLES, Example

BOUNDED = [
    example for example in EXAMPLES
    if example.name in {
        "types", "enum", "minimum", "number bounds", "minLength", "pattern with a length", "date-time", "order",
        "minItems", "prefixItems", "oneOf by required", "oneOf by kind", "allOf narrows", "if", "dependentRequired",
        "uuid",
    }
]  # fmt: skip


@pytest.mark.parametrize("example", BOUNDED, ids=lambda example: example.name)
def test_whatever_a_model_writes_fits(model: kvasir.Model, example: Example) -> None:
    document = compile_schema(json.dumps(example.schema)).document
    for seed in range(3):
        made = model.generate("JSON: ", json_schema=example.schema, seed=seed, temperature=2.0, max_tokens=400)
        if made.finish_reason == "stop":
            assert document.fits(made.parsed, document.root)
        else:
            assert made.parsed is None


def test_a_keyword_that_no_grammar_enforces_is_checked(model: kvasir.Model) -> None:
    schema = {"type": "array", "items": {"enum": [1, 2]}, "minItems": 4, "maxItems": 4, "uniqueItems": True}
    with pytest.raises(errors.BadSchema, match="uniqueItems"):
        model.generate("JSON: ", json_schema=schema, seed=1, max_tokens=400)
