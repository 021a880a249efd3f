"""How many: tokens exact, rows as the core counted them, eight at once and not one after the other."""

from __future__ import annotations

import pytest

from kvasir.types import FinishReason
from tests.engine_real.rig import Rig
from tests.engine_real.subject import Subject


@pytest.mark.parametrize("n", [1, 4, 16])
def test_max_tokens_is_exact(subject: Subject, layout: str, n: int) -> None:
    with Rig(subject.model, layout=layout) as rig:
        beside = rig.submit(subject.prompt(20, salt=1), max_tokens=9)
        sink = rig.submit(subject.prompt(30), max_tokens=n)
        rig.drain()
        assert len(sink.tokens) == sink.done.usage.completion_tokens == n
        assert sink.done.reason is FinishReason.LENGTH
        assert len(beside.tokens) == 9
        assert rig.context.n_rows_decoded == 30 + (n - 1) + 20 + (9 - 1)  # a token sampled last never runs


def test_eight_that_share_a_prefix_run_side_by_side(subject: Subject, layout: str) -> None:
    common = subject.prompt(96, salt=3)
    with Rig(subject.model, layout=layout, slots=8, context_size=2048) as rig:
        sinks = [rig.submit(common + subject.own(i), max_tokens=20) for i in range(8)]
        while not all(sink.tokens for sink in sinks):
            rig.tick()
            assert not any(sink.ends for sink in sinks)
        rig.drain()
        assert rig.counters.coalesced == 7
        assert any(len(step) == 8 and all(n == 1 for _, n in step) for step in rig.context.steps)


def test_eight_prompts_of_1024_common_and_256_own_tokens_prefill_3072_rows(tiny: Subject, layout: str) -> None:
    common = tiny.prompt(1024, salt=3)
    with Rig(tiny.model, layout=layout, slots=8, context_size=8 * 2048) as rig:
        sinks = [rig.submit(common + tiny.own(i, 256), max_tokens=5) for i in range(8)]
        rig.drain()
        assert rig.context.n_rows_decoded == 1024 + 8 * 256 + 8 * (5 - 1)  # a token sampled last never runs
        assert rig.counters.prefill_rows == 3072
        assert [sink.done.usage.cached_tokens for sink in sinks] == [0] + [1024] * 7


def test_every_row_is_in_the_books_of_a_request(subject: Subject, layout: str) -> None:
    """Stops, lengths, cancels in the queue, in prefill and in decode, reuse: `drain` adds everything up."""
    first = subject.prompt(40, salt=7)
    with Rig(subject.model, layout=layout, slots=3, chunk_tokens=16, prefill_budget=16) as rig:
        said = rig.run(first, max_tokens=12).tokens
        stop = frozenset({next(token for i, token in enumerate(said) if i > 3 and token not in said[:i])})
        stopped = rig.submit(first, max_tokens=12, stop_tokens=stop)
        sinks = [rig.submit(subject.prompt(10 + 6 * i, salt=i % 4), max_tokens=1 + i) for i in range(12)]
        while not sinks[0].ends:
            rig.tick()
        for sink in sinks[2:12:3]:
            rig.cancel(sink)
        rig.drain()
        assert stopped.done.reason is FinishReason.STOP
        assert stopped.done.stop_token in stop
        assert stopped.tokens == said[: len(stopped.tokens)]
        assert rig.counters.ended["cancelled"] > 0
        assert rig.counters.cached_tokens > 0
        stats = rig.loop.stats()
        assert stats.rows_decoded == rig.context.n_rows_decoded
        assert stats.counters.prefill_rows + stats.counters.decode_rows == rig.context.n_rows_decoded


def test_generation_ends_when_the_cells_of_a_sequence_are_full(tiny: Subject, layout: str) -> None:
    with Rig(tiny.model, layout=layout, slots=2, context_size=512) as rig:
        limit = rig.loop.scheduler.limits.n_seq_tokens
        assert limit == (512 if layout == "unified" else 256)
        sink = rig.run(tiny.prompt(limit - 2), max_tokens=50)
        assert sink.done.reason is FinishReason.LENGTH
        assert len(sink.tokens) == 3  # two more cells, and the token that found none


def test_five_hundred_requests_through_four_slots_leak_nothing(tiny: Subject, layout: str) -> None:
    with Rig(tiny.model, layout=layout) as rig:
        for i in range(500):
            rig.submit(tiny.prompt(1 + i % 9, salt=i), max_tokens=1 + i % 3)
            if i % 50 == 49:
                rig.drain()
        assert rig.counters.admitted == 500
        for resident in rig.loop.residents.parked:
            rig.loop._evict(resident)
        assert rig.context.memory.used_cells == 0
