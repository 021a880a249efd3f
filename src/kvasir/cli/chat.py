"""`kvasir chat`: talk with a model, on a terminal or through pipes.

Owns the command's options and the plain form of a chat: a line in, a reply out. The terminal's form is `terminal.py`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

import kvasir
from kvasir.chat.events import ChatReply, Evicted, Text
from kvasir.cli import console
from kvasir.cli.options import (
    ContextOption,
    FrequencyOption,
    GpuLayersOption,
    GrammarOption,
    IgnoreEosOption,
    MinPOption,
    ModelOption,
    MoreOption,
    NoCacheFlag,
    PresenceOption,
    RepeatOption,
    SamplersOption,
    SchemaOption,
    SeedOption,
    StopOption,
    TemperatureOption,
    ThreadsOption,
    TopKOption,
    TopPOption,
    given,
    options_of,
    text_of,
)
from kvasir.cli.run import open_model
from kvasir.cli.slash import is_command, loaded, obey
from kvasir.cli.talk import Talk
from kvasir.config import sampling_defaults, store_settings
from kvasir.errors import KvasirError, Stopped

FAILURE = 1


def chat(
    model: ModelOption = None,
    system: Annotated[
        str | None, typer.Option("--system", metavar="TEXT|@FILE", help="The system prompt, or a file that holds it.")
    ] = None,
    load: Annotated[
        Path | None, typer.Option("--load", metavar="FILE", help="Go on with a conversation that /save wrote.")
    ] = None,
    max_tokens: Annotated[
        int | None, typer.Option("--max-tokens", "-n", help="End a reply after this many. Default: half the context.")
    ] = None,
    temperature: TemperatureOption = None,
    top_k: TopKOption = None,
    top_p: TopPOption = None,
    min_p: MinPOption = None,
    repeat_penalty: RepeatOption = None,
    frequency_penalty: FrequencyOption = None,
    presence_penalty: PresenceOption = None,
    seed: SeedOption = None,
    stop: StopOption = None,
    grammar: GrammarOption = None,
    json_schema: SchemaOption = None,
    samplers: SamplersOption = None,
    ignore_eos: IgnoreEosOption = None,
    think: Annotated[bool | None, typer.Option("--think/--no-think", help="Let the model think first, or not.")] = None,
    evict: Annotated[
        Literal["oldest", "reprefill", "refuse"],
        typer.Option(help="When the context is full: give up old turns, do so exactly, or refuse."),
    ] = "oldest",
    template: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A Jinja chat template in place of the model's own.")
    ] = None,
    context_size: ContextOption = None,
    threads: ThreadsOption = None,
    gpu_layers: GpuLayersOption = None,
    no_cache: NoCacheFlag = False,
    more: MoreOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object for each reply.")] = False,
) -> None:
    """Talk with a model.

    On a terminal: /help lists the commands, Ctrl-C stops a reply, Ctrl-D leaves. In a pipe each line of standard input
    is answered, in plain text.

    \b
    Examples:
      kvasir chat
      kvasir chat -m ./model.gguf --system "You are brief."
      kvasir chat --system @persona.txt --load yesterday.json
      echo "Name three rivers." | kvasir chat --temperature 0
    """
    sizes, sampling = options_of(locals())
    options = sampling | given(enable_thinking=think, template=template) | {"evict": evict}
    prompt = text_of("--system", system)
    with open_model(model, **sizes) as opened:
        talk = begin(opened, system=prompt, load=load, options=options)
        if as_json or not _has_terminal():
            _answer_lines(talk, as_json=as_json)
        else:
            _on_terminal(talk, is_loaded=load is not None)


def begin(model: kvasir.Model, *, system: str | None, load: Path | None, options: dict[str, Any]) -> Talk:
    """Begin to talk. Raises `Unsupported` now, not at the first message, where the model cannot chat."""
    if "max_tokens" not in options and sampling_defaults().max_tokens == kvasir.Sampling().max_tokens:
        # A reply that filled the whole context would leave no room for another one.
        options = {**options, "max_tokens": max(model.limit // 2, 1)}
    model.render("Hello", **{name: options[name] for name in ("template",) if name in options})
    return Talk(model, system=system, load=load, options=options)


def _has_terminal() -> bool:
    return sys.stdin.isatty() and sys.stdout.isatty() and os.environ.get("TERM", "dumb") != "dumb"


def _on_terminal(talk: Talk, *, is_loaded: bool) -> None:
    from rich.console import Console

    from kvasir.cli.prompt_line import PromptLine
    from kvasir.cli.terminal import Terminal

    terminal = Terminal(talk, Console(highlight=False))
    line = PromptLine(store_settings().home, toolbar=terminal.toolbar)
    terminal.run(line, first=loaded(talk) if is_loaded else [])


def _answer_lines(talk: Talk, *, as_json: bool) -> None:
    """Answer each line of standard input; one that fails is told, and the next is answered."""
    has_failed = False
    for line in _lines():
        try:
            if sys.stdin.isatty() and is_command(line):
                if _obey(talk, line):
                    break
            else:
                _answer(talk, line, as_json=as_json)
        except Stopped:
            raise
        except KvasirError as error:
            has_failed = True
            console.complain(str(error))
            talk.forget_unanswered()
    if has_failed:
        raise typer.Exit(FAILURE)


def _lines() -> Iterator[str]:
    for line in sys.stdin.buffer:
        if text := line.decode("utf-8", "replace").strip():
            yield text


def _answer(talk: Talk, text: str, *, as_json: bool) -> None:
    turn = talk.chat.say(text)
    if as_json:
        _write_reply(turn.result())
        return
    last = ""
    try:
        for event in turn.events():
            if isinstance(event, Evicted):
                console.note(f"made room: {len(event.messages)} old messages given up, {event.n_tokens:,} tokens")
            elif isinstance(event, Text):
                console.write(event.text)
                last = event.text or last
    finally:
        if not last.endswith("\n"):
            console.write("\n")


def _write_reply(reply: ChatReply) -> None:
    console.write_json(reply)


def _obey(talk: Talk, line: str) -> bool:
    answer = obey(talk, line)
    for each in answer.lines:
        console.note(each)
    if answer.reply is not None:
        console.write(answer.reply().result().content + "\n")
    return answer.is_end
