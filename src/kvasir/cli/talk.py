"""What a chat in a terminal holds: the conversation, how another one is begun, and the figures of its replies.

Owns which conversation is the current one. Prints nothing: what there is to say is returned as text.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvasir.chat.events import ChatReply
from kvasir.errors import BadRequest

if TYPE_CHECKING:
    from kvasir.service.conversation import Conversation
    from kvasir.service.model import Model
    from kvasir.service.turn import Turn


class Talk:
    """A conversation that can be replaced by another one with the same options."""

    def __init__(
        self,
        model: Model,
        *,
        system: str | None = None,
        load: Path | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        self.model = model
        self._options = dict(options or {})
        self.replies: list[ChatReply] = []
        self.chat = self._begin(system=system)
        if load is not None:
            self.load(load)
            if system is not None:
                self.replace_system(system)

    @property
    def system(self) -> str | None:
        """The system prompt, if there is one."""
        first = next(iter(self.chat.messages), None)
        return str(first["content"]) if first is not None and first["role"] == "system" else None

    def ask_again(self, text: str) -> Turn:
        """Put the user's last message in other words, and answer that."""
        self.chat.edit(self._last_question(), text)
        return self.chat.reply()

    def last_question(self) -> str:
        """What the user said last."""
        return str(self.chat.messages[self._last_question()]["content"])

    def forget_unanswered(self) -> bool:
        """Forget a question that nobody answered: many templates want question and answer by turns."""
        messages = self.chat.messages
        if not messages or messages[-1]["role"] != "user":
            return False
        self.chat.undo()
        return True

    def clear(self) -> None:
        """Begin anew, with the same system prompt."""
        self.chat = self._begin(system=self.system)

    def replace_system(self, text: str) -> None:
        """Set the system prompt and keep all that was said; it is read anew."""
        rest = self.chat.messages[0 if self.system is None else 1 :]
        self.chat = self._begin(system=text, messages=rest)

    def save(self, path: Path) -> None:
        """Write the conversation to a file; one that holds something else is left alone."""
        if path.exists() and not _is_conversation(path):
            raise BadRequest(f"{path} exists and is no saved conversation; give another name.")
        self.chat.save(path)

    def load(self, path: Path) -> None:
        """Go on with a saved conversation; if it cannot be read, nothing changes."""
        self.chat = self._begin(resume=path)

    def _begin(
        self, *, system: str | None = None, messages: Sequence[Mapping[str, Any]] = (), resume: Path | None = None
    ) -> Conversation:
        return self.model.conversation(system=system, messages=messages, resume=resume, **self._options)

    def _last_question(self) -> int:
        asked = [index for index, message in enumerate(self.chat.messages) if message["role"] == "user"]
        if not asked:
            raise BadRequest("nothing has been said yet.")
        return asked[-1]


def _is_conversation(path: Path) -> bool:
    try:
        state = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(state, dict) and {"version", "messages"} <= set(state)
