"""A fenced block of code, coloured line by line as it comes.

Owns the lines so far: what a line means depends on those before it (a text over several lines, a comment).
"""

from __future__ import annotations

from rich.syntax import Syntax
from rich.text import Text

from kvasir.cli.wrap import Piece

# Each line is read again together with the lines before it, at most this many: a few milliseconds.
LOOK_BACK = 100


class Code:
    """One block. `fence` is what opened it, and closes it."""

    def __init__(self, fence: str, language: str) -> None:
        self._fence = fence
        self._syntax = Syntax("", language or "text", theme="ansi_dark")
        self._lines: list[str] = []

    def is_end(self, line: str) -> bool:
        """Whether a line closes the block."""
        text = line.strip()
        return len(text) >= len(self._fence) and not text.strip(self._fence[0])

    def add(self, line: str) -> list[Piece]:
        """Take a line; return it coloured."""
        self._lines = [*self._lines[-LOOK_BACK:], line]
        lines = self._syntax.highlight("\n".join(self._lines)).split("\n", allow_blank=True)
        return _pieces(lines[len(self._lines) - 1]) if line else []


def _pieces(line: Text) -> list[Piece]:
    """The line's spans, which follow one another, and what is between them."""
    pieces, at = [], 0
    for start, end, style in line.spans:
        pieces += [Piece(line.plain[at:start]), Piece(line.plain[start:end], style)]
        at = end
    return [piece for piece in [*pieces, Piece(line.plain[at:])] if piece.text]
