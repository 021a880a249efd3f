"""A Markdown table as rows of a terminal, its columns in line. Pure."""

from __future__ import annotations

import re
from itertools import zip_longest

from rich.cells import cell_len

from kvasir.cli.inline import inline
from kvasir.cli.wrap import Piece

_RULE = re.compile(r"\s*\|?(\s*:?-+:?\s*\|?)+\s*")
_BAR = re.compile(r"(?<!\\)\|")
_BETWEEN = Piece(" │ ", "dim")


def table(lines: list[str], width: int) -> list[list[Piece]]:
    """Return the rows; the lines as they are where they are no table, or one too wide for the terminal."""
    if len(lines) < 2 or not _RULE.fullmatch(lines[1]):
        return [inline(line)[0] for line in lines]
    head, *body = [_cells(line) for line in (lines[0], *lines[2:])]
    rows = [[inline(cell, style="bold")[0] for cell in head], *[[inline(cell)[0] for cell in row] for row in body]]
    sizes = [max(_size(cell) for cell in column) for column in zip_longest(*rows, fillvalue=[])]
    if sum(sizes) + 3 * (len(sizes) - 1) > width:
        return [inline(line)[0] for line in lines]
    rule = [Piece("─┼─".join("─" * size for size in sizes), "dim")]
    first, *others = [_row(cells, sizes) for cells in rows]
    return [first, rule, *others]


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in _BAR.split(line.strip().removeprefix("|").removesuffix("|"))]


def _size(cell: list[Piece]) -> int:
    return sum(cell_len(piece.text) for piece in cell)


def _row(cells: list[list[Piece]], sizes: list[int]) -> list[Piece]:
    pieces: list[Piece] = []
    for i, size in enumerate(sizes):
        cell = cells[i] if i < len(cells) else []
        pieces += [_BETWEEN] if i else []
        pieces += [*cell, Piece(" " * (size - _size(cell)))]
    return pieces
