"""How a set of characters is spelled: as itself, or inside a JSON string.

Owns JSON's escapes. Inside a string, quotes, backslashes and control characters have one escape each; the other
characters stand for themselves, so that no text has two spellings and a key cannot hide behind an escape.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable

from kvasir.model.grammar.charset import EVERY, Ranges, chars, size, without
from kvasir.model.grammar.gbnf import NEVER, Chars, Node, Text, choice, repeat, seq

Spelling = Callable[[Ranges], Node]

_CONTROLS: Ranges = ((0x01, 0x1F), (0x7F, 0x7F))
_SHORT = '"\\\b\f\n\r\t'  # those that JSON has an escape of two characters for
PLAIN = without(EVERY, (*_CONTROLS[:1], *chars('"\\'), *_CONTROLS[1:]))


def as_text(ranges: Ranges) -> Node:
    """One character of the set, as it is."""
    if size(ranges) == 1:
        return Text(chr(ranges[0][0]))
    return Chars(ranges) if ranges else NEVER


def in_json(ranges: Ranges) -> Node:
    """One character of the set, as it stands in a JSON string."""
    plain = without(ranges, without(EVERY, PLAIN))
    found = [as_text(plain)] if plain else []
    escaped = without(ranges, PLAIN)
    # The rare control characters are left out where there is anything else to say.
    spelled = [c for c in _SHORT if without(chars(c), escaped) == ()]
    if not found and not spelled:
        spelled = [chr(point) for low, high in escaped for point in range(low, high + 1)]
    return choice(*found, *(Text(json_spelling(c)) for c in spelled))


def json_spelling(text: str) -> str:
    """The text as it stands between the quotes of a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def quoted(body: Node) -> Node:
    """A JSON string with this body."""
    return seq(Text('"'), body, Text('"'))


CHAR = in_json(EVERY)


def other_than(names: Iterable[str]) -> Node:
    """A JSON string that is none of these names, and not empty."""
    tree: dict[str, dict[str, object]] = {}
    for name in names:
        here: dict[str, object] = tree  # type: ignore[assignment]
        for char in name:
            here = here.setdefault(char, {})  # type: ignore[assignment]
        here[""] = {}
    return quoted(_beside(tree, start=True))


_ANY_PLAIN = repeat(Chars(PLAIN), 0, None)


def _beside(tree: object, *, start: bool = False) -> Node:
    """What may follow a beginning that some names share, so that none of them comes out."""
    assert isinstance(tree, dict)
    found: list[Node] = [] if start or "" in tree else [Text("")]
    branches = {char: rest for char, rest in tree.items() if char}
    others = without(PLAIN, chars("".join(branches)))
    found.append(seq(Chars(others), _ANY_PLAIN))
    found += [seq(Text(char), _beside(rest)) for char, rest in branches.items() if without(chars(char), PLAIN) == ()]
    return choice(*found)
