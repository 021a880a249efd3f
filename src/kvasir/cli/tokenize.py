"""`kvasir tokenize`: text to token ids, and back.

Owns the command's options and what is printed. Loads the vocabulary only, so it is quick on any model.
"""

from __future__ import annotations

from typing import Annotated

import typer

from kvasir.cli import console
from kvasir.cli.options import JsonFlag, ModelOption
from kvasir.cli.run import open_model
from kvasir.errors import BadOption


def tokenize(
    text: Annotated[
        str | None, typer.Argument(metavar="TEXT", help="The text; `-` reads it from standard input.")
    ] = None,
    model: ModelOption = None,
    decode: Annotated[bool, typer.Option("--decode", "-d", help="The other way: token ids to text.")] = False,
    pieces: Annotated[bool, typer.Option("--pieces", help="Show each token's text beside its id.")] = False,
    special: Annotated[bool, typer.Option(help="Add the model's own special tokens, and read those named.")] = True,
    as_json: JsonFlag = False,
) -> None:
    """Show the tokens of a text, one id per line.

    \b
    Examples:
      kvasir tokenize "hello world"
      kvasir tokenize --pieces "naïve 🦙"
      kvasir tokenize "hello" | kvasir tokenize --decode -
    """
    given = console.read_input(text, what="TEXT")
    with open_model(model, vocab_only=True) as opened:
        if decode:
            decoded = opened.detokenize(_ids(given))
            if as_json:
                console.write_json({"text": decoded})
            else:
                console.write(decoded + "\n")
            return
        tokens = opened.tokenize(given, add_special=special, parse_special=special)
        texts = [opened.detokenize([token], special=True) for token in tokens] if pieces or as_json else []
    if as_json:
        console.write_json({"tokens": tokens, "pieces": texts})
        return
    lines = [f"{token}\t{piece!r}" for token, piece in zip(tokens, texts, strict=True)] if pieces else map(str, tokens)
    console.write("".join(f"{line}\n" for line in lines))


def _ids(given: str | bytes) -> list[int]:
    text = given if isinstance(given, str) else given.decode("utf-8", errors="replace")
    words = text.replace(",", " ").replace("[", " ").replace("]", " ").split()
    for word in words:
        if not word.isascii() or not word.isdigit():
            raise BadOption(f"--decode takes token ids, got {word!r}.")
    return [int(word) for word in words]
