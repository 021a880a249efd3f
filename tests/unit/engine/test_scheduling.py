"""Who runs when: batching, queue, priorities, age, cancel, deadlines."""

from __future__ import annotations

from typing import Any

import pytest

from kvasir.engine import Failed
from kvasir.engine.scheduler import are_late
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


def wide_rig(**settings: Any) -> Rig:
    """The usual sizes: 512 rows a tick, of these 128 for prompts that came after a stream."""
    return Rig(**({"slots": 8, "context_size": 16384, "batch": 512, "ubatch": 512} | settings))


def prompt_rows(rig: Rig, *, since: int) -> list[int]:
    """Rows of each tick that were not a stream's next token, as long as there were any."""
    rows = [sum(n_tokens for _, _, n_tokens in step if n_tokens > 1) for step in rig.context.steps[since:]]
    return rows[: rows.index(0)]


def test_one_late_prompt_spares_one_stream() -> None:
    rig = wide_rig()
    stream = rig.submit(prompt(3), **ENDLESS)
    rig.tick()
    rig.submit(prompt(600, salt=1), **ENDLESS)
    rig.tick(8)
    assert prompt_rows(rig, since=1) == [128, 128, 128, 128, 88]
    assert len(stream.tokens) == 9


def test_four_late_prompts_spare_two_streams() -> None:
    rig = wide_rig()
    for i in range(2):
        rig.submit(prompt(3, salt=i), **ENDLESS)
    rig.tick()
    for i in range(4):
        rig.submit(prompt(256, salt=2 + i), cache=False, **ENDLESS)
    rig.tick(10)
    assert prompt_rows(rig, since=1) == [128] * 8


def test_a_burst_is_read_in_whole_chunks_beside_its_own_streams() -> None:
    rig = wide_rig()
    for i in range(8):
        rig.submit(prompt(600, salt=i), cache=False, **ENDLESS)
    rig.tick(12)
    n_ticks = len(prompt_rows(rig, since=0))
    totals = [sum(n_tokens for _, _, n_tokens in step) for step in rig.context.steps]
    assert totals[: n_ticks - 1] == [512] * (n_ticks - 1)
    assert totals[n_ticks:] == [8] * (12 - n_ticks)


def test_what_is_queued_while_the_first_of_a_burst_is_read_belongs_to_it() -> None:
    rig = wide_rig()
    rig.submit(prompt(100), **ENDLESS)
    rig.loop.tick()
    rig.submit(prompt(1000, salt=1), **ENDLESS)  # the clock stands still: it came before the tick had ended
    rig.tick(4)
    assert prompt_rows(rig, since=1) == [511, 489]


def test_a_prompt_that_waited_for_a_slot_spares_whoever_ran_meanwhile() -> None:
    rig = wide_rig(slots=2)
    rig.submit(prompt(3), **ENDLESS)
    short = rig.submit(prompt(3, salt=1), max_tokens=4, stop_tokens=frozenset())
    rig.submit(prompt(300, salt=2), cache=False, **ENDLESS)
    rig.tick(4)
    assert short.ends
    rig.tick(5)
    assert prompt_rows(rig, since=4) == [128, 128, 44]


@pytest.mark.parametrize(
    ("prompts", "streams", "late"),
    [
        ([], [], False),
        ([5.0], [], False),
        ([], [1.0], False),
        ([5.0], [5.0], False),
        ([5.0], [1.0, 9.0], True),
        ([1.0, 5.0], [3.0], True),
        ([1.0, 2.0], [3.0, 4.0], False),
    ],
)
def test_a_prompt_is_late_if_a_stream_had_its_first_token_before(
    prompts: list[float], streams: list[float], late: bool
) -> None:
    assert are_late(prompts, streams) is late


def test_a_free_slot_is_the_lowest_so_that_streams_are_neighbours() -> None:
    rig = Rig(slots=4, layout="split")
    sinks = [rig.submit(prompt(4, salt=i), cache=False, **ENDLESS) for i in range(4)]
    rig.tick()
    for sink in (sinks[3], sinks[1], sinks[2]):
        rig.cancel(sink)
    rig.tick()
    late = [rig.submit(prompt(4, salt=4 + i), cache=False, **ENDLESS) for i in range(2)]
    rig.tick()
    assert [rig.sequence(sink).slot for sink in (sinks[0], *late)] == [0, 1, 2]


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
