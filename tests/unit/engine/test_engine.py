"""The engine with its thread: opening, submitting from many threads, closing in every way."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest

from kvasir.engine import Engine, EngineSettings, Event, Tokens
from kvasir.engine.settings import default_threads, kv_bytes, layout_of, sequence_limit
from kvasir.errors import BadOption, EngineStopped, ModelLoadError, PromptTooLong, QueueFull, Unsupported
from kvasir.native import fake
from kvasir.types import FinishReason
from tests.unit.engine.rig import CORE, Collected, expected, prompt, request

WAIT_S = 20.0
ROOT = Path(__file__).parents[3]


class Waiting(Collected):
    """A sink another thread can wait on."""

    def __init__(self) -> None:
        super().__init__()
        self.ended = threading.Event()
        self.first = threading.Event()

    def put(self, event: Event) -> None:
        super().put(event)
        self.first.set()
        if not isinstance(event, Tokens):
            self.ended.set()

    def wait(self) -> Waiting:
        assert self.ended.wait(WAIT_S)
        return self


@pytest.fixture
def model() -> fake.Model:
    return fake.Model.load("fake:plain")


def open_engine(model: fake.Model, **settings: Any) -> Engine:
    options: dict[str, Any] = {"slots": 4, "context_size": 1024, "threads": 1, "debug": True}
    return Engine.open(model, EngineSettings(**(options | settings)), core=CORE)


@pytest.fixture
def engine(model: fake.Model) -> Iterator[Engine]:
    with open_engine(model) as made:
        yield made


def slow(engine: Engine, seconds: float) -> None:
    context = cast(fake.Context, engine._loop.context)
    context.step_delay_s = seconds


def test_a_request_gets_its_tokens(engine: Engine, model: fake.Model) -> None:
    sink = Waiting()
    engine.submit(request(model, prompt(10), max_tokens=20), sink)
    made, stop = expected("fake:plain", prompt(10), max_tokens=20)
    assert sink.wait().tokens == made
    assert sink.done.stop_token == stop


def test_two_threads_submit_and_nothing_is_mixed(engine: Engine, model: fake.Model) -> None:
    sinks: dict[int, Waiting] = {}

    def work(first: int) -> None:
        for i in range(first, first + 20):
            sinks[i] = Waiting()
            while True:
                try:
                    engine.submit(request(model, prompt(5 + i, salt=i), max_tokens=6), sinks[i])
                    break
                except QueueFull as full:
                    time.sleep(full.retry_after_s or 0.01)

    threads = [threading.Thread(target=work, args=(n,)) for n in (0, 20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    for i in range(40):
        assert sinks[i].wait().tokens == expected("fake:plain", prompt(5 + i, salt=i), max_tokens=6)[0]
    assert sum(engine.stats().counters.ended.values()) == 40


def test_cancel_ends_a_running_request(engine: Engine, model: fake.Model) -> None:
    slow(engine, 0.005)
    sink = Waiting()
    request_id = engine.submit(request(model, prompt(10), max_tokens=500, stop_tokens=frozenset()), sink)
    assert sink.first.wait(WAIT_S)
    engine.cancel(request_id)
    assert sink.wait().done.reason is FinishReason.CANCELLED


def test_a_prompt_that_can_never_fit_is_refused_at_once_with_both_numbers(engine: Engine, model: fake.Model) -> None:
    with pytest.raises(PromptTooLong) as refused:
        engine.submit(request(model, prompt(1025)), Waiting())
    assert (refused.value.n_tokens, refused.value.limit) == (1025, 1024)
    sink = Waiting()
    engine.submit(request(model, prompt(1024), stop_tokens=frozenset()), sink)
    assert len(sink.wait().tokens) == 1


@pytest.mark.parametrize(
    ("tokens", "options", "said"),
    [
        ((), {}, "empty"),
        ((1, 2, 70_000), {}, "70000"),
        ((1, -1), {}, "-1"),
        ((1, 2), {"max_tokens": 0}, "max_tokens"),
    ],
)
def test_a_bad_request_is_refused_in_one_sentence(
    engine: Engine, model: fake.Model, tokens: tuple[int, ...], options: dict[str, Any], said: str
) -> None:
    good = request(model, (1, 2), **options)
    with pytest.raises(BadOption, match=said):
        engine.submit(type(good)(tokens, good.sampling, good.sampler, good.stop_tokens, good.max_tokens), Waiting())


def test_close_answers_what_is_open_and_later_submits_are_refused(model: fake.Model) -> None:
    engine = open_engine(model, slots=2)
    slow(engine, 0.01)
    sinks = [Waiting() for _ in range(6)]
    for sink in sinks:
        engine.submit(request(model, prompt(10), max_tokens=500, stop_tokens=frozenset()), sink)
    assert sinks[0].first.wait(WAIT_S)
    engine.close()
    engine.close()
    assert all(isinstance(sink.error, EngineStopped) for sink in sinks)
    with pytest.raises(EngineStopped, match="closed"):
        engine.submit(request(model, prompt(10)), Waiting())
    with pytest.raises(EngineStopped):
        engine.call(lambda: None)
    engine.cancel(cast(Any, 1))
    assert not engine._thread.is_alive()
    assert engine._loop.context.closed  # type: ignore[attr-defined]
    assert engine.stats().requests_open == 0


def test_close_does_not_wait_for_a_long_decode(model: fake.Model) -> None:
    engine = open_engine(model)
    slow(engine, 30.0)
    sink = Waiting()
    engine.submit(request(model, prompt(10)), sink)
    time.sleep(0.05)
    started = time.monotonic()
    engine.close()
    assert time.monotonic() - started < 5
    assert isinstance(sink.error, EngineStopped)


def test_close_from_a_sink_does_not_wait_for_itself(model: fake.Model) -> None:
    engine = open_engine(model)

    class Closing(Waiting):
        def put(self, event: Event) -> None:
            if isinstance(event, Tokens):
                engine.close()
            super().put(event)

    sink = Closing()
    engine.submit(request(model, prompt(10), max_tokens=100, stop_tokens=frozenset()), sink)
    assert isinstance(sink.wait().error, EngineStopped)


def test_a_fault_of_ours_answers_everybody_and_stops_the_engine(
    model: fake.Model, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engine = open_engine(model)
    slow(engine, 0.005)
    sinks = [Waiting() for _ in range(6)]
    for sink in sinks:
        engine.submit(request(model, prompt(10), max_tokens=500, stop_tokens=frozenset()), sink)
    assert sinks[0].first.wait(WAIT_S)

    def broken() -> Any:
        raise ZeroDivisionError("oops")

    monkeypatch.setattr(engine._loop.scheduler, "plan", broken)
    for sink in sinks:
        assert isinstance(sink.wait().error, EngineStopped)
    with pytest.raises(EngineStopped, match="ZeroDivisionError: oops"):
        engine.submit(request(model, prompt(10)), Waiting())
    assert "fault of ours" in caplog.text
    engine.close()


def test_an_engine_nobody_holds_closes_itself(model: fake.Model) -> None:
    engine = open_engine(model)
    thread = engine._thread
    del engine
    gc.collect()
    thread.join(WAIT_S)
    assert not thread.is_alive()


def test_a_script_that_never_closes_ends_promptly() -> None:
    script = (
        "from tests.unit.engine.test_engine import *\n"
        "model = fake.Model.load('fake:plain')\n"
        "engine = open_engine(model); slow(engine, 0.5); sink = Waiting()\n"
        "engine.submit(request(model, prompt(10), max_tokens=500, stop_tokens=frozenset()), sink)\n"
        "sink.first.wait(10); print('last line', flush=True)\n"
    )
    started = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "last line\n", "")
    assert time.monotonic() - started < 30


def test_a_call_runs_on_the_engine_thread(engine: Engine) -> None:
    assert engine.call(lambda: threading.current_thread().name).result(WAIT_S) == "kvasir-engine"
    with pytest.raises(ZeroDivisionError):
        engine.call(lambda: 1 // 0).result(WAIT_S)


def test_stats_tell_slots_cells_counters_and_times(engine: Engine, model: fake.Model) -> None:
    sink = Waiting()
    engine.submit(request(model, prompt(10), max_tokens=4, stop_tokens=frozenset()), sink)
    sink.wait()
    engine.call(lambda: None).result(WAIT_S)
    stats = engine.stats()
    assert (stats.slots, stats.slots_used, stats.slots_parked, stats.queue) == (4, 0, 1, 0)
    assert (stats.cells, stats.cells_used) == (1024, 13)  # the parked sequence: prompt and all but the last token
    assert (stats.counters.ticks, stats.counters.prefill_rows, stats.counters.decode_rows) == (4, 10, 3)
    assert stats.counters.ended == {"length": 1}
    assert stats.tick_s.n == 4
    assert stats.first_token_s.n == stats.queue_s.n == 1
    assert 0 < stats.python_share < 1
    assert stats.layout == "unified"


def test_observers_get_every_event_and_cannot_stop_the_engine(
    model: fake.Model, caplog: pytest.LogCaptureFixture
) -> None:
    seen: list[Any] = []

    def observe(event: Any) -> None:
        seen.append(event)
        if type(event).__name__ == "FirstToken":
            raise RuntimeError("not me")

    with open_engine(model, observe=observe) as engine:
        for _ in range(2):
            sink = Waiting()
            engine.submit(request(model, prompt(10), max_tokens=4), sink)
            sink.wait()
    assert [type(event).__name__ for event in seen] == ["Queued", "Admitted", "FirstToken"]
    assert [record.message for record in caplog.records] == ["the observer raised at FirstToken and is called no more"]


def test_an_encoder_cannot_generate() -> None:
    with pytest.raises(Unsupported, match="encoder"):
        open_engine(fake.Model.load("fake:embed"))


def test_in_the_split_layout_slots_divide_the_cells(model: fake.Model) -> None:
    with open_engine(model, slots=2, context_size=256, layout="split", context={"type_k": "q8_0"}) as engine:
        assert engine.stats().layout == "split"
        assert engine.stats().slots == 2
        assert engine.limit == 128


@pytest.mark.parametrize(
    "wrong", [{"slots": 0}, {"layout": "unifed"}, {"max_queue": -1}, {"slots": 9, "batch": 8}, {"chunk_tokens": True}]
)
def test_wrong_settings_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(BadOption):
        EngineSettings(**wrong)


def test_auto_is_split_only_where_every_slot_has_the_trained_context() -> None:
    model = fake.Model.load("fake:plain?n_ctx_train=2048")

    def layout(available: int, **options: Any) -> tuple[bool, int]:
        return layout_of(EngineSettings(**options), model, available=available)

    much, little = 1 << 40, 1 << 20
    assert layout(much, slots=4) == (False, 4 * 2048)  # open size, small model: every slot has the trained context
    assert layout(little, slots=4) == (True, 2048)
    assert layout(much, slots=4, context_size=2048) == (True, 2048)
    assert layout(little, slots=4, context_size=8192) == (False, 8192)
    assert layout(much, slots=1) == (True, 2048)
    assert layout(much, slots=4, layout="unified") == (True, 2048)
    assert layout(much, slots=2, layout="split", context_size=512) == (False, 512)


def test_a_sequence_stays_within_the_trained_context_unless_rope_is_stretched() -> None:
    assert sequence_limit(EngineSettings(), n_ctx_seq=8192, n_ctx_train=2048) == 2048
    stretched = EngineSettings(context={"rope_scaling": "yarn"})
    assert sequence_limit(stretched, n_ctx_seq=8192, n_ctx_train=2048) == 8192


def test_threads_default_to_cores_this_process_may_use() -> None:
    assert 1 <= default_threads() <= len(os.sched_getaffinity(0))


def test_a_context_that_cannot_be_held_is_refused_with_numbers() -> None:
    model = fake.Model.load("fake:plain")
    with pytest.raises(
        ModelLoadError, match=r"a context of 2,000,000,000 tokens needs about [\d,.]+ GiB .* context_size"
    ):
        Engine.open(model, EngineSettings(context_size=2_000_000_000), core=CORE)
    assert kv_bytes(model, 1000, {"type_k": "q8_0"}) < kv_bytes(model, 1000, {})
