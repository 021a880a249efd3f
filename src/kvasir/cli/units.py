"""Bytes and times as people write and read them. Pure."""

from __future__ import annotations

import re

from kvasir.errors import BadOption

_SIZE = re.compile(r"(\d+(?:\.\d+)?) ?([kmgt]?)(i?b?)", re.IGNORECASE)
_POWERS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}
_AGE = re.compile(r"(\d+(?:\.\d+)?) ?([smhdw])", re.IGNORECASE)
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 604_800}


def parse_bytes(option: str, text: str) -> int:
    """Read `2GiB`, `500MB` or `1024`: KB is 1,000 bytes, KiB and K are 1,024."""
    found = _SIZE.fullmatch(text.strip())
    if found is None or (not found[2] and found[3].lower() not in ("", "b")):
        raise BadOption(f"{option} must be a size such as 2GiB or 500MB, got {text!r}.")
    base = 1000 if found[3].lower() == "b" else 1024
    return int(float(found[1]) * base ** _POWERS[found[2].lower()])


def parse_age(option: str, text: str) -> float:
    """Read `7d`, `12h`, `30m`, `45s` or `2w` as seconds."""
    found = _AGE.fullmatch(text.strip())
    if found is None:
        raise BadOption(f"{option} must be an age such as 7d, 12h or 30m, got {text!r}.")
    return float(found[1]) * _SECONDS[found[2].lower()]


def show_bytes(n_bytes: int) -> str:
    """Say `1.5 GiB`."""
    size, units = float(n_bytes), ["B", "KiB", "MiB", "GiB", "TiB"]
    while size >= 1024 and len(units) > 1:
        size /= 1024
        units.pop(0)
    return f"{size:.0f} {units[0]}" if units[0] == "B" or size >= 100 else f"{size:.1f} {units[0]}"


def show_age(seconds: float) -> str:
    """Say `3h ago`, in the largest unit there is at least one of."""
    for unit in ("w", "d", "h", "m"):
        if seconds >= _SECONDS[unit]:
            return f"{seconds // _SECONDS[unit]:.0f}{unit} ago"
    return f"{max(0.0, seconds):.0f}s ago"
