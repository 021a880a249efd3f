"""The line a person types on: history, completion of /commands and files, several lines, and the gauge below.

Owns the prompt and its keys. Ctrl-C clears the line; a second one, or Ctrl-D, leaves. What was typed before is kept in
`chat-history` in Kvasir's home.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path

from prompt_toolkit import PromptSession
from prompt_toolkit.completion import CompleteEvent, Completer, Completion, PathCompleter
from prompt_toolkit.document import Document
from prompt_toolkit.formatted_text import StyleAndTextTuples
from prompt_toolkit.history import FileHistory, History, InMemoryHistory
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from prompt_toolkit.styles import Style

from kvasir.cli.slash import COMMANDS

HISTORY = "chat-history"
STYLE = Style.from_dict(
    {
        "prompt": "ansicyan bold",
        "bottom-toolbar": "noreverse",
        "dim": "ansibrightblack",
        "low": "ansigreen",
        "high": "ansiyellow",
        "full": "ansired",
    }
)


class PromptLine:
    """Asks for one line after another."""

    def __init__(self, home: Path, *, toolbar: Callable[[], StyleAndTextTuples]) -> None:
        self._toolbar = toolbar
        self._is_leaving = False  # Ctrl-C was the last key
        self._session: PromptSession[str] = PromptSession(
            [("class:prompt", "› ")],
            history=history(home),
            completer=CommandCompleter(),
            key_bindings=self._keys(),
            bottom_toolbar=self._bottom,
            prompt_continuation=_continuation,
            style=STYLE,
            multiline=True,
            reserve_space_for_menu=4,
        )
        self._session.default_buffer.on_text_changed += self._stay

    def ask(self, draft: str = "") -> str | None:
        """Wait for a line; None when the person leaves."""
        self._is_leaving = False
        try:
            return self._session.prompt(default=draft)
        except (EOFError, KeyboardInterrupt):
            return None

    def _stay(self, _: object) -> None:
        self._is_leaving = False

    def _bottom(self) -> StyleAndTextTuples:
        if self._is_leaving:
            return [("class:dim", "Ctrl-C again leaves")]
        return self._toolbar()

    def _keys(self) -> KeyBindings:
        keys = KeyBindings()

        @keys.add("enter")
        def send(event: KeyPressEvent) -> None:
            event.current_buffer.validate_and_handle()

        @keys.add("escape", "enter")
        @keys.add("c-j")
        def break_line(event: KeyPressEvent) -> None:
            event.current_buffer.insert_text("\n")

        @keys.add("c-c")
        @keys.add("<sigint>")
        def clear_or_leave(event: KeyPressEvent) -> None:
            if self._is_leaving and not event.current_buffer.text:
                event.app.exit(exception=KeyboardInterrupt())
                return
            event.current_buffer.reset()
            self._is_leaving = True

        return keys


def _continuation(_: int, __: int, n_wraps: int) -> StyleAndTextTuples:
    """What stands before a further line; before one that only ran over the margin, nothing."""
    return [("class:prompt", "  " if n_wraps else "· ")]


class CommandCompleter(Completer):
    """Completes the names of commands, and the files they take."""

    def __init__(self) -> None:
        self._paths = PathCompleter(expanduser=True)

    def get_completions(self, document: Document, complete_event: CompleteEvent) -> Iterable[Completion]:
        """What the text before the cursor may become."""
        text = document.text_before_cursor
        if not text.startswith("/") or "\n" in text:
            return
        name, space, rest = text[1:].partition(" ")
        if not space:
            for known, command in COMMANDS.items():
                if known.startswith(name):
                    yield Completion(known, start_position=-len(name), display_meta=command.help)
        elif name in COMMANDS and COMMANDS[name].takes_file:
            yield from self._paths.get_completions(Document(rest), complete_event)


def history(home: Path) -> History:
    """What was typed before, for the owner's eyes only; in memory alone where it cannot be kept."""
    path = home / HISTORY
    try:
        home.mkdir(parents=True, exist_ok=True)
        os.close(os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600))
    except OSError:
        return InMemoryHistory()
    return FileHistory(str(path))
