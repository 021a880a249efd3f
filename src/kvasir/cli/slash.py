"""The /commands of a chat: one function for each, and the table that names them.

Owns their names and what they answer. They change the `Talk` and return what to show; who reads lines and prints is
not known here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from kvasir.cli.figures import brief, message_tokens, statistics
from kvasir.cli.talk import Talk
from kvasir.errors import BadRequest, suggest

if TYPE_CHECKING:
    from kvasir.service.turn import Turn


@dataclass(frozen=True, slots=True)
class Answer:
    """What a command leads to: lines to show, a reply to start, a line to type on with, or the end."""

    lines: list[str] = field(default_factory=list)
    reply: Callable[[], Turn] | None = None
    draft: str = ""
    is_end: bool = False


@dataclass(frozen=True, slots=True)
class Command:
    """One command: `usage` names what it takes; a name in capitals must be given, one in brackets may be."""

    run: Callable[[Talk, str], Answer]
    usage: str
    help: str

    @property
    def takes_file(self) -> bool:
        """Whether what it takes is a path."""
        return self.usage == "FILE"


def is_command(line: str) -> bool:
    """Whether a line is meant for us: `//` begins a message that begins with a slash."""
    return line.startswith("/") and not line.startswith("//")


def obey(talk: Talk, line: str) -> Answer:
    """Run one command line. Raises `BadRequest` for a name that is none, or without what it needs."""
    name, rest = (*line[1:].strip().split(maxsplit=1), "", "")[:2]
    command = COMMANDS.get(name.lower())
    if command is None:
        raise BadRequest(f"there is no command /{name}.{_instead(name)} /help lists them; // begins a message with /.")
    if rest and not command.usage:
        raise BadRequest(f"/{name} takes nothing, got {rest!r}.")
    if not rest and command.usage and not command.usage.startswith("["):
        raise BadRequest(f"/{name} needs a {command.usage}: /{name} {command.usage}.")
    return command.run(talk, rest)


def _instead(name: str) -> str:
    return suggest(name, COMMANDS).replace("Did you mean '", "Did you mean '/")


def _help(_: Talk, __: str) -> Answer:
    rows = [(f"/{name} {command.usage}".rstrip(), command.help) for name, command in COMMANDS.items()]
    width = max(len(usage) for usage, _ in rows)
    keys = "Alt-Enter begins a new line, Ctrl-R searches, Ctrl-C stops a reply, Ctrl-D leaves."
    return Answer([*(f"{usage:{width}}  {text}" for usage, text in rows), keys])


def _system(talk: Talk, text: str) -> Answer:
    if not text:
        return Answer([talk.system if talk.system is not None else "there is no system prompt."])
    talk.replace_system(text)
    return Answer([f"the system prompt is set; {_in_memory(talk)}."])


def _undo(talk: Talk, _: str) -> Answer:
    forgotten = talk.chat.undo()
    return Answer([f"forgot “{brief(forgotten[0])}” and what came after it."])


def _regenerate(talk: Talk, _: str) -> Answer:
    # A fixed seed would give the same reply.
    again = f"again: “{brief({'content': talk.last_question()})}”"
    return Answer([again], reply=lambda: talk.chat.regenerate(seed=None))


def _edit(talk: Talk, text: str) -> Answer:
    if not text:
        return Answer(draft=f"/edit {talk.last_question()}")
    talk.last_question()  # says so where there is nothing to edit
    return Answer(reply=lambda: talk.ask_again(text))


def _save(talk: Talk, name: str) -> Answer:
    path = Path(name).expanduser()
    talk.save(path)
    return Answer([f"saved {len(talk.chat.messages)} messages to {path}."])


def _load(talk: Talk, name: str) -> Answer:
    talk.load(Path(name).expanduser())
    return Answer(loaded(talk))


def loaded(talk: Talk) -> list[str]:
    """What there is to say of a conversation that was loaded: how long it is, and where it stands."""
    messages = talk.chat.messages
    last = [f"{message['role']}: {brief(message, size=70)}" for message in messages[-2:]]
    return [f"loaded {_in_memory(talk)}.", *last]


def _stats(talk: Talk, _: str) -> Answer:
    return Answer(statistics(talk))


def _tokens(talk: Talk, _: str) -> Answer:
    return Answer(message_tokens(talk))


def _clear(talk: Talk, _: str) -> Answer:
    talk.clear()
    return Answer(["a new conversation; the system prompt stays." if talk.system else "a new conversation."])


def _quit(_: Talk, __: str) -> Answer:
    return Answer(is_end=True)


def _in_memory(talk: Talk) -> str:
    return f"{len(talk.chat.messages)} messages, {talk.chat.n_tokens:,} tokens"


COMMANDS: dict[str, Command] = {
    "help": Command(_help, "", "Show this."),
    "system": Command(_system, "[TEXT]", "Show or set the system prompt; what was said stays."),
    "undo": Command(_undo, "", "Forget the last question and its answer."),
    "regenerate": Command(_regenerate, "", "Answer the last question again."),
    "edit": Command(_edit, "[TEXT]", "Put the last question in other words, and answer that."),
    "save": Command(_save, "FILE", "Write the conversation to a file."),
    "load": Command(_load, "FILE", "Go on with a saved conversation."),
    "stats": Command(_stats, "", "Show tokens, speeds, the context and the cache."),
    "tokens": Command(_tokens, "", "Show how many tokens each message has."),
    "clear": Command(_clear, "", "Begin a new conversation."),
    "quit": Command(_quit, "", "Leave. So does Ctrl-D."),
}
