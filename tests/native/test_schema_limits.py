"""What llama.cpp's converter of schemas would not survive is refused before it sees it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvasir import native
from kvasir.errors import BadSchema

INT = {"type": "integer"}


def chain(n: int) -> dict[str, Any]:
    parts = {f"d{i}": {"type": "array", "items": {"$ref": f"#/$defs/d{i + 1}"}} for i in range(n)}
    return {"$ref": "#/$defs/d0", "$defs": {**parts, f"d{n}": INT}}


TOO_MUCH = [
    ({"type": "object", "properties": {"_" * 100_000: INT}}, "bytes in a name"),
    ({"$ref": "#/$defs/" + "_" * 100_000, "$defs": {"_" * 100_000: INT}}, "bytes in a"),
    (chain(20_000), "levels along its references"),
    ({"type": "object", "properties": {f"p{i}": INT for i in range(3000)}}, "members in one object"),
]  # fmt: skip


@pytest.mark.parametrize(("schema", "why"), TOO_MUCH, ids=[why for _, why in TOO_MUCH])
def test_a_schema_that_would_crash_or_hang_the_converter_is_refused(schema: Any, why: str) -> None:
    with pytest.raises(BadSchema, match=why):
        native.json_schema_to_grammar(json.dumps(schema))


@pytest.mark.parametrize(("schema", "why"), TOO_MUCH, ids=[why for _, why in TOO_MUCH])
def test_so_is_such_a_schema_of_a_tool(schema: Any, why: str) -> None:
    template = native.ChatTemplate(source="{% for m in messages %}{{ m.content }}{% endfor %}{{ tools | tojson }}")
    tool = {"type": "function", "function": {"name": "f", "description": "", "parameters": schema}}
    with pytest.raises(BadSchema, match=why):
        template.render(json.dumps([{"role": "user", "content": "x"}]), tools=json.dumps([tool]))


@pytest.mark.parametrize(
    "schema", [chain(100), {"enum": [f"v{i}" for i in range(5000)]}, {"type": "string", "minLength": 9}]
)
def test_what_real_schemas_have_is_converted(schema: Any) -> None:
    assert "root" in native.json_schema_to_grammar(json.dumps(schema))
