"""The fake core's chat: one template, ChatML with Hermes' tool calls and Qwen's thinking, rendered by hand.

Owns how fake models spell messages and how their replies are read. `TEMPLATE` is the Jinja text of what `render` does;
another source is only looked at for the words "tools" and "<think>": without them the template knows no such thing.
It refuses what the real core refuses, and like there a call that is malformed becomes content.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kvasir.errors import BadOption, BadSchema
from kvasir.native.fake_model import TEMPLATE, Model, one_of
from kvasir.native.fake_sampler import SamplerParams, json_schema_to_grammar
from kvasir.native.fake_vocab import Vocab

_ASSISTANT = "<|im_start|>assistant\n"
_NO_THOUGHT = "<think>\n\n</think>\n\n"
_THINK, _END_THINK = "<think>", "</think>"
_CALL, _END_CALL = "<tool_call>", "</tool_call>"
_HEAD = re.compile(r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"arguments"\s*:\s*')


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A rendered prompt, and what its reply will look like."""

    prompt: str
    grammar: str = ""
    grammar_lazy: bool = False
    grammar_triggers: list[tuple[str, str, int]] = field(default_factory=list)
    preserved_tokens: list[str] = field(default_factory=list)
    stops: list[str] = field(default_factory=list)
    generation_prompt: str = ""
    format: str = "fake"
    thinking_start: str = ""
    thinking_ends: list[str] = field(default_factory=list)
    supports_thinking: bool = False
    has_calls: bool = False

    def constrain(self, params: SamplerParams, vocab: Vocab) -> None:
        """Give a sampler this prompt's grammar with its triggers, and the tokens of its thinking markers.

        A word that is one token triggers as that token. `reasoning_budget` stays as it is; `reasoning_forced` becomes
        the first end marker.
        """

        def tokens(text: str) -> list[int]:
            return vocab.tokenize(text, add_special=False, parse_special=True)

        params.grammar, params.grammar_lazy = self.grammar, self.grammar_lazy
        words = [word for kind, word, _ in self.grammar_triggers if kind == "word"]
        params.grammar_trigger_tokens = [ids[0] for ids in map(tokens, words) if len(ids) == 1]
        params.grammar_trigger_patterns = [re.escape(word) for word in words if len(tokens(word)) > 1]
        prefill = tokens(self.generation_prompt)
        params.grammar_prefill = prefill if self.grammar and not self.grammar_lazy else []
        if self.supports_thinking:
            params.reasoning_start, params.reasoning_prefill = tokens(self.thinking_start), prefill
            params.reasoning_ends = [tokens(end) for end in self.thinking_ends]
            params.reasoning_forced = params.reasoning_ends[0]


@dataclass(frozen=True, slots=True)
class ChatDelta:
    """What a piece of a reply added: "content", "reasoning" or "tool_call"."""

    kind: str
    text: str = ""
    index: int = 0
    id: str = ""
    name: str = ""


class ChatTemplate:
    """How a model spells messages. Without a model it needs a source."""

    def __init__(
        self, model: Model | None = None, source: str = "", *, bos_token: str = "", eos_token: str = ""
    ) -> None:
        if model is None and not source:
            raise BadOption("a chat template needs a model or a source; got neither")
        own = model.chat_template() if model is not None and not source else None
        self.explicit = bool(source or own)
        self.source = source or own or TEMPLATE
        if self.source.count("{%") != self.source.count("%}") or self.source.count("{{") != self.source.count("}}"):
            raise BadOption("the chat template is not valid Jinja: a bracket is left open; correct it or give another.")
        tools = "tools" in self.source
        self.caps = dict.fromkeys(("supports_string_content", "supports_system_role"), True) | dict.fromkeys(
            ("supports_typed_content", "supports_preserve_reasoning", "supports_reasoning_effort"), False
        ) | dict.fromkeys(
            ("supports_tools", "supports_tool_calls", "supports_parallel_tool_calls", "supports_object_arguments"),
            tools,
        )  # fmt: skip

    def render(
        self, messages: str, *, tools: str = "", tool_choice: str = "auto", parallel_tool_calls: bool = False,
        json_schema: str = "", enable_thinking: bool = True, add_generation_prompt: bool = True,
        continue_final: bool = False, kwargs: Mapping[str, str] | None = None,
    ) -> ChatPrompt:  # fmt: skip
        """Return the prompt for messages in OpenAI's shape, given as JSON text."""
        one_of("tool_choice", tool_choice, ("none", "auto", "required"))
        said, offered = _messages(messages), _tools(tools) if self.caps["supports_tools"] else []
        extra = {name: _json("a template argument", text) for name, text in (kwargs or {}).items()}
        thinks, wanted = "<think>" in self.source, bool(extra.get("enable_thinking", enable_thinking))
        last = said.pop() if continue_final and said else None
        opening = ""
        if last is not None:
            opening = _ASSISTANT + _body(last, final=True)
        elif add_generation_prompt:
            opening = _ASSISTANT + (_NO_THOUGHT if thinks and not wanted else "")
        calls = bool(offered) and tool_choice != "none"
        return ChatPrompt(
            _head(said, offered) + "".join(map(_turn, said)) + opening,
            grammar=_grammar(offered if calls else [], json_schema),
            grammar_lazy=calls and tool_choice == "auto" and not json_schema,
            grammar_triggers=[("word", _CALL, -1)] if calls and tool_choice == "auto" and not json_schema else [],
            preserved_tokens=[_CALL, _END_CALL] if calls else [],
            generation_prompt=opening,
            thinking_start=_THINK if thinks else "",
            thinking_ends=[_END_THINK] if thinks else [],
            supports_thinking=thinks,
            has_calls=calls,
        )


class ChatParser:
    """Reads one reply as it comes. What it gave is never taken back, and it never raises."""

    def __init__(self, prompt: ChatPrompt, *, continues: bool = False) -> None:
        self._prompt = prompt
        self._text = prompt.generation_prompt.removeprefix(_ASSISTANT)
        self._ids: list[str] = []
        self._plain_from: int | None = None
        self._seen = _Reply()
        if continues:
            self._seen = _parse(self._text, prompt, final=False)
        self._skipped = (len(self._seen.reasoning), len(self._seen.content), len(self._seen.calls))

    @property
    def rejected(self) -> bool:
        """Whether the reply did not have the expected form: from there on all text is content."""
        return self._plain_from is not None

    @property
    def reasoning(self) -> str:
        """The reasoning so far."""
        return self._seen.reasoning[self._skipped[0] :]

    @property
    def content(self) -> str:
        """The content so far."""
        return self._seen.content[self._skipped[1] :]

    @property
    def tool_calls(self) -> list[tuple[str, str, str]]:
        """The calls so far: id, name, arguments as JSON text."""
        calls = list(zip(self._ids, self._seen.calls, strict=False))[self._skipped[2] :]
        return [(id_, name, arguments) for id_, (name, arguments) in calls]

    def feed(self, text: str) -> list[ChatDelta]:
        """Take the text that came, and return what it makes certain."""
        self._text += text
        return self._advance(final=False)

    def finish(self) -> list[ChatDelta]:
        """Return the rest, at the end of the reply."""
        return self._advance(final=True)

    def _advance(self, *, final: bool) -> list[ChatDelta]:
        reply = self._seen if self.rejected else _parse(self._text, self._prompt, final=final)
        if self._plain_from is None:
            self._plain_from = reply.stuck_at
        if self._plain_from is not None:
            reply = _Reply(reply.reasoning, reply.content + self._text[self._plain_from :], reply.calls)
            self._plain_from = len(self._text)
        deltas = self._difference(reply)
        self._seen = reply
        return deltas

    def _difference(self, new: _Reply) -> list[ChatDelta]:
        old = self._seen
        pieces = [("reasoning", new.reasoning[len(old.reasoning) :]), ("content", new.content[len(old.content) :])]
        deltas = [ChatDelta(kind, text) for kind, text in pieces if text]
        for index, (name, arguments) in enumerate(new.calls):
            known = len(old.calls[index][1]) if index < len(old.calls) else None
            if known is None:  # nine letters and digits: the templates of Mistral refuse any other id
                self._ids.append(secrets.token_hex(5)[:9])
            if known != len(arguments):
                name = "" if known is not None else name
                deltas.append(ChatDelta("tool_call", arguments[known or 0 :], index, self._ids[index], name))
        return deltas


@dataclass(frozen=True, slots=True)
class _Reply:
    """A reply as far as it is understood; `stuck_at` is where it stopped having the expected form."""

    reasoning: str = ""
    content: str = ""
    calls: tuple[tuple[str, str], ...] = ()
    stuck_at: int | None = None


def _parse(text: str, prompt: ChatPrompt, *, final: bool) -> _Reply:
    reasoning, at = "", 0
    if prompt.supports_thinking:
        lead = text.lstrip()
        if not final and lead != _THINK and _THINK.startswith(lead):
            return _Reply()
        if lead.startswith(_THINK):
            begin = len(text) - len(lead) + len(_THINK)
            end = text.find(_END_THINK, begin)
            if end < 0:
                return _Reply(text[begin : len(text) - (0 if final else _held(text, _END_THINK))].strip())
            reasoning, at = text[begin:end].strip(), _skip_space(text, end + len(_END_THINK))
    if not prompt.has_calls:
        return _Reply(reasoning, text[at:])
    return _parse_calls(text, at, reasoning, final=final)


def _parse_calls(text: str, at: int, reasoning: str, *, final: bool) -> _Reply:
    content, calls = "", []
    while (begin := text.find(_CALL, at)) >= 0:
        content += text[at:begin]
        end = text.find(_END_CALL, begin)
        closed = end >= 0
        body_at = begin + len(_CALL)
        body = text[body_at : end if closed else len(text) - (0 if final else _held(text, _END_CALL))]
        name, arguments, whole = _call(body)
        if name is not None:
            calls.append((name, arguments))
        if not whole and (closed or final):
            head = _HEAD.match(body)
            stuck_at = begin if name is None or head is None else body_at + head.end() + len(arguments)
            return _Reply(reasoning, content, tuple(calls), stuck_at)
        if not closed:
            return _Reply(reasoning, content, tuple(calls))
        at = _skip_space(text, end + len(_END_CALL))
    held = 0 if final else _held(text[at:], _CALL)
    return _Reply(reasoning, content + text[at : len(text) - held], tuple(calls))


def _call(body: str) -> tuple[str | None, str, bool]:
    """Return the name, the arguments as far as they came, and whether the call is whole."""
    head = _HEAD.match(body)
    if head is None:
        return None, "", False
    name, at = str(json.loads(head[1])), head.end()
    try:
        arguments, end = json.JSONDecoder().raw_decode(body, at)
    except (ValueError, RecursionError):
        return name, body[at:], False
    return name, body[at:end], isinstance(arguments, dict) and body[end:].strip() == "}"


def _held(text: str, marker: str) -> int:
    """Return how many characters at the end may be the start of a marker."""
    return next((n for n in range(min(len(marker), len(text)), 0, -1) if marker.startswith(text[-n:])), 0)


def _skip_space(text: str, at: int) -> int:
    return len(text) - len(text[at:].lstrip())


def _json(what: str, text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise BadOption(f"{what} must be JSON text: {error}; correct it.") from error


def _messages(text: str) -> list[dict[str, Any]]:
    messages = _json("messages", text)
    if not isinstance(messages, list) or not all(isinstance(m, dict) for m in messages):
        raise BadOption(f"messages must be an array of objects, got {text[:80]}")
    for message in messages:
        if not isinstance(message.get("role"), str) or not {"content", "tool_calls"} & set(message):
            raise BadOption(f"a message has a role, and content or tool_calls; got {message}")
        message["content"] = _text(message.get("content"))
    return messages


def _text(content: Any) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list) or not all(isinstance(p, dict) and p.get("type") == "text" for p in content):
        raise BadOption(f"content is text, or an array of parts of type text; got {content!r}")
    return "\n".join(str(part["text"]) for part in content)


def _tools(text: str) -> list[dict[str, Any]]:
    tools = _json("tools", text) if text else []
    if not isinstance(tools, list):
        raise BadOption(f"tools must be an array, got {text[:80]}")
    for tool in tools:
        if not isinstance(tool, dict) or tool.get("type") != "function" or "name" not in tool.get("function", {}):
            raise BadOption(f'a tool is {{"type": "function", "function": {{"name": ...}}}}; got {tool}')
    return tools


def _head(messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> str:
    """Take the system message, if it comes first, and return it with the tools."""
    first = messages.pop(0)["content"] if messages and messages[0]["role"] in ("system", "developer") else ""
    if tools:
        listed = "".join("\n" + json.dumps(tool, ensure_ascii=False) for tool in tools)
        first += ("\n\n" if first else "") + f"# Tools\n\n<tools>{listed}\n</tools>"
    return _turn({"role": "system", "content": first}) if first else ""


def _turn(message: dict[str, Any]) -> str:
    role = "system" if message["role"] == "developer" else message["role"]
    return f"<|im_start|>{role}\n{_body(message)}<|im_end|>\n"


def _body(message: dict[str, Any], *, final: bool = False) -> str:
    thought = message.get("reasoning_content")
    closed = f"\n{_END_THINK}\n\n" if message["content"] or not final else ""
    text = (f"{_THINK}\n{thought}{closed}" if thought else "") + str(message["content"])
    for call in message.get("tool_calls") or []:
        function = call["function"]
        arguments = function["arguments"]
        spelled = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        text += f'{_CALL}\n{{"name": "{function["name"]}", "arguments": {spelled}}}\n{_END_CALL}'
    return text


def _grammar(tools: list[dict[str, Any]], json_schema: str) -> str:
    if json_schema:
        return json_schema_to_grammar(json_schema)
    literals = []
    for tool in tools:
        schema = tool["function"].get("parameters") or {"type": "object"}
        try:
            arguments = json_schema_to_grammar(json.dumps(schema)).partition("::= ")[2]
        except BadSchema as error:
            raise BadSchema(f"tool {tool['function']['name']!r}: {error}") from error
        call = f'{_CALL}\n{{"name": "{tool["function"]["name"]}", "arguments": {json.loads(arguments)}}}\n{_END_CALL}'
        literals.append(json.dumps(call, ensure_ascii=False))
    return f"root ::= {' | '.join(literals)}" if literals else ""
