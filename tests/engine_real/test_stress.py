"""Hundreds of requests through eight slots of real llama.cpp, with its thread, random cancels and too few cells."""

from __future__ import annotations

import random
import threading
import time
from dataclasses import dataclass, field
from typing import Any, cast

import pytest

from kvasir.engine import Engine, EngineSettings, Event, RequestId
from kvasir.engine.core import Core
from kvasir.engine.engine import open_loop
from kvasir.engine.events import Admitted, Ended, Pressure
from kvasir.engine.loop import Loop
from kvasir.errors import QueueFull
from kvasir.types import FinishReason
from tests.engine_real.noise import OUT_OF_ORDER, check_drift
from tests.engine_real.rig import SpiedContext, SpiedCore, Taken, n_unrun, request
from tests.engine_real.subject import Subject
from tests.engine_real.trial import Bench

N_REQUESTS = 500
MAX_TOKENS = 80


@dataclass(eq=False)
class Waited(Taken):
    """A sink that can be waited for, and that remembers being ended twice."""

    ended: threading.Event = field(default_factory=threading.Event)

    def put(self, event: Event) -> None:
        super().put(event)
        if self.ends:
            self.ended.set()


class Books:
    """An observer on the engine thread: what each request cost, read off its sequence the moment it ends."""

    def __init__(self) -> None:
        self.loop: Loop | None = None
        self.n_rows = 0
        self.events: dict[type, int] = {}

    def __call__(self, event: Any) -> None:
        self.events[type(event)] = self.events.get(type(event), 0) + 1
        if isinstance(event, Ended):
            assert self.loop is not None
            self.n_rows += event.n_prompt - event.n_cached + event.n_generated + event.n_again
            ended = [seq for seq in self.loop.scheduler.ended if seq.id == event.id]
            # Who ends in the queue has nothing in memory: what was cached for it once, and nothing beyond, had run.
            self.n_rows -= n_unrun(ended[0]) if ended else event.n_prompt + event.n_generated - event.n_cached


def prompts_of(subject: Subject) -> list[tuple[int, ...]]:
    """Twelve prompts: three families with a common beginning, and loners."""
    families = [subject.own(i, 60) for i in range(3)]
    shared = [family + subject.own(4 + j, 10 + 12 * j) for family in families for j in range(3)]
    return [*shared, *(subject.own(20 + i, 15 + 25 * i) for i in range(3))]


@pytest.fixture(scope="module")
def bench(tiny: Subject) -> Bench:
    """The noise of these very prompts: over 80 tokens and twelve prompts some are near a border of rounding."""
    shapes = ("chunks of 1", "among 7", OUT_OF_ORDER)
    return Bench.of(tiny, "bf16", prompts=prompts_of(tiny), n_follow=MAX_TOKENS, shapes=shapes)


def test_five_hundred_requests_through_eight_slots_add_up(bench: Bench, tiny: Subject, layout: str) -> None:
    prompts = prompts_of(tiny)
    # Eight slots of up to 150 tokens do not fit: unified must evict and preempt, split has what every slot needs.
    settings = EngineSettings(
        slots=8, layout=layout, context_size=384 if layout == "unified" else 2048, threads=1, max_queue=32, debug=True,
        chunk_tokens=64, prefill_budget=48, aging_s=0.02, context={"type_v": "bf16"}, observe=(books := Books()),
    )  # fmt: skip
    core = SpiedCore()
    loop = books.loop = open_loop(cast(Core, core), tiny.model, settings)
    context = cast(SpiedContext, loop.context)
    with Engine(loop, n_vocab=tiny.model.vocab.n_tokens) as engine:
        sent = send(engine, core, tiny, prompts, N_REQUESTS)
        for sink, _ in sent:
            assert sink.ended.wait(60)
        rows, fault = engine.call(lambda: (context.n_rows_decoded, fault_of(loop))).result(10)
        stats, n_pressed = engine.stats(), books.events.get(Pressure, 0)
        used = engine.call(lambda: empty(loop)).result(10)

    assert fault is None
    assert used == 0
    assert (stats.slots_used, stats.queue, stats.requests_open) == (0, 0, 0)
    assert all(len(sink.ends) == 1 and sink.events[-1] is sink.ends[0] for sink, _ in sent)
    counters = stats.counters
    assert counters.queued == sum(counters.ended.values()) == N_REQUESTS
    assert set(counters.ended) == {"length", "cancelled"}
    assert counters.ended["cancelled"] > N_REQUESTS // 20
    assert rows == stats.rows_decoded == books.n_rows == counters.prefill_rows + counters.decode_rows
    assert stats.rows_lost == counters.ledger_faults == counters.sinks_broken == counters.retries == 0
    happened = ["coalesced", "shared_live", "shared_parked", "parked", "evicted", "aged"]
    if layout == "unified":
        happened += ["preempted", "rows_again"]
    for name in happened:
        assert getattr(counters, name) > 0, name
    assert books.events[Admitted] == counters.admitted
    assert n_pressed == counters.evicted + counters.preempted
    check_tokens(bench, sent)


def send(
    engine: Engine, core: SpiedCore, subject: Subject, prompts: list[tuple[int, ...]], n: int
) -> list[tuple[Waited, tuple[int, ...]]]:
    """Submit as fast as the gate lets, and cancel about every sixth: at once, or after some tokens."""
    dice = random.Random(5)
    sent: list[tuple[Waited, tuple[int, ...]]] = []
    doomed: list[tuple[Waited, int]] = []
    for _ in range(n):
        tokens = dice.choice(prompts)
        sink = Waited()
        wanted = request(subject.model, tokens, max_tokens=dice.randint(1, MAX_TOKENS), priority=dice.randint(0, 2))
        core.kept[id(wanted.sampler)] = sink.logits
        sink.id = submit(engine, wanted, sink)
        sent.append((sink, tokens))
        if dice.random() < 0.2:
            doomed.append((sink, dice.choice([0, 0, 1, 5])))
        for other, n_tokens in list(doomed):
            if other.ends or len(other.tokens) >= n_tokens:
                engine.cancel(other.id)
                doomed.remove((other, n_tokens))
    return sent


def submit(engine: Engine, wanted: Any, sink: Waited) -> RequestId:
    while True:
        try:
            return engine.submit(wanted, sink)
        except QueueFull as full:
            time.sleep(min(full.retry_after_s or 0.0, 0.002))


def fault_of(loop: Loop) -> str | None:
    """Compare ledgers, positions, cells and rows with llama.cpp's. Engine thread."""
    return loop.runner.fault(loop.residents, shared=loop.context.kv_unified)


def empty(loop: Loop) -> int:
    """Give up everything parked; return the cells still in use. Engine thread."""
    for resident in loop.residents.parked:
        loop._evict(resident)
    return int(loop.context.memory.used_cells)


def check_tokens(bench: Bench, sent: list[tuple[Waited, tuple[int, ...]]]) -> None:
    """Everybody got what it would have got alone, as far as it came."""
    parted = 0
    for sink, tokens in sent:
        done, n = sink.done, len(sink.tokens)
        assert (done.usage.prompt_tokens, done.usage.completion_tokens) == (len(tokens), n)
        assert done.reason in (FinishReason.LENGTH, FinishReason.CANCELLED)
        whole = bench.alone(tokens, max_tokens=MAX_TOKENS)
        parted += check_drift(sink, Taken(whole.events[:n], whole.logits[:n]), bench.noise) < n
    assert parted <= len(sent) // 50
