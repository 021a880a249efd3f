"""A reply on a terminal: thinking dimmed, the answer as Markdown, calls and what was given up as a line each.

Owns what has been printed of one reply. Prints only what is new, so whatever scrolled away stays as it was.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from rich.text import Text as RichText

from kvasir.chat.events import Done, Event, Evicted, Reasoning, Text, ToolCallDone
from kvasir.cli.console import clean
from kvasir.cli.markdown import Markdown
from kvasir.cli.wrap import Piece, Wrap
from kvasir.types import FinishReason

if TYPE_CHECKING:
    from rich.console import Console

    from kvasir.chat.events import ChatReply

# Longer rows are hard to read, however wide the terminal is.
WIDEST = 100
# Silence that is shorter needs no word.
PATIENCE_S = 0.5


class ReplyView:
    """Prints the events of one reply; a `with` block, so that the cursor is at the start of a row behind it."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._thought: Wrap | None = None
        self._answer: Markdown | None = None
        self._waiting = Waiting(console)

    def __enter__(self) -> ReplyView:
        self._waiting.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._waiting.stop()
        self._end_thought()
        self._end_answer()

    def show(self, event: Event) -> None:
        """Print what an event brings."""
        if not isinstance(event, Evicted):
            self._waiting.stop()
        match event:
            case Reasoning():
                self._think(event.text)
            case Text():
                self._say(event.text)
            case ToolCallDone():
                self._tell(f"→ {event.call.name}({event.call.arguments_json})")
            case Evicted():
                n = len(event.messages)
                self._tell(f"(made room: {n} old messages given up, {event.n_tokens:,} tokens)")
            case Done():
                self._end(event.reply)

    def _think(self, text: str) -> None:
        self._end_answer()
        if self._thought is None:
            self._thought = Wrap(self._width)
        first, *more = text.split("\n")
        self._thought.add(Piece(first, "dim"))
        for line in more:
            self._thought.end_row()
            self._thought.add(Piece(line, "dim"))
        self._print(self._thought.take())

    def _end_thought(self) -> None:
        if self._thought is not None:
            self._print([*self._thought.finish(), Piece("\n" + "─" * self._width() + "\n", "dim")])
            self._thought = None

    def _say(self, text: str) -> None:
        self._end_thought()
        if self._answer is None:
            self._answer = Markdown(self._width)
        self._print(self._answer.feed(text))

    def _end_answer(self) -> None:
        if self._answer is not None:
            self._print([*self._answer.finish(), Piece("\n")])
            self._answer = None

    def _end(self, reply: ChatReply) -> None:
        if reply.finish_reason is FinishReason.CANCELLED:
            self._tell("(stopped)")
        elif reply.finish_reason is FinishReason.LENGTH:
            self._tell(f"(cut off after {reply.usage.completion_tokens:,} tokens)")

    def _tell(self, line: str) -> None:
        self._waiting.stop()
        self._end_thought()
        self._end_answer()
        self._print([Piece(clean(line) + "\n", "dim")])

    def _print(self, pieces: list[Piece]) -> None:
        if pieces:
            self._console.print(RichText.assemble(*pieces), end="", soft_wrap=True)

    def _width(self) -> int:
        return max(min(self._console.width, WIDEST), 1)


class Waiting:
    """A sign of life while a long prompt is read; it appears after a moment, and leaves nothing behind."""

    def __init__(self, console: Console) -> None:
        self._status = console.status("[dim]reading[/dim]", spinner="dots", spinner_style="dim")
        self._timer = threading.Timer(PATIENCE_S, self._status.start)
        self._timer.daemon = True

    def start(self) -> None:
        """Begin to wait."""
        self._timer.start()

    def stop(self) -> None:
        """End it. Idempotent."""
        self._timer.cancel()
        if self._timer.ident is not None:
            self._timer.join()  # it may be about to show itself
        self._status.stop()
