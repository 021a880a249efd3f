"""`kvasir embed`: texts to vectors, one per line.

Owns the command's options and what is printed; the work is `Model.embed`.
"""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer

from kvasir.cli import console
from kvasir.cli.options import GpuLayersOption, JsonFlag, ModelOption, MoreOption, ThreadsOption, given, split_more
from kvasir.cli.run import open_model
from kvasir.errors import BadOption, TokenizeFailed

if TYPE_CHECKING:
    from kvasir.engine.embedder import Normalize


class Scale(StrEnum):
    """How vectors are scaled."""

    L2 = "l2"
    MAX = "max"
    NONE = "none"


_SCALES: dict[Scale, Normalize] = {Scale.L2: "l2", Scale.MAX: "max", Scale.NONE: None}


def embed(
    texts: Annotated[
        list[str] | None, typer.Argument(metavar="TEXT", help="Texts; `-` reads one per line of standard input.")
    ] = None,
    model: ModelOption = None,
    normalize: Annotated[Scale, typer.Option(help="l2: length 1. max: largest element 1.")] = Scale.L2,
    threads: ThreadsOption = None,
    gpu_layers: GpuLayersOption = None,
    more: MoreOption = None,
    as_json: JsonFlag = False,
) -> None:
    """Turn texts into vectors: one line of numbers for each text.

    \b
    Examples:
      kvasir embed "a cat" "a dog"
      kvasir embed -m ./minilm.gguf --json - < sentences.txt
    """
    wanted = _texts(texts)
    more_load, more_sampling = split_more(more)
    if more_sampling:
        raise BadOption(f"{next(iter(more_sampling))!r} is a sampling option; embed takes load options only.")
    # Vectors come from a context of their own; without the cache, the model's file need not be hashed.
    load = {"cache": False} | more_load | given(threads=threads, gpu_layers=gpu_layers)
    with open_model(model, **load) as opened:
        vectors = opened.embed(wanted, normalize=_SCALES[normalize])
    if as_json:
        console.write_json({"n": vectors.shape[1], "vectors": vectors.tolist()})
        return
    for vector in vectors:
        console.write(" ".join(f"{value:.6g}" for value in vector) + "\n")


def _texts(texts: list[str] | None) -> list[str]:
    if texts and texts != ["-"]:
        return texts
    data = console.read_input(texts[0] if texts else None, what="TEXT")
    try:
        lines = (data if isinstance(data, str) else data.decode("utf-8")).splitlines()
    except UnicodeDecodeError as error:
        raise TokenizeFailed(f"standard input is not valid UTF-8 at byte {error.start}.") from None
    if not lines:
        raise BadOption("standard input is empty; give one text per line.")
    return lines
