"""Options that several commands share, and how their text becomes values.

Owns the spelling on the command line. Names and meanings are those of the Python API; an option that has no flag of
its own is given as `-o name=value`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from kvasir.config import ALIASES, LOAD_OPTIONS
from kvasir.errors import BadOption, suggest
from kvasir.types import SAMPLING_OPTIONS, Sampling

ModelOption = Annotated[
    str | None,
    typer.Option("--model", "-m", metavar="REF", help="A path, a known name or a reference. Default: smollm2."),
]
ContextOption = Annotated[int | None, typer.Option(help="Tokens of context. Default: what the model was trained on.")]
ThreadsOption = Annotated[int | None, typer.Option(help="CPU threads. Default: one per physical core.")]
GpuLayersOption = Annotated[int | None, typer.Option(help="Layers to put on the GPU. Default: all.")]
MoreOption = Annotated[
    list[str] | None,
    typer.Option("--option", "-o", metavar="NAME=VALUE", help="Any other load or sampling option. Repeatable."),
]
NoCacheFlag = Annotated[bool, typer.Option("--no-cache", help="Use no stored prefix, and leave none behind.")]
TemperatureOption = Annotated[float | None, typer.Option("--temperature", "-t", help="0 takes the likeliest.")]
TopKOption = Annotated[int | None, typer.Option(help="Draw from the K likeliest tokens; 0 is all.")]
TopPOption = Annotated[float | None, typer.Option(help="Draw from the likeliest that make up this share.")]
MinPOption = Annotated[float | None, typer.Option(help="Drop tokens below this share of the likeliest.")]
RepeatOption = Annotated[float | None, typer.Option(help="Above 1, tokens used before become rarer.")]
FrequencyOption = Annotated[float | None, typer.Option(help="The same, by how often they were used.")]
PresenceOption = Annotated[float | None, typer.Option(help="The same, for having been used at all.")]
SeedOption = Annotated[int | None, typer.Option("--seed", "-s", help="The same seed gives the same text.")]
StopOption = Annotated[list[str] | None, typer.Option(help="End before this text. Repeatable.")]
GrammarOption = Annotated[str | None, typer.Option(metavar="FILE", help="A GBNF grammar the text must follow.")]
SchemaOption = Annotated[str | None, typer.Option(metavar="JSON|FILE", help="A JSON schema the text must follow.")]
SamplersOption = Annotated[str | None, typer.Option(metavar="A,B,..", help="Which samplers run, in order.")]
IgnoreEosOption = Annotated[bool | None, typer.Option("--ignore-eos", help="Write on past the model's own end.")]
JsonFlag = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


def given(**options: Any) -> dict[str, Any]:
    """The options that were given; the others are left to the environment, `kvasir.toml` and the defaults."""
    return {name: value for name, value in options.items() if value is not None and value != []}


def options_of(values: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The load options and the sampling options among a command's values; those given as `-o` give way to flags.

    A bad sampling option is told here, before a model is loaded.
    """
    load, sampling = split_more(values["more"])
    flags = given(**{name: _READERS.get(name, _same)(value) for name, value in values.items()})
    sampling |= {name: value for name, value in flags.items() if name in SAMPLING_OPTIONS}
    load |= {name: flags[name] for name in ("context_size", "threads", "gpu_layers") if name in flags}
    load |= {"cache": False} if values["no_cache"] else {}
    Sampling.of(**sampling)
    return load, sampling


def split_more(more: Sequence[str] | None) -> tuple[dict[str, Any], dict[str, Any]]:
    """Sort `-o name=value` texts into load options and sampling options."""
    load: dict[str, Any] = {}
    sampling: dict[str, Any] = {}
    for text in more or ():
        name, equals, value = text.partition("=")
        name = name.strip().replace("-", "_")
        if not equals:
            raise BadOption(f"-o takes name=value, got {text!r}.")
        if name in SAMPLING_OPTIONS:
            sampling[name] = _value(value)
        elif name in LOAD_OPTIONS or name in ALIASES:
            load[name] = _value(value)
        else:
            raise BadOption(f"unknown option {name!r}.{suggest(name, (*SAMPLING_OPTIONS, *LOAD_OPTIONS))}")
    return load, sampling


def schema_of(text: str | None) -> Mapping[str, Any] | None:
    """A JSON schema given as text or as the path of a file."""
    if text is None:
        return None
    source = text if text.lstrip().startswith("{") else _file("--json-schema", text)
    try:
        schema = json.loads(source)
    except ValueError as error:
        raise BadOption(f"--json-schema is not valid JSON: {error}.") from None
    if not isinstance(schema, dict):
        raise BadOption(f"--json-schema must be a JSON object, got {source.strip()[:40]!r}.")
    return schema


def grammar_of(path: str | None) -> str | None:
    """A GBNF grammar from a file."""
    return None if path is None else _file("--grammar", path)


def text_of(option: str, text: str | None) -> str | None:
    """A text, or with `@` before it the path of a file that holds it, without its last line end."""
    if text is None or not text.startswith("@"):
        return text
    return _file(option, text[1:]).removesuffix("\n")


def names_of(text: str | None) -> list[str] | None:
    """Names joined with commas."""
    return None if text is None else [name.strip() for name in text.split(",")]


def _file(option: str, path: str) -> str:
    try:
        return Path(path).expanduser().read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise BadOption(f"{option} cannot read {path!r}: {reason}.") from None


def _value(text: str) -> Any:
    """Numbers, lists, true, false and null as in JSON; everything else is text."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def _same(value: Any) -> Any:
    return value


# Flags whose text is not yet the option's value.
_READERS: dict[str, Callable[[Any], Any]] = {"grammar": grammar_of, "json_schema": schema_of, "samplers": names_of}
