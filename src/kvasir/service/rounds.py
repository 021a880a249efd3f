"""Replies with the help of tools: round after round, until the model asks for nothing more.

Owns the loop and its limit, and how what a tool returns or raises becomes a message. Decides in `Rounds`, which waits
for nothing; `run` and `arun` act, on a thread and in asyncio.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from kvasir.chat.events import ChatReply, ToolCall
from kvasir.chat.functions import result_text
from kvasir.chat.messages import Message, normalise
from kvasir.chat.tools import Tool, toolset
from kvasir.errors import BadOption, suggest
from kvasir.service import checks
from kvasir.types import FinishReason

if TYPE_CHECKING:
    from kvasir.service.model import Model


class Rounds:
    """One exchange: the messages so far, and what to do with the next reply."""

    def __init__(
        self,
        messages: str | Sequence[Mapping[str, Any]],
        tools: Sequence[Any],
        max_rounds: int,
        options: dict[str, Any],
    ) -> None:
        self.messages: list[Message] = normalise(messages)
        self.options: dict[str, Any] = {**options, "tools": toolset(tools)}
        self._tools = {tool.name: tool for tool in toolset(tools)}
        self._n_left = checks.whole("max_rounds", max_rounds, least=1)

    def wanted(self, reply: ChatReply) -> tuple[ToolCall, ...]:
        """Note a reply; return the calls to make now, none where the exchange is over."""
        self.messages.append(reply.message())
        # What must be called is called once: held to it for ever, the model could never answer.
        if self.options.get("tool_choice") != "none":
            self.options = {**self.options, "tool_choice": "auto"}
        if reply.finish_reason is not FinishReason.TOOL_CALLS:
            return ()
        known = [self._tools[call.name] for call in reply.tool_calls if call.name in self._tools]
        if any(tool.function is None for tool in known):
            return ()
        self._n_left -= 1
        if self._n_left == 0:  # the last word is an answer, from what is known by then
            self.options = {**self.options, "tool_choice": "none"}
        return reply.tool_calls

    def tool(self, call: ToolCall) -> Tool:
        """Return the tool a call means; `BadOption` where there is none."""
        if call.name not in self._tools:
            raise BadOption(f"there is no tool {call.name!r}.{suggest(call.name, self._tools)}")
        return self._tools[call.name]

    def answer(self, call: ToolCall, result: object) -> None:
        """Note what a call came to."""
        text = failure(result) if isinstance(result, Exception) else result_text(result)
        self.messages.append({"role": "tool", "tool_call_id": call.id, "name": call.name, "content": text})

    def end(self, reply: ChatReply) -> ChatReply:
        """Return the last reply, with the whole exchange."""
        return replace(reply, messages=tuple(self.messages))


def run(
    model: Model,
    messages: str | Sequence[Mapping[str, Any]],
    tools: Sequence[Any],
    *,
    max_rounds: int,
    options: dict[str, Any],
) -> ChatReply:
    """Run all rounds on this thread."""
    rounds = Rounds(messages, tools, max_rounds, options)
    for tool in toolset(tools):
        if tool.is_async:
            raise BadOption(f"tool {tool.name!r} is async; use arun_tools.")
    while True:
        reply = model.chat(rounds.messages, **rounds.options)
        calls = rounds.wanted(reply)
        if not calls:
            return rounds.end(reply)
        for call in calls:
            rounds.answer(call, _called(rounds, call))


async def arun(
    model: Model,
    messages: str | Sequence[Mapping[str, Any]],
    tools: Sequence[Any],
    *,
    max_rounds: int,
    options: dict[str, Any],
) -> ChatReply:
    """Run all rounds in this task; the calls of one round run together."""
    rounds = Rounds(messages, tools, max_rounds, options)
    while True:
        reply = await model.achat(rounds.messages, **rounds.options)
        calls = rounds.wanted(reply)
        if not calls:
            return rounds.end(reply)
        results = await asyncio.gather(*(_acalled(rounds, call) for call in calls))
        for call, result in zip(calls, results, strict=True):
            rounds.answer(call, result)


def failure(error: Exception) -> str:
    """What a model is told of a tool that raised."""
    return json.dumps({"error": f"{type(error).__name__}: {error}"}, ensure_ascii=False)


def _called(rounds: Rounds, call: ToolCall) -> object:
    try:
        return rounds.tool(call).call(call.arguments)
    except Exception as error:  # whatever a tool raises is the model's to deal with
        return error


async def _acalled(rounds: Rounds, call: ToolCall) -> object:
    try:
        tool = rounds.tool(call)
        if tool.is_async:
            return await tool.call(call.arguments)
        return await asyncio.to_thread(tool.call, call.arguments)
    except Exception as error:  # whatever a tool raises is the model's to deal with
        return error
