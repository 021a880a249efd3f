"""Words on the rows of a terminal, as they come: breaks between words, and never goes back.

Owns the column the cursor stands in. A word is held until it is certain where it ends, line ends until something
follows them. Control characters, which a model may write but a terminal must not obey, are left out.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import NamedTuple

from rich.cells import cell_len
from rich.style import Style

from kvasir.cli.console import clean

# Chinese, Japanese and Korean text has no spaces: each of its characters may begin a row.
_CJK = "\u2e80-\u9fff\uac00-\ud7af\uf900-\ufaff\uff00-\uffef"
_ALONE = re.compile(f"[{_CJK}]")
_PARTS = re.compile(rf"\s+|[{_CJK}]|[^\s{_CJK}]+")


class Piece(NamedTuple):
    """Some text and how it looks, in Rich's words."""

    text: str
    style: str | Style = ""


class Wrap:
    """Takes pieces of text and gives out pieces of rows."""

    def __init__(self, width: Callable[[], int]) -> None:
        self._width = width
        self._out: list[Piece] = []
        self._word: list[Piece] = []
        self._spaces = Piece("")  # before the word
        self._is_long = False  # the word's beginning is already out
        self._column = 0
        self._hang = Piece("")  # before each row that follows
        self._n_ends = 0  # line ends that are due before the next text
        self._has_begun = False

    def begin_row(self, lead: Piece, *, hang: str = "") -> None:
        """Begin a row with `lead`; the rows its text runs over to begin with `hang`."""
        self._hang = Piece(hang, lead.style)
        if lead.text.strip():
            self._emit(lead)
        else:
            self._spaces = lead

    def add(self, piece: Piece) -> None:
        """Put text on the row; what does not fit goes to the next."""
        for part in _PARTS.findall(clean(piece.text)):
            if part.isspace():
                self._flush()
                self._spaces = Piece(self._spaces.text + part, piece.style)
            else:
                self._add_word(Piece(part, piece.style))

    def end_row(self) -> None:
        """End the row; more than one empty row in sequence becomes one."""
        self._flush()
        self._spaces = self._hang = Piece("")
        self._n_ends = min(self._n_ends + 1, 2)

    def line(self, pieces: list[Piece]) -> None:
        """Put a whole row out as it is; a terminal breaks it where it must."""
        if not pieces:  # an empty line of code is one
            self._emit(Piece(""))
        for piece in pieces:
            self._emit(Piece(clean(piece.text), piece.style))
        self.end_row()

    def take(self) -> list[Piece]:
        """What can be printed now."""
        out, self._out = self._out, []
        return out

    def finish(self) -> list[Piece]:
        """What can be printed when nothing follows."""
        self._flush()
        return self.take()

    def _add_word(self, part: Piece) -> None:
        if _ALONE.fullmatch(part.text):
            self._flush()
        self._word.append(part)
        if self._is_long or _size(self._word) > self._width():
            # It fits on no row, so nothing is gained by waiting; the terminal breaks it.
            self._flush()
            self._is_long = True

    def _flush(self) -> None:
        """Put the held word out, on this row or the next."""
        word, self._word = self._word, []
        is_rest, self._is_long = self._is_long, False
        if not word:
            return
        if is_rest:
            for piece in word:
                self._emit(piece)
            return
        size = _size(word)
        spaces, self._spaces = self._spaces, Piece("")
        if self._n_ends == 0 and self._column + len(spaces.text) + size > self._width() and self._column:
            self._out.append(Piece("\n"))
            self._column = 0
            spaces = self._hang
        for piece in (spaces, *word):
            self._emit(piece)

    def _emit(self, piece: Piece) -> None:
        if self._n_ends:
            if self._has_begun:
                self._out.append(Piece("\n" * self._n_ends))
            self._n_ends, self._column = 0, 0
        self._has_begun = True
        self._column += cell_len(piece.text)
        if self._out and self._out[-1].style == piece.style:
            self._out[-1] = Piece(self._out[-1].text + piece.text, piece.style)
        elif piece.text:
            self._out.append(piece)


def _size(word: list[Piece]) -> int:
    return sum(cell_len(piece.text) for piece in word)
