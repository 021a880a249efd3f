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
    FrequencyOption,
    GpuLayersOption,
    GrammarOption,
    IgnoreEosOption,
    JsonFlag,
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
    options_of,
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
    logprobs: Annotated[int | None, typer.Option(help="With --json: log probabilities, and N alternatives.")] = None,
    ignore_eos: IgnoreEosOption = None,
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
    load, sampling = options_of(locals())
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
