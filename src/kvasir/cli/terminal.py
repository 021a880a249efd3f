"""A chat on a terminal: ask for a line, obey it or answer it, and again.

Owns the loop, and what Ctrl-C means while a reply runs: it stops the reply, and what was said stays. An error is one
line, and the chat goes on.
"""

from __future__ import annotations

import contextlib
import signal
import sys
import termios
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from rich.text import Text

import kvasir
from kvasir.chat.events import Done
from kvasir.cli.console import clean
from kvasir.cli.figures import gauge, level, speed
from kvasir.cli.reply import ReplyView, Waiting
from kvasir.cli.slash import is_command, obey
from kvasir.cli.talk import Talk
from kvasir.errors import ContextFull, KvasirError, Stopped

if TYPE_CHECKING:
    from prompt_toolkit.formatted_text import StyleAndTextTuples
    from rich.console import Console

    from kvasir.cli.prompt_line import PromptLine
    from kvasir.service.turn import Turn

# So many times Ctrl-C without the reply ending: it is left as it is.
PATIENCE = 3


class Terminal:
    """The person's side of a `Talk`."""

    def __init__(self, talk: Talk, console: Console) -> None:
        self._talk = talk
        self._console = console
        self._used = (0, 0)  # tokens, limit

    def run(self, line: PromptLine, *, first: list[str]) -> None:
        """Chat until the person leaves. `first` is said before."""
        self._greet(first)
        draft: str | None = ""
        with _quiet_keys():
            while draft is not None and (text := self._ask(line, draft)) is not None:
                draft = self._take(text)

    def toolbar(self) -> StyleAndTextTuples:
        """The line below the prompt."""
        n_tokens, limit = self._used
        more = [speed(reply.usage.completion_tokens - 1, reply.timings.decode_s) for reply in self._talk.replies[-1:]]
        facts = [_name(self._talk), *filter(None, more)]
        return [(f"class:{level(n_tokens, limit)}", gauge(n_tokens, limit)), ("class:dim", "  " + " · ".join(facts))]

    def _greet(self, first: list[str]) -> None:
        self._show([f"kvasir {kvasir.__version__} · {_name(self._talk)}", "/help lists the commands."])
        self._show(first)

    def _ask(self, line: PromptLine, draft: str) -> str | None:
        self._console.print()
        # Reading a long system prompt is only warmth: Ctrl-C ends it, and the first turn does it.
        with contextlib.suppress(KeyboardInterrupt), _waiting(self._console):
            self._used = (self._talk.chat.n_tokens, self._talk.chat.limit)
        return line.ask(draft)

    def _take(self, text: str) -> str | None:
        """Do what a line says; return what the next one begins with, or None at the end."""
        text = text.strip()
        try:
            if is_command(text):
                return self._obey(text)
            if text:
                said = text.removeprefix("/")
                self._reply(lambda: self._talk.chat.say(said))
        except Stopped:
            raise  # nobody will ever answer
        except KvasirError as error:
            self._complain(error)
        except KeyboardInterrupt:
            self._show(["(interrupted)"])
        return ""

    def _obey(self, text: str) -> str | None:
        with _waiting(self._console):
            answer = obey(self._talk, text)
        self._show(answer.lines)
        if answer.reply is not None:
            self._reply(answer.reply)
        return None if answer.is_end else answer.draft

    def _reply(self, start: Callable[[], Turn]) -> None:
        self._console.print()
        try:
            with stopping() as stop, ReplyView(self._console) as view:
                turn = start()
                stop.of(turn)
                for event in turn.events():
                    view.show(event)
                    if isinstance(event, Done):
                        self._talk.replies.append(event.reply)
        finally:
            if self._talk.forget_unanswered():
                self._show(["(the question is forgotten: it has no answer)"])

    def _show(self, lines: list[str]) -> None:
        for line in lines:
            self._console.print(Text(clean(line), style="dim"), highlight=False)

    def _complain(self, error: KvasirError) -> None:
        more = " /undo or /clear make room." if isinstance(error, ContextFull) else ""
        self._console.print(Text(clean(f"{error}{more}"), style="red"), highlight=False)


class Stop:
    """Takes Ctrl-C, and stops the reply as soon as there is one."""

    def __init__(self) -> None:
        self._turn: Turn | None = None
        self._n_presses = 0

    def of(self, turn: Turn) -> None:
        """From here on it is this reply that is stopped."""
        self._turn = turn
        if self._n_presses:
            turn.cancel()

    def press(self, *_: Any) -> None:
        """Ctrl-C was pressed."""
        self._n_presses += 1
        if self._n_presses >= PATIENCE:
            raise KeyboardInterrupt
        if self._turn is not None:
            self._turn.cancel()


@contextlib.contextmanager
def stopping() -> Iterator[Stop]:
    """Inside, Ctrl-C stops a reply instead of the program."""
    stop = Stop()
    before = signal.signal(signal.SIGINT, stop.press)
    try:
        yield stop
    finally:
        signal.signal(signal.SIGINT, before)


@contextlib.contextmanager
def _quiet_keys() -> Iterator[None]:
    """Inside, what is typed between prompts does not show among the words of a reply; the next prompt has it."""
    if not sys.stdin.isatty():
        yield
        return
    before = termios.tcgetattr(sys.stdin)
    quiet = [*before]
    # Keys arrive as the prompt wants them: Enter not as Ctrl-J, Ctrl-D as itself.
    quiet[0] = before[0] & ~termios.ICRNL
    quiet[3] = before[3] & ~(termios.ECHO | termios.ICANON)
    termios.tcsetattr(sys.stdin, termios.TCSANOW, quiet)
    try:
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSANOW, before)


@contextlib.contextmanager
def _waiting(console: Console) -> Iterator[None]:
    waiting = Waiting(console)
    waiting.start()
    try:
        yield
    finally:
        waiting.stop()


def _name(talk: Talk) -> str:
    return talk.model.info.path.stem
