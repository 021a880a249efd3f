"""A JSON schema becomes a grammar, and replies are checked against it.

Owns the promise of structured output: the grammar never admits what an enforced keyword forbids, keywords that it does
not enforce are named, and a reply is validated against the whole schema before anyone sees it. The grammar may be
narrower than the schema: members come in the schema's order, a schema that names members means those alone, and numbers
have at most 15 digits.
"""

from __future__ import annotations

import json
import math
import re
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from kvasir.errors import BadGrammar, BadSchema
from kvasir.model.grammar import numbers, regex
from kvasir.model.grammar.denial import absent_members, denied_member, excludes
from kvasir.model.grammar.document import Case, Denial, Document, Schema
from kvasir.model.grammar.facts import Facts
from kvasir.model.grammar.formats import FORMATS
from kvasir.model.grammar.gbnf import (
    EMPTY,
    MAX_LONG,
    MAX_REPEAT,
    NEVER,
    Node,
    Ref,
    Rules,
    Text,
    choice,
    finite,
    optional,
    repeat,
    repeat_long,
    seq,
    write,
)
from kvasir.model.grammar.strings import CHAR, in_json, json_spelling, other_than, quoted

# The sampler reads no grammar with more rules.
_MAX_RULES = 10_000

# A schema is itself validated, which takes some ten seconds a megabyte.
_MAX_BYTES = 512 << 10

# Python's JSON reader recurses, and so does llama.cpp's.
_MAX_NESTING = 200

_SPACE = Ref("space")
_COMMA = seq(Text(","), _SPACE)
_NEWLINES = repeat(Text("\n"), 1, 2)
_INDENT = repeat(choice(Text(" "), Text("\t")), 0, 20)


def _listed(opening: str, item: Node, closing: str) -> Node:
    items = seq(item, repeat(seq(_COMMA, item), 0, None))
    return seq(Text(opening), _SPACE, optional(items), _SPACE, Text(closing))


_ANY: Rules = {
    "space": choice(EMPTY, Text(" "), seq(_NEWLINES, _INDENT)),
    "char": CHAR,
    "string": quoted(repeat(Ref("char"), 0, None)),
    "number": numbers.NUMBER,
    "boolean": choice(Text("true"), Text("false")),
    "null": Text("null"),
    "object": _listed("{", seq(Ref("string"), Text(":"), _SPACE, Ref("value")), "}"),
    "array": _listed("[", Ref("value"), "]"),
    "value": choice(*(Ref(name) for name in ("object", "array", "string", "number", "boolean", "null"))),
}


@dataclass(frozen=True, slots=True)
class Compiled:
    """A schema's grammar, its rules as values, and the keywords that only the check of a reply enforces."""

    grammar: str
    rules: Rules
    unenforced: tuple[str, ...]
    document: Document

    def check(self, text: str) -> Any:
        """Read a complete reply. Raises `BadSchema` where it is no JSON or breaks the schema."""
        try:
            value = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise BadSchema(f"the reply does not fit json_schema: it is no JSON, {error}.") from None
        fault = self.document.fault(value)
        if fault is not None:
            raise BadSchema(f"the reply does not fit json_schema: {fault}.")
        return value


@lru_cache(maxsize=64)
def compile_schema(schema_json: str) -> Compiled:
    """Turn a schema, as JSON text, into a grammar. Raises `BadSchema` where none can be made, with the reason."""
    if len(schema_json) > _MAX_BYTES:
        raise BadSchema(f"json_schema has more than {_MAX_BYTES >> 10} KiB; ask for a part of it.")
    try:
        root = json.loads(schema_json)
    except (ValueError, RecursionError) as error:
        raise BadSchema(f"json_schema is no JSON: {error}.") from None
    if _nesting(root) > _MAX_NESTING:
        raise BadSchema(f"json_schema nests more than {_MAX_NESTING} levels; use $defs and $ref.")
    return _Compiler(Document(root)).compile()


def _nesting(root: object) -> int:
    level, here = 0, [root]
    while here := [child for part in here for child in _children(part)]:
        level += 1
    return level


def _children(part: object) -> Sequence[object]:
    return list(part.values()) if isinstance(part, dict) else part if isinstance(part, list) else ()


class _Compiler:
    """Gives every conjunction of schemas that is met one rule; a queue, so that no depth of references is too deep."""

    def __init__(self, document: Document) -> None:
        self._document = document
        self._rules: Rules = dict(_ANY)
        self._names: dict[tuple[int, ...], str] = {}
        self._todo: deque[tuple[str, tuple[Schema, ...]]] = deque()
        self._unenforced: set[str] = set()

    def compile(self) -> Compiled:
        root = self._rule((self._document.root,), "root").name
        while self._todo:
            name, schemas = self._todo.popleft()
            self._rules[name] = choice(*(self._case(case) for case in self._document.cases(schemas)))
            if len(self._rules) > _MAX_RULES:
                raise BadSchema(f"json_schema needs more than {_MAX_RULES:,} grammar rules; ask for less at a time.")
        rules = finite(self._rules, root)
        if not rules:
            raise BadSchema("json_schema admits no value that a grammar can write; check its types and bounds.")
        return Compiled(write(rules, root), rules, tuple(sorted(self._unenforced)), self._document)

    def _rule(self, schemas: tuple[Schema, ...], hint: str) -> Ref:
        """The rule of a value that satisfies all of the schemas."""
        asked = tuple({id(schema): schema for schema in schemas if schema is not True and schema != {}}.values())
        if not asked:
            return Ref("value")
        key = tuple(map(id, asked))
        if key not in self._names:
            self._names[key] = f"{re.sub('[^a-zA-Z0-9]+', '-', hint)[:40].strip('-') or 'rule'}-{len(self._names)}"
            self._todo.append((self._names[key], asked))
        return Ref(self._names[key])

    def _fresh(self, node: Node, hint: str) -> Node:
        """The node, as a rule of its own."""
        name = f"{hint}-{len(self._rules)}x"
        self._rules[name] = node
        return Ref(name)

    # One case

    def _case(self, case: Case) -> Node:
        facts = Facts(self._document, case)
        if facts.values is not None:
            return choice(*(Text(json.dumps(value, ensure_ascii=False)) for value in facts.values))
        if not self._forbid(facts):
            return NEVER
        self._deny(facts)
        objects_only = bool(facts.forbidden or facts.narrowed)
        if facts.says_nothing and not objects_only:
            return Ref("value")
        kinds = [kind for kind in facts.types if kind == "object" or not objects_only]
        return choice(*(getattr(self, f"_{kind}")(facts) for kind in kinds))

    def _forbid(self, facts: Facts) -> bool:
        """Leave out members of which one must be absent; False where all of them must be there."""
        for denial in facts.case.denied:
            names = absent_members(denial.schema)
            absent = [name for name in names or () if name not in facts.required]
            if names is not None and not absent:
                return False
            facts.forbidden.update(absent[:1])
        return True

    def _deny(self, facts: Facts) -> None:
        """See that no other denied schema can hold, or say which keyword is not enforced."""
        for denial in facts.case.denied:
            if absent_members(denial.schema) is not None or excludes(facts, denial.schema):
                continue
            member = denied_member(denial.schema)
            if member is None:
                self._unenforced.add(denial.keyword)
            else:
                name, part = member
                rule = self._document.denying(Denial(denial.keyword, part))
                facts.narrowed[name] = (*facts.narrowed.get(name, ()), rule)

    def _boolean(self, _: Facts) -> Node:
        return Ref("boolean")

    def _null(self, _: Facts) -> Node:
        return Ref("null")

    def _leave(self, facts: Facts, *keywords: str) -> None:
        self._unenforced.update(keyword for keyword in keywords if facts.given(keyword))

    # Numbers

    def _integer(self, facts: Facts) -> Node:
        self._leave_multiples(facts)
        low = high = None
        if facts.low is not None:
            low = math.ceil(facts.low.value)
            low += facts.low.open and low == facts.low.value
        if facts.high is not None:
            high = math.floor(facts.high.value)
            high -= facts.high.open and high == facts.high.value
        return numbers.integers(low, high)

    def _number(self, facts: Facts) -> Node:
        self._leave_multiples(facts)
        found = numbers.decimals(facts.low, facts.high)
        if found is None:
            self._leave(facts, "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
            return Ref("number")
        return Ref("number") if found is numbers.NUMBER else found

    def _leave_multiples(self, facts: Facts) -> None:
        if any(step != 1 or "number" in facts.types for step in facts.given("multipleOf")):
            self._unenforced.add("multipleOf")

    # Strings

    def _string(self, facts: Facts) -> Node:
        least, most = facts.least("minLength"), facts.most("maxLength")
        if most is not None and least > most:
            return NEVER
        patterns = facts.texts("pattern") or [FORMATS[name] for name in facts.texts("format") if name in FORMATS]
        if patterns:
            return self._matching(facts, patterns, least, most)
        if least > MAX_REPEAT:
            raise BadSchema(f"json_schema has minLength {least:,}; a grammar counts to {MAX_REPEAT:,}.")
        if most is not None and most > MAX_LONG:
            self._unenforced.add("maxLength")
            most = None
        if not least and most is None:
            return Ref("string")
        return quoted(repeat_long(Ref("char"), least, most))

    def _matching(self, facts: Facts, patterns: list[str], least: int, most: int | None) -> Node:
        """A string of the first pattern; further ones cannot be enforced at the same time."""
        if len(patterns) > 1:
            self._unenforced.add("pattern")
        try:
            sized = regex.search_sized(patterns[0], least, most, spelling=in_json, narrow=True)
            if sized is not None:
                return quoted(sized)
            if least or most is not None:
                self._leave(facts, "minLength", "maxLength")
            return quoted(regex.search(patterns[0], spelling=in_json, narrow=True))
        except BadGrammar:
            self._unenforced.add("pattern")
            self._leave(facts, "minLength", "maxLength")
            return Ref("string")

    # Arrays

    def _array(self, facts: Facts) -> Node:
        least, most = facts.least("minItems"), facts.most("maxItems")
        if most is None or most > 1:
            self._leave(facts, "uniqueItems")
        if list(facts.said("contains")):
            self._unenforced.add("contains")
        n_first = facts.n_places if most is None else min(facts.n_places, most)
        least = max(least, n_first)
        if least > MAX_REPEAT:
            raise BadSchema(f"json_schema has minItems {least:,}; a grammar counts to {MAX_REPEAT:,}.")
        most = MAX_REPEAT if most is not None and most > MAX_REPEAT else most
        if (most is not None and least > most) or (facts.rest is None and least > n_first):
            return NEVER
        first = [self._rule(facts.place(at), f"item-{at}") for at in range(n_first)]
        rest = None if facts.rest is None or most == n_first else self._rule(facts.rest, "item")
        return seq(Text("["), _SPACE, _items(first, rest, least, most), _SPACE, Text("]"))

    # Objects

    def _object(self, facts: Facts) -> Node:
        if facts.forbidden.intersection(facts.required):
            return NEVER
        rules = facts.given("propertyNames")
        names = [name for name in facts.names if all(self._document.fits(name, rule) for rule in rules)]
        if set(facts.required) - set(names) or False in facts.said("propertyNames"):
            return NEVER
        extra = self._extra(facts, names)
        entries = [_Entry(self._entry(name, facts), name in facts.required) for name in names]
        return self._sized(facts, entries, extra)

    def _entry(self, name: str, facts: Facts) -> Node:
        return seq(Text(f'"{json_spelling(name)}":'), _SPACE, self._rule(facts.member(name), name))

    def _extra(self, facts: Facts, names: list[str]) -> Node | None:
        """A member that is not named; None where there may be none."""
        known = [*names, *facts.forbidden]
        rules = tuple(facts.given("propertyNames"))
        if facts.patterns:
            return self._patterned(facts, known)
        if facts.others is None or (rules and known):
            return None
        key: Node = other_than(known) if known else Ref("string")
        if rules:
            key = self._rule((*rules, _STRING), "name")
        return seq(key, Text(":"), _SPACE, self._rule(facts.others, "other"))

    def _patterned(self, facts: Facts, known: list[str]) -> Node | None:
        entries: list[Node] = []
        for pattern, rule in facts.patterns:
            shared = any(re.search(pattern, name) for name in known)
            elsewhere = any(
                pattern not in schema.get("patternProperties", {})
                and schema.get("additionalProperties", True) is not True
                for schema in facts.case.holds
            )
            key = None if shared or elsewhere else self._key(pattern)
            if key is not None:
                entries.append(seq(key, Text(":"), _SPACE, self._rule((rule,), "other")))
        if len(entries) > 1:
            self._unenforced.add("patternProperties")
        if entries and facts.given("propertyNames"):
            self._unenforced.add("propertyNames")
        return choice(*entries) if entries else None

    @staticmethod
    def _key(pattern: str) -> Node | None:
        try:
            return quoted(regex.search(pattern, spelling=in_json, narrow=True))
        except BadGrammar:
            return None

    def _sized(self, facts: Facts, entries: list[_Entry], extra: Node | None) -> Node:
        """The object with as many members as it may have, or as near to that as a grammar counts."""
        least, most = facts.least("minProperties"), facts.most("maxProperties")
        n_required = sum(entry.required for entry in entries)
        if most is not None and n_required > most:
            return NEVER
        if most == n_required:
            entries, extra = [entry for entry in entries if entry.required], None
        n_extra = None if most is None else most - len(entries)
        if n_extra is not None and n_extra <= 0:
            extra = None
            if n_extra < 0 and most == 1:
                return choice(*(_braced(entry.node) for entry in entries), *([] if least else [_braced(EMPTY)]))
            if n_extra < 0:
                self._unenforced.add("maxProperties")
        if extra is None and least > len(entries):
            return NEVER
        if extra is None and least == len(entries):
            entries = [_Entry(entry.node, True) for entry in entries]
        elif least > max(n_required, 1):
            self._unenforced.add("minProperties")
        return _braced(self._members(entries, extra, n_extra, may_be_empty=not least))

    def _members(self, entries: list[_Entry], extra: Node | None, n_extra: int | None, *, may_be_empty: bool) -> Node:
        """Members in their order with commas between them, in rules whose number grows with the members."""
        start: Node = EMPTY if may_be_empty else NEVER
        after: Node = EMPTY
        if extra is not None:
            more = None if n_extra is None else min(n_extra, MAX_REPEAT)
            after = repeat(seq(_COMMA, extra), 0, more)
            start = choice(start, seq(extra, repeat(seq(_COMMA, extra), 0, None if more is None else more - 1)))
        for entry in reversed(entries):
            tail = after if after == EMPTY else self._fresh(after, "members")
            here = seq(entry.node, tail)
            start = here if entry.required else choice(here, start)
            following = seq(_COMMA, entry.node)
            after = seq(following if entry.required else optional(following), tail)
        return start


_STRING = {"type": "string"}


@dataclass(frozen=True, slots=True)
class _Entry:
    """A member with its name, and whether it must be there."""

    node: Node
    required: bool


def _braced(members: Node) -> Node:
    return seq(Text("{"), _SPACE, members, _SPACE, Text("}"))


def _items(first: Sequence[Node], rest: Node | None, least: int, most: int | None) -> Node:
    """Items with commas between them."""
    listed = seq(*(part for at, item in enumerate(first) for part in ([_COMMA, item] if at else [item])))
    if rest is None:
        return listed
    n_least, n_most = least - len(first), None if most is None else most - len(first)
    following = seq(_COMMA, rest)
    if first:
        return seq(listed, repeat(following, n_least, n_most))
    some = seq(rest, repeat(following, max(n_least - 1, 0), None if n_most is None else n_most - 1))
    return some if n_least else optional(some)
