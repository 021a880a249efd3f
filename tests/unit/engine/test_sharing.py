"""Prefixes are computed once: sharing from running, parked and prefilling sequences, and what it must never cross."""

from __future__ import annotations

from typing import Any

import pytest

from kvasir.engine.events import Admitted, Diverged, Pressure, Ticked
from kvasir.engine.sequence import State
from kvasir.types import FinishReason
from tests.unit.engine.rig import Collected, Rig, expected, prompt

LAYOUTS = ("unified", "split")
COMMON = prompt(96, salt=3)


def own(i: int, n_tokens: int = 24) -> tuple[int, ...]:
    """A continuation that differs from all others at its first token."""
    return (97 + i, *prompt(n_tokens - 1, salt=40 + i))


def rig_of(layout: str, **settings: Any) -> Rig:
    return Rig(layout=layout, **({"slots": 8, "context_size": 2048, "prefill_budget": 64} | settings))


def check_exact(rig: Rig, sink: Collected, tokens: tuple[int, ...], max_tokens: int) -> None:
    made, stop = expected(rig.path, tokens, max_tokens=max_tokens)
    assert sink.tokens == made
    assert sink.done.stop_token == stop


@pytest.mark.parametrize("layout", LAYOUTS)
def test_eight_at_once_with_a_common_prefix_compute_it_once(layout: str) -> None:
    rig = rig_of(layout)
    prompts = [COMMON + own(i) for i in range(8)]
    sinks = [rig.submit(tokens, max_tokens=4) for tokens in prompts]
    rig.drain()
    for sink, tokens in zip(sinks, prompts, strict=True):
        check_exact(rig, sink, tokens, 4)
    counters = rig.loop.meter.counters
    assert counters.coalesced == 7
    assert counters.prefill_rows == len(COMMON) + 8 * 24
    assert [sink.done.usage.cached_tokens for sink in sinks] == [0] + 7 * [len(COMMON)]


def test_sharing_does_not_serialise() -> None:
    rig = rig_of("unified")
    sinks = [rig.submit(COMMON + own(i), max_tokens=40, stop_tokens=frozenset()) for i in range(8)]
    while not all(sink.tokens for sink in sinks):
        rig.tick()
        assert not any(sink.ends for sink in sinks)
    rig.drain()
    assert any(len(step) == 8 and all(n == 1 for _, _, n in step) for step in rig.context.steps)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_running_sequence_lends_its_prompt_and_what_it_has_said(layout: str) -> None:
    rig = rig_of(layout)
    first = rig.submit(COMMON, max_tokens=60, stop_tokens=frozenset())
    rig.tick(12)
    said = tuple(first.tokens[:6])
    assert len(first.tokens) > 8
    second = rig.submit(COMMON + said + own(1), max_tokens=5)
    rig.drain()
    check_exact(rig, second, COMMON + said + own(1), 5)
    assert second.done.usage.cached_tokens == len(COMMON) + 6
    assert first.tokens == expected(rig.path, COMMON, max_tokens=60, stop_tokens=frozenset())[0]
    assert rig.loop.meter.counters.shared_live == 1


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_next_turn_continues_the_parked_one_in_its_slot(layout: str) -> None:
    rig = rig_of(layout)
    first = rig.submit(COMMON, max_tokens=6, stop_tokens=frozenset())
    rig.drain()
    turn = COMMON + tuple(first.tokens) + own(2)
    second = rig.submit(turn, max_tokens=5)
    rig.drain()
    check_exact(rig, second, turn, 5)
    assert second.done.usage.cached_tokens == len(COMMON) + 5  # the last token of the first turn never ran
    assert rig.loop.meter.counters.shared_parked == 1
    assert len(rig.loop.residents.parked) == 1


def test_equal_prompts_run_one_token_each_after_the_first() -> None:
    rig = rig_of("unified")
    sinks = [rig.submit(COMMON, max_tokens=3, seed=i, temperature=0.9) for i in range(4)]
    rig.drain()
    assert rig.loop.meter.counters.prefill_rows == len(COMMON) + 3
    for i, sink in enumerate(sinks):
        assert sink.tokens == expected(rig.path, COMMON, max_tokens=3, seed=i, temperature=0.9)[0]


def test_followers_of_a_cancelled_leader_take_what_it_had() -> None:
    rig = rig_of("unified", chunk_tokens=32)
    leader = rig.submit(COMMON + own(0), max_tokens=4)
    follower = rig.submit(COMMON + own(1), max_tokens=4)
    rig.tick(2)
    assert rig.sequence(follower).state is State.FOLLOW
    rig.cancel(leader)
    rig.drain()
    assert leader.done.reason is FinishReason.CANCELLED
    assert follower.done.usage.cached_tokens == 64
    check_exact(rig, follower, COMMON + own(1), 4)


def test_two_that_follow_each_other_do_not_wait_for_ever() -> None:
    rig = rig_of("unified", chunk_tokens=16)
    twin = COMMON + own(1) + own(2)
    sinks = [rig.submit(tokens, max_tokens=2) for tokens in (COMMON + own(0), twin + own(3), twin + own(4))]
    rig.drain()
    assert [sink.done.usage.cached_tokens for sink in sinks] == [0, len(COMMON), len(twin)]


@pytest.mark.parametrize(
    ("one", "other"),
    [({"scope": "a"}, {"scope": "b"}), ({"scope": "a"}, {}), ({}, {"cache": False}), ({"cache": False}, {})],
)
def test_nothing_is_shared_across_scopes_or_with_those_who_do_not_want_it(
    one: dict[str, Any], other: dict[str, Any]
) -> None:
    rig = rig_of("unified")
    first = rig.submit(COMMON, max_tokens=2, **one)
    second = rig.submit(COMMON, max_tokens=2, **other)
    rig.drain()
    third = rig.submit(COMMON, max_tokens=2, **other)
    rig.drain()
    assert first.done.usage.cached_tokens == second.done.usage.cached_tokens == 0
    assert third.done.usage.cached_tokens == (0 if other.get("cache") is False else len(COMMON) - 1)
    assert rig.loop.meter.counters.shared_live == 0


def test_a_prompt_that_shares_only_the_system_prompt_never_evicts_a_long_conversation_while_a_slot_is_free() -> None:
    rig = rig_of("unified", slots=3)
    long_one = rig.submit(COMMON + prompt(200, salt=9), max_tokens=4)
    rig.drain()
    for i in range(6):
        rig.submit(COMMON + own(i), max_tokens=2)
        rig.drain()
    turn = COMMON + prompt(200, salt=9) + tuple(long_one.tokens) + own(7)
    again = rig.submit(turn, max_tokens=2)
    rig.drain()
    assert again.done.usage.cached_tokens >= len(COMMON) + 200
    assert rig.loop.meter.counters.shared_parked == 7


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("path", ["fake:window", "fake:recurrent", "fake:hybrid"])
def test_memories_that_cannot_rewind_are_served_exactly(path: str, layout: str) -> None:
    rig = rig_of(layout, path=path)
    first = rig.submit(COMMON, max_tokens=6, stop_tokens=frozenset())
    rig.drain()
    turn = COMMON + tuple(first.tokens) + own(2)
    branch = COMMON[:50] + own(3)
    for tokens in (turn, branch, COMMON + own(4)):
        sink = rig.submit(tokens, max_tokens=5)
        rig.drain()
        check_exact(rig, sink, tokens, 5)
    assert rig.loop.meter.counters.shared_parked > 0


def test_a_prompt_that_diverges_early_is_told_with_its_first_differing_token() -> None:
    seen: list[Any] = []
    rig = rig_of("unified", observe=seen.append)
    rig.submit((*COMMON[:10], 100, *prompt(300, salt=1)), max_tokens=2, scope="client")
    rig.drain()
    rig.submit((*COMMON[:10], 101, *prompt(300, salt=1)), max_tokens=2, scope="client")
    rig.drain()
    (event,) = [event for event in seen if isinstance(event, Diverged)]
    assert (event.scope, event.n_common, event.there, event.here) == ("client", 10, 100, 101)


def test_admission_tells_reuse_and_its_source() -> None:
    seen: list[Any] = []
    rig = rig_of("unified", observe=seen.append)
    rig.submit(COMMON + own(0), max_tokens=30, stop_tokens=frozenset())
    rig.submit(COMMON + own(1), max_tokens=2)
    rig.drain()
    rig.submit(COMMON + own(1), max_tokens=2)
    rig.drain()
    admitted = [(event.source, event.n_reused) for event in seen if isinstance(event, Admitted)]
    assert admitted == [("cold", 0), ("live", len(COMMON)), ("parked", len(COMMON) + 23)]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_tick_tells_the_cells_that_are_in_use(layout: str) -> None:
    told: list[tuple[int, int, int]] = []

    def observe(event: object) -> None:
        if isinstance(event, Ticked):
            told.append((event.cells_used, rig.loop.stats().cells_used, rig.context.memory.used_cells))

    rig = rig_of(layout, observe=observe)
    for i in range(4):
        rig.submit(COMMON + own(i), max_tokens=4, stop_tokens=frozenset())
    rig.drain()
    assert all(len(set(figures)) == 1 for figures in told)
    n_own = 4 * (24 + 3)  # the last token of each never runs
    assert told[-1][0] == n_own + len(COMMON) * (1 if layout == "unified" else 4)


# Few cells


def test_parked_sequences_go_before_anybody_waits() -> None:
    seen: list[Any] = []
    rig = rig_of("unified", slots=4, context_size=256, observe=seen.append)
    for i in range(3):
        rig.submit(prompt(70, salt=20 + i), max_tokens=2)
        rig.drain()
    late = rig.submit(prompt(200, salt=5), max_tokens=2)
    rig.drain()
    check_exact(rig, late, prompt(200, salt=5), 2)
    assert rig.loop.meter.counters.evicted > 0
    assert rig.loop.meter.counters.preempted == 0
    assert any(isinstance(event, Pressure) and event.evicted_slot is not None for event in seen)


def test_a_preempted_request_goes_on_as_if_nothing_had_happened() -> None:
    rig = rig_of("unified", slots=4, context_size=256)
    prompts = [prompt(50, salt=30 + i) for i in range(4)]
    sinks = [
        rig.submit(tokens, max_tokens=60, stop_tokens=frozenset(), temperature=0.8, seed=i)
        for i, tokens in enumerate(prompts)
    ]
    rig.drain()
    for i, (sink, tokens) in enumerate(zip(sinks, prompts, strict=True)):
        assert (
            sink.tokens
            == expected(rig.path, tokens, max_tokens=60, stop_tokens=frozenset(), temperature=0.8, seed=i)[0]
        )
    counters = rig.loop.meter.counters
    assert counters.preempted > 0
    usages = [sink.done.usage for sink in sinks]
    computed = sum(u.prompt_tokens - u.cached_tokens + u.completion_tokens for u in usages) - len(sinks)
    assert computed + counters.rows_again == rig.context.n_rows_decoded


def test_the_youngest_of_the_lowest_priority_is_preempted() -> None:
    seen: list[Any] = []
    rig = rig_of("unified", slots=3, context_size=200, observe=seen.append)
    sinks = [
        rig.submit(prompt(50, salt=i), max_tokens=40, stop_tokens=frozenset(), priority=p)
        for i, p in enumerate((0, 0, 1))
    ]
    rig.drain()
    preempted = [event.preempted for event in seen if isinstance(event, Pressure) and event.preempted is not None]
    assert preempted
    assert set(preempted) == {sinks[1].id}
    assert all(sink.done.reason is FinishReason.LENGTH for sink in sinks)
