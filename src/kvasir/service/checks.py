"""Values that callers give beside sampling, checked: what does not fit raises `BadOption`.

Owns the sentences, so that the same mistake is told in the same words everywhere.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from kvasir.errors import BadOption


def whole(name: str, value: object, *, least: int | None = None) -> int:
    """A whole number, `least` or more."""
    if isinstance(value, bool) or not isinstance(value, int) or (least is not None and value < least):
        bound = "" if least is None else f", {least} or more"
        raise BadOption(f"{name} must be a whole number{bound}, got {value!r}.")
    return value


def seconds(name: str, value: object) -> float | None:
    """A time, or None for none."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise BadOption(f"{name} must be a number of seconds above 0, got {value!r}.")
    return float(value)


def flag(name: str, value: object) -> bool:
    """True or False."""
    if not isinstance(value, bool):
        raise BadOption(f"{name} must be True or False, got {value!r}.")
    return value


def mapping(name: str, value: object) -> None:
    """A dict, or None for none."""
    if value is not None and not isinstance(value, Mapping):
        raise BadOption(f"{name} must be a dict, got {value!r}.")


def key(value: object) -> bytes | None:
    """The key of a completion, as bytes; None for none."""
    if value is None:
        return None
    try:
        raw = bytes.fromhex(value) if isinstance(value, str) else b""
    except ValueError:
        raw = b""
    if len(raw) != 32:
        raise BadOption(f"parent_key must be the key of a completion, 64 hexadecimal digits, got {value!r}.")
    return raw
