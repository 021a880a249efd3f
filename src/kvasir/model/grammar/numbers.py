"""JSON numbers between bounds, digit by digit.

Owns the grammars of integers and of decimals. Decimals have at most 15 digits, so that two that differ as text
differ as floats too, and a bound that the text keeps is kept by the number read from it.
"""

from __future__ import annotations

from dataclasses import dataclass
from decimal import Decimal

from kvasir.model.grammar.gbnf import EMPTY, NEVER, Chars, Node, Text, choice, nonempty, optional, repeat, seq

MAX_DIGITS = 15

DIGIT = Chars(((ord("0"), ord("9")),))
_LEADING = Chars(((ord("1"), ord("9")),))
_MORE_DIGITS = repeat(DIGIT, 0, MAX_DIGITS - 1)

_INTEGER = seq(optional(Text("-")), choice(Text("0"), seq(_LEADING, _MORE_DIGITS)))
_FRACTION = seq(Text("."), repeat(DIGIT, 1, MAX_DIGITS))
_EXPONENT = seq(
    Chars(((ord("E"), ord("E")), (ord("e"), ord("e")))), optional(Chars(((43, 43), (45, 45)))), repeat(DIGIT, 1, 2)
)
NUMBER = seq(_INTEGER, optional(_FRACTION), optional(_EXPONENT))


@dataclass(frozen=True, slots=True)
class Bound:
    """One end of a range; `open` leaves the value itself out."""

    value: Decimal
    open: bool = False

    @property
    def mirrored(self) -> Bound:
        """The same bound seen from the other side of zero."""
        return Bound(-self.value, self.open)


def integers(low: int | None, high: int | None) -> Node:
    """Integers from `low` to `high`, both among them."""
    if low is None and high is None:
        return _INTEGER
    if low is not None and high is not None and low > high:
        return NEVER
    found: list[Node] = []
    if low is None or low < 0:
        least = 1 if high is None or high >= 0 else -high
        found.append(seq(Text("-"), _naturals(least, None if low is None else -low)))
    if high is None or high >= 0:
        found.append(_naturals(max(low or 0, 0), high))
    return choice(*found)


def _naturals(low: int, high: int | None) -> Node:
    if high is not None and low > high:
        return NEVER
    if low == 0:
        return choice(Text("0"), _naturals(1, high))
    first, last = str(low), str(high) if high is not None else None
    if last is not None and len(first) == len(last):
        return _same_length(first, last)
    longest = len(last) - 1 if last is not None else max(MAX_DIGITS, len(first) + 1)
    found = [_same_length(first, "9" * len(first))]
    if longest > len(first):
        found.append(seq(_LEADING, repeat(DIGIT, len(first), longest - 1)))
    if last is not None:
        found.append(_same_length("1" + "0" * (len(last) - 1), last))
    return choice(*found)


def _same_length(low: str, high: str) -> Node:
    """Digit strings from `low` to `high`, which are equally long."""
    if not low:
        return EMPTY
    if low[0] == high[0]:
        return seq(Text(low[0]), _same_length(low[1:], high[1:]))
    n_rest = len(low) - 1
    first, last = int(low[0]), int(high[0])
    found: list[Node] = []
    if low[1:] != "0" * n_rest:
        found.append(seq(Text(low[0]), _same_length(low[1:], "9" * n_rest)))
        first += 1
    if high[1:] != "9" * n_rest:
        found.append(seq(Text(high[0]), _same_length("0" * n_rest, high[1:])))
        last -= 1
    if first <= last:
        found.append(seq(_digits(first, last), repeat(DIGIT, n_rest, n_rest)))
    return choice(*found)


def decimals(low: Bound | None, high: Bound | None) -> Node | None:
    """Numbers between two bounds; None where a bound has more digits than a grammar of decimals can compare."""
    if any(bound is not None and not _comparable(bound.value) for bound in (low, high)):
        return None
    if low is None and high is None:
        return NUMBER
    found: list[Node] = []
    zero = Decimal(0)
    if low is None or low.value < 0:
        nearest = high.mirrored if high is not None and high.value <= 0 else Bound(zero)
        found.append(seq(Text("-"), _magnitudes(nearest, low.mirrored if low is not None else None)))
    if high is None or high.value >= 0:
        found.append(_magnitudes(low if low is not None and low.value >= 0 else Bound(zero), high))
    return choice(*found)


def _comparable(value: Decimal) -> bool:
    whole, fraction = _split(value)
    return len(str(whole)) + len(fraction) < MAX_DIGITS


def _split(value: Decimal) -> tuple[int, str]:
    """The whole part and the digits after the point, without the sign."""
    whole, _, fraction = f"{abs(value):f}".partition(".")
    return int(whole), fraction.rstrip("0")


def _magnitudes(low: Bound, high: Bound | None) -> Node:
    """Decimals without a sign from `low`, which is not negative."""
    whole, fraction = _split(low.value)
    least = _End(fraction, low.open)
    if high is None:
        more = seq(_naturals(whole + 1, None), _fractions(None, None, room=MAX_DIGITS))
        return choice(seq(Text(str(whole)), _fractions(least, None, room=_room(whole))), more)
    if high.value < low.value:
        return NEVER
    last, last_fraction = _split(high.value)
    most = _End(last_fraction, high.open)
    if whole == last:
        return seq(Text(str(whole)), _fractions(least, most, room=_room(whole)))
    return choice(
        seq(Text(str(whole)), _fractions(least, None, room=_room(whole))),
        seq(_naturals(whole + 1, last - 1), _fractions(None, None, room=_room(last))),
        seq(Text(str(last)), _fractions(None, most, room=_room(last))),
    )


def _room(whole: int) -> int:
    return MAX_DIGITS - len(str(whole))


@dataclass(frozen=True, slots=True)
class _End:
    """The digits of a bound that are still to be compared; none means zeros from here on."""

    digits: str
    open: bool

    @property
    def digit(self) -> int:
        return int(self.digits[0]) if self.digits else 0

    @property
    def rest(self) -> _End:
        return _End(self.digits[1:], self.open)

    @property
    def is_zero(self) -> bool:
        return not self.digits.strip("0")


def _fractions(low: _End | None, high: _End | None, *, room: int) -> Node:
    """The point and what follows it, or nothing where a whole number lies between the bounds."""
    digits = _tails(low, high, room)
    whole = [EMPTY] if _may_stop(low, high) else []
    return choice(*whole, seq(Text("."), nonempty(digits)))


def _tails(low: _End | None, high: _End | None, room: int) -> Node:
    """Up to `room` digits that keep to both bounds; None is a bound that earlier digits have settled."""
    if low is None and high is None:
        return repeat(DIGIT, 0, room)
    found: list[Node] = [EMPTY] if _may_stop(low, high) else []
    if room == 0:
        return choice(*found)
    first = low.digit if low is not None else -1
    last = high.digit if high is not None else 10
    if low is not None and high is not None and first == last:
        return choice(*found, seq(Text(str(first)), _tails(low.rest, high.rest, room - 1)))
    if low is not None and first < last:
        found.append(seq(Text(str(first)), _tails(low.rest, None, room - 1)))
    if high is not None and first < last:
        found.append(seq(Text(str(last)), _tails(None, high.rest, room - 1)))
    if first + 1 <= last - 1:
        found.append(seq(_digits(first + 1, last - 1), repeat(DIGIT, 0, room - 1)))
    return choice(*found)


def _may_stop(low: _End | None, high: _End | None) -> bool:
    above = low is None or (low.is_zero and not low.open)
    return above and not (high is not None and high.is_zero and high.open)


def _digits(first: int, last: int) -> Node:
    return Text(str(first)) if first == last else Chars(((ord("0") + first, ord("0") + last),))
