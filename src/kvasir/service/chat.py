"""Chat on a model: messages and options become a prompt and a request, and the request a `ChatStream`.

Owns `ChatOptions` and the two steps every reply goes through: `prepare` writes the messages out and tokenizes them,
`start` builds what constrains the reply and submits it. What a reply's text means is `kvasir.chat`'s to say.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from kvasir.chat import grammars
from kvasir.chat.eviction import FIXED_ROLES
from kvasir.chat.messages import Message, normalise
from kvasir.chat.parser import ReplyParser
from kvasir.chat.prompt import Rendered, Template, template_source
from kvasir.chat.structured import Constraint, constraint_of
from kvasir.chat.tools import offer, toolset
from kvasir.engine.radix import common_prefix
from kvasir.errors import BadOption, BadRequest, Unsupported, suggest
from kvasir.model.sampler import Guide, schema_json
from kvasir.model.tokenizer import Tokenizer
from kvasir.service import checks
from kvasir.service.chat_stream import ChatStream, Receiver
from kvasir.service.options import SamplingOptions
from kvasir.types import SAMPLING_OPTIONS, Sampling

if TYPE_CHECKING:
    from kvasir.service.model import Model

__all__ = ["ChatOptions", "ChatStream", "Messages", "Prepared", "prepare", "start"]

Messages = str | Sequence[Mapping[str, Any]]
"""What is replied to: messages in OpenAI's shape, or one text of the user."""

# The format of gpt-oss: an answer is one of several channels, so a grammar of ours would have to know them all.
_CHANNELS = "<|channel|>"
# A question that nobody asks, for templates that write no system prompt without one.
_ANY_QUESTION: Message = {"role": "user", "content": "\ufffd"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatOptions:
    """Everything about a reply that is not sampling.

    `tools` are Python functions or descriptions in OpenAI's shape; `tool_choice` is "auto", "none", "required" or the
    name of the tool that must be called. `enable_thinking=False` turns thinking off; `thinking_budget` bounds it in
    tokens. `template` replaces the model's chat template (text, or a `Path`), `template_kwargs` are handed to it.
    `continue_final` goes on with a last message of the assistant. At most one of `response_format`, `regex`, `choices`
    and the sampling options `json_schema` and `grammar` constrains the answer.
    """

    tools: Sequence[Any] | None = None  # kept as a tuple of `Tool`
    tool_choice: str | Mapping[str, Any] = "auto"
    parallel_tool_calls: bool = True
    enable_thinking: bool | None = None  # None: as the template likes
    thinking_budget: int | None = None
    template: str | Path | None = None
    template_kwargs: Mapping[str, Any] | None = None
    continue_final: bool = False
    response_format: Mapping[str, Any] | None = None
    regex: str | None = None
    choices: Any = None  # a list of texts, an Enum class or a Literal

    def __post_init__(self) -> None:
        object.__setattr__(self, "tools", toolset(self.tools))
        offer(toolset(self.tools), self.tool_choice)
        checks.flag("parallel_tool_calls", self.parallel_tool_calls)
        checks.flag("continue_final", self.continue_final)
        if self.enable_thinking is not None:
            checks.flag("enable_thinking", self.enable_thinking)
        if self.thinking_budget is not None:
            checks.whole("thinking_budget", self.thinking_budget, least=0)
        checks.mapping("template_kwargs", self.template_kwargs)
        checks.mapping("response_format", self.response_format)

    @classmethod
    def of(cls, **options: Any) -> ChatOptions:
        """Return options by name; unknown names raise `BadOption`."""
        for name in options:
            if name not in CHAT_OPTIONS:
                raise BadOption(f"unknown option {name!r}.{suggest(name, (*CHAT_OPTIONS, *SAMPLING_OPTIONS))}")
        return cls(**options)

    @classmethod
    def split(cls, options: Mapping[str, Any]) -> tuple[ChatOptions, SamplingOptions]:
        """Part the options of a chat from those of sampling; unknown names raise `BadOption`."""
        sampling = {name: value for name, value in options.items() if name in SAMPLING_OPTIONS}
        rest = {name: value for name, value in options.items() if name not in sampling}
        return cls.of(**rest), cast(SamplingOptions, sampling)

    def tool_schemas(self) -> list[dict[str, Any]]:
        """The tools as plain JSON data, in OpenAI's shape."""
        return [tool.schema() for tool in toolset(self.tools)]


CHAT_OPTIONS = tuple(f.name for f in fields(ChatOptions))
"""The name of every option of a chat, in order."""


class Prepared(NamedTuple):
    """A prompt that is ready to be continued: its text, its tokens, and how to read the reply."""

    text: str
    tokens: list[int]
    rendered: Rendered
    messages: list[Message]


def prepare(
    model: Model,
    messages: Messages,
    options: ChatOptions,
    *,
    add_generation_prompt: bool = True,
    scope: str | None = None,
) -> Prepared:
    """Write messages out with the model's template, and tokenize them: what the model wrote itself as it wrote it.

    Without `add_generation_prompt` the text ends after the last message. Raises `BadRequest` for messages that are
    wrong, `Unsupported` where the model has no template.
    """
    plain = normalise(messages)
    rendered = _render(model, plain, options, add_generation_prompt=add_generation_prompt)
    return Prepared(rendered.text, model._encode(rendered.text, scope), rendered, plain)


def start(
    model: Model,
    prepared: Prepared,
    options: ChatOptions,
    sampling: Sampling,
    *,
    owner: str | None = None,
    scope: str | None = None,
    priority: int = 0,
    deadline: float | None = None,
    parent_key: str | None = None,
    cache: bool = True,
) -> ChatStream:
    """Submit a prepared prompt and return at once. `owner` names whose edited KV it may continue."""
    constraint = _constraint(model, options, sampling)
    rendered = prepared.rendered
    if constraint is not None:
        rendered = _constrained(model, prepared, options, sampling, constraint)
    tokenizer = model._weights.tokenizer
    request, reply = model._request(
        prepared.tokens,
        replace(sampling, grammar=None, json_schema=None),
        remember=model._remembering(prepared.text, prepared.tokens, scope) if cache else None,
        guide=_guide(rendered, options),
        stops=rendered.stops,
        shown=frozenset(token for text in rendered.preserved if (token := _single(tokenizer, text)) is not None),
        checkpoint=_system_end(model, prepared, options, scope) if cache else None,
        **model._queued(
            priority=priority, deadline=deadline, parent_key=parent_key, cache=cache, scope=scope, owner=owner
        ),
    )
    receiver = Receiver(
        reply,
        ReplyParser(model._core, rendered),
        parse=constraint.parse if constraint is not None else None,
        stops=tuple(sampling.stop),
        thinks=rendered.thinking is not None,
    )
    return ChatStream(model._submit(request, reply), receiver)


def _render(
    model: Model,
    messages: list[Message],
    options: ChatOptions,
    *,
    add_generation_prompt: bool = True,
    json_schema: str = "",
) -> Rendered:
    return _template(model, options).render(
        messages,
        offer(toolset(options.tools), options.tool_choice),
        parallel=options.parallel_tool_calls,
        json_schema=json_schema,
        enable_thinking=options.enable_thinking is not False,
        add_generation_prompt=add_generation_prompt,
        continue_final=options.continue_final,
        kwargs=options.template_kwargs,
    )


def _system_end(model: Model, prepared: Prepared, options: ChatOptions, scope: str | None) -> int | None:
    """Tokens that all prompts with this system prompt begin with, where the model needs to know: it cannot rewind.

    None where there is no system prompt, or no cache to keep anything.
    """
    fixed = list(takewhile(lambda message: message["role"] in FIXED_ROLES, prepared.messages))
    if not fixed or model._cache is None or model.info.memory_kind not in ("recurrent", "hybrid"):
        return None
    try:
        asked = _render(
            model, [*fixed, _ANY_QUESTION], replace(options, continue_final=False), add_generation_prompt=False
        )
    except BadRequest:
        return None
    return common_prefix(model._encode(asked.text, scope), prepared.tokens)


def _template(model: Model, options: ChatOptions) -> Template:
    """The template to use; parsed once a model. Two threads may both parse it, and either result will do."""
    source = template_source(options.template)
    if source not in model._templates:
        model._templates[source] = Template(model._core, model._weights.native, source)
    return model._templates[source]


def _constraint(model: Model, options: ChatOptions, sampling: Sampling) -> Constraint | None:
    """What the answer must look like, whichever option says so."""
    schema = _schema_of(options.response_format)
    if schema is not None and sampling.json_schema is not None:
        raise BadOption("response_format and json_schema were both given; an answer can follow only one of them.")
    return constraint_of(
        model._core,
        json_schema=schema if schema is not None else sampling.json_schema,
        grammar=sampling.grammar,
        regex=options.regex,
        choices=options.choices,
    )


def _constrained(
    model: Model, prepared: Prepared, options: ChatOptions, sampling: Sampling, constraint: Constraint
) -> Rendered:
    """Return the same prompt whose reply follows the constraint, after its thinking."""
    rendered = prepared.rendered
    if rendered.tools:
        raise BadOption(
            "tools and a constraint of the answer were both given; a reply can follow only one of them. "
            "Give tool_choice='none', or leave the constraint out."
        )
    if _CHANNELS in _template(model, options).source:
        schema = _schema_of(options.response_format) or sampling.json_schema
        if schema is None:
            raise Unsupported(
                "this model answers in channels, and only json_schema can constrain them.",
                what="grammar, regex and choices",
                why="this model answers in channels",
            )
        return _render(model, prepared.messages, options, json_schema=schema_json(schema))
    grammar, thinking = constraint.grammar, rendered.thinking
    if thinking is not None and (thinking.opened or options.enable_thinking is not False):
        grammar = grammars.after_thinking(grammar, start=thinking.start, ends=thinking.ends, opened=thinking.opened)
    return replace(rendered, grammar=grammar, wakes_on="", prefilled=False)


def _schema_of(response_format: Mapping[str, Any] | None) -> Any:
    """The JSON schema that OpenAI's `response_format` asks for; None where it asks for plain text."""
    if response_format is None:
        return None
    kind = response_format.get("type")
    if kind == "text":
        return None
    if kind == "json_object":
        return {"type": "object"}
    inner = response_format.get("json_schema") if kind == "json_schema" else None
    schema = inner.get("schema") if isinstance(inner, Mapping) else None
    if not isinstance(schema, Mapping):
        raise BadOption(
            'response_format must be {"type": "text"}, {"type": "json_object"} or '
            f'{{"type": "json_schema", "json_schema": {{"schema": ...}}}}, got {response_format!r}.'
        )
    return schema


def _guide(rendered: Rendered, options: ChatOptions) -> Guide:
    """What the sampler is told. Thinking that is off and begun all the same ends at once."""
    budget = 0 if options.enable_thinking is False else options.thinking_budget
    opened = rendered.thinking is not None and rendered.thinking.opened
    return Guide(rendered.prompt, rendered.grammar, rendered.wakes_on, rendered.prefilled, budget, opened)


def _single(tokenizer: Tokenizer, text: str) -> int | None:
    tokens = tokenizer.encode(text, add_special=False, parse_special=True)
    return tokens[0] if len(tokens) == 1 else None
