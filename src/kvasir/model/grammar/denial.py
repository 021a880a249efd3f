"""Whether what a grammar would write can be something the schema forbids.

Owns the proof that a case and a schema exclude each other: by type, by listed values, by a member that one needs and
the other cannot have, or by what both say of one member. What is not proved here is not enforced.
"""

from __future__ import annotations

from collections.abc import Mapping

from kvasir.errors import BadSchema
from kvasir.model.grammar.document import Case, Document, Schema
from kvasir.model.grammar.facts import Facts

_DEPTH = 3  # of members within members; a discriminator lies at the first

_NOTES = frozenset({"title", "description", "$comment", "deprecated", "examples", "default"})


def absent_members(schema: Schema) -> list[str] | None:
    """The members of which one must be absent, where that is all that denying means; [] where nothing helps."""
    if schema is True or (isinstance(schema, Mapping) and not set(schema) - _NOTES):
        return []
    if not isinstance(schema, Mapping) or set(schema) - _NOTES != {"required"}:
        return None
    return list(schema["required"])


def denied_member(schema: Schema) -> tuple[str, Schema] | None:
    """The one member that must be there and not fit its schema, where that is all that denying means."""
    if not isinstance(schema, Mapping) or set(schema) - _NOTES - {"required", "type"} != {"properties"}:
        return None
    if len(schema["properties"]) != 1 or schema.get("type", "object") != "object":
        return None
    ((name, part),) = schema["properties"].items()
    return (name, part) if set(schema.get("required", [])) <= {name} else None


def excludes(facts: Facts, schema: Schema) -> bool:
    """Whether nothing that fits the facts can fit the schema too. False also means that nobody knows."""
    try:
        return _excludes(facts, schema, _DEPTH)
    except BadSchema:  # the other schema cannot be looked at; it is checked when the reply is read
        return False


def _excludes(facts: Facts, schema: Schema, depth: int) -> bool:
    if facts.values is not None:
        return not any(facts.document.fits(value, schema) for value in facts.values)
    return all(_contradict(facts, Facts(facts.document, case), depth) for case in _cases(facts.document, schema))


def _cases(document: Document, schema: Schema) -> list[Case]:
    return document.cases((schema,))


def _contradict(facts: Facts, other: Facts, depth: int) -> bool:
    if not _kinds(facts.types) & _kinds(other.declared):
        return True
    if other.listed is not None:
        return not any(facts.admits(value) for value in other.listed)
    if facts.types != ("object",) or depth == 0:
        return False
    return any(_cannot_have(facts, name) for name in other.required) or any(
        _member_excludes(facts, name, part, depth) for name in facts.required for part in other.member(name)
    )


def _kinds(types: frozenset[str] | tuple[str, ...]) -> set[str]:
    return {"number" if kind == "integer" else kind for kind in types}


def _cannot_have(facts: Facts, name: str) -> bool:
    closed = facts.others is None and not facts.patterns and name not in facts.names
    return closed or name in facts.forbidden


def _member_excludes(facts: Facts, name: str, schema: Schema, depth: int) -> bool:
    document = facts.document
    return all(_excludes(Facts(document, case), schema, depth - 1) for case in document.cases(facts.member(name)))
