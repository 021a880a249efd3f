"""`kvasir cache`: see what the cache holds and counted, check it, make it smaller, and fill it ahead of need.

Owns the commands' options and what is printed; `kvasir.service.cache_view` does the work. The folder and its quotas
are those a model would use: `KVASIR_CACHE_DIR`, `kvasir.toml`, or `kv` in the store.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import msgspec
import typer

from kvasir.cli import console
from kvasir.cli.options import (
    ContextOption,
    GpuLayersOption,
    JsonFlag,
    ModelOption,
    MoreOption,
    ThreadsOption,
    given,
    split_more,
)
from kvasir.cli.run import open_model
from kvasir.cli.units import parse_age, parse_bytes, show_age, show_bytes
from kvasir.config import load_settings, store_settings
from kvasir.errors import BadOption, StoreError

if TYPE_CHECKING:
    from kvasir.cache import CacheStats, Listed, Verified
    from kvasir.service.cache_view import CacheView

app = typer.Typer(no_args_is_help=True, help="See, check, fill and shrink the cache of computed prefixes.")

TIMES = ("export_ns", "publish_ns", "read_ns", "import_ns", "search_ns")
# A key's first digits, enough to find it in `ls --json`.
DIGITS = 12


class Look(NamedTuple):
    """An open cache, and the folder it is in."""

    view: CacheView
    folder: Path


@app.command("stats")
def show_stats(as_json: JsonFlag = False) -> None:
    """Show what the cache holds, and what all processes that used it counted.

    A process that runs is counted as of some seconds ago. Tiers are shown as they are now.

    \b
    Examples:
      kvasir cache stats
      kvasir cache stats --json | jq .hit_ratio
    """
    with _opened(record=False) as (view, folder):
        stats = view.stats(all_processes=True)
    if as_json:
        console.write_json(_stats_facts(stats, folder))
    else:
        console.write("".join(f"{line}\n" for line in _stats_lines(stats, folder)))


@app.command("ls")
def list_rows(as_json: JsonFlag = False) -> None:
    """List the prefixes in the cache as a tree: what begins the same stands under one branch.

    A line is a run of rows: its tokens, size, hits, tier, last use, and the key of its end. With --json, one object
    for each row. Hits of a process are known once it has ended.

    \b
    Examples:
      kvasir cache ls
      kvasir cache ls --json | jq '.[] | select(.hits == 0) | .path'
    """
    with _opened(record=False) as (view, folder):
        rows = view.ls()
    if as_json:
        console.write_json(rows)
    elif not rows:
        console.note(f"the cache {folder} is empty.")
    elif sys.stdout.isatty():
        _print_tree(_branches(rows))
    else:
        console.write("".join(f"{'  ' * branch.depth}{_label(branch)}\n" for branch in _branches(rows)))


@app.command("verify")
def verify_rows(as_json: JsonFlag = False) -> None:
    """Read every row and check every checksum; rows that are not whole are removed.

    Exit code 1 where bad rows were found. Generating never uses a bad row, verified or not.

    \b
    Examples:
      kvasir cache verify
    """
    with _opened() as (view, folder):
        n_short = view.stats().corrupt_files  # cut so short that opening the cache removed them
        paths = {row.key: row.path for row in view.ls()}
        with console.loading_bar("verifying") as show:
            found = view.verify((lambda done, total: show(done / total)) if show else None)
    left = [path for key in found.bad if (path := paths.get(key)) is not None and Path(path).exists()]
    if as_json:
        removed = len(found.bad) - len(left) + n_short
        console.write_json({"rows": found.rows, "bytes": found.bytes, "bad": found.bad, "removed": removed})
    else:
        _print_verified(found, paths, n_short, folder)
    if found.bad or n_short:
        raise typer.Exit(1)


@app.command("prune")
def prune_rows(
    to: Annotated[
        str | None, typer.Option("--to", metavar="BYTES", help="Keep at most this much: 2GiB, 500MB.")
    ] = None,
    older_than: Annotated[
        str | None, typer.Option("--older-than", metavar="AGE", help="Delete what was not used for: 7d, 12h, 30m.")
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Delete rows that were not used for long, or the least useful ones until the rest fits.

    Rows that begin a longer prefix go after those that follow them, so what stays can be used.

    \b
    Examples:
      kvasir cache prune --to 2GiB
      kvasir cache prune --older-than 7d
    """
    to_bytes = None if to is None else parse_bytes("--to", to)
    older_than_s = None if older_than is None else parse_age("--older-than", older_than)
    if to_bytes is None and older_than_s is None:
        raise BadOption("say what to delete: --to BYTES, --older-than AGE, or both.")
    with _opened() as (view, _):
        freed = view.prune(to_bytes=to_bytes, older_than_s=older_than_s)
        _print_freed(view, freed, as_json=as_json)


@app.command("clear")
def clear_rows(
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False, as_json: JsonFlag = False
) -> None:
    """Delete every row of every model. Asks first; where nobody can answer, it needs --yes. Counters stay.

    \b
    Examples:
      kvasir cache clear
      kvasir cache clear --yes
    """
    if not yes and not sys.stdin.isatty():
        raise BadOption("clear deletes every row; say --yes where nobody can be asked.")
    with _opened() as (view, folder):
        if not yes:
            rows = view.ls()
            size = show_bytes(sum(row.bytes for row in rows))
            typer.confirm(f"Delete {_count(len(rows), 'row')} ({size}) in {folder}?", abort=True, err=True)
        _print_freed(view, view.clear(), as_json=as_json)


@app.command("warm")
def warm_prompt(
    file: Annotated[str, typer.Argument(metavar="FILE", help="A file with a prompt; `-` is standard input.")],
    model: ModelOption = None,
    context_size: ContextOption = None,
    threads: ThreadsOption = None,
    gpu_layers: GpuLayersOption = None,
    more: MoreOption = None,
    as_json: JsonFlag = False,
) -> None:
    """Compute a prompt and keep it, so that a later run that begins with it starts at once.

    The file's last line end is left out, as `kvasir run -` does.

    \b
    Examples:
      kvasir cache warm system-prompt.txt
      kvasir cache warm handbook.txt -m ./model.gguf
    """
    prompt = _prompt(file)
    load, sampling = split_more(more)
    if sampling:
        raise BadOption(f"{next(iter(sampling))!r} is a sampling option; warm takes load options only.")
    load |= given(context_size=context_size, threads=threads, gpu_layers=gpu_layers)
    with open_model(model, **load) as opened:
        done = opened.cache.warm(prompt)
    if done.path is None:
        raise StoreError("the prompt was computed but could not be written; `kvasir cache stats` counts why.")
    if as_json:
        console.write_json(done)
    elif done.was_there:
        console.write(f"{done.tokens} tokens were there already ({done.seconds:.2f} s)\n")
    else:
        console.write(f"kept {done.tokens} tokens, {done.cached_tokens} of them known before ({done.seconds:.2f} s)\n")


# Below: opening, reading, and what is printed.


@contextlib.contextmanager
def _opened(*, record: bool = True) -> Iterator[Look]:
    """The cache a model would use, without taking memory or making a folder. Raises `StoreError`."""
    # The service loads the native core, which `kvasir --help` and `kvasir models` must not wait for.
    from kvasir.service.cache_view import CacheView, OpenCache
    from kvasir.service.caching import cache_settings

    settings = cache_settings(load_settings(), store_settings())
    folder = settings.disk_dir or settings.tmpfs_dir
    assert folder is not None
    there = {name: path for name in ("disk_dir", "tmpfs_dir") if (path := getattr(settings, name)) and path.exists()}
    nothing: dict[str, Any] = {"ram_bytes": 0, "disk_dir": None, "tmpfs_dir": None, "pressure": "none"}
    with OpenCache.open(msgspec.structs.replace(settings, **nothing | there), record=record) as opened:
        view = CacheView(opened)
        if errors := view.stats().errors_by_code:
            raise StoreError(f"the cache {folder} cannot be opened: {', '.join(errors)}.")
        yield Look(view, folder)


def _prompt(file: str) -> str | bytes:
    if file == "-":
        return console.read_input(file, what="FILE")
    try:
        return Path(file).expanduser().read_bytes().removesuffix(b"\n").removesuffix(b"\r")
    except OSError as error:
        raise BadOption(f"FILE cannot be read: {file!r}: {error.strerror}.") from None


def _stats_facts(stats: CacheStats, folder: Path) -> dict[str, Any]:
    facts = {name: getattr(stats, name) for name in stats.__struct_fields__}
    return {"folder": str(folder), "hits": stats.hits, "hit_ratio": stats.hit_ratio, **facts}


def _stats_lines(stats: CacheStats, folder: Path) -> Iterator[str]:
    yield f"folder {folder}"
    yield ""
    yield f"{'tier':<6} {'rows':>8} {'bytes':>10} {'quota':>10}"
    for name, tier in stats.tiers.items():
        yield f"{name:<6} {tier.rows:>8} {show_bytes(tier.bytes):>10} {show_bytes(tier.quota):>10}"
    yield ""
    yield f"{'hit_ratio':<22} {stats.hit_ratio:.3f}"
    yield f"{'prefill_saved_s':<22} {stats.prefill_saved_s:.3f}"
    for name in stats.__struct_fields__:
        value = getattr(stats, name)
        if isinstance(value, int):
            seconds = f"  ({value / 1e9:.3f} s)" if name in TIMES else ""
            yield f"{name:<22} {value}{seconds}"
        elif isinstance(value, dict) and value and name != "tiers":
            yield name
            yield from (f"  {reason:<20} {n}" for reason, n in value.items())


class Branch(NamedTuple):
    """A run of rows that follow each other with nothing beside them; or, without rows, a space's name."""

    depth: int
    above: int | None  # where in the list the branch stands that this one grows from
    name: str
    rows: list[Listed]


def _branches(rows: list[Listed]) -> list[Branch]:
    """The tree with its runs drawn together: a prompt of 100 blocks is one line, not a staircase."""
    n_below: dict[str, int] = {}
    for row in rows:
        n_below[row.parent] = n_below.get(row.parent, 0) + 1
    found: list[Branch] = []
    for space in dict.fromkeys(row.space for row in rows):
        ours = [row for row in rows if row.space == space]
        root = len(found)
        found.append(Branch(0, None, space, ours))
        at: dict[str, int] = {}
        for row in ours:
            above = at.get(row.parent, root)
            if row.parent not in at or n_below[row.parent] > 1:
                found.append(Branch(found[above].depth + 1, above, "", []))
                above = len(found) - 1
            found[above].rows.append(row)
            at[row.key] = above
    return found


def _label(branch: Branch) -> str:
    rows = branch.rows
    n_rows = _count(len(rows), "row")
    size = show_bytes(sum(row.bytes for row in rows))
    if branch.depth == 0:
        what = " (logits)" if rows[0].holds == "logits" else ""
        return f"space {branch.name[:DIGITS]}{what}  {n_rows}  {size}"
    hits = _count(max(row.hits for row in rows), "hit")
    age = show_age(time.time() - max(row.last_used for row in rows))
    tiers = "+".join(dict.fromkeys(row.tier for row in rows))
    span = f"{rows[0].start}-{rows[-1].end}"
    return f"{span}  {n_rows}  {size}  {hits}  {tiers}  {age}  {rows[-1].key[:DIGITS]}"


def _print_tree(branches: list[Branch]) -> None:
    from rich.console import Console  # slow to import; a pipe needs none of it
    from rich.text import Text
    from rich.tree import Tree

    grown: list[Tree] = []
    for branch in branches:
        label = Text(_label(branch))
        grown.append(Tree(label) if branch.above is None else grown[branch.above].add(label))
    terminal = Console(highlight=True)
    for branch, tree in zip(branches, grown, strict=True):
        if branch.above is None:
            terminal.print(tree)


def _print_verified(found: Verified, paths: dict[str, str | None], n_short: int, folder: Path) -> None:
    for key in found.bad:
        path = paths.get(key) or key
        console.write(f"{'cannot be read' if Path(path).exists() else 'removed'} {path}\n")
    if n_short:
        console.write(f"removed {_count(n_short, 'file')} cut short\n")
    n_bad = len(found.bad) + n_short
    good = f"whole: {_count(found.rows - len(found.bad), 'row')} ({show_bytes(found.bytes)})"
    console.write(f"{good}, bad: {n_bad}, in {folder}\n")


def _print_freed(view: CacheView, freed: int, *, as_json: bool) -> None:
    tiers = view.stats().tiers.values()
    n_rows, n_bytes = sum(tier.rows for tier in tiers), sum(tier.bytes for tier in tiers)
    if as_json:
        console.write_json({"freed_bytes": freed, "rows": n_rows, "bytes": n_bytes})
    else:
        console.write(f"freed {show_bytes(freed)}, left {_count(n_rows, 'row')} ({show_bytes(n_bytes)})\n")


def _count(n: int, what: str) -> str:
    return f"{n} {what}" if n == 1 else f"{n} {what}s"
