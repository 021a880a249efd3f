"""What one case of a schema says about each kind of value, merged into plain facts.

Owns the meaning of the keywords that stand side by side: types, values, bounds, members and items. A member or an item
is described by all schemas that apply to it. Knows no grammar.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from functools import cached_property
from typing import Any

from kvasir.errors import BadSchema
from kvasir.model.grammar.document import Case, Document, Schema
from kvasir.model.grammar.numbers import Bound

TYPES = ("object", "array", "string", "number", "integer", "boolean", "null")

# A schema that names no type but has one of these means values of that type.
_IMPLIED = {
    "object": (
        "properties", "required", "additionalProperties", "patternProperties", "minProperties", "maxProperties",
        "propertyNames", "unevaluatedProperties",
    ),
    "array": ("items", "prefixItems", "minItems", "maxItems", "uniqueItems", "contains", "unevaluatedItems"),
    "string": ("pattern", "minLength", "maxLength", "format"),
    "number": ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
}  # fmt: skip


@dataclass
class Facts:
    """One case, keyword by keyword."""

    document: Document
    case: Case
    forbidden: set[str] = field(default_factory=set)  # members that must not be there
    narrowed: dict[str, tuple[Schema, ...]] = field(default_factory=dict)  # members that must be there, and what else

    @property
    def _holds(self) -> tuple[Mapping[str, Any], ...]:
        return self.case.holds

    def said(self, keyword: str) -> Iterator[Any]:
        """Every value that is given for a keyword."""
        return (schema[keyword] for schema in self._holds if keyword in schema)

    @cached_property
    def declared(self) -> frozenset[str]:
        """The types that `type` leaves; all of them without it."""
        found = set(TYPES)
        for wanted in self.said("type"):
            named = {wanted} if isinstance(wanted, str) else set(wanted)
            found &= named | ({"integer"} if "number" in named else set())
        return frozenset(found)

    @cached_property
    def types(self) -> tuple[str, ...]:
        """The types a value may have; where no type is declared, those that the keywords are about."""
        found = set(self.declared)
        if found == set(TYPES):
            implied = {
                kind for kind, words in _IMPLIED.items() if any(w in schema for schema in self._holds for w in words)
            }
            found = implied or found
        if "number" in found:
            found.discard("integer")
        return tuple(kind for kind in TYPES if kind in found)

    @cached_property
    def says_nothing(self) -> bool:
        """Whether any value at all will do."""
        return len(self.types) == len(TYPES) - 1

    @cached_property
    def values(self) -> list[Any] | None:
        """The values that are left of `const` and `enum` when everything else is asked; None without those."""
        if self.listed is None:
            return None
        # The list is not asked whether it holds its own values: that would take the square of its length.
        asked = [_without_list(schema, self.listed) for schema in self._holds]
        return [value for value in _distinct(self.listed) if self._admits(value, [s for s in asked if s])]

    @cached_property
    def listed(self) -> list[Any] | None:
        """The shortest list of values that `const` or `enum` give; None without those."""
        lists = [*([value] for value in self.said("const")), *self.said("enum")]
        return min(lists, key=len) if lists else None

    def admits(self, value: object) -> bool:
        """Whether a value satisfies all that holds here."""
        return all(self.document.fits(value, schema) for schema in self._holds)

    def _admits(self, value: object, asked: list[Schema]) -> bool:
        fits = self.document.fits
        return all(fits(value, schema) for schema in asked) and not any(fits(value, d.schema) for d in self.case.denied)

    # Objects

    @property
    def names(self) -> list[str]:
        """The members that are named, in their order."""
        listed = [name for properties in self.said("properties") for name in properties]
        return [name for name in dict.fromkeys([*listed, *self.required]) if name not in self.forbidden]

    @property
    def required(self) -> list[str]:
        """The members that must be there."""
        # Draft 3 wrote a flag into each member instead of a list.
        listed = [name for names in self.said("required") if isinstance(names, list) for name in names]
        return [*dict.fromkeys([*listed, *self.narrowed])]

    def member(self, name: str) -> tuple[Schema, ...]:
        """All schemas that apply to a member."""
        found = (part for schema in self._holds for part in _member_of(schema, name))
        return (*found, *self.narrowed.get(name, ()))

    @cached_property
    def patterns(self) -> list[tuple[str, Schema]]:
        """Patterns of names, with what members of such a name must satisfy."""
        return [item for patterns in self.said("patternProperties") for item in patterns.items()]

    @property
    def others(self) -> tuple[Schema, ...] | None:
        """What members without a name here must satisfy; None where there may be none.

        A schema that names members means those, unless it speaks of others; so do all who write schemas for models.
        """
        said = [*self.said("additionalProperties")]
        if any(rule is False for rule in [*said, *self.said("unevaluatedProperties")]):
            return None
        if (self.names or self.patterns) and not said:
            return None
        return tuple(rule for rule in [*said, *self.said("unevaluatedProperties")] if rule is not True)

    # Arrays

    @cached_property
    def n_places(self) -> int:
        """How many items have a schema of their own."""
        return max((len(places) for places, _ in map(_places_of, self._holds)), default=0)

    def place(self, at: int) -> tuple[Schema, ...]:
        """All schemas that apply to the item at a place."""
        found = (places[at] if at < len(places) else rest for places, rest in map(_places_of, self._holds))
        return tuple(part for part in found if part is not True)

    @cached_property
    def rest(self) -> tuple[Schema, ...] | None:
        """What items after those with a place must satisfy; None where there may be none."""
        said = any("items" in schema or "additionalItems" in schema for schema in self._holds)
        found = self.place(self.n_places)
        if False in found or False in list(self.said("unevaluatedItems")) or (self.n_places and not said):
            return None
        return (*found, *(rule for rule in self.said("unevaluatedItems") if rule is not True))

    # Sizes and bounds

    def least(self, keyword: str) -> int:
        """The largest of a lower limit."""
        return max((int(value) for value in self.said(keyword)), default=0)

    def most(self, keyword: str) -> int | None:
        """The smallest of an upper limit."""
        return min((int(value) for value in self.said(keyword)), default=None)

    @cached_property
    def low(self) -> Bound | None:
        """The lower bound of a number."""
        return max(self._bounds("minimum", "exclusiveMinimum"), key=lambda b: (b.value, b.open), default=None)

    @cached_property
    def high(self) -> Bound | None:
        """The upper bound of a number."""
        return min(self._bounds("maximum", "exclusiveMaximum"), key=lambda b: (b.value, not b.open), default=None)

    def _bounds(self, closed: str, opened: str) -> Iterator[Bound]:
        for schema in self._holds:
            also_open = schema.get(opened)
            if closed in schema:
                yield Bound(_decimal(schema[closed]), also_open is True)
            if also_open is not None and not isinstance(also_open, bool):
                yield Bound(_decimal(also_open), open=True)

    def texts(self, keyword: str) -> list[str]:
        """The different texts of a keyword like `pattern`."""
        return list(dict.fromkeys(self.said(keyword)))

    def given(self, keyword: str) -> list[Any]:
        """The values of a keyword that ask for something: False and 0 do not."""
        return [value for value in self.said(keyword) if value is not False and value != 0]


def _distinct(values: list[Any]) -> list[Any]:
    return list({json.dumps(value, sort_keys=True): value for value in values}.values())


def _without_list(schema: Mapping[str, Any], listed: list[Any]) -> Schema:
    """The schema less the list itself and what only names things."""
    if schema.get("enum") is not listed:
        return schema
    return {name: rule for name, rule in schema.items() if name not in ("enum", "description", "title", "default")}


def _member_of(schema: Mapping[str, Any], name: str) -> Iterable[Schema]:
    named = schema.get("properties", {})
    matching = [rule for pattern, rule in schema.get("patternProperties", {}).items() if _found(pattern, name)]
    if name in named:
        return [named[name], *matching]
    if matching or "additionalProperties" not in schema:
        return matching
    return [schema["additionalProperties"]]


def _found(pattern: str, name: str) -> bool:
    try:
        return re.search(pattern, name) is not None
    except re.error as error:
        raise BadSchema(f"json_schema has the pattern {pattern!r}, which does not parse: {error}.") from None


def _places_of(schema: Mapping[str, Any]) -> tuple[list[Schema], Schema]:
    """The schemas of the first items and that of all others, in the words of any dialect."""
    items = schema.get("items", True)
    if isinstance(items, list):
        return items, schema.get("additionalItems", True)
    return schema.get("prefixItems", []), items


def _decimal(value: Any) -> Decimal:
    if isinstance(value, float) and not math.isfinite(value):
        raise BadSchema(f"json_schema has the bound {value}, which is no number.")
    return Decimal(repr(value))
