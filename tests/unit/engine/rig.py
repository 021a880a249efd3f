"""An engine on the fake core, ticked by hand: no thread, no real clock, every invariant checked after every tick."""

from __future__ import annotations

import itertools
from concurrent.futures import wait
from dataclasses import dataclass, field
from typing import Any, cast

from kvasir.engine import Binding, Done, EngineSettings, Event, Failed, Request, RequestId, Tokens
from kvasir.engine.core import Core
from kvasir.engine.engine import open_loop
from kvasir.engine.loop import Loop
from kvasir.engine.mailbox import Cancel, Submit
from kvasir.engine.sequence import Sequence, State
from kvasir.native import fake
from kvasir.types import Sampling

CORE = cast(Core, fake)
TICK_S = 0.01
NOBODY = RequestId(0)


@dataclass
class Collected:
    """A sink that keeps what it gets."""

    events: list[Event] = field(default_factory=list)
    id: RequestId = NOBODY

    def put(self, event: Event) -> None:
        self.events.append(event)

    @property
    def tokens(self) -> list[int]:
        return [token for event in self.events if isinstance(event, Tokens) for token in event.ids]

    @property
    def ends(self) -> list[Done | Failed]:
        return [event for event in self.events if not isinstance(event, Tokens)]

    @property
    def done(self) -> Done:
        (end,) = self.ends
        assert isinstance(end, Done), end
        return end

    @property
    def error(self) -> Exception:
        (end,) = self.ends
        assert isinstance(end, Failed), end
        return end.error


def sampler(model: fake.Model, tokens: tuple[int, ...], *, seed: int = 0, temperature: float = 0.0) -> fake.Sampler:
    params = fake.SamplerParams()
    params.seed, params.temperature = seed, temperature
    made = fake.Sampler(model.vocab, params)
    made.accept_prompt(list(tokens))
    return made


def request(model: fake.Model, tokens: tuple[int, ...], **options: Any) -> Request:
    chosen = sampler(model, tokens, seed=options.pop("seed", 0), temperature=options.pop("temperature", 0.0))
    values: dict[str, Any] = {
        "sampling": options.pop("sampling", Sampling()), "sampler": chosen, "max_tokens": 8,
        "stop_tokens": frozenset(model.vocab.eog_tokens),
    }  # fmt: skip
    return Request(tokens, **(values | options))


def prompt(n_tokens: int, *, salt: int = 0) -> tuple[int, ...]:
    return tuple(97 + (i * 7 + salt * 13 + i * i * salt) % 26 for i in range(n_tokens))


def expected(path: str, tokens: tuple[int, ...], **options: Any) -> tuple[list[int], int | None]:
    """What one request gives when nobody schedules anything: one token a decode, by hand."""
    model = fake.Model.load(path)
    wanted = request(model, tokens, **options)
    context = fake.Context(model, n_ctx=2048)
    made: list[int] = []
    row = fake.Row(0, 0, list(tokens), cast(fake.Sampler, wanted.sampler))
    while len(made) < wanted.max_tokens:
        token = context.step([row]).tokens[0]
        assert token is not None
        if token in wanted.stop_tokens:
            return made, token
        made.append(token)
        row = fake.Row(0, len(tokens) + len(made) - 1, [token], cast(fake.Sampler, wanted.sampler))
    return made, None


def await_rows(loop: Loop) -> None:
    """Wait until all searches are over and what they found is read, so that no tick passes in which nothing happens."""
    assert loop.warm is not None
    wait(loop.warm._searches.values(), 30)
    for restore in loop.warm._restores.values():
        if restore.loading is not None:
            restore.loading.result(30)


def imported_per_tick(rig: Any, stream: Any, late: list[Any]) -> list[int]:
    """Tick until the late ones have ended, while a stream runs: it never misses a tick, whatever they import in it."""
    imported = []
    while any(not sink.ends for sink in late):
        await_rows(rig.loop)
        before, n_said = rig.loop.warm.n_imported, len(stream.tokens)
        rig.tick()
        imported.append(rig.loop.warm.n_imported - before)
        assert len(stream.tokens) == n_said + 1
    return imported


class Rig:
    """A loop to tick by hand. Time passes only in ticks, or as a test says."""

    def __init__(self, path: str = "fake:plain", *, cache: Binding | None = None, **settings: Any) -> None:
        self.now = 0.0
        self.path = path
        self.model = fake.Model.load(path)
        options: dict[str, Any] = {"slots": 4, "context_size": 512, "batch": 64, "ubatch": 64, "threads": 1}
        self.settings = EngineSettings(**(options | settings))
        self.loop: Loop = open_loop(CORE, self.model, self.settings, cache=cache, clock=lambda: self.now)
        self.context = cast(fake.Context, self.loop.context)
        self.sinks: list[Collected] = []
        self._ids = itertools.count(1)

    def submit(self, tokens: tuple[int, ...], **options: Any) -> Collected:
        sink = Collected()
        self.loop.gate.enter()
        sink.id = RequestId(next(self._ids))
        self.sinks.append(sink)
        seq = Sequence(sink.id, request(self.model, tokens, **options), sink, now=self.now)
        self.loop.mailbox.post(Submit(seq))
        return sink

    def cancel(self, sink: Collected) -> None:
        self.loop.mailbox.post(Cancel(sink.id))

    def tick(self, n: int = 1) -> bool:
        more = True
        for _ in range(n):
            n_steps = len(self.context.steps)
            more = self.loop.tick()
            self.now += TICK_S
            self.check(n_steps)
        return more

    def drain(self, most: int = 5000) -> None:
        for _ in range(most):
            if not self.tick():
                return
        raise AssertionError("the engine did not come to rest")

    def sequence(self, sink: Collected) -> Sequence:
        (seq,) = [seq for seq in self.loop.scheduler.open_sequences() if seq.id == sink.id]
        return seq

    def check(self, n_steps: int = 0) -> None:
        """Every invariant of the engine."""
        scheduler, residents = self.loop.scheduler, self.loop.residents
        live = [*scheduler.active.values(), *scheduler.ended]
        assert self.loop.runner.fault(residents, shared=self.context.kv_unified) is None
        assert residents.n_running == len(live) == len({seq.slot for seq in live})
        for seq in scheduler.active.values():
            assert seq.state in (State.FOLLOW, State.LOADING, State.PREFILL, State.DECODE)
            assert seq.state is not State.DECODE or (seq.n_left == 1 and seq.n_generated > 0)
            assert seq.state is not State.FOLLOW or seq.n_decoded == 0
        assert all(seq.state is State.DONE for seq in scheduler.ended)
        waiting = [seq for seq in scheduler.open_sequences() if seq.state is State.WAITING]
        assert len(waiting) == len(scheduler.waiting)
        assert all(seq.slot is None for seq in waiting)
        if self.context.memory.kind != "recurrent":
            assert self.context.memory.used_cells <= self.context.memory.n_cells
        for step in self.context.steps[n_steps:]:
            assert sum(n_tokens for _, _, n_tokens in step) <= scheduler.limits.n_rows
            assert [slot for slot, _, _ in step] == sorted({slot for slot, _, _ in step})
        for sink in self.sinks:
            assert len(sink.ends) <= 1
            assert not sink.ends or sink.events[-1] is sink.ends[0]
        n_ended = sum(bool(sink.ends) for sink in self.sinks)
        assert self.loop.gate.n_open == len(self.sinks) - n_ended

    def check_idle(self) -> None:
        """What must hold when nothing is open: every sink answered, everything free, all rows accounted for."""
        assert all(len(sink.ends) == 1 for sink in self.sinks)
        assert self.loop.residents.n_running == 0
        for resident in self.loop.residents.parked:
            self.context.memory.remove(resident.slot, 0, None)
        assert self.context.memory.used_cells == 0
        assert self.loop.gate.n_open == 0
        counters = self.loop.meter.counters
        assert counters.queued == sum(counters.ended.values()) == len(self.sinks)
