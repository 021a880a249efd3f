"""A regular expression becomes a grammar.

Owns the way from Python's own parse of a pattern to rules: literals, classes, groups, alternation and repetition, with
the flags `i`, `s`, `a` and `x`, and anchors at the ends. What is not a regular language, or looks around, is refused
with its place. Lazy repetition is plain repetition here: the language is the same.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from re import _constants as sre  # type: ignore[attr-defined]
from re import _parser as parser  # type: ignore[attr-defined]
from typing import Any

from kvasir.errors import BadGrammar
from kvasir.model.grammar import charset
from kvasir.model.grammar.charset import EVERY, Ranges, chars, complement, union, without
from kvasir.model.grammar.gbnf import EMPTY, MAX_REPEAT, Node, choice, repeat, seq
from kvasir.model.grammar.strings import Spelling, as_text

Item = tuple[Any, Any]

_SETS = (sre.LITERAL, sre.NOT_LITERAL, sre.ANY, sre.IN)
_BEGINS = (sre.AT_BEGINNING, sre.AT_BEGINNING_STRING)
_ENDS = (sre.AT_END, sre.AT_END_STRING)

# More than a person writes; a pattern that spreads wider has alternatives within alternatives around its anchors.
_MAX_SPREAD = 64

_NAMES = {
    sre.ASSERT: ("a lookaround", r"\(\?<?="),
    sre.ASSERT_NOT: ("a negative lookaround", r"\(\?<?!"),
    sre.GROUPREF: ("a backreference", r"\\[1-9]|\(\?P="),
    sre.GROUPREF_EXISTS: ("a conditional group", r"\(\?\("),
    sre.ATOMIC_GROUP: ("an atomic group", r"\(\?>"),
    sre.POSSESSIVE_REPEAT: ("a possessive repetition", r"[*+?}]\+"),
}


def full_match(pattern: str, *, spelling: Spelling = as_text, narrow: bool = False) -> Node:
    """The texts that `re.fullmatch` accepts.

    `narrow` keeps to what both Python and ECMAScript mean by a class: `\\w` is ASCII and `\\W` nothing that any script
    calls a word. Raises `BadGrammar`.
    """
    tree = _parsed(pattern)
    reader = _Reader(pattern, spelling, narrow)
    return reader.sequence(list(tree), _Place(tree.state.flags, first=True, last=True))


def search(pattern: str, *, spelling: Spelling = as_text, narrow: bool = False) -> Node:
    """The texts in which `re.search` finds the pattern: it may begin and end anywhere it is not anchored."""
    tree = _parsed(pattern)
    reader = _Reader(pattern, spelling, narrow)
    anything = repeat(spelling(EVERY), 0, None)
    found: list[Node] = []
    for first, items in reader.spread(list(tree), _BEGINS, at=0):
        for last, rest in reader.spread(items, _ENDS, at=-1):
            body = reader.sequence(rest, _Place(tree.state.flags, first=first, last=last))
            found.append(seq(EMPTY if first else anything, body, EMPTY if last else anything))
    return choice(*found)


def search_sized(pattern: str, least: int, most: int | None, *, spelling: Spelling, narrow: bool) -> Node | None:
    """Like `search`, for texts of `least` to `most` characters; None where a grammar cannot count both.

    It can where every text the pattern finds is of that size, and where one character repeats between others.
    """
    tree = _parsed(pattern)
    reader = _Reader(pattern, spelling, narrow)
    ends = [
        (first and last, rest)
        for first, items in reader.spread(list(tree), _BEGINS, at=0)
        for last, rest in reader.spread(items, _ENDS, at=-1)
    ]
    if not all(anchored for anchored, _ in ends):
        return None
    low, high = tree.getwidth()
    if low >= least and (most is None or high <= most):
        return search(pattern, spelling=spelling, narrow=narrow)
    squeezed = _squeezed(ends[0][1], least, most) if len(ends) == 1 else None
    if squeezed is None:
        return None
    return reader.sequence(squeezed, _Place(tree.state.flags, first=True, last=True))


def _squeezed(items: list[Item], least: int, most: int | None) -> list[Item] | None:
    """The items with the one repetition among them cut to size; None if that is not how they are made."""
    repeats = [at for at, (op, _) in enumerate(items) if op in (sre.MAX_REPEAT, sre.MIN_REPEAT)]
    if len(repeats) != 1 or any(op not in _SETS for at, (op, _) in enumerate(items) if at != repeats[0]):
        return None
    op, (low, high, inner) = items[repeats[0]]
    if [inner_op for inner_op, _ in inner if inner_op in _SETS] == [] or len(inner) != 1:
        return None
    n_fixed = len(items) - 1
    low = max(low, least - n_fixed)
    high = high if most is None else min(high, most - n_fixed)
    if low > high:
        return None
    return [*items[: repeats[0]], (op, (low, high, inner)), *items[repeats[0] + 1 :]]


def _parsed(pattern: str) -> Any:
    try:
        return parser.parse(pattern)
    except (re.error, RecursionError, OverflowError) as error:
        raise BadGrammar(f"the regular expression {_shown(pattern)} does not parse: {error}.") from None


@dataclass(frozen=True, slots=True)
class _Place:
    """Where in the pattern we are: the flags in force, and whether nothing stands before or after."""

    flags: int
    first: bool
    last: bool


@dataclass(frozen=True, slots=True)
class _Reader:
    pattern: str
    spelling: Spelling
    narrow: bool

    def sequence(self, items: Sequence[Item], place: _Place) -> Node:
        parts: list[Node] = []
        for at, item in enumerate(items):
            first = place.first and all(op is sre.AT for op, _ in items[:at])
            last = place.last and all(op is sre.AT for op, _ in items[at + 1 :])
            if item[0] is sre.AT:
                self._anchor(item[1], _Place(place.flags, first=first, last=last), items, at)
            else:
                parts.append(self._item(item, _Place(place.flags, first=first, last=last)))
        return seq(*parts)

    def _item(self, item: Item, place: _Place) -> Node:
        op, value = item
        if op in _SETS:
            return self.spelling(self._set(item, place.flags))
        if op is sre.BRANCH:
            return choice(*(self.sequence(list(branch), place) for branch in value[1]))
        if op is sre.SUBPATTERN:
            _, added, removed, inner = value
            return self.sequence(list(inner), replace(place, flags=(place.flags | added) & ~removed))
        if op in (sre.MAX_REPEAT, sre.MIN_REPEAT):
            return self._repeat(value, place)
        raise self._refusal(*_NAMES.get(op, (f"{str(op).lower()}", "$^")))

    def _repeat(self, value: tuple[int, Any, Any], place: _Place) -> Node:
        least, most, inner = value
        once = most == 1
        part = self.sequence(list(inner), replace(place, first=place.first and once, last=place.last and once))
        if least > MAX_REPEAT or (most is not sre.MAXREPEAT and most > MAX_REPEAT):
            raise self._refusal(f"a repetition of more than {MAX_REPEAT:,}", r"\{\d*,?\d{4,}")
        return repeat(part, least, None if most is sre.MAXREPEAT else most)

    # Sets

    def _set(self, item: Item, flags: int) -> Ranges:
        op, value = item
        if op is sre.ANY:
            return EVERY if flags & re.DOTALL else complement(chars("\n\r" if self.narrow else "\n"))
        if op is sre.IN:
            negated = value[0][0] is sre.NEGATE
            members = value[1:] if negated else value
        else:
            negated, members = op is sre.NOT_LITERAL, [(sre.LITERAL, value)]
        found = union(pair for member in members for pair in self._member(member, flags, wide=negated))
        found = without(found, complement(EVERY))
        if flags & re.IGNORECASE:
            found = charset.any_case(found, ascii_only=bool(flags & re.ASCII))
        return complement(found) if negated else without(found, without(found, EVERY))

    def _member(self, member: Item, flags: int, *, wide: bool) -> Ranges:
        op, value = member
        if op is sre.LITERAL:
            return ((value, value),)
        if op is sre.RANGE:
            return (value,)
        _, *negation, name = str(value).lower().split("_")
        # Of two meanings a narrow set takes what both have; under a negation it is the other way round.
        ascii_only = bool(flags & re.ASCII) or (self.narrow and wide == bool(negation))
        found = charset.category(name, ascii_only=ascii_only)
        return complement(found) if negation else found

    # Anchors

    def _anchor(self, kind: Any, place: _Place, items: Sequence[Item], at: int) -> None:
        if (kind in _BEGINS and place.first) or (kind in _ENDS and place.last):
            return
        if kind in (sre.AT_BOUNDARY, sre.AT_NON_BOUNDARY):
            if kind is sre.AT_BOUNDARY and self._beside_word(place, items, at):
                return
            raise self._refusal("a word boundary", r"\\[bB]")
        raise self._refusal("an anchor inside the pattern", r"\\[AZ]|[\^$]")

    def _beside_word(self, place: _Place, items: Sequence[Item], at: int) -> bool:
        """Whether a boundary at an end of the text only says that a word character stands there, and one does."""
        inner = items[at + 1 :] if place.first else items[:at][::-1] if place.last else []
        letters = [item for item in inner if item[0] is not sre.AT][:1]
        if not letters or letters[0][0] not in (sre.LITERAL, sre.IN):
            return False
        word = charset.category("word", ascii_only=bool(place.flags & re.ASCII))
        return without(self._set(letters[0], place.flags), word) == ()

    def spread(self, items: list[Item], anchors: tuple[Any, ...], *, at: int) -> list[tuple[bool, list[Item]]]:
        """The alternatives of a pattern, each with whether this end of it is anchored, and without that anchor."""
        done: list[tuple[bool, list[Item]]] = []
        todo = [items]
        while todo:
            if len(todo) + len(done) > _MAX_SPREAD:
                raise self._refusal("anchors in too many alternatives", r"[\^$]")
            here = todo.pop()
            op, value = _end_of(here, at)
            rest = here[1:] if at == 0 else here[:-1]
            if op is sre.AT and value in anchors:
                done.append((True, rest))
            elif op is sre.SUBPATTERN and not value[1] and not value[2] and _anchored(value[3], anchors):
                todo.append(_joined(list(value[3]), rest, at))
            elif op is sre.BRANCH and any(_anchored(branch, anchors) for branch in value[1]):
                todo += [_joined(list(branch), rest, at) for branch in reversed(value[1])]
            else:
                done.append((False, here))
        return done

    # Refusals

    def _refusal(self, what: str, spelled: str) -> BadGrammar:
        place = next((f" at character {at}" for at in _places(self.pattern, spelled)), "")
        return BadGrammar(
            f"the regular expression {_shown(self.pattern)} has {what}{place}, which no grammar expresses; "
            "write it without."
        )


def _anchored(items: Any, anchors: tuple[Any, ...]) -> bool:
    """Whether one of the anchors stands anywhere in these items, groups and alternatives included."""
    for op, value in items:
        if op is sre.AT and value in anchors:
            return True
        if op is sre.SUBPATTERN and _anchored(value[3], anchors):
            return True
        if op is sre.BRANCH and any(_anchored(branch, anchors) for branch in value[1]):
            return True
    return False


def _end_of(items: list[Item], at: int) -> Item:
    return items[at] if items else (sre.FAILURE, None)


def _joined(inner: list[Item], rest: list[Item], at: int) -> list[Item]:
    return [*inner, *rest] if at == 0 else [*rest, *inner]


def _places(pattern: str, spelled: str) -> Iterator[int]:
    """Where the construct is written, counted from 1, outside of escapes and classes."""
    wanted = re.compile(spelled)
    at = 0
    while at < len(pattern):
        if wanted.match(pattern, at) and not (at == 0 and pattern[0] == "^"):
            yield at + 1
        skipped = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]", re.DOTALL).match(pattern, at)
        at = skipped.end() if skipped else at + 1


def _shown(pattern: str) -> str:
    return repr(pattern if len(pattern) <= 80 else pattern[:77] + "...")
