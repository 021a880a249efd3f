"""A JSON schema as a document: its dialect, its references, and the conjunctions it comes down to.

Owns what `$ref`, `allOf`, `anyOf`, `oneOf`, `not`, `if` and the dependencies mean: a schema is a list of alternatives,
each a set of plain schemas that all hold, and of schemas that must not. Knows no grammar. The `jsonschema` package
knows the dialects; nothing is ever fetched.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

import jsonschema
from jsonschema.protocols import Validator
from referencing import Registry
from referencing.exceptions import Unresolvable

from kvasir.errors import BadSchema

Schema = Any  # a dict, or True or False

# A schema without "$schema" is read as the newest of these that it is valid in.
_DIALECTS = (jsonschema.Draft202012Validator, jsonschema.Draft7Validator, jsonschema.Draft4Validator)

# Products of anyOf beside anyOf grow fast; a grammar with more alternatives at one place is too slow to sample by.
_MAX_ALTERNATIVES = 512

_DATA = frozenset({"const", "enum", "default", "example", "examples"})  # keywords whose values are no schemas


@dataclass(frozen=True, slots=True)
class Denial:
    """A schema that must not hold, and the keyword that says so."""

    keyword: str
    schema: Schema


@dataclass(frozen=True, slots=True)
class Case:
    """One way to satisfy a schema: all of `holds`, and none of `denied`."""

    holds: tuple[Mapping[str, Any], ...] = ()
    denied: tuple[Denial, ...] = ()

    def __add__(self, other: Case) -> Case:
        return Case((*self.holds, *other.holds), (*self.denied, *other.denied))


class Document:
    """One schema with all that it refers to."""

    def __init__(self, root: Schema) -> None:
        self.root = root
        self._dialect = _dialect(root)
        self._validator: Validator = self._dialect(root, registry=Registry())
        self._anchors: dict[str, Schema] = {}
        self._bases: list[str] = []
        self._index(root)
        self._id = root.get("$id", root.get("id", "")) if isinstance(root, Mapping) else ""
        self._known: dict[tuple[int, ...], list[Case]] = {}
        # Made here, not found in the document: kept, for a schema is known by its identity.
        self._made: list[Schema] = []

    def fits(self, value: Any, schema: Schema) -> bool:
        """Whether a value satisfies one of the document's schemas."""
        try:
            return bool(self._validator.evolve(schema=schema).is_valid(value))
        except (Unresolvable, RecursionError) as error:
            raise BadSchema(f"json_schema cannot be checked: {_first_line(error)}.") from None

    def fault(self, value: Any) -> str | None:
        """What is wrong with a value, in one line; None if nothing is."""
        try:
            error = jsonschema.exceptions.best_match(self._validator.iter_errors(value))
        except (Unresolvable, RecursionError) as failure:
            raise BadSchema(f"json_schema cannot be checked: {_first_line(failure)}.") from None
        if error is None:
            return None
        return f"{error.json_path} breaks {error.validator!r}: {_first_line(error.message)}"

    # Alternatives

    def cases(self, schemas: tuple[Schema, ...]) -> list[Case]:
        """Every way to satisfy all of the schemas."""
        key = tuple(map(id, schemas))
        if key not in self._known:
            self._known[key] = self._all_cases(schemas)
        return self._known[key]

    def _all_cases(self, schemas: tuple[Schema, ...]) -> list[Case]:
        found = [Case()]
        for schema in schemas:
            found = _crossed(found, self._cases_of(schema, frozenset()))
        return found

    def _cases_of(self, schema: Schema, seen: frozenset[int]) -> list[Case]:
        if isinstance(schema, bool):
            return [Case()] if schema else []
        if id(schema) in seen:
            return []  # a schema that comes back to itself in place adds no way to satisfy it
        seen |= {id(schema)}
        found = [Case((schema,))]
        for group in self._groups(schema, seen):
            found = _crossed(found, group)
        return found

    def _groups(self, schema: Mapping[str, Any], seen: frozenset[int]) -> Iterable[list[Case]]:
        for keyword in ("$dynamicRef", "$recursiveRef"):
            if keyword in schema:
                raise BadSchema(f"json_schema uses {keyword}, which is not supported; use $ref.")
        if "$ref" in schema:
            yield self._cases_of(self._target(schema["$ref"]), seen)
        for part in schema.get("allOf", ()):
            yield self._cases_of(part, seen)
        if "anyOf" in schema:
            yield [case for part in schema["anyOf"] for case in self._cases_of(part, seen)]
        if "oneOf" in schema:
            yield self._one_of(schema["oneOf"], seen)
        if "not" in schema:
            yield [Case((), (Denial("not", schema["not"]),))]
        if "if" in schema:
            yield self._conditional(schema, seen)
        yield from self._dependencies(schema, seen)

    def _one_of(self, parts: list[Schema], seen: frozenset[int]) -> list[Case]:
        found: list[Case] = []
        for chosen in parts:
            denied = Case((), tuple(Denial("oneOf", part) for part in parts if part is not chosen))
            found += [case + denied for case in self._cases_of(chosen, seen)]
        return found

    def _conditional(self, schema: Mapping[str, Any], seen: frozenset[int]) -> list[Case]:
        asked = schema["if"]
        then = _crossed(self._cases_of(asked, seen), self._cases_of(schema.get("then", True), seen))
        otherwise = [Case((), (Denial("if", asked),))]
        return then + _crossed(otherwise, self._cases_of(schema.get("else", True), seen))

    def _dependencies(self, schema: Mapping[str, Any], seen: frozenset[int]) -> Iterable[list[Case]]:
        for keyword in ("dependentRequired", "dependentSchemas", "dependencies"):
            for name, needs in schema.get(keyword, {}).items():
                needed = self._make({"required": needs}) if isinstance(needs, list) else needs
                present = self._make({"required": [name]})
                with_it = _crossed(self._cases_of(present, seen), self._cases_of(needed, seen))
                yield [*with_it, Case((), (Denial(keyword, present),))]

    def denying(self, denial: Denial) -> Schema:
        """A schema that says what a denial does, in the same word."""
        if denial.keyword == "if":
            return self._make({"if": denial.schema, "then": False})
        return self._make({"not": denial.schema})

    def _make(self, schema: Schema) -> Schema:
        known = next((made for made in self._made if made == schema), None)
        if known is None:
            self._made.append(schema)
        return schema if known is None else known

    # References

    def _target(self, ref: str) -> Schema:
        if ref.startswith("#") and self._bases:
            raise BadSchema(
                f"json_schema gives a part of itself the $id {self._bases[0]!r}; leave it out or inline it."
            )
        base, _, fragment = ref.partition("#")
        if base and base != str(self._id).rstrip("#"):
            raise BadSchema(f"json_schema refers to {ref!r}, which is outside of it; put it under $defs.")
        if fragment and not fragment.startswith("/"):
            if fragment not in self._anchors:
                raise BadSchema(f"json_schema refers to {ref!r}, which it does not have.")
            return self._anchors[fragment]
        return self._pointed(fragment, ref)

    def _pointed(self, pointer: str, ref: str) -> Schema:
        here = self.root
        for step in unquote(pointer).split("/")[1:]:
            name = step.replace("~1", "/").replace("~0", "~")
            try:
                here = here[int(name)] if isinstance(here, list) else here[name]
            except (KeyError, IndexError, ValueError, TypeError):
                raise BadSchema(f"json_schema refers to {ref!r}, which it does not have.") from None
        if not isinstance(here, Mapping | bool):
            raise BadSchema(f"json_schema refers to {ref!r}, which is no schema.")
        return here

    def _index(self, root: Schema) -> None:
        """Find anchors, and parts that have an address of their own, for those change what `#` means."""
        todo: list[object] = [root]
        while todo:
            here = todo.pop()
            if isinstance(here, Mapping):
                todo += [value for name, value in here.items() if name not in _DATA]
                self._note(here, nested=here is not root)
            elif isinstance(here, list):
                todo += here

    def _note(self, part: Mapping[str, Any], *, nested: bool) -> None:
        if isinstance(part.get("$anchor"), str):
            self._anchors[part["$anchor"]] = part
        address = part.get("id" if self._dialect is jsonschema.Draft4Validator else "$id")
        if not isinstance(address, str) or not nested:
            return
        if address.startswith("#"):
            self._anchors[address[1:]] = part
        else:
            self._bases.append(address)


def _dialect(root: Any) -> type[Validator]:
    if not isinstance(root, dict | bool):
        raise BadSchema(f"json_schema must be an object, got {type(root).__name__}.")
    named = isinstance(root, Mapping) and "$schema" in root
    tried = (jsonschema.validators.validator_for(root, default=_DIALECTS[0]),) if named else _DIALECTS
    faults: list[str] = []
    if tried[0] is jsonschema.Draft3Validator:
        raise BadSchema("json_schema is written in draft 3, which is not supported; use draft 4 or later.")
    for dialect in tried:
        try:
            dialect.check_schema(root)  # type: ignore[arg-type]  # the stub forgets that true is a schema
        except jsonschema.SchemaError as error:
            faults.append(f"{error.json_path}: {_first_line(error.message)}")
        except RecursionError:
            raise BadSchema("json_schema nests too deeply; use $defs and $ref.") from None
        else:
            return dialect
    raise BadSchema(f"json_schema is not valid JSON Schema, at {faults[0]}.")


def _crossed(some: list[Case], others: list[Case]) -> list[Case]:
    if len(some) * len(others) > _MAX_ALTERNATIVES:
        raise BadSchema(f"json_schema combines to more than {_MAX_ALTERNATIVES} alternatives at one place; split it.")
    return [one + other for one in some for other in others]


def _first_line(error: object) -> str:
    line = (str(error).splitlines() or [type(error).__name__])[0]
    return (line if len(line) <= 160 else f"{line[:157]}...").rstrip(".")
