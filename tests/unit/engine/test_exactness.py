"""The same request gives the same tokens, however it was scheduled."""

from __future__ import annotations

import pytest

from kvasir.engine import Tokens
from kvasir.types import FinishReason, Sampling
from tests.unit.engine.rig import Rig, expected, prompt

LAYOUTS = ("unified", "split")
KINDS = ("fake:plain", "fake:window", "fake:recurrent", "fake:hybrid")


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("path", KINDS)
def test_a_request_alone_equals_the_same_among_15_others(path: str, layout: str) -> None:
    rig = Rig(path, slots=8, context_size=2048, layout=layout)
    sinks = [rig.submit(prompt(5 + 11 * i, salt=i), seed=i, temperature=0.8, max_tokens=24) for i in range(16)]
    rig.drain()
    rig.check_idle()
    for i, sink in enumerate(sinks):
        tokens, stop = expected(path, prompt(5 + 11 * i, salt=i), seed=i, temperature=0.8, max_tokens=24)
        assert sink.tokens == tokens
        assert sink.done.stop_token == stop


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_a_chunked_prompt_equals_an_unchunked_one(chunk: int, layout: str) -> None:
    rig = Rig(chunk_tokens=chunk, prefill_budget=chunk, layout=layout)
    sinks = [rig.submit(prompt(100, salt=i), max_tokens=10) for i in range(3)]
    rig.drain()
    for i, sink in enumerate(sinks):
        assert sink.tokens == expected("fake:plain", prompt(100, salt=i), max_tokens=10)[0]


@pytest.mark.parametrize("strategy", ["DecodeMaximal", "PrefillPriority", "balanced"])
def test_every_strategy_gives_the_same_tokens(strategy: str) -> None:
    rig = Rig(strategy=strategy, prefill_budget=16)
    sinks = [rig.submit(prompt(30 * (i + 1), salt=i), max_tokens=12) for i in range(6)]
    rig.drain()
    for i, sink in enumerate(sinks):
        assert sink.tokens == expected("fake:plain", prompt(30 * (i + 1), salt=i), max_tokens=12)[0]


@pytest.mark.parametrize("n", [1, 4, 16])
def test_max_tokens_is_exact(n: int) -> None:
    rig = Rig()
    sink = rig.submit(prompt(10), max_tokens=n, stop_tokens=frozenset())
    rig.drain()
    assert len(sink.tokens) == n
    assert sink.done.reason is FinishReason.LENGTH
    assert sink.done.usage.completion_tokens == n
    assert rig.context.n_rows_decoded == 10 + n - 1  # the last token was sampled and never ran


def test_a_stop_token_is_not_sent_and_not_counted() -> None:
    rig = Rig("fake:plain?eog_every=4")
    sink = rig.submit(prompt(10), max_tokens=200)
    rig.drain()
    assert sink.done.reason is FinishReason.STOP
    assert sink.done.stop_token in rig.model.vocab.eog_tokens
    assert sink.done.stop_token not in sink.tokens
    assert sink.done.usage.completion_tokens == len(sink.tokens)
    assert rig.context.n_rows_decoded == 10 + len(sink.tokens)


def test_generation_ends_with_length_when_the_context_is_full() -> None:
    rig = Rig(context_size=32, slots=1)
    sink = rig.submit(prompt(30), max_tokens=100, stop_tokens=frozenset())
    rig.drain()
    assert sink.done.reason is FinishReason.LENGTH
    assert len(sink.tokens) == 3  # two more cells, and the token that found none


def test_usage_sums_to_the_rows_the_core_counted() -> None:
    rig = Rig("fake:plain?eog_every=8", slots=3)
    sinks = [rig.submit(prompt(3 + 5 * i, salt=i), max_tokens=1 + i) for i in range(20)]
    rig.drain()
    usages = [sink.done.usage for sink in sinks]
    n_unrun = sum(sink.done.reason is FinishReason.LENGTH for sink in sinks)
    total = sum(u.prompt_tokens - u.cached_tokens + u.completion_tokens for u in usages)
    assert total - n_unrun == rig.context.n_rows_decoded
    stats = rig.loop.stats()
    assert stats.rows_decoded == stats.counters.prefill_rows + stats.counters.decode_rows == rig.context.n_rows_decoded


def test_thousands_of_requests_through_four_slots_leak_nothing() -> None:
    rig = Rig()
    for i in range(2000):
        rig.submit(prompt(1 + i % 5, salt=i), max_tokens=1 + i % 2)
        if i % 40 == 39:
            rig.drain()
            rig.sinks.clear()
    assert rig.loop.residents.n_running == 0
    assert rig.context.memory.used_cells == rig.loop.residents.n_cells(shared=True)
    assert rig.loop.meter.counters.admitted == 2000
    assert not rig.loop.scheduler.open_sequences()


def test_log_probabilities_come_with_their_tokens() -> None:
    rig = Rig()
    sink = rig.submit(prompt(10), max_tokens=3, sampling=Sampling(logprobs=2), stop_tokens=frozenset())
    rig.drain()
    reported = [event.logprobs[0] for event in sink.events if isinstance(event, Tokens)]
    assert len(reported) == 3
    assert all(each is not None and len(each.top) == 2 for each in reported)
