"""What a chat gives out: the events of a reply as it grows, and the whole reply.

Owns these values, plain and frozen. Who makes them: `parser.py` from text, the service from the engine's last word.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, TypeAlias

from kvasir.types import FinishReason, Timings, TokenLogprob, Usage


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A function the model wants called.

    `arguments` is the object it gave; where what it wrote is no JSON object, the text itself, as `arguments_json` is.
    """

    id: str
    name: str
    arguments: dict[str, Any] | str
    arguments_json: str

    @classmethod
    def of(cls, identity: str, name: str, arguments_json: str) -> ToolCall:
        """Read the arguments; text that is no JSON object stays text."""
        text = arguments_json or "{}"
        try:
            arguments = json.loads(text)
        except ValueError:
            arguments = text
        return cls(identity, name, arguments if isinstance(arguments, dict) else text, text)

    def message(self) -> dict[str, Any]:
        """The call as OpenAI's messages hold it."""
        function = {"name": self.name, "arguments": self.arguments_json}
        return {"id": self.id, "type": "function", "function": function}


@dataclass(frozen=True, slots=True)
class ChatUsage(Usage):
    """Tokens of one reply. `reasoning_tokens` is the part of `completion_tokens` spent on thinking."""

    reasoning_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatReply:
    """What the model said.

    `reasoning` is what it thought before, where it does. `parsed` is the object that `json_schema`, `regex` or
    `choices` described; None where the reply was cut off. `finish_reason` is "tool_calls" where it wants functions
    called. `key` names what the reply left in the cache. `messages` is the whole exchange where several rounds made it.
    """

    content: str
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    parsed: Any = None
    finish_reason: FinishReason
    usage: ChatUsage
    timings: Timings
    seed: int
    key: str | None = None
    stop: str | None = None
    logprobs: tuple[TokenLogprob, ...] | None = None
    messages: tuple[dict[str, Any], ...] = ()

    def message(self) -> dict[str, Any]:
        """The reply as a message, to be put after the others for the next turn."""
        message: dict[str, Any] = {"role": "assistant", "content": self.content}
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        if self.tool_calls:
            message["tool_calls"] = [call.message() for call in self.tool_calls]
        return message


@dataclass(frozen=True, slots=True)
class Text:
    """The next piece of the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """The next piece of what the model thinks before it answers."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCallStarted:
    """The model begins to call a function; its arguments follow."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class ToolCallArguments:
    """The next piece of a call's arguments, JSON text."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class ToolCallDone:
    """A call is complete."""

    index: int
    call: ToolCall


@dataclass(frozen=True, slots=True)
class Evicted:
    """A conversation gave up messages to make room."""

    messages: tuple[dict[str, Any], ...]
    n_tokens: int


@dataclass(frozen=True, slots=True)
class Done:
    """The reply is complete: always the last event."""

    reply: ChatReply


Event: TypeAlias = Text | Reasoning | ToolCallStarted | ToolCallArguments | ToolCallDone | Evicted | Done
