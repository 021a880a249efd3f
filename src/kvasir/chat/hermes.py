"""Tool calls for templates that know none, spelled the way Hermes and Qwen models learned it.

Owns the wording: tools are described in the system message, calls and results are text of ordinary messages. Pure:
messages in, messages out.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from kvasir.chat.grammars import CALL_END, CALL_START
from kvasir.chat.messages import Message
from kvasir.chat.tools import Tool

_SYSTEM = """# Tools

You may call functions to answer the user. These are the functions, as JSON schemas:
<tools>
{tools}
</tools>

To call a function, write its name and its arguments as one JSON object between tags, like this:
<tool_call>
{{"name": "function name", "arguments": {{"argument": "value"}}}}
</tool_call>"""
_REQUIRED = "\nAnswer with a function call."


def describe(messages: Sequence[Message], tools: Sequence[Tool], *, required: bool) -> list[Message]:
    """Tell the model of its tools: in the system message, or in a new one before all others."""
    listed = "\n".join(json.dumps(tool.schema(), ensure_ascii=False) for tool in tools)
    text = _SYSTEM.format(tools=listed) + (_REQUIRED if required else "")
    first = messages[0] if messages else None
    if first is None or first["role"] not in ("system", "developer"):
        return [{"role": "system", "content": text}, *messages]
    return [{**first, "content": f"{first['content']}\n\n{text}".lstrip()}, *messages[1:]]


def spell(messages: Sequence[Message]) -> list[Message]:
    """Write calls and results out as text; results that follow one another become one message of the user."""
    spelled: list[Message] = []
    after_result = False
    for message in messages:
        is_result = message["role"] == "tool"
        plain = _result(message) if is_result else _calls(message)
        if is_result and after_result:
            spelled[-1] = {**spelled[-1], "content": f"{spelled[-1]['content']}\n{plain['content']}"}
        else:
            spelled.append(plain)
        after_result = is_result
    return spelled


def _result(message: Message) -> Message:
    return {"role": "user", "content": f"<tool_response>\n{message['content']}\n</tool_response>"}


def _calls(message: Message) -> Message:
    calls = message.get("tool_calls")
    if not calls:
        return message
    plain = {name: value for name, value in message.items() if name != "tool_calls"}
    texts = [_call(call["function"]["name"], call["function"]["arguments"]) for call in calls]
    return {**plain, "content": "\n".join([plain["content"], *texts] if plain["content"] else texts)}


def _call(name: str, arguments: str) -> str:
    return f'{CALL_START}\n{{"name": {json.dumps(name)}, "arguments": {arguments}}}\n{CALL_END}'
