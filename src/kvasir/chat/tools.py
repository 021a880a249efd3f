"""Tools: the functions a model may ask for, and which of them it may or must.

Owns `Tool` and the choice among several. A tool is described by a JSON schema; one that is made from a Python function
can also be called. How calls are spelled is the template's affair (`prompt.py`, `parser.py`).
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from kvasir.chat.functions import Schema, bind, describe
from kvasir.errors import BadOption, suggest

CHOICES = ("none", "auto", "required")
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")


@dataclass(frozen=True, slots=True)
class Tool:
    """A function the model may call.

    >>> def weather(city: str, unit: Literal["C", "F"] = "C") -> str:
    ...     '''Tell the weather.
    ...
    ...     city: where
    ...     '''
    >>> Tool.of(weather).call({"city": "Oslo"})

    Made by `Tool.of` from a Python function, or from a dict in OpenAI's shape; the latter has no `function`.
    """

    name: str
    description: str = ""
    parameters: Schema = field(default_factory=lambda: {"type": "object", "properties": {}})
    function: Callable[..., Any] | None = None

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise BadOption(f"a tool's name is 1 to 64 letters, digits, '_', '-' and '.', got {self.name!r}.")
        if not isinstance(self.parameters, Mapping):
            raise BadOption(f"tool {self.name!r} must have a JSON schema as parameters, got {self.parameters!r}.")
        try:
            json.dumps(self.parameters)
        except (TypeError, ValueError) as error:
            raise BadOption(f"the parameters of tool {self.name!r} are no JSON: {error}.") from None

    @classmethod
    def of(cls, source: Tool | Callable[..., Any] | Mapping[str, Any]) -> Tool:
        """Make a tool from a Python function or from its description, `{"name": ..., "parameters": {...}}`."""
        if isinstance(source, Tool):
            return source
        if isinstance(source, Mapping):
            return _from_mapping(source)
        if callable(source):
            read = describe(source)
            return cls(read.name, read.description, read.parameters, source)
        raise BadOption(f"a tool is a Python function or a dict that describes one, got {source!r}.")

    @property
    def is_async(self) -> bool:
        """Whether calling it gives something to await."""
        call = getattr(self.function, "__call__", None)  # noqa: B004
        return inspect.iscoroutinefunction(self.function) or inspect.iscoroutinefunction(call)

    def schema(self) -> Schema:
        """The description in OpenAI's shape, as templates take it."""
        function = {"name": self.name, "description": self.description, "parameters": dict(self.parameters)}
        return {"type": "function", "function": function}

    def call(self, arguments: Mapping[str, Any] | str) -> Any:
        """Call the function with JSON arguments, made what its type hints ask for. An async one gives an awaitable.

        Raises `BadOption` for arguments that do not fit, and whatever the function raises.
        """
        if self.function is None:
            raise BadOption(f"tool {self.name!r} is only described; make it from a Python function to call it.")
        return self.function(**bind(self.function, _object(self.name, arguments)))


class Offered(NamedTuple):
    """The tools a model is told of, and whether it may ("auto"), must ("required") or must not ("none") call one."""

    tools: tuple[Tool, ...]
    choice: str


def toolset(tools: object) -> tuple[Tool, ...]:
    """Make tools of a list of functions and descriptions. Raises `BadOption` where two have one name."""
    if tools is None:
        return ()
    if isinstance(tools, str | Mapping) or not isinstance(tools, Sequence):
        raise BadOption(f"tools must be a list of functions or of their descriptions, got {tools!r}.")
    made = tuple(Tool.of(tool) for tool in tools)
    names = [tool.name for tool in made]
    for name in names:
        if names.count(name) > 1:
            raise BadOption(f"two tools are named {name!r}; a call could not tell them apart.")
    return made


def offer(tools: tuple[Tool, ...], choice: object) -> Offered:
    """Apply `tool_choice`: a mode, or the one tool that must be called, by name or in OpenAI's shape."""
    if choice is None:
        choice = "auto"
    if choice in ("none", "auto"):
        return Offered(tools, str(choice) if tools else "none")
    if not tools:
        raise BadOption(f"tool_choice is {choice!r}, but no tools were given.")
    if choice == "required":
        return Offered(tools, "required")
    name = _chosen(choice)
    chosen = tuple(tool for tool in tools if tool.name == name)
    if not chosen:
        known = [tool.name for tool in tools]
        raise BadOption(f"tool_choice names {name!r}, and there is no such tool.{suggest(name, [*known, *CHOICES])}")
    return Offered(chosen, "required")


def _chosen(choice: object) -> str:
    if isinstance(choice, str):
        return choice
    function = choice.get("function") if isinstance(choice, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if isinstance(name, str):
        return name
    raise BadOption(f"tool_choice must be one of {', '.join(CHOICES)}, or name a tool, got {choice!r}.")


def _from_mapping(source: Mapping[str, Any]) -> Tool:
    function = source.get("function", source) if source.get("type", "function") == "function" else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise BadOption(
            'a described tool is like {"type": "function", "function": {"name": ..., "parameters": {...}}}, '
            f"got {dict(source)!r}."
        )
    parameters = function.get("parameters")
    return Tool(
        function["name"],
        str(function.get("description") or ""),
        {"type": "object", "properties": {}} if parameters is None else parameters,
    )


def _object(name: str, arguments: Mapping[str, Any] | str) -> Mapping[str, Any]:
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except ValueError as error:
            raise BadOption(f"the arguments of {name} are no JSON: {error}.") from None
    if not isinstance(arguments, Mapping):
        raise BadOption(f"the arguments of {name} must be a JSON object, got {arguments!r}.")
    return arguments
