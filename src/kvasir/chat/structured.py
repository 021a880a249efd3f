"""What an answer must look like: a JSON schema, a grammar, a regular expression or a list of choices.

Owns the constraint that such an option becomes: the grammar that the sampler follows, and the reading of the complete
answer into an object. Reading checks what the grammar could not enforce, so what it returns always fits.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from types import ModuleType
from typing import Any, Literal, get_args, get_origin

from kvasir.errors import BadGrammar, BadOption
from kvasir.model.grammar import gbnf, regex
from kvasir.model.sampler import compiled_schema, parse_reply, schema_json


@dataclass(frozen=True, slots=True)
class Constraint:
    """What an answer must look like.

    `parse` reads a complete answer and raises `BadSchema` or `BadGrammar` where it does not fit. `unenforced` names the
    keywords of a schema that the grammar cannot express: only `parse` sees to those.
    """

    grammar: str
    parse: Callable[[str], object]
    schema_json: str | None = None
    unenforced: tuple[str, ...] = ()


def constraint_of(
    core: ModuleType,
    *,
    json_schema: Any = None,
    grammar: str | None = None,
    regex: str | None = None,
    choices: Any = None,
) -> Constraint | None:
    """Make the constraint of whichever option is given; None where none is.

    `json_schema` is a dict or a Pydantic model class; `choices` a list of texts, an Enum class or a Literal. Raises
    `BadOption`, `BadSchema` or `BadGrammar`.
    """
    options = {"json_schema": json_schema, "grammar": grammar, "regex": regex, "choices": choices}
    given = [name for name, value in options.items() if value is not None]
    if len(given) > 1:
        raise BadOption(f"{' and '.join(given)} were given together; an answer can follow only one of them.")
    if not given:
        return None
    return _MAKERS[given[0]](options[given[0]])


def _of_schema(schema: Any) -> Constraint:
    if not isinstance(schema, Mapping) and not hasattr(schema, "model_json_schema"):
        raise BadOption(f"json_schema must be a dict or a Pydantic model class, got {_shown(schema)}.")
    compiled = compiled_schema(schema)
    return Constraint(
        compiled.grammar, lambda text: parse_reply(schema, text), schema_json(schema), compiled.unenforced
    )


def _of_grammar(grammar: Any) -> Constraint:
    if not isinstance(grammar, str) or not grammar.strip():
        raise BadOption(f"grammar must be GBNF text, got {_shown(grammar)}.")
    return Constraint(grammar, str)


def _of_regex(pattern: Any) -> Constraint:
    if not isinstance(pattern, str):
        raise BadOption(f"regex must be a regular expression as text, got {_shown(pattern)}.")
    rules = gbnf.finite({"root": regex.full_match(pattern, narrow=True)}, "root")
    if not rules:
        raise BadGrammar(f"the regular expression {_shown(pattern)} matches nothing; write one that does.")
    wanted = re.compile(pattern)

    def parse(text: str) -> str:
        if wanted.fullmatch(text) is None:
            raise BadGrammar(f"the answer {_shown(text)} does not match the regular expression {_shown(pattern)}.")
        return text

    return Constraint(gbnf.write(rules, "root"), parse)


def _of_choices(choices: Any) -> Constraint:
    known = _texts(choices)
    grammar = gbnf.write({"root": gbnf.choice(*map(gbnf.Text, known))}, "root")

    def parse(text: str) -> object:
        if text not in known:
            raise BadGrammar(f"the answer {_shown(text)} is none of the choices.")
        return known[text]

    return Constraint(grammar, parse)


def _texts(choices: Any) -> dict[str, object]:
    """Each choice as the model says it, with what it stands for."""
    pairs: list[tuple[Any, object]]
    if isinstance(choices, type) and issubclass(choices, Enum):
        pairs = [
            (member.value if isinstance(member.value, str) else name, member) for name, member in _members(choices)
        ]
    elif get_origin(choices) is Literal:
        pairs = [(value if isinstance(value, str) else str(value), value) for value in get_args(choices)]
    elif isinstance(choices, Iterable) and not isinstance(choices, str | bytes | Mapping):
        pairs = [(value, value) for value in choices]
    else:
        raise BadOption(f"choices must be a list of texts, an Enum class or a Literal, got {_shown(choices)}.")
    wrong = [text for text, _ in pairs if not isinstance(text, str) or not text or "\0" in text]
    if wrong or not pairs:
        raise BadOption(f"choices must be texts that are not empty, got {_shown(wrong[0] if wrong else choices)}.")
    known = dict(pairs)
    if len(known) < len(pairs):
        raise BadOption(f"choices must differ from each other, got {_shown([text for text, _ in pairs])}.")
    return known


def _members(choices: type[Enum]) -> list[tuple[str, Enum]]:
    return [(member.name, member) for member in choices]


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


_MAKERS: dict[str, Callable[[Any], Constraint]] = {
    "json_schema": _of_schema,
    "grammar": _of_grammar,
    "regex": _of_regex,
    "choices": _of_choices,
}
