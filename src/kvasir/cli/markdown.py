"""Markdown as it comes, for a terminal: text in, styled pieces out, each printed once and never again.

Owns the reading of blocks, line by line. What is not certain yet is held back (a `**` until it closes, a line of code
until it ends), so nothing that was printed has to change: no flicker, and no limit on the length of a reply. Text that
only looks like Markdown comes out as it is. Knows no terminal but its width.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from kvasir.cli.code import Code
from kvasir.cli.inline import inline
from kvasir.cli.table import table
from kvasir.cli.wrap import Piece, Wrap

_HEADING = re.compile(r" {0,3}(#{1,6})\s+(?=\S)")
_BULLET = re.compile(r"(\s*)[-*+]\s+(?=\S)")
_NUMBER = re.compile(r"(\s*)(\d{1,9}[.)])\s+(?=\S)")
_QUOTE = re.compile(r"\s*>\s?")
_FENCE = re.compile(r"\s*(`{3,}(?=[^`]*$)|~{3,})\s*([\w+#.-]*)")
# What may still become a heading, an item, a line or a fence when more of the line has come.
_UNCERTAIN = re.compile(r"\s*(#{1,6}\s*|[-*+_][-*+_\s]*|\d{1,9}[.)]?\s*|`{1,2}|~{1,2}|>|(`{3}|~{3}|\|).*)?")
_RULE = re.compile(r"\s*(?:(?:-\s*){3,}|(?:\*\s*){3,}|(?:_\s*){3,})")
_TAB = "    "


@dataclass(frozen=True, slots=True)
class _Opening:
    """How a line begins: what is shown before its text, what before the rows that follow, and its style."""

    n_chars: int  # of the source
    lead: str = ""
    hang: str = ""
    style: str = ""
    lead_style: str = ""


class Markdown:
    """Renders one text. `feed()` it, print what it returns, and `finish()` it."""

    def __init__(self, width: Callable[[], int]) -> None:
        self._width = width
        self._wrap = Wrap(width)
        self._line = ""  # of the line that comes, what is not rendered yet
        self._before = ""  # the last character that is
        self._opening: _Opening | None = None  # once it is certain how the line begins
        self._code: Code | None = None
        self._rows: list[str] = []  # of a table

    def feed(self, text: str) -> list[Piece]:
        """Take the next text; return what can be printed now."""
        first, *more = text.replace("\t", _TAB).split("\n")
        self._take(first)
        for part in more:
            self._end_line()
            self._take(part)
        return self._wrap.take()

    def finish(self) -> list[Piece]:
        """Return the rest, without a line end."""
        if self._line or self._opening is not None:
            self._end_line()
        if self._code is not None:
            self._close_code()
        self._end_table()
        return self._wrap.finish()

    def _take(self, text: str) -> None:
        self._line += text
        if self._code is not None or not text:
            return
        if self._opening is None and not _UNCERTAIN.fullmatch(self._line):
            self._open(_opening(self._line))
        if self._opening is not None:
            self._write(whole=False)

    def _end_line(self) -> None:
        line = self._line
        if self._code is not None:
            self._add_code(self._code, line)
        elif self._opening is None and line.lstrip().startswith("|"):
            self._rows.append(line)
        elif self._opening is None and (fence := _FENCE.match(line)):
            self._open_code(fence)
        elif self._opening is None and _RULE.fullmatch(line):
            self._end_table()
            self._wrap.line([Piece("─" * self._width(), "dim")])
        else:
            self._end_text()
        self._line, self._before, self._opening = "", "", None

    def _end_text(self) -> None:
        if self._opening is None:
            self._open(_opening(self._line))
        self._write(whole=True)
        self._wrap.end_row()

    def _open(self, opening: _Opening) -> None:
        self._end_table()
        self._opening = opening
        self._line = self._line[opening.n_chars :]
        self._wrap.begin_row(Piece(opening.lead, opening.lead_style), hang=opening.hang)

    def _write(self, *, whole: bool) -> None:
        assert self._opening is not None
        pieces, n_chars = inline(self._line, style=self._opening.style, before=self._before, whole=whole)
        self._before = self._line[n_chars - 1] if n_chars else self._before
        self._line = self._line[n_chars:]
        for piece in pieces:
            self._wrap.add(piece)

    def _open_code(self, fence: re.Match[str]) -> None:
        self._end_table()
        self._code = Code(fence[1], fence[2])
        title = f"── {fence[2]} " if fence[2] else ""
        self._wrap.line([Piece(title + "─" * (self._width() - len(title)), "dim")])

    def _add_code(self, code: Code, line: str) -> None:
        if code.is_end(line):
            self._close_code()
        else:
            self._wrap.line(code.add(line))

    def _close_code(self) -> None:
        self._code = None
        self._wrap.line([Piece("─" * self._width(), "dim")])

    def _end_table(self) -> None:
        rows, self._rows = self._rows, []
        for row in table(rows, self._width()) if rows else ():
            self._wrap.line(row)


def _opening(line: str) -> _Opening:
    """How a line begins, of which enough has come to be certain."""
    if found := _HEADING.match(line):
        return _Opening(found.end(), style="bold" if len(found[1]) > 1 else "bold underline")
    if found := _BULLET.match(line):
        return _item(found, "• ")
    if found := _NUMBER.match(line):
        return _item(found, f"{found[2]} ")
    if found := _QUOTE.match(line):
        return _Opening(found.end(), lead="│ ", hang="│ ", style="italic", lead_style="dim")
    indent = len(line) - len(line.lstrip())
    return _Opening(indent, lead=" " * indent, hang=" " * indent)


def _item(found: re.Match[str], mark: str) -> _Opening:
    lead = found[1] + mark
    return _Opening(found.end(), lead=lead, hang=" " * len(lead), lead_style="cyan")
