"""Numbers between bounds: exactly those, digit by digit."""

from __future__ import annotations

import json
from decimal import Decimal

from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvasir.model.grammar.gbnf import finite
from kvasir.model.grammar.numbers import Bound, decimals, integers
from tests.unit.grammar.following import admits, gbnf_of, texts_of

whole = st.integers(-1200, 1200) | st.integers(-(10**12), 10**12)
bounds = st.none() | whole


@settings(max_examples=60, deadline=None)
@given(bounds, bounds, st.lists(whole, max_size=20))
@example(-5, 120, [-6, -5, -1, 0, 9, 10, 99, 100, 120, 121])
@example(None, -10, [-9, -10, -11, -100, 0, 10])
@example(99, None, [98, 99, 100, 1000])
def test_integers_are_those_between_the_bounds(low: int | None, high: int | None, asked: list[int]) -> None:
    node = integers(low, high)
    rules = finite({"root": node}, "root")
    if low is not None and high is not None and low > high:
        assert not rules
        return
    grammar = gbnf_of(node)
    for n in [*asked, *(b + d for b in (low, high) if b is not None for d in (-1, 0, 1))]:
        inside = (low is None or low <= n) and (high is None or n <= high)
        assert admits(grammar, str(n)) == inside, n
    for text in texts_of(rules):
        n = json.loads(text)
        assert low is None or low <= n
        assert high is None or n <= high


ends = st.none() | st.builds(Bound, st.decimals(-1000, 1000, places=3).map(Decimal.normalize), st.booleans())


@settings(max_examples=60, deadline=None)
@given(ends, ends)
@example(Bound(Decimal(0)), Bound(Decimal(1)))
@example(Bound(Decimal(0), open=True), None)
@example(Bound(Decimal("-0.5"), open=True), Bound(Decimal("-0.25"), open=True))
@example(Bound(Decimal("1E+3")), Bound(Decimal("1E+3")))
def test_decimals_stay_between_the_bounds(low: Bound | None, high: Bound | None) -> None:
    node = decimals(low, high)
    assert node is not None
    for text in texts_of(rules) if (rules := finite({"root": node}, "root")) else []:
        value = json.loads(text)
        assert low is None or value > float(low.value) or (value == float(low.value) and not low.open), text
        assert high is None or value < float(high.value) or (value == float(high.value) and not high.open), text


@settings(max_examples=60, deadline=None)
@given(ends, ends, st.decimals(-1000, 1000, places=2))
def test_decimals_between_the_bounds_are_admitted(low: Bound | None, high: Bound | None, value: Decimal) -> None:
    node = decimals(low, high)
    assert node is not None
    above = low is None or value > low.value or (value == low.value and not low.open)
    below = high is None or value < high.value or (value == high.value and not high.open)
    text = f"{abs(value) if value == 0 else value:f}"
    if finite({"root": node}, "root"):
        assert admits(gbnf_of(node), text) == (above and below), text


def test_a_bound_with_too_many_digits_is_not_compared() -> None:
    assert decimals(Bound(Decimal("0.12345678901234567")), None) is None
