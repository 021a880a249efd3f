"""`kvasir run`: continue a prompt.

Owns the command's options and what is printed; the work is `kvasir.load` and `Model.stream`.
"""

from __future__ import annotations

from typing import Annotated, Any

import typer

import kvasir
from kvasir.cli import console
from kvasir.cli.models import download_bar
from kvasir.cli.options import (
    ContextOption,
    GpuLayersOption,
    JsonFlag,
    ModelOption,
    MoreOption,
    NoCacheFlag,
    ThreadsOption,
    given,
    grammar_of,
    names_of,
    schema_of,
    split_more,
)
from kvasir.config import load_settings
from kvasir.model.reference import DEFAULT_MODEL
from kvasir.model.store import resolve


def run(
    prompt: Annotated[
        str | None, typer.Argument(metavar="PROMPT", help="The text to continue; `-` reads it from standard input.")
    ] = None,
    model: ModelOption = None,
    max_tokens: Annotated[int | None, typer.Option("--max-tokens", "-n", help="Stop after this many tokens.")] = None,
    temperature: Annotated[float | None, typer.Option("--temperature", "-t", help="0 takes the likeliest.")] = None,
    top_k: Annotated[int | None, typer.Option(help="Draw from the K likeliest tokens; 0 is all.")] = None,
    top_p: Annotated[float | None, typer.Option(help="Draw from the likeliest that make up this share.")] = None,
    min_p: Annotated[float | None, typer.Option(help="Drop tokens below this share of the likeliest.")] = None,
    repeat_penalty: Annotated[float | None, typer.Option(help="Above 1, tokens used before become rarer.")] = None,
    frequency_penalty: Annotated[float | None, typer.Option(help="The same, by how often they were used.")] = None,
    presence_penalty: Annotated[float | None, typer.Option(help="The same, for having been used at all.")] = None,
    seed: Annotated[int | None, typer.Option("--seed", "-s", help="The same seed gives the same text.")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="End before this text. Repeatable.")] = None,
    grammar: Annotated[str | None, typer.Option(metavar="FILE", help="A GBNF grammar the text must follow.")] = None,
    json_schema: Annotated[
        str | None, typer.Option(metavar="JSON|FILE", help="A JSON schema the text must follow.")
    ] = None,
    samplers: Annotated[str | None, typer.Option(metavar="A,B,..", help="Which samplers run, in order.")] = None,
    logprobs: Annotated[int | None, typer.Option(help="With --json: log probabilities, and N alternatives.")] = None,
    ignore_eos: Annotated[bool | None, typer.Option("--ignore-eos", help="Write on past the model's own end.")] = None,
    context_size: ContextOption = None,
    threads: ThreadsOption = None,
    gpu_layers: GpuLayersOption = None,
    no_cache: NoCacheFlag = False,
    more: MoreOption = None,
    as_json: JsonFlag = False,
) -> None:
    """Continue a prompt, and stream the text to standard output.

    Without PROMPT, or with `-`, the prompt is read from standard input. Ctrl-C stops (exit code 130).

    \b
    Examples:
      kvasir run "Once upon a time"
      kvasir run -m ./model.gguf --max-tokens 64 --temperature 0 "The capital of France is"
      echo "Dear diary," | kvasir run --seed 7
      kvasir run --json "2 + 2 =" | jq .usage
      kvasir run -o typical_p=0.9 -o dry_multiplier=0.8 "Roses are red"
    """
    text = console.read_input(prompt, what="PROMPT")
    more_load, more_sampling = split_more(more)
    sampling = more_sampling | given(
        max_tokens=max_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repeat_penalty=repeat_penalty,
        frequency_penalty=frequency_penalty,
        presence_penalty=presence_penalty,
        seed=seed,
        stop=stop,
        grammar=grammar_of(grammar),
        json_schema=schema_of(json_schema),
        samplers=names_of(samplers),
        logprobs=logprobs,
        ignore_eos=ignore_eos,
    )
    kvasir.Sampling.of(**sampling)  # a bad option is told before a model is loaded
    load = more_load | given(context_size=context_size, threads=threads, gpu_layers=gpu_layers)
    load |= {"cache": False} if no_cache else {}
    with open_model(model, **load) as opened:
        stream = opened.stream(text, **sampling)
        if as_json:
            console.write_json(stream.result())
        else:
            _print(stream)


def open_model(ref: str | None, **options: Any) -> kvasir.Model:
    """Fetch a model if need be and load it for one request at a time, with a bar for each on a terminal."""
    options = {"slots": 1, **options}
    model_dir = load_settings(options).model_dir
    with download_bar(ref or DEFAULT_MODEL) as fetched:
        path = resolve(ref, model_dir=model_dir, progress=fetched)
    with console.loading_bar("loading") as loaded:
        return kvasir.load(path, progress=loaded, **options)


def _print(stream: kvasir.Stream) -> None:
    last = ""
    try:
        for piece in stream:
            console.write(piece)
            last = piece
    except KeyboardInterrupt:
        console.write("\n")
        raise
    if not last.endswith("\n"):
        console.write("\n")
