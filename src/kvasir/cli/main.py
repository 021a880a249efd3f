"""The command `kvasir`: its subcommands, and what an error looks like from a shell.

Owns the exit codes and the one place where errors become lines on standard error. No traceback reaches a user unless
`--debug` asks for it. Each command lives in a file of its own.
"""

from __future__ import annotations

import logging
import sys
import traceback
from collections.abc import Sequence
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

import kvasir
from kvasir.cli import cache, chat, console, doctor, embed, models, run, tokenize
from kvasir.errors import BadRequest, KvasirError

OK, FAILURE, BAD_USAGE, INTERRUPTED = 0, 1, 2, 130

EPILOG = """\b
Exit codes:
  0    it worked
  1    it failed; standard error says why in one line
  2    bad usage: an unknown command or option, or a value out of range
  130  interrupted by Ctrl-C
\b
Settings come from arguments, then KVASIR_* variables, then kvasir.toml, then defaults.
`kvasir COMMAND --help` shows examples.
"""


class Hints(logging.Handler):
    """Shows our own warnings as a line each; llama.cpp's are for --debug."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write one on standard error."""
        if record.name == "kvasir":
            console.complain(record.getMessage())


HINTS = Hints(logging.WARNING)


class Commands(TyperGroup):
    """The commands; turns whatever they raise into a line and an exit code."""

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        windows_expand_args: bool = True,
        **extra: Any,
    ) -> Any:
        """Run one command line; exit with its code, or return it where not `standalone_mode`."""
        code = self._run(args, prog_name, complete_var, windows_expand_args=windows_expand_args, **extra)
        if standalone_mode:
            sys.exit(code)
        return code

    def _run(self, *args: Any, **extra: Any) -> int:
        try:
            code = super().main(*args, **{**extra, "standalone_mode": False})
        except KvasirError as error:
            console.complain(str(error))
            return BAD_USAGE if isinstance(error, BadRequest) else FAILURE
        except KeyboardInterrupt:
            return INTERRUPTED
        except typer.Abort:
            return FAILURE
        except Exception as error:
            return _report(error)
        return code if isinstance(code, int) else OK


def _report(error: Exception) -> int:
    """Tell of what is not one of ours: a usage error of the parser, or a bug."""
    if hasattr(error, "format_message"):
        return _report_usage(error)
    if isinstance(error, ImportError):  # a build or an extra that is missing; its message says which
        console.complain(str(error))
        return FAILURE
    if logging.getLogger("kvasir").isEnabledFor(logging.DEBUG):
        traceback.print_exc()
    console.complain(f"{type(error).__name__}: {error}. This is a bug; `kvasir --debug ...` shows where.")
    return FAILURE


def _report_usage(error: Any) -> int:
    close = getattr(error, "possibilities", None)
    message = str(error.message if close else error.format_message()).rstrip(".")
    if close:
        message += f". Did you mean {sorted(close)[0]}?"
    elif not message.endswith("?"):
        message += "."
    context = getattr(error, "ctx", None)
    path = context.command_path if context is not None else "kvasir"
    console.complain(f"{message} See `{path} --help`.")
    return int(error.exit_code)


app = typer.Typer(
    name="kvasir",
    cls=Commands,
    epilog=EPILOG,
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,  # plain help, in a pipe as on a terminal
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _show_version(wanted: bool) -> None:
    if wanted:
        console.write(f"kvasir {kvasir.__version__}\n")
        raise typer.Exit(OK)


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version.")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Log everything, llama.cpp included, and trace bugs.")] = False,
) -> None:
    """Run GGUF models with llama.cpp.

    \b
    Examples:
      kvasir run "Once upon a time"
      kvasir chat
      kvasir doctor
    """
    if debug:
        logging.basicConfig(stream=sys.stderr, format="%(levelname)s %(name)s: %(message)s")
        logging.getLogger("kvasir").setLevel(logging.DEBUG)
    else:
        logging.getLogger("kvasir").addHandler(HINTS)


app.command("run")(run.run)
app.command("chat")(chat.chat)
app.command("embed")(embed.embed)
app.command("tokenize")(tokenize.tokenize)
app.command("pull")(models.pull)
app.add_typer(models.app, name="models")
app.add_typer(cache.app, name="cache")
app.command("doctor")(doctor.doctor)


def main() -> None:
    """The entry point of the `kvasir` script."""
    app(prog_name="kvasir")


if __name__ == "__main__":
    main()
