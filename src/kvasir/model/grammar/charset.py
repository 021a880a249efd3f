"""Sets of characters, as sorted ranges of code points.

Owns union, complement and difference, and the classes a regular expression names (`\\d`, `\\w`, `\\s`), in Unicode and
in ASCII. NUL and surrogates belong to no set: a grammar cannot match the one, text cannot hold the other.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from functools import cache
from re._casefix import _EXTRA_CASES  # type: ignore[import-not-found]

Ranges = tuple[tuple[int, int], ...]

NONE: Ranges = ()
EVERY: Ranges = ((0x01, 0xD7FF), (0xE000, sys.maxunicode))


def chars(text: str) -> Ranges:
    """The set of the characters of a text."""
    return union((ord(c), ord(c)) for c in text)


def union(ranges: Iterable[tuple[int, int]]) -> Ranges:
    """The set of all code points in any of the ranges."""
    merged: list[tuple[int, int]] = []
    for low, high in sorted(ranges):
        if merged and low <= merged[-1][1] + 1:
            merged[-1] = (merged[-1][0], max(high, merged[-1][1]))
        else:
            merged.append((low, high))
    return tuple(merged)


def complement(ranges: Ranges) -> Ranges:
    """Every character that is not in the set."""
    return without(EVERY, ranges)


def without(ranges: Ranges, taken: Ranges) -> Ranges:
    """The set less another one."""
    left: list[tuple[int, int]] = []
    for low, high in ranges:
        for taken_low, taken_high in taken:
            if taken_high < low or taken_low > high:
                continue
            if taken_low > low:
                left.append((low, taken_low - 1))
            low = taken_high + 1
            if low > high:
                break
        if low <= high:
            left.append((low, high))
    return tuple(left)


def common(ranges: Ranges, others: Ranges) -> Ranges:
    """What two sets share."""
    return without(ranges, complement(others))


def size(ranges: Ranges) -> int:
    """How many characters the set has."""
    return sum(high - low + 1 for low, high in ranges)


@cache
def category(name: str, *, ascii_only: bool) -> Ranges:
    """The set of `digit`, `word` or `space`, as Python's `re` understands it."""
    return _selected(_CATEGORIES[name], 127 if ascii_only else sys.maxunicode)


_CATEGORIES: dict[str, Callable[[str], bool]] = {
    "digit": str.isdecimal,
    "word": lambda c: c.isalnum() or c == "_",
    # Python's ASCII class leaves out the four separators U+001C to U+001F, which str.isspace() counts in.
    "space": str.isspace,
}


def _selected(test: Callable[[str], bool], most: int) -> Ranges:
    picked = (point for point in range(1, most + 1) if test(chr(point)))
    found = union((point, point) for point in picked)
    return without(found, ((0x1C, 0x1F),)) if most == 127 else found


def any_case(ranges: Ranges, *, ascii_only: bool) -> Ranges:
    """The set with the other case of each letter, as `re` pairs them."""
    pairs = [pair for pair in _lowered() if not ascii_only or pair[0] < 128]
    lows = {low for point, low in pairs if _holds(ranges, point)}
    lowered = union([*ranges, *((low, low) for low in lows)])
    if not ascii_only:
        lowered = union([*lowered, *_same_letters(lowered)])
    return union([*lowered, *((point, point) for point, low in pairs if _holds(lowered, low))])


@cache
def _lowered() -> tuple[tuple[int, int], ...]:
    """Pairs of a code point and its lower case, where they differ."""
    pairs = ((point, ord(chr(point).lower()[0])) for (low, high) in EVERY for point in range(low, high + 1))
    return tuple(pair for pair in pairs if pair[0] != pair[1])


def _same_letters(ranges: Ranges) -> list[tuple[int, int]]:
    """Lower-case letters that share an upper case with one of the set, like the two forms of sigma."""
    return [(same, same) for low, others in _EXTRA_CASES.items() if _holds(ranges, low) for same in others]


def _holds(ranges: Ranges, point: int) -> bool:
    return any(low <= point <= high for low, high in ranges)
