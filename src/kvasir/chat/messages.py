"""Messages: what a chat is made of, checked once and made plain.

Owns the shape: OpenAI's roles and fields in, dicts of strings out, so that nothing below asks again what a message may
be. Says by index what is wrong with one. Knows no template: how a message is written out is `prompt.py`'s.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kvasir.errors import BadOption, Unsupported, suggest

Message = dict[str, Any]
"""A message as plain JSON data: `role`, `content`, and where there are any `reasoning_content`, `tool_calls`,
`tool_call_id` and `name`."""

ROLES = ("system", "developer", "user", "assistant", "tool")
FIELDS = ("role", "content", "name", "tool_calls", "tool_call_id", "reasoning_content")
# What other clients put into a message they got from a server, and what means nothing when it is empty.
_EMPTY_FIELDS = ("refusal", "audio", "annotations", "function_call", "reasoning")
_TEXT_PARTS = ("text", "input_text", "output_text")


def normalise(messages: str | Sequence[Mapping[str, Any]]) -> list[Message]:
    """Check messages and return them as plain dicts; a string is one message of the user.

    Content parts of type text become one string, arguments of tool calls JSON text. Raises `BadOption` that names the
    message by its index, and `Unsupported` for parts that are not text.
    """
    if isinstance(messages, str):
        return [{"role": "user", "content": messages}]
    if isinstance(messages, bytes | Mapping) or not isinstance(messages, Sequence):
        raise BadOption(f"messages must be a text or a list of messages, got {type(messages).__name__}.")
    if not messages:
        raise BadOption("messages is empty; give at least one.")
    return [_message(index, message) for index, message in enumerate(messages)]


def _message(index: int, message: object) -> Message:
    if not isinstance(message, Mapping):
        raise _bad(index, f"must be a dict with role and content, got {type(message).__name__}")
    role = message.get("role")
    if role not in ROLES:
        hint = suggest(role, ROLES) if isinstance(role, str) else ""
        raise BadOption(f"message {index}: role must be one of {', '.join(ROLES)}, got {role!r}.{hint}")
    _check_fields(index, message)
    plain: Message = {"role": role, "content": _content(index, message, role)}
    for name, read in _READERS.items():
        if message.get(name) is not None:
            plain[name] = read(index, name, message[name])
    if "reasoning" in message and message["reasoning"] and "reasoning_content" not in plain:
        plain["reasoning_content"] = _text(index, "reasoning", message["reasoning"])
    _check_role(index, plain)
    return plain


def _check_fields(index: int, message: Mapping[str, Any]) -> None:
    for name, value in message.items():
        if name in FIELDS or name == "reasoning" or (name in _EMPTY_FIELDS and not value):
            continue
        raise BadOption(f"message {index}: unknown field {name!r}.{suggest(str(name), FIELDS)}")


def _check_role(index: int, plain: Message) -> None:
    if "tool_calls" in plain and plain["role"] != "assistant":
        raise _bad(index, f"has tool_calls, which only the assistant makes, but its role is {plain['role']!r}")
    if plain["role"] == "tool" and "tool_call_id" not in plain and "name" not in plain:
        raise _bad(index, "is a tool's result and needs the tool_call_id it answers, or the tool's name")


def _content(index: int, message: Mapping[str, Any], role: str) -> str:
    content = message.get("content")
    if isinstance(content, str):
        return content
    if content is None and role == "assistant":
        if any(message.get(name) for name in ("tool_calls", "reasoning_content", "reasoning")):
            return ""
        raise _bad(index, "has neither content nor tool_calls")
    if isinstance(content, Sequence) and not isinstance(content, bytes):
        return "\n".join(_part(index, part) for part in content)
    raise _bad(index, f"must have content, a string or a list of text parts, got {type(content).__name__}")


def _part(index: int, part: object) -> str:
    if isinstance(part, str):
        return part
    if not isinstance(part, Mapping) or not isinstance(kind := part.get("type"), str):
        raise _bad(index, 'has a content part that is not like {"type": "text", "text": "..."}')
    if kind not in _TEXT_PARTS:
        raise Unsupported(
            f"message {index}: a content part is of type {kind!r}, and only text is read; leave it out.",
            what=kind,
            why="only text is read",
        )
    return _text(index, "text", part.get("text"))


def _text(index: int, name: str, value: object) -> str:
    if not isinstance(value, str):
        raise _bad(index, f"must have a string as {name}, got {type(value).__name__}")
    return value


def _calls(index: int, name: str, calls: object) -> list[Message]:
    if isinstance(calls, str | Mapping) or not isinstance(calls, Sequence):
        raise _bad(index, f"must have a list as {name}, got {type(calls).__name__}")
    return [_call(index, call) for call in calls]


def _call(index: int, call: object) -> Message:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(call, Mapping) or not isinstance(function, Mapping):
        raise _bad(index, 'has a tool call that is not like {"id": ..., "type": "function", "function": {...}}')
    name, identity = function.get("name"), call.get("id")
    if not isinstance(name, str) or not name:
        raise _bad(index, "has a tool call without the function's name")
    if identity is not None and not isinstance(identity, str):
        raise _bad(index, f"has a tool call whose id is no string but {type(identity).__name__}")
    arguments = {"name": name, "arguments": _arguments(index, function.get("arguments"))}
    return {"id": identity or "", "type": "function", "function": arguments}


def _arguments(index: int, arguments: object) -> str:
    if arguments is None or arguments == "":
        return "{}"
    if isinstance(arguments, str):
        return arguments
    try:
        return json.dumps(arguments, ensure_ascii=False)
    except (TypeError, ValueError) as error:
        raise _bad(index, f"has a tool call whose arguments are no JSON ({error})") from None


_READERS: Mapping[str, Callable[[int, str, Any], Any]] = {
    "name": _text,
    "tool_call_id": _text,
    "reasoning_content": _text,
    "tool_calls": _calls,
}


def _bad(index: int, what: str) -> BadOption:
    return BadOption(f"message {index} {what}.")
