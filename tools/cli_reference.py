"""Write docs/cli.md from the commands themselves.

`python tools/cli_reference.py` rewrites the file; with `--check` it says whether the file is what it would write.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

from typer.testing import CliRunner

from kvasir.cli.main import app

PAGE = Path(__file__).parent.parent / "docs" / "cli.md"

COMMANDS: tuple[tuple[str, ...], ...] = (
    (),
    ("run",),
    ("chat",),
    ("embed",),
    ("tokenize",),
    ("pull",),
    ("models",),
    ("models", "list"),
    ("models", "show"),
    ("models", "convert"),
    ("models", "remove"),
    ("cache",),
    ("cache", "stats"),
    ("cache", "ls"),
    ("cache", "verify"),
    ("cache", "prune"),
    ("cache", "clear"),
    ("cache", "warm"),
    ("doctor",),
)

HEAD = """# Commands

Written by `tools/cli_reference.py` from the commands' own help; do not edit it by hand.

Results go to standard output as plain text, everything about the work to standard error. With `--json` a command
prints JSON instead. Bars and colours appear only on a terminal. An error is one line that begins with `kvasir:`.
"""


def reference() -> str:
    """The whole page."""
    return HEAD + "".join(_section(words) for words in COMMANDS)


def _section(words: tuple[str, ...]) -> str:
    title = " ".join(("kvasir", *words))
    return f"\n## {title}\n\n```text\n{_help(words)}\n```\n"


def _help(words: tuple[str, ...]) -> str:
    # The width of help follows the terminal; the page must not.
    runner = CliRunner(env={"COLUMNS": "100", "TERMINAL_WIDTH": "100", "NO_COLOR": "1"})
    done = runner.invoke(app, [*words, "--help"], prog_name="kvasir", terminal_width=100)
    if done.exit_code != 0:
        raise SystemExit(f"`kvasir {' '.join(words)} --help` failed: {done.output}")
    return "\n".join(_lines(done.stdout)).strip()


def _lines(text: str) -> Iterator[str]:
    for line in text.splitlines():
        yield line.rstrip()


def main() -> None:
    """Write the page, or check it."""
    if sys.argv[1:] == ["--check"]:
        if not PAGE.exists() or PAGE.read_text(encoding="utf-8") != reference():
            sys.exit("docs/cli.md is stale; run tools/cli_reference.py and commit it.")
        return
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text(reference(), encoding="utf-8")
    print(os.path.relpath(PAGE))


if __name__ == "__main__":
    main()
