"""Markdown inside a line: bold, italic, struck out, code, links. Pure.

Reads a line of which perhaps only the beginning has come. An opening mark is held until its end has come or cannot be
near any more; then it is text.
"""

from __future__ import annotations

import re
import string

from kvasir.cli.wrap import Piece

# A mark that is not closed within so many characters is text, also where all of it is there: how a text looks must not
# depend on how it was cut up. Long enough for a bold sentence, short enough that
# nobody wonders where the reply has gone.
HOLD = 240

_SPECIAL = re.compile(r"[`*_~\[\\]")
_LINK = re.compile(r"\[([^\[\]]+)\]\(([^()\s]+)\)")
_LINK_BEGUN = re.compile(r"\[[^\[\]]*(?:\](?:\([^()\s]*)?)?")
_STYLES = {"*": "italic", "_": "italic", "**": "bold", "__": "bold", "***": "bold italic", "~~": "strike"}


def inline(text: str, *, style: str = "", before: str = "", whole: bool = True) -> tuple[list[Piece], int]:
    """Render what is certain; return the pieces, and how many characters of `text` they took.

    `before` is the character before the text. With `whole` nothing follows, and all is certain.
    """
    pieces: list[Piece] = []
    at = 0
    while at < len(text):
        special = _SPECIAL.search(text, at)
        start = special.start() if special else len(text)
        if start > at:
            pieces.append(Piece(text[at:start], style))
        if special is None:
            return pieces, len(text)
        previous = text[start - 1] if start else before
        found = _marked(text, start, style=style, before=previous, whole=whole)
        if found is None:
            return pieces, start
        pieces += found[0]
        at = found[1]
    return pieces, at


_Found = tuple[list[Piece], int]  # what it becomes, and where it ends


def _marked(text: str, start: int, *, style: str, before: str, whole: bool) -> _Found | None:
    """What stands at a special character; None while that is not certain."""
    match text[start]:
        case "\\":
            return _escaped(text, start, style=style, whole=whole)
        case "[":
            return _link(text, start, style=style, whole=whole)
        case mark:
            size = len(text) - start - len(text[start:].lstrip(mark))
            if start + size == len(text) and not whole:
                return None  # the mark itself may become longer
            if mark == "`":
                return _code(text, start, size, style=style, whole=whole)
            return _emphasis(text, start, size, style=style, before=before, whole=whole)


def _escaped(text: str, start: int, *, style: str, whole: bool) -> _Found | None:
    following = text[start + 1 : start + 2]
    if not following and not whole:
        return None
    if following and following in string.punctuation:
        return [Piece(following, style)], start + 2
    return [Piece("\\", style)], start + 1


def _link(text: str, start: int, *, style: str, whole: bool) -> _Found | None:
    found = _LINK.match(text, start)
    if found is not None and found.end() - start <= HOLD:
        label, address = found[1], found[2]
        pieces, _ = inline(label, style=f"{style} underline".strip())
        return (pieces if label == address else [*pieces, Piece(f" ({address})", "dim")]), found.end()
    if not whole and len(text) - start <= HOLD and _LINK_BEGUN.fullmatch(text, start):
        return None
    return [Piece("[", style)], start + 1


def _code(text: str, start: int, size: int, *, style: str, whole: bool) -> _Found | None:
    inner = start + size
    mark = "`" * size
    ends = (found for found in re.finditer("`+", text[inner:]) if found[0] == mark)
    end = next(ends, None)
    if end is None or not _is_certain(text, start, inner + end.end(), whole=whole):
        return _unclosed(text, start, mark, style=style, whole=whole)
    code = text[inner : inner + end.start()]
    if code.startswith(" ") and code.endswith(" ") and code.strip():
        code = code[1:-1]
    return [Piece(code, f"{style} cyan".strip())], inner + end.end()


def _emphasis(text: str, start: int, size: int, *, style: str, before: str, whole: bool) -> _Found | None:
    mark = text[start : start + size]
    inner = start + size
    opens = mark in _STYLES and text[inner : inner + 1].strip()
    if not opens or (mark[0] == "_" and before.isalnum()):
        return [Piece(mark, style)], inner
    char, word = re.escape(mark[0]), r"(?!\w)" if mark[0] == "_" else ""
    closing = re.compile(rf"(?<![\s{char}\\]){re.escape(mark)}(?!{char}){word}")
    end = closing.search(text, inner + 1)
    if end is None or not _is_certain(text, start, end.end(), whole=whole):
        return _unclosed(text, start, mark, style=style, whole=whole)
    pieces, _ = inline(text[inner : end.start()], style=f"{style} {_STYLES[mark]}".strip(), before=mark)
    return pieces, end.end()


def _is_certain(text: str, start: int, end: int, *, whole: bool) -> bool:
    """Whether a closing mark is near enough, and cannot become longer."""
    return end - start <= HOLD and (whole or end < len(text))


def _unclosed(text: str, start: int, mark: str, *, style: str, whole: bool) -> _Found | None:
    if not whole and len(text) - start <= HOLD:
        return None
    return [Piece(mark, style)], start + len(mark)
