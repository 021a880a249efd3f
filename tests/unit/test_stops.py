"""Stop strings: the same answer however the text is cut, and no part of a stop ever shown."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvasir.service.stops import StopFilter

# A tiny alphabet, so that stops overlap, nest and almost match all the time.
texts = st.text(alphabet="ab\n", max_size=40)
stop_lists = st.lists(st.text(alphabet="ab\n", min_size=1, max_size=5), max_size=4)


def run(stops: list[str], pieces: list[str]) -> tuple[list[str], str | None]:
    stop_filter = StopFilter(stops)
    shown = [stop_filter.feed(piece) for piece in pieces]
    return [*shown, stop_filter.flush()], stop_filter.matched


def by_definition(stops: list[str], text: str) -> tuple[str, str | None]:
    """Read character by character; the longest of the stops complete at the first such character."""
    for end in range(1, len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            stop = max(complete, key=len)
            return text[: end - len(stop)], stop
    return text, None


@st.composite
def cut_texts(draw: st.DrawFn) -> list[str]:
    text = draw(texts)
    cuts = sorted(draw(st.lists(st.integers(0, len(text)), max_size=10)))
    return [text[i:j] for i, j in zip([0, *cuts], [*cuts, len(text)], strict=True)]


@given(stop_lists, cut_texts())
def test_any_cut_of_a_text_gives_what_the_rule_says(stops: list[str], pieces: list[str]) -> None:
    shown, matched = run(stops, pieces)
    assert ("".join(shown), matched) == by_definition(stops, "".join(pieces))


@given(stop_lists, cut_texts())
def test_no_part_of_a_stop_is_ever_shown(stops: list[str], pieces: list[str]) -> None:
    want, matched = by_definition(stops, "".join(pieces))
    stop_filter, so_far = StopFilter(stops), ""
    for piece in pieces:
        so_far += stop_filter.feed(piece)
        assert want.startswith(so_far)
    if matched is not None:
        assert so_far == want


@given(stop_lists, texts)
def test_nothing_waits_longer_than_it_may_become_a_stop(stops: list[str], text: str) -> None:
    stop_filter = StopFilter(stops)
    shown = "".join(stop_filter.feed(character) for character in text)
    if stop_filter.matched is None:
        held = text[len(shown) :]
        assert not held or any(stop.startswith(held) and stop != held for stop in stops)


@pytest.mark.parametrize(
    ("stops", "pieces", "shown", "matched"),
    [
        (["END"], ["one E", "N", "D two"], "one ", "END"),
        (["END"], ["one E", "N", "Z two"], "one ENZ two", None),
        (["ab", "abc"], ["xabc"], "x", "ab"),
        (["cd", "abcde"], ["xab", "cd", "e"], "xab", "cd"),
        (["b", "ab"], ["x", "a", "b"], "x", "ab"),
        ([], ["plain"], "plain", None),
        (["\n\n"], ["line\n", "x\n", "\ny"], "line\nx", "\n\n"),
    ],
)
def test_examples(stops: list[str], pieces: list[str], shown: str, matched: str | None) -> None:
    got, stop = run(stops, pieces)
    assert ("".join(got), stop) == (shown, matched)


def test_text_after_the_stop_is_dropped() -> None:
    stop_filter = StopFilter(["."])
    assert stop_filter.feed("a.b") == "a"
    assert stop_filter.feed("c") == ""
    assert stop_filter.flush() == ""
