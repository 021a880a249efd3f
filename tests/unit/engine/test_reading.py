"""Requests that only read, and spans cut out of what they left."""

from __future__ import annotations

import pytest

from kvasir.types import FinishReason
from tests.unit.engine.rig import Collected, Rig, expected, prompt

LAYOUTS = pytest.mark.parametrize("layout", ["unified", "split"])


def read(rig: Rig, tokens: tuple[int, ...], **options: object) -> Collected:
    sink = rig.submit(tokens, sampler=None, max_tokens=0, **options)
    rig.drain()
    return sink


@LAYOUTS
def test_a_read_leaves_all_of_its_tokens_in_memory(layout: str) -> None:
    rig = Rig(layout=layout)
    sink = read(rig, prompt(100))
    assert sink.tokens == []
    assert sink.done.reason is FinishReason.LENGTH
    assert sink.done.usage.completion_tokens == 0
    assert [resident.n_live for resident in rig.loop.residents] == [100]
    assert rig.context.n_rows_decoded == 100


@LAYOUTS
def test_what_follows_a_read_costs_only_its_own_tokens(layout: str) -> None:
    rig = Rig(layout=layout)
    tokens = prompt(100)
    read(rig, tokens[:90])
    sink = rig.submit(tokens)
    rig.drain()
    assert sink.done.usage.cached_tokens == 90
    assert sink.tokens == expected("fake:plain", tokens)[0]
    assert rig.context.n_rows_decoded == 100 + len(sink.tokens) - (sink.done.reason is FinishReason.LENGTH)


@LAYOUTS
def test_a_cut_conversation_goes_on_from_what_is_left(layout: str) -> None:
    rig = Rig(layout=layout)
    tokens = prompt(100)
    read(rig, tokens, owner="me")
    assert rig.loop.shift("me", list(tokens), 20, 50)
    rig.check()
    n_rows = rig.context.n_rows_decoded
    left = tokens[:20] + tokens[50:]
    sink = rig.submit((*left, *prompt(5, salt=3)), owner="me", max_tokens=1)
    rig.drain()
    assert sink.done.usage.cached_tokens == 70
    assert rig.context.n_rows_decoded - n_rows == 5
    assert rig.loop.meter.counters.shifted == 1


@LAYOUTS
def test_cut_kv_is_nobody_elses_and_never_kept(layout: str) -> None:
    rig = Rig(layout=layout)
    tokens = prompt(100)
    read(rig, tokens, owner="me")
    assert rig.loop.shift("me", list(tokens), 20, 50)
    left = tokens[:20] + tokens[50:]
    stranger = rig.submit((*left, 97), owner="you")
    anybody = rig.submit((*left, 98))
    rig.drain()
    assert stranger.done.usage.cached_tokens == 0
    assert anybody.done.usage.cached_tokens <= 70  # from the stranger, who computed it
    assert all(not resident.is_open for resident in rig.loop.residents if resident.editor == "me")


@LAYOUTS
def test_cutting_spares_who_shares_the_cells(layout: str) -> None:
    rig = Rig(layout=layout)
    tokens = prompt(100)
    read(rig, tokens)
    other = rig.submit((*tokens, *prompt(3, salt=5)))
    rig.drain()
    read(rig, tokens[:100], owner="me")
    assert rig.loop.shift("me", list(tokens), 30, 60)
    rig.check()
    again = rig.submit((*tokens, *prompt(3, salt=5)))
    rig.drain()
    assert again.tokens == other.tokens


def test_what_is_not_in_memory_cannot_be_cut() -> None:
    rig = Rig()
    tokens = prompt(60)
    assert not rig.loop.shift("me", list(tokens), 10, 20)
    read(rig, tokens, owner="me")
    assert not rig.loop.shift("me", list(tokens[:50]), 10, 20)


@pytest.mark.parametrize("path", ["fake:recurrent", "fake:hybrid"])
def test_memory_that_cannot_shift_says_so(path: str) -> None:
    rig = Rig(path)
    tokens = prompt(60)
    read(rig, tokens, owner="me")
    assert not rig.loop.shift("me", list(tokens), 10, 20)
    sink = rig.submit((*tokens, 99))
    rig.drain()
    assert sink.tokens == expected(path, (*tokens, 99))[0]


def test_a_preempted_cut_conversation_reads_its_tokens_again() -> None:
    rig = Rig(slots=2, context_size=256, layout="unified")
    never = frozenset[int]()
    tokens = prompt(80)
    read(rig, tokens, owner="me")
    assert rig.loop.shift("me", list(tokens), 10, 60)
    mine = rig.submit((*tokens[:10], *tokens[60:], 97), owner="me", max_tokens=140, priority=-1, stop_tokens=never)
    rig.tick(3)
    other = rig.submit(prompt(90, salt=9), max_tokens=100, priority=5, stop_tokens=never)
    rig.drain()
    assert rig.loop.meter.counters.preempted > 0
    assert mine.done.usage.completion_tokens == 140
    assert other.tokens == expected("fake:plain", prompt(90, salt=9), max_tokens=100, stop_tokens=never)[0]
    assert not any(resident.editor for resident in rig.loop.residents)
