"""Where commands read and write: plain text in a pipe, colours and bars on a terminal only.

Owns standard input, output and error. A reader that closes the pipe (`| head`) ends the command quietly. Results go
to standard output, everything about the work to standard error.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
from collections.abc import Iterator
from typing import Any

import msgspec
import typer

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def write(text: str) -> None:
    """Write to standard output now; the end of the command if nobody reads it any more."""
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        _forget_stdout()
        raise typer.Exit(0) from None


def write_json(value: object) -> None:
    """Write one value as one line of JSON."""
    write(msgspec.json.encode(value, enc_hook=_plain).decode() + "\n")


def note(text: str) -> None:
    """Say something about the work, on standard error."""
    print(text, file=sys.stderr, flush=True)


def complain(message: str) -> None:
    """Report a failure in one line."""
    note("kvasir: " + " ".join(message.split()))


def read_input(argument: str | None, *, what: str) -> str | bytes:
    """The argument; or standard input where it is `-`, or absent in a pipe, without its last line end."""
    if argument is not None and argument != "-":
        return argument
    if argument is None and sys.stdin.isatty():
        raise typer.BadParameter(f"give a {what}, or `-` and type it on standard input.")
    return sys.stdin.buffer.read().removesuffix(b"\n").removesuffix(b"\r")


def clean(text: str) -> str:
    """Text without control characters, which a model may write but a terminal must not obey."""
    return _CONTROL.sub("", text)


@contextlib.contextmanager
def loading_bar(title: str) -> Iterator[Any]:
    """A bar on standard error for something that reports its part done, 0 to 1; None where nobody would see it."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console  # a fifth of the time that a short command takes; a pipe needs none of it
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bars:
        bar = bars.add_task(title, total=1.0)

        def show(part: float) -> bool:
            bars.update(bar, completed=part)
            return True

        yield show


def _forget_stdout() -> None:
    # Else the interpreter flushes into the closed pipe when it ends, and complains.
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _plain(value: Any) -> Any:
    dump = getattr(value, "model_dump", None) or getattr(value, "tolist", None)
    return dump() if dump is not None else str(value)
