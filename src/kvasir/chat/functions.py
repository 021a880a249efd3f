"""Python functions as tools: the JSON schema of a signature, its docstring, and calls with JSON arguments.

Owns what a type hint means to a model: `Literal`, `Optional`, lists, dicts, dataclasses, enums and Pydantic models
become schemas, and arguments that come back become values of these types. Schemas are written out in full, without
references, because models and templates read them as text.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import msgspec

from kvasir.errors import BadOption, suggest

Schema = dict[str, Any]

_SECTION = re.compile(r"^(returns?|yields?|raises?|examples?|notes?):?\s*$", re.I)
_ARGUMENTS = re.compile(r"^(args|arguments|parameters|params):?\s*$", re.I)
_SPHINX = re.compile(r"^:(param|parameter|arg|argument)\s+(?:[^:]*\s)?\*{0,2}(\w+)\s*:\s*(.*)$")
_SPHINX_OTHER = re.compile(r"^:\w+[^:]*:")
_LINE = re.compile(r"^\*{0,2}(\w+)\s*(?:\([^)]*\))?\s*(?::|--|-)\s+(.*)$")


@dataclass(frozen=True, slots=True)
class Signature:
    """What a function takes, as a model is told it."""

    name: str
    description: str
    parameters: Schema


def describe(function: Callable[..., Any]) -> Signature:
    """Read a function's name, docstring and type hints. Raises `BadOption` where a call could not name an argument."""
    name = getattr(function, "__name__", type(function).__name__)
    hints = _hints(function)
    doc = parse_doc(inspect.getdoc(function) or "", tuple(hints))
    properties: Schema = {}
    required: list[str] = []
    for parameter in _parameters(function, name):
        hint = hints[parameter.name]
        schema = _schema(hint, f"{name}({parameter.name})")
        note = doc.arguments.get(parameter.name) or _note(hint)
        if note:
            schema = {**schema, "description": note}
        if parameter.default is inspect.Parameter.empty:
            required.append(parameter.name)
        elif (default := _plain(parameter.default)) is not None:
            schema = {**schema, "default": default}
        properties[parameter.name] = schema
    parameters = {"type": "object", "properties": properties, "required": required}
    return Signature(name, doc.summary, parameters)


def bind(function: Callable[..., Any], arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Make JSON arguments the values that the hints ask for. Raises `BadOption` for what does not fit."""
    name = getattr(function, "__name__", type(function).__name__)
    hints = _hints(function)
    parameters = {parameter.name: parameter for parameter in _parameters(function, name)}
    for given in arguments:
        if given not in parameters:
            raise BadOption(f"{name} has no argument {given!r}.{suggest(given, parameters)}")
    missing = [p for p in parameters.values() if p.default is inspect.Parameter.empty and p.name not in arguments]
    if missing:
        raise BadOption(f"{name} needs the argument {missing[0].name!r}.")
    return {given: _converted(name, given, value, hints[given]) for given, value in arguments.items()}


def result_text(value: object) -> str:
    """What a function returned, as the text a model reads: text as it is, everything else as JSON."""
    if isinstance(value, str):
        return value
    if hasattr(value, "model_dump_json"):
        return str(value.model_dump_json())
    try:
        return msgspec.json.encode(value, enc_hook=_encoded).decode()
    except (TypeError, ValueError):
        return str(value)


@dataclass(frozen=True, slots=True)
class Doc:
    """A docstring: what comes before its sections, and what it says of each argument."""

    summary: str
    arguments: dict[str, str]


def parse_doc(text: str, names: tuple[str, ...]) -> Doc:
    """Read Google's `Args:`, Sphinx's `:param x:` and plain `x: ...` lines that name an argument."""
    summary: list[str] = []
    arguments: dict[str, str] = {}
    current: str | None = None
    in_section = is_about_others = False
    for line in text.splitlines():
        stripped = line.strip()
        found = None if is_about_others else _argument(stripped, names)
        if found is not None:
            current, arguments[found[0]] = found[0], found[1]
        elif _ARGUMENTS.match(stripped) or _SPHINX_OTHER.match(stripped):
            current, in_section, is_about_others = None, True, False
        elif _SECTION.match(stripped):
            current, in_section, is_about_others = None, True, True
        elif current is not None and stripped and line[:1].isspace():
            arguments[current] = f"{arguments[current]} {stripped}"
        elif not in_section and current is None:
            summary.append(stripped)
        elif not stripped:
            current = None
    return Doc("\n".join(summary).strip(), {name: note.strip() for name, note in arguments.items()})


def _argument(line: str, names: tuple[str, ...]) -> tuple[str, str] | None:
    if (match := _SPHINX.match(line)) and match[2] in names:
        return match[2], match[3]
    if (match := _LINE.match(line)) and match[1] in names:
        return match[1], match[2]
    return None


def _parameters(function: Callable[..., Any], name: str) -> list[inspect.Parameter]:
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        raise BadOption(f"the signature of {name} cannot be read; describe the tool by a JSON schema.") from None
    for parameter in parameters:
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.POSITIONAL_ONLY):
            raise BadOption(
                f"{name} has the argument {str(parameter)!r}, which cannot be given by name; "
                "a tool's arguments need names."
            )
    return parameters


def _hints(function: Callable[..., Any]) -> dict[str, Any]:
    """The type of every argument; one without a hint has the type of its default, or any."""
    call = function if inspect.isroutine(function) else getattr(type(function), "__call__", function)  # noqa: B004
    try:
        known = get_type_hints(getattr(function, "func", call), include_extras=True)
    except (NameError, TypeError):
        known = {}
    hints = {}
    for name, parameter in inspect.signature(function).parameters.items():
        default = parameter.default
        guess = type(default) if isinstance(default, str | int | float | bool) else Any
        hints[name] = known.get(name, guess)
    return hints


def _schema(hint: Any, where: str) -> Schema:
    defs: Schema = {}

    def hook(kind: type) -> Schema:
        if not hasattr(kind, "model_json_schema"):
            raise NotImplementedError
        document = dict(kind.model_json_schema())
        defs.update(document.pop("$defs", {}))
        return document

    try:
        (schema,), found = msgspec.json.schema_components([hint], schema_hook=hook, ref_template="#/$defs/{name}")
    except (TypeError, NotImplementedError, ValueError):
        raise BadOption(f"the type of {where}, {hint!r}, has no JSON schema; use plain types.") from None
    defs.update(found)
    inlined: Schema = _inline(schema, defs, ())
    return inlined


def _inline(node: Any, defs: Schema, inside: tuple[str, ...]) -> Any:
    """Write references out; one that refers to itself becomes "any object", which is all a text could say of it."""
    if isinstance(node, list):
        return [_inline(part, defs, inside) for part in node]
    if not isinstance(node, dict):
        return node
    reference = node.get("$ref")
    if isinstance(reference, str):
        name = reference.rpartition("/")[2]
        rest = {key: value for key, value in node.items() if key != "$ref"}
        if name in inside:
            return {"type": "object", **rest}
        return {**_inline(defs.get(name, {}), defs, (*inside, name)), **_inline(rest, defs, inside)}
    return {key: _inline(value, defs, inside) for key, value in node.items()}


def _note(hint: Any) -> str:
    """The description in `Annotated[int, "how many"]`, or in a field that has one."""
    if get_origin(hint) is not Annotated:
        return ""
    for extra in get_args(hint)[1:]:
        note = extra if isinstance(extra, str) else getattr(extra, "description", None)
        if isinstance(note, str):
            return note
    return ""


def _plain(value: object) -> Any:
    try:
        return json.loads(msgspec.json.encode(value, enc_hook=_encoded))
    except (TypeError, ValueError):
        return None


def _converted(name: str, argument: str, value: Any, hint: Any) -> Any:
    try:
        return msgspec.convert(value, hint, strict=False, dec_hook=_decoded)
    except (msgspec.ValidationError, ValueError) as error:
        raise BadOption(f"{name} cannot take {value!r} as {argument}: {str(error).rstrip('.')}.") from None


def _decoded(kind: type, value: Any) -> Any:
    return kind.model_validate(value) if hasattr(kind, "model_validate") else value


def _encoded(value: Any) -> Any:
    if hasattr(value, "model_dump"):
        return value.model_dump(mode="json")
    raise NotImplementedError
