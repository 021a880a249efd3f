"""Templates: messages become the text a model continues, together with what its reply will look like.

Owns the choice between the template's own way to spell tools and ours (`hermes.py`), and what a model without a
template is told. Rendering itself is llama.cpp's, behind `native.ChatTemplate`. Any number of threads may use one.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any

from kvasir import native
from kvasir.chat import grammars, hermes
from kvasir.chat.messages import Message
from kvasir.chat.tools import Offered, Tool
from kvasir.errors import BadOption, Unsupported

# A turn of a conversation renders the same messages two or three times, at 2 to 20 ms each.
MAX_PROMPTS = 16
# A template that writes the date must not be remembered until tomorrow.
_TELLS_TIME = re.compile(r"strftime|date|now\b")
NO_TOOLS = Offered((), "none")


@dataclass(frozen=True, slots=True)
class Thinking:
    """How a template marks thinking. `opened`: the prompt has begun it, so the reply begins inside."""

    start: str
    ends: tuple[str, ...]
    opened: bool


@dataclass(frozen=True, slots=True)
class Rendered:
    """A prompt and how to read its reply.

    `grammar`, if given, takes the place of the one that `prompt` brings: it holds from the start, or from the text
    `wakes_on` on, and with `prefilled` its text begins where the prompt begins the reply. `preserved` are special
    tokens that the reply's text shows. `ours` says that tools are spelled by `hermes.py`, because the template knows
    none.
    """

    text: str
    prompt: native.ChatPrompt
    stops: tuple[str, ...]
    preserved: tuple[str, ...]
    thinking: Thinking | None
    tools: tuple[Tool, ...]
    continues: bool
    grammar: str | None = None
    wakes_on: str = ""
    prefilled: bool = False
    ours: bool = False


class Template:
    """One chat template: the model's own, or a given one."""

    def __init__(self, core: ModuleType, model: Any = None, source: str = "") -> None:
        self._native: native.ChatTemplate = core.ChatTemplate(model, source)
        self.source: str = self._native.source
        self.caps: dict[str, bool] = dict(self._native.caps)
        self._render = lru_cache(MAX_PROMPTS)(self._fresh) if not _TELLS_TIME.search(self.source) else self._fresh

    def render(
        self,
        messages: Sequence[Message],
        offered: Offered = NO_TOOLS,
        *,
        parallel: bool = True,
        json_schema: str = "",
        enable_thinking: bool = True,
        add_generation_prompt: bool = True,
        continue_final: bool = False,
        kwargs: Mapping[str, Any] | None = None,
    ) -> Rendered:
        """Write messages out. Raises `Unsupported` without a template, `BadRequest` where it refuses the messages."""
        self._check(messages, continue_final=continue_final)
        options = {
            "enable_thinking": enable_thinking,
            "add_generation_prompt": add_generation_prompt and not continue_final,
            "continue_final": continue_final,
            "kwargs": {name: _json(name, value) for name, value in (kwargs or {}).items()},
        }
        # Tools that must not be called are not told of: a small model would call them all the same.
        if offered.choice != "none" and self.caps.get("supports_tools") and self.caps.get("supports_tool_calls"):
            tools = json.dumps([tool.schema() for tool in offered.tools])
            prompt = self._apply(
                messages, tools=tools, tool_choice=offered.choice, parallel_tool_calls=parallel, **options
            )
            if offered.choice != "required" or prompt.grammar:
                rendered = _rendered(prompt, offered, continues=continue_final)
                return _strict(rendered, required=offered.choice == "required", parallel=parallel)
        if not self.caps.get("supports_tool_calls"):
            messages = hermes.spell(messages)
        if offered.choice == "none":
            prompt = self._apply(messages, json_schema=json_schema, **options)
            return _rendered(prompt, offered, continues=continue_final)
        required = offered.choice == "required"
        prompt = self._apply(hermes.describe(messages, offered.tools, required=required), **options)
        # A model that never learned to call would, once forced to begin, go on calling until its tokens are spent.
        several = parallel and not required
        grammar = grammars.tool_calls(offered.tools, parallel=several)
        return _in_our_words(_rendered(prompt, offered, continues=continue_final), grammar, required=required)

    def _apply(self, messages: Sequence[Message], **options: Any) -> native.ChatPrompt:
        options["kwargs"] = tuple(sorted(options["kwargs"].items()))
        return self._render(json.dumps(messages, ensure_ascii=False), **options)

    def _fresh(self, messages: str, *, kwargs: tuple[tuple[str, str], ...], **options: Any) -> native.ChatPrompt:
        return self._native.render(messages, kwargs=dict(kwargs), **options)

    def _check(self, messages: Sequence[Message], *, continue_final: bool) -> None:
        if not self._native.explicit:
            raise Unsupported(
                "this model brings no chat template, so it is not known how its chats are written; give one as "
                "template=, the text of a Jinja template or a pathlib.Path to one.",
                what="chat",
                why="the model brings no chat template",
            )
        if continue_final and messages[-1]["role"] != "assistant":
            raise BadOption(
                f"continue_final continues a last message of the assistant, got one of role {messages[-1]['role']!r}."
            )


def template_source(template: object) -> str:
    """Return the text of a template given as text or as a path; empty where the model's own is meant."""
    if template is None:
        return ""
    if isinstance(template, Path):
        try:
            return template.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise BadOption(f"the chat template {template} cannot be read: {error}.") from None
    if not isinstance(template, str) or "{" not in template:
        raise BadOption(f"template must be the text of a Jinja template or a pathlib.Path to one, got {template!r}.")
    return template


def _rendered(prompt: native.ChatPrompt, offered: Offered, *, continues: bool) -> Rendered:
    return Rendered(
        text=prompt.prompt,
        prompt=prompt,
        stops=tuple(prompt.stops),
        preserved=tuple(prompt.preserved_tokens),
        thinking=_thinking(prompt),
        tools=offered.tools if offered.choice != "none" else (),
        continues=continues,
    )


def _strict(rendered: Rendered, *, required: bool, parallel: bool) -> Rendered:
    """Hold the reply to what was asked: a call and nothing else, one call and no more."""
    grammar = rendered.prompt.grammar
    if rendered.prompt.grammar_lazy or not grammar:
        return rendered
    if required:
        grammar = grammars.without_prose(grammar)
    return replace(rendered, grammar=grammar if parallel else grammars.only_one_call(grammar), prefilled=True)


def _in_our_words(rendered: Rendered, grammar: str, *, required: bool) -> Rendered:
    thinking = rendered.thinking
    if required and thinking is not None:
        grammar = grammars.after_thinking(grammar, start=thinking.start, ends=thinking.ends, opened=thinking.opened)
    return replace(
        rendered,
        grammar=grammar,
        wakes_on="" if required else grammars.CALL_START,
        preserved=(*rendered.preserved, grammars.CALL_START, grammars.CALL_END),
        ours=True,
    )


def _thinking(prompt: native.ChatPrompt) -> Thinking | None:
    # Some thoughts are ended by a call; what is asked here is where they end and the answer begins.
    ends = tuple(end for end in prompt.thinking_ends if not re.search("tool|function", end))
    start = prompt.thinking_start
    if not prompt.supports_thinking or not start or not ends:
        return None
    begun = prompt.generation_prompt.rfind(start)
    ended = max(prompt.generation_prompt.rfind(end) for end in ends)
    return Thinking(start, ends, opened=begun >= 0 and begun > ended)


def _json(name: str, value: Any) -> str:
    try:
        return json.dumps(value)
    except (TypeError, ValueError) as error:
        raise BadOption(f"template_kwargs[{name!r}] is no JSON: {error}.") from None
