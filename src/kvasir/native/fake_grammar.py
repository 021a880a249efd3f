"""GBNF for the fake core: read and followed, character by character.

Owns a reader of llama.cpp's grammar language and the set of stacks that a text leaves open. Slow and small: it follows
the same rules as the real core, and refuses what that refuses (left recursion, missing rules), but nothing of tokens.
"""

from __future__ import annotations

import codecs
import re
from dataclasses import dataclass
from typing import TypeAlias

from kvasir.errors import BadGrammar

_MAX_STACKS = 20_000  # more than any grammar of a test; left recursion never ends

_NAME = re.compile(r"[a-zA-Z0-9-]+")
_BLANK = re.compile(r"(?:[ \t]|#[^\r\n]*)*")
_BLANK_LINES = re.compile(r"(?:[ \t\r\n]|#[^\r\n]*)*")
_COUNT = re.compile(r"\{\s*(\d+)\s*(,\s*(\d*)\s*)?\}")
_SIGNS: dict[str, tuple[int, int | None]] = {"*": (0, None), "+": (1, None), "?": (0, 1)}
_ESCAPES = {"t": "\t", "r": "\r", "n": "\n", "\\": "\\", '"': '"', "[": "[", "]": "]", "-": "-"}
_N_HEX = {"x": 2, "u": 4, "U": 8}


@dataclass(frozen=True, slots=True)
class _Set:
    """One character in (or, if negated, not in) some ranges."""

    ranges: tuple[tuple[str, str], ...]
    negated: bool = False

    def holds(self, char: str) -> bool:
        return any(low <= char <= high for low, high in self.ranges) != self.negated

    @property
    def reaches_past_ascii(self) -> bool:
        return self.negated or any(high > "\x7f" for _, high in self.ranges)


_Symbols: TypeAlias = tuple["_Set | str", ...]  # a str names a rule
_Rules: TypeAlias = dict[str, list[_Symbols]]


class Grammar:
    """A grammar and what may come next. Never changes: `after` returns another one."""

    def __init__(self, text: str, root: str) -> None:
        self._rules = _Reader(text).rules()
        missing = {name for alts in self._rules.values() for alt in alts for name in alt if isinstance(name, str)}
        missing = (missing | {root}) - set(self._rules)
        if missing:
            raise BadGrammar(f"the grammar is not valid GBNF: it has no rule '{min(missing)}'.")
        self._stacks = self._open({(root,)})
        self._pending = b""

    @property
    def may_end(self) -> bool:
        """Whether the text so far is complete."""
        return () in self._stacks and not self._pending

    def after(self, piece: bytes) -> Grammar | None:
        """Where the grammar stands after more bytes; None if it does not admit them."""
        decoder = codecs.getincrementaldecoder("utf-8")()
        try:
            text = decoder.decode(self._pending + piece)
        except UnicodeDecodeError:
            return None
        stacks = self._stacks
        for char in text:
            stacks = self._open({stack[1:] for stack in stacks if stack and _takes(stack[0], char)})
        twin = object.__new__(Grammar)
        twin._rules, twin._stacks, twin._pending = self._rules, stacks, decoder.getstate()[0]
        alive = bool(stacks) and (not twin._pending or any(stack and _wide(stack[0]) for stack in stacks))
        return twin if alive else None

    def _open(self, stacks: set[_Symbols]) -> frozenset[_Symbols]:
        """The stacks with every rule on top replaced by its alternatives."""
        seen: set[_Symbols] = set()
        found: set[_Symbols] = set()
        todo = list(stacks)
        while todo:
            stack = todo.pop()
            if stack in seen:
                continue
            seen.add(stack)
            if len(seen) > _MAX_STACKS:
                raise BadGrammar("the grammar is not valid GBNF: left recursion.")
            if stack and isinstance(stack[0], str):
                todo += [alternative + stack[1:] for alternative in self._rules[stack[0]]]
            else:
                found.add(stack)
        return frozenset(found)


def _takes(symbol: _Set | str, char: str) -> bool:
    return isinstance(symbol, _Set) and symbol.holds(char)


def _wide(symbol: _Set | str) -> bool:
    return isinstance(symbol, _Set) and symbol.reaches_past_ascii


class _Reader:
    """Reads GBNF from the first character to the last."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0
        self._rules: _Rules = {}
        self._n_made = 0

    def rules(self) -> _Rules:
        self._skip(_BLANK_LINES)
        while self._at < len(self._text):
            name = self._match(_NAME, "a rule's name")
            self._skip(_BLANK)
            self._take("::=")
            self._skip(_BLANK_LINES)
            self._rules[name] = self._alternatives(nested=False)
            if self._at < len(self._text) and self._text[self._at] not in "\r\n":
                raise self._fault("the end of the rule")
            self._skip(_BLANK_LINES)
        return self._rules

    def _alternatives(self, *, nested: bool) -> list[_Symbols]:
        found = [self._sequence(nested=nested)]
        while self._peek() == "|":
            self._at += 1
            self._skip(_BLANK_LINES)
            found.append(self._sequence(nested=nested))
        return found

    def _sequence(self, *, nested: bool) -> _Symbols:
        found: _Symbols = ()
        while (char := self._peek()) not in ("", "|", ")", "\r", "\n"):
            item: _Symbols = ()
            if char == '"':
                item = self._literal()
            elif char == "[":
                item = (self._set(),)
            elif char == "(":
                item = (self._group(),)
            elif char == ".":
                self._at += 1
                item = (_Set((), negated=True),)
            else:
                item = (self._match(_NAME, "a rule's name"),)
            self._skip(_BLANK_LINES if nested else _BLANK)
            found += self._repeated(item, nested=nested)
        return found

    def _group(self) -> str:
        self._at += 1
        self._skip(_BLANK_LINES)
        name = self._make(self._alternatives(nested=True))
        self._take(")")
        return name

    def _repeated(self, item: _Symbols, *, nested: bool) -> _Symbols:
        count = self._count()
        if count is None:
            return item
        self._skip(_BLANK_LINES if nested else _BLANK)
        least, most = count
        if most is None:
            name = self._make([])
            self._rules[name] += [(*item, name), ()]
            return item * least + (name,)
        name = ""
        for _ in range(most - least):
            name = self._make([(*item, name) if name else item, ()])
        return item * least + ((name,) if name else ())

    def _count(self) -> tuple[int, int | None] | None:
        char = self._peek()
        if char in _SIGNS:
            self._at += 1
            return _SIGNS[char]
        if char != "{":
            return None
        match = _COUNT.match(self._text, self._at)
        if match is None:
            raise self._fault("a count")
        self._at = match.end()
        least = int(match[1])
        most = least if match[2] is None else int(match[3]) if match[3] else None
        if most is not None and most < least:
            raise self._fault("a larger count")
        return least, most

    def _literal(self) -> _Symbols:
        self._at += 1
        found: list[_Set] = []
        while self._peek() != '"':
            char = self._char()
            found.append(_Set(((char, char),)))
        self._at += 1
        return tuple(found)

    def _set(self) -> _Set:
        self._at += 1
        negated = self._peek() == "^"
        self._at += negated
        ranges: list[tuple[str, str]] = []
        while self._peek() != "]":
            low = high = self._char()
            if self._peek() == "-" and self._text[self._at + 1 : self._at + 2] != "]":
                self._at += 1
                high = self._char()
            ranges.append((low, high))
        self._at += 1
        return _Set(tuple(ranges), negated)

    def _char(self) -> str:
        char = self._peek()
        if not char or char == "\0":
            raise self._fault("more text")
        self._at += 1
        if char != "\\":
            return char
        kind = self._peek()
        self._at += 1
        if kind in _N_HEX:
            digits = self._text[self._at : self._at + _N_HEX[kind]]
            self._at += len(digits)
            return chr(int(digits, 16))
        if kind not in _ESCAPES:
            raise self._fault("a known escape")
        return _ESCAPES[kind]

    def _make(self, alternatives: list[_Symbols]) -> str:
        self._n_made += 1
        name = f"_{self._n_made}"  # no rule of a grammar can have this name
        self._rules[name] = alternatives
        return name

    def _peek(self) -> str:
        return self._text[self._at : self._at + 1]

    def _take(self, wanted: str) -> None:
        if not self._text.startswith(wanted, self._at):
            raise self._fault(f"'{wanted}'")
        self._at += len(wanted)

    def _match(self, pattern: re.Pattern[str], what: str) -> str:
        match = pattern.match(self._text, self._at)
        if match is None:
            raise self._fault(what)
        self._at = match.end()
        return match[0]

    def _skip(self, pattern: re.Pattern[str]) -> None:
        match = pattern.match(self._text, self._at)
        assert match is not None
        self._at = match.end()

    def _fault(self, wanted: str) -> BadGrammar:
        return BadGrammar(f"the grammar is not valid GBNF: {wanted} is expected at character {self._at + 1}.")
