"""Tool calls written as plain text: in a code fence, between tags, or as a bare JSON object.

Owns what counts as such a call: JSON with the name of a known tool and an object of arguments. Text arrives in pieces;
what may still become a call is held back until it is decided, and everything else goes through unchanged, at once.
Pure: text in, pieces out.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from enum import Enum, auto
from typing import Any, NamedTuple

TAGS = ("<tool_call>", "<tools>", "<function_call>")
FENCE = "```"
_INFO = ("", "json", "xml", "text", "plaintext", "tool_call", "tool", "tools", "tool_code", "function_call")
_KEYS = ("name", "arguments", "parameters", "id", "type", "function")
_FENCE_HEAD = re.compile(r"```([\w+-]*)[ \t]*\r?\n?\s*")
_FENCE_LINE = re.compile(r"^[ \t]*```", re.M)
_CALL_HEAD = re.compile(r'\s*\{\s*"name"\s*:\s*"([^"\\]*)"\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)')
_CALL_TAIL = re.compile(r"\s*\}\s*</\w+>")
_FIRST_KEY = re.compile(r'[\[\s]*\{\{?\s*(?:"(\w*)("?)\s*(?::\s*(?:"([^"]*)("?))?)?)?')
_DECODER = json.JSONDecoder()


class Piece(NamedTuple):
    """What is certain: `kind` is "text", "start" (of a call; the text is its name), "arguments" or "end"."""

    kind: str
    text: str = ""


class _Verdict(NamedTuple):
    """Whether a held text is a call. `calls` is None for "wait", empty for "no"; `end` is where the calls end."""

    calls: tuple[tuple[str, str], ...] | None
    end: int = 0


_WAIT = _Verdict(None)
_NO = _Verdict(())


class _State(Enum):
    START = auto()  # only space since the beginning, or since a call
    PROSE = auto()
    FENCE = auto()  # inside a code fence that is no call
    ARGUMENTS = auto()  # inside the arguments of a call
    TAIL = auto()  # between a call's arguments and its closing tag


class CallScanner:
    """Finds calls in one reply. With `streams`, a call between tags is given out while its arguments still come."""

    def __init__(self, names: Iterable[str], *, streams: bool = False) -> None:
        self._names = frozenset(names)
        self._streams = streams
        self._held = ""
        self._state = _State.START
        self._n_calls = 0
        self._line_start = True  # whether what went through last ends a line
        self._depth = _Depth()

    def feed(self, text: str) -> list[Piece]:
        """Take the text that came; return what is certain now."""
        self._held += text
        return self._run(final=False)

    def finish(self) -> list[Piece]:
        """Return the rest: the text has ended."""
        pieces = self._run(final=True)
        if self._state is _State.ARGUMENTS:
            return [*pieces, Piece("end")]
        if self._state is _State.TAIL or (self._n_calls and not self._held.strip()):
            self._held = ""  # a closing tag that never came, or space
        return pieces + self._pass(len(self._held))

    def _run(self, *, final: bool) -> list[Piece]:
        steps = {
            _State.START: self._start,
            _State.PROSE: self._prose,
            _State.FENCE: self._fence,
            _State.ARGUMENTS: self._arguments,
            _State.TAIL: self._tail,
        }
        pieces: list[Piece] = []
        while self._held:
            before = (self._state, len(self._held))
            pieces += steps[self._state](final)
            if (self._state, len(self._held)) == before:
                break
        return pieces

    def _start(self, final: bool) -> list[Piece]:
        lead = self._held.lstrip()
        if not lead:
            return []
        space = len(self._held) - len(lead)
        if not self._may_open(lead):
            self._state = _State.PROSE
            return self._pass(space)
        verdict = self._judge(lead, final)
        if verdict.calls is None:
            return []
        if verdict.calls or self._state is _State.ARGUMENTS:
            return self._taken(verdict, space)
        self._state = _State.PROSE
        return self._pass(space) + self._refused(lead)

    def _prose(self, final: bool) -> list[Piece]:
        at = self._opening(final)
        if at is None:
            return self._pass(len(self._held))
        pieces = self._pass(at)
        verdict = self._judge(self._held, final)
        if verdict.calls is None:
            return pieces
        if verdict.calls or self._state is _State.ARGUMENTS:
            return pieces + self._taken(verdict, 0)
        return pieces + self._refused(self._held)

    def _fence(self, final: bool) -> list[Piece]:
        if fences := self._fences():
            self._state = _State.PROSE
            return self._pass(fences[0] + len(FENCE))
        partial = [] if final else self._partial_fence()
        return self._pass(min(partial, default=len(self._held)))

    def _arguments(self, final: bool) -> list[Piece]:
        n = self._depth.take(self._held)
        text, self._held = self._held[:n], self._held[n:]
        if not self._depth.closed:
            return [Piece("arguments", text)]
        self._state = _State.TAIL
        return [Piece("arguments", text), Piece("end")]

    def _tail(self, final: bool) -> list[Piece]:
        if match := _CALL_TAIL.match(self._held):
            self._held = self._held[match.end() :]
            self._state = _State.START
        return []

    def _pass(self, n: int) -> list[Piece]:
        """Let text through."""
        text, self._held = self._held[:n], self._held[n:]
        if not text:
            return []
        last = text.rpartition("\n")
        self._line_start = not last[2].strip(" \t") and (bool(last[1]) or self._line_start)
        return [Piece("text", text)]

    def _taken(self, verdict: _Verdict, space: int) -> list[Piece]:
        self._held = self._held[space + verdict.end :]
        self._n_calls += 1
        self._line_start = True
        if self._state is _State.ARGUMENTS:
            return [Piece("start", name) for name, _ in verdict.calls or ()]
        self._state = _State.START
        pieces = [
            (Piece("start", name), Piece("arguments", arguments), Piece("end"))
            for name, arguments in verdict.calls or ()
        ]
        return [piece for call in pieces for piece in call]

    def _refused(self, text: str) -> list[Piece]:
        """Let an opening through that opened no call."""
        if text.startswith(FENCE):
            self._state = _State.FENCE
            return self._pass(len(FENCE))
        self._state = _State.PROSE
        return self._pass(1)

    def _may_open(self, lead: str) -> bool:
        if lead[0] in "{[":
            return True
        return any(lead.startswith(opener) or opener.startswith(lead) for opener in (*TAGS, FENCE))

    def _opening(self, final: bool) -> int | None:
        """Where the next opening is, or the end of the text that may become one."""
        found = [at for tag in TAGS if (at := self._held.find(tag)) >= 0]
        found += self._fences()
        if not final:
            found += self._partial_tag() + self._partial_fence()
        return min(found, default=None)

    def _fences(self) -> list[int]:
        """Where lines begin with a fence."""
        matches = _FENCE_LINE.finditer(self._held)
        return [match.end() - len(FENCE) for match in matches if match.start() > 0 or self._line_start]

    def _partial_tag(self) -> list[int]:
        text = self._held
        for n in range(min(len(text), max(map(len, TAGS)) - 1), 0, -1):
            if any(tag.startswith(text[-n:]) for tag in TAGS):
                return [len(text) - n]
        return []

    def _partial_fence(self) -> list[int]:
        line = self._held.rpartition("\n")
        ticks = line[2].lstrip(" \t")
        return [len(self._held) - len(ticks)] if ticks in ("`", "``") and (line[1] or self._line_start) else []

    # What a held text is

    def _judge(self, text: str, final: bool) -> _Verdict:
        if not final and any(opener.startswith(text) and opener != text for opener in (*TAGS, FENCE)):
            return _WAIT
        if text[0] in "{[":
            verdict = self._json_calls(text, 0, final)
            rest = text[verdict.end :].strip() if verdict.calls else ""
            if rest:
                return _NO  # a call is the whole reply, or none at all
            return verdict if final or not verdict.calls else _WAIT
        if text.startswith(FENCE):
            return self._fenced(text, final)
        return self._tagged(text, 0, final)

    def _fenced(self, text: str, final: bool) -> _Verdict:
        head = _FENCE_HEAD.match(text)
        if head is None or not any(info.startswith(head[1]) for info in _INFO):
            return _NO
        if head.end() == len(text):
            return _NO if final else _WAIT
        if head[1] not in _INFO:
            return _NO
        verdict = (
            self._json_calls(text, head.end(), final)
            if text[head.end()] in "{["
            else self._tagged(text, head.end(), final)
        )
        if not verdict.calls:
            return verdict
        rest = text[verdict.end :].lstrip()
        if rest.startswith(FENCE):
            return verdict._replace(end=len(text) - len(rest) + len(FENCE))
        if final and not rest.strip("`"):
            return verdict._replace(end=len(text))
        return _WAIT if FENCE.startswith(rest) else _NO

    def _tagged(self, text: str, at: int, final: bool) -> _Verdict:
        tag = next((tag for tag in TAGS if text.startswith(tag, at)), None)
        if tag is None:
            return _WAIT if not final and any(tag.startswith(text[at:]) for tag in TAGS) else _NO
        body_at = at + len(tag)
        head = _CALL_HEAD.match(text, body_at)
        if self._streams and at == 0 and head is not None and head[1] in self._names:
            self._state, self._depth = _State.ARGUMENTS, _Depth()
            return _Verdict(((head[1], ""),), head.end())
        if not text[body_at:].strip():
            return _NO if final else _WAIT
        verdict = self._json_calls(text, body_at, final)
        if not verdict.calls:
            return verdict
        rest, closing = text[verdict.end :].lstrip(), f"</{tag[1:]}"
        if rest.startswith(closing):
            end = len(text) - len(rest) + len(closing)
            more = text[end:].lstrip()
            if at and more and not final and any(tag.startswith(more) and tag != more for tag in TAGS):
                return _WAIT
            if at and more.startswith(TAGS):  # in a fence, several in a row
                after = self._tagged(text, len(text) - len(more), final)
                return after._replace(calls=verdict.calls + after.calls) if after.calls else after
            return verdict._replace(end=end)
        if closing.startswith(rest):
            return verdict._replace(end=len(text)) if final else _WAIT
        return _NO

    def _json_calls(self, text: str, at: int, final: bool) -> _Verdict:
        """Read JSON objects that follow one another, or one array of them."""
        calls: list[tuple[str, str]] = []
        while (at := _skip_space(text, at)) < len(text) and text[at] in "{[":
            # Qwen2.5-Coder's template shows its calls in doubled braces, and so the model writes them.
            doubled = text.startswith("{{", at)
            try:
                value, end = _DECODER.raw_decode(text, at + doubled)
            except ValueError as error:
                waits = not final and _is_cut(text, error) and self._is_plausible(text[at:])
                return _WAIT if waits else _NO
            found = [_call(each, self._names) for each in (value if isinstance(value, list) else [value])]
            if not found or None in found:
                return _NO
            calls += [call for call in found if call is not None]
            at = end
            if doubled and not final and not text[end:].strip():
                return _WAIT
            if doubled and text[end:].lstrip().startswith("}"):
                at = text.index("}", end) + 1
        return _Verdict(tuple(calls), _rstripped(text, at)) if calls else _NO

    def _is_plausible(self, text: str) -> bool:
        """Whether the beginning of a JSON object may become a call of a known tool."""
        match = _FIRST_KEY.match(text)
        if match is None:
            return not text.strip("[ \t\r\n")
        key, key_ends, value, value_ends = match.groups()
        if key is None:
            return match.end() == len(text)
        if not key_ends:
            return match.end() == len(text) and any(known.startswith(key) for known in _KEYS)
        if key != "name" or value is None:
            return key in _KEYS
        if not value_ends:
            return any(name.startswith(value) for name in self._names)
        return value in self._names


class _Depth:
    """Follows one JSON object through pieces of text until it is closed."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = self._escaped = False
        self.closed = False

    def take(self, text: str) -> int:
        """Return how much of this text belongs to the object."""
        for i, letter in enumerate(text):
            if self._in_string:
                self._in_string = self._escaped or letter != '"'
                self._escaped = letter == "\\" and not self._escaped
            elif letter == '"':
                self._in_string = True
            elif letter in "{[":
                self._depth += 1
            elif letter in "}]":
                self._depth -= 1
                if self._depth == 0:
                    self.closed = True
                    return i + 1
        return len(text)


def _call(value: Any, names: frozenset[str]) -> tuple[str, str] | None:
    if isinstance(value, dict) and isinstance(value.get("function"), dict):
        value = value["function"]
    if not isinstance(value, dict) or value.get("name") not in names or not set(value) <= set(_KEYS):
        return None
    arguments = value.get("arguments", value.get("parameters"))
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except ValueError:
            return None
    return (value["name"], json.dumps(arguments, ensure_ascii=False)) if isinstance(arguments, dict) else None


def _is_cut(text: str, error: ValueError) -> bool:
    """Whether JSON failed to parse only because it is not all there."""
    if not isinstance(error, json.JSONDecodeError):
        return False
    rest = text[error.pos :].strip()
    if not rest or error.msg.startswith("Unterminated string"):
        return True
    if error.msg.startswith("Invalid \\"):  # an escape whose digits are still to come
        return len(rest) < len("\\uXXXX")
    return error.msg == "Expecting value" and any(word.startswith(rest) for word in ("true", "false", "null", "-"))


def _skip_space(text: str, at: int) -> int:
    while at < len(text) and text[at] in " \t\r\n,;":
        at += 1
    return at


def _rstripped(text: str, at: int) -> int:
    return len(text[:at].rstrip(" \t\r\n,;"))
