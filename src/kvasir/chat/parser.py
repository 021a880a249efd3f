"""One reply's text becomes events: the template's own parser first, then calls written as plain text.

Owns how both are joined: indexes and ids of calls, when one is complete, what of the text is left as content. Nothing
is ever lost and nothing raises: what no parser understands is content.
"""

from __future__ import annotations

import secrets
from types import ModuleType
from typing import Any

from kvasir.chat.events import Event, Reasoning, Text, ToolCall, ToolCallArguments, ToolCallDone, ToolCallStarted
from kvasir.chat.prompt import Rendered
from kvasir.chat.scanner import CallScanner, Piece


class ReplyParser:
    """Reads one reply, piece by piece. One per reply."""

    def __init__(self, core: ModuleType, rendered: Rendered) -> None:
        self._native: Any = core.ChatParser(rendered.prompt, continues=rendered.continues)
        names = [tool.name for tool in rendered.tools]
        self._scanner = CallScanner(names, streams=rendered.ours) if names else None
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._calls: list[ToolCall] = []
        self._open: _OpenCall | None = None
        self.answering = False
        """Whether the reply is past its thinking."""

    @property
    def content(self) -> str:
        """The answer so far."""
        return "".join(self._content)

    @property
    def reasoning(self) -> str:
        """The thinking so far."""
        return "".join(self._reasoning)

    @property
    def tool_calls(self) -> tuple[ToolCall, ...]:
        """The calls that are complete."""
        return tuple(self._calls)

    def feed(self, text: str) -> list[Event]:
        """Take the text that came; return what it makes certain."""
        return self._take(self._native.feed(text))

    def finish(self) -> list[Event]:
        """Return the rest, at the end of the reply."""
        events = self._take(self._native.finish())
        if self._scanner is not None:
            events += self._scanned(self._scanner.finish())
        return events + self._closed()

    def _take(self, deltas: list[Any]) -> list[Event]:
        events: list[Event] = []
        for delta in deltas:
            if delta.kind == "reasoning":
                self._reasoning.append(delta.text)
                events.append(Reasoning(delta.text))
                continue
            self.answering = True
            if delta.kind == "tool_call":
                events += self._called(delta)
            elif self._scanner is not None:
                events += self._scanned(self._scanner.feed(delta.text))
            else:
                events += self._said(delta.text)
        return events

    def _called(self, delta: Any) -> list[Event]:
        events: list[Event] = []
        if delta.name or self._open is None or self._open.source != delta.index:
            events += self._begun(delta.name, delta.id, source=delta.index)
        return events + self._argued(delta.text)

    def _scanned(self, pieces: list[Piece]) -> list[Event]:
        events: list[Event] = []
        for piece in pieces:
            if piece.kind == "text":
                events += self._said(piece.text)
            elif piece.kind == "start":
                events += self._begun(piece.text)
            elif piece.kind == "arguments":
                events += self._argued(piece.text)
            else:
                events += self._closed()
        return events

    def _said(self, text: str) -> list[Event]:
        self._content.append(text)
        return [*self._closed(), Text(text)]

    def _begun(self, name: str, identity: str = "", *, source: int | None = None) -> list[Event]:
        closed = self._closed()
        # Nine letters and digits: the templates of Mistral refuse any other id.
        self._open = _OpenCall(identity or secrets.token_hex(5)[:9], name, source)
        return [*closed, ToolCallStarted(len(self._calls), self._open.id, name)]

    def _argued(self, text: str) -> list[Event]:
        assert self._open is not None
        self._open.arguments.append(text)
        return [ToolCallArguments(len(self._calls), text)] if text else []

    def _closed(self) -> list[Event]:
        if self._open is None:
            return []
        call = ToolCall.of(self._open.id, self._open.name, "".join(self._open.arguments))
        self._open = None
        self._calls.append(call)
        return [ToolCallDone(len(self._calls) - 1, call)]


class _OpenCall:
    """A call whose arguments still come; `source` is the native parser's index of it."""

    def __init__(self, identity: str, name: str, source: int | None) -> None:
        self.id = identity
        self.name = name
        self.source = source
        self.arguments: list[str] = []
