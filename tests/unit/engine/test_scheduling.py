"""Who runs when: batching, queue, priorities, age, cancel, deadlines."""

from __future__ import annotations

import pytest

from kvasir.engine import Failed
from kvasir.engine.sequence import State
from kvasir.errors import DeadlineExceeded, QueueFull
from kvasir.types import FinishReason
from tests.unit.engine.rig import TICK_S, Rig, expected, prompt

ENDLESS = {"max_tokens": 100, "stop_tokens": frozenset[int]()}


def test_running_sequences_share_one_decode() -> None:
    rig = Rig(slots=4)
    for i in range(4):
        rig.submit(prompt(4, salt=i), **ENDLESS)
    rig.tick(2)
    assert [len(step) for step in rig.context.steps] == [4, 4]


def test_a_long_prompt_beside_streams_takes_only_the_prefill_budget() -> None:
    rig = Rig(prefill_budget=16, slots=4)
    streams = [rig.submit(prompt(3, salt=i), **ENDLESS) for i in range(3)]
    rig.tick()
    rig.submit(prompt(100), max_tokens=2)
    n_before = len(streams[0].tokens)
    rig.tick(6)
    assert len(streams[0].tokens) == n_before + 6  # no stream missed a tick
    assert [step[-1][2] for step in rig.context.steps[1:]] == [16] * 6


def test_a_prompt_alone_takes_whole_chunks() -> None:
    rig = Rig(chunk_tokens=50, prefill_budget=16)
    rig.submit(prompt(120), max_tokens=1)
    rig.drain()
    assert [step[0][2] for step in rig.context.steps] == [50, 50, 20]


def test_requests_beyond_slots_and_queue_are_refused_with_a_hint() -> None:
    rig = Rig(slots=1, max_queue=2)
    for i in range(3):
        rig.submit(prompt(4, salt=i))
    with pytest.raises(QueueFull) as refused:
        rig.submit(prompt(4))
    assert refused.value.retry_after_s is not None
    assert refused.value.retry_after_s > 0
    rig.drain()
    rig.submit(prompt(4))
    rig.drain()
    rig.check_idle()
    assert rig.loop.gate.n_refused == 1


def test_first_come_first_served_within_a_priority() -> None:
    rig = Rig(slots=1)
    sinks = [rig.submit(prompt(4, salt=i), max_tokens=2, stop_tokens=frozenset()) for i in range(4)]
    order = []
    while rig.tick():
        order += [i for i, sink in enumerate(sinks) if sink.ends and i not in order]
    assert order == [0, 1, 2, 3]


def test_a_higher_priority_is_admitted_first() -> None:
    rig = Rig(slots=1)
    rig.submit(prompt(4), **ENDLESS)
    rig.tick()
    low, high = rig.submit(prompt(4, salt=1)), rig.submit(prompt(4, salt=2), priority=5)
    rig.cancel(rig.sinks[0])
    rig.tick(2)
    assert rig.sequence(high).state is State.DECODE
    assert rig.sequence(low).state is State.WAITING


def test_age_brings_a_waiting_request_before_higher_priorities() -> None:
    rig = Rig(slots=1, aging_s=0.05)
    low = rig.submit(prompt(4), max_tokens=2, priority=0)
    for i in range(40):
        rig.submit(prompt(4, salt=i), max_tokens=4, priority=3, stop_tokens=frozenset())
        rig.tick(4)
        if low.ends:
            break
    assert low.ends
    rig2 = Rig(slots=1, aging_s=0.05)
    rig2.submit(prompt(4), **ENDLESS)
    rig2.tick()
    old = rig2.submit(prompt(4, salt=1), priority=0)
    rig2.tick(20)  # 0.2 s are four levels
    fresh = rig2.submit(prompt(4, salt=2), priority=3)
    rig2.cancel(rig2.sinks[0])
    rig2.tick(2)
    assert rig2.sequence(old).state is not State.WAITING
    assert rig2.sequence(fresh).state is State.WAITING
    assert rig2.loop.meter.counters.aged == 1


def test_a_request_that_needs_many_cells_is_not_overtaken() -> None:
    rig = Rig(slots=4, context_size=100, layout="unified")
    rig.submit(prompt(40), max_tokens=20, stop_tokens=frozenset())
    big = rig.submit(prompt(60, salt=1), max_tokens=20)
    small = rig.submit(prompt(4, salt=2), max_tokens=2)
    rig.tick(3)
    assert rig.sequence(big).state is rig.sequence(small).state is State.WAITING
    rig.drain()
    rig.check_idle()
    assert big.tokens == expected("fake:plain", prompt(60, salt=1), max_tokens=20)[0]


def test_a_cancel_in_the_queue_ends_it_without_a_slot() -> None:
    rig = Rig(slots=1)
    rig.submit(prompt(4), **ENDLESS)
    waiting = rig.submit(prompt(4, salt=1))
    rig.tick()
    rig.cancel(waiting)
    rig.tick()
    assert waiting.done.reason is FinishReason.CANCELLED
    assert waiting.done.usage.completion_tokens == 0


def test_a_cancel_in_prefill_takes_effect_by_the_next_tick() -> None:
    rig = Rig(chunk_tokens=10)
    sink = rig.submit(prompt(100))
    rig.tick(3)
    assert rig.sequence(sink).state is State.PREFILL
    rig.cancel(sink)
    rig.tick()
    assert sink.done.reason is FinishReason.CANCELLED
    rig.drain()
    assert rig.context.n_rows_decoded == 30
    rig.check_idle()


def test_a_cancel_while_decoding_keeps_what_came_and_disturbs_nobody() -> None:
    rig = Rig()
    sink, other = rig.submit(prompt(5), **ENDLESS), rig.submit(prompt(9, salt=1), max_tokens=20)
    rig.tick(5)
    rig.cancel(sink)
    rig.drain()
    assert sink.done.reason is FinishReason.CANCELLED
    assert sink.tokens == expected("fake:plain", prompt(5), max_tokens=5, stop_tokens=frozenset())[0]
    assert sink.done.usage.completion_tokens == 5
    assert other.tokens == expected("fake:plain", prompt(9, salt=1), max_tokens=20)[0]


def test_a_cancel_before_the_first_tick_and_one_after_the_end_are_harmless() -> None:
    rig = Rig()
    early, late = rig.submit(prompt(5)), rig.submit(prompt(5))
    rig.cancel(early)
    rig.drain()
    rig.cancel(late)
    rig.drain()
    assert early.done.reason is FinishReason.CANCELLED
    assert late.done.reason is not FinishReason.CANCELLED


def test_a_deadline_fails_a_request_in_the_queue_and_while_running() -> None:
    rig = Rig(slots=1)
    running = rig.submit(prompt(5), deadline_s=10 * TICK_S, **ENDLESS)
    waiting = rig.submit(prompt(5), deadline_s=5 * TICK_S)
    in_time = rig.submit(prompt(5), deadline_s=1000.0, max_tokens=3)
    rig.tick(7)
    assert isinstance(waiting.error, DeadlineExceeded)
    assert not running.ends
    rig.drain()
    assert isinstance(running.error, DeadlineExceeded)
    assert len(running.tokens) >= 9
    assert in_time.done.usage.completion_tokens == len(in_time.tokens) > 0


def test_timings_add_up() -> None:
    rig = Rig(slots=1, chunk_tokens=10)
    rig.submit(prompt(4), max_tokens=5, stop_tokens=frozenset())
    second = rig.submit(prompt(30, salt=1), max_tokens=4, stop_tokens=frozenset())
    rig.drain()
    timings = second.done.timings
    assert timings.queue_s == pytest.approx(5 * TICK_S)
    assert timings.prefill_s == pytest.approx(2 * TICK_S)  # three chunks; the clock stands still inside a tick
    assert timings.first_token_s == pytest.approx(7 * TICK_S)
    assert timings.decode_s == pytest.approx(3 * TICK_S)


def test_a_sink_that_raises_is_cancelled_alone() -> None:
    rig = Rig()
    other = rig.submit(prompt(9), max_tokens=6)
    broken = rig.submit(prompt(5), **ENDLESS)

    def refuse(event: object) -> None:
        raise RuntimeError("no room here")

    broken.put = refuse  # type: ignore[method-assign]
    while rig.loop.tick():
        pass
    assert not any(isinstance(event, Failed) for event in other.events)
    assert other.tokens == expected("fake:plain", prompt(9), max_tokens=6)[0]
    assert rig.loop.meter.counters.ended["cancelled"] == 1
    assert rig.loop.residents.n_running == 0
