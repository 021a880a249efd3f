"""An engine on real llama.cpp, ticked by hand: what it decoded and every logit it sampled from are kept.

The loop is the real one; only its core is watched. `debug` compares the ledgers with llama.cpp's after every tick.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from kvasir import native
from kvasir.engine import Binding, Done, EngineSettings, Event, Failed, Request, RequestId, Tokens
from kvasir.engine.core import Core
from kvasir.engine.engine import open_loop
from kvasir.engine.mailbox import Cancel, Submit
from kvasir.engine.sequence import Sequence
from kvasir.types import FinishReason, Sampling

Logits = NDArray[np.float32]
NOBODY = RequestId(0)


@dataclass(eq=False)
class Taken:
    """A sink that keeps what it gets, and the logits that every token of it was sampled from."""

    events: list[Event] = field(default_factory=list)
    logits: list[Logits] = field(default_factory=list)
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


class SpiedRow(NamedTuple):
    """A row and the arguments it was made with."""

    row: native.Row
    slot: int
    n_tokens: int
    sampler: Any


class SpiedContext:
    """A native context that remembers its steps. Everything else is the context's own."""

    def __init__(self, context: native.Context, kept: dict[int, list[Logits]]) -> None:
        self._context = context
        self._kept = kept  # by the identity of the sampler, which is the request's own
        self.steps: list[list[tuple[int, int]]] = []  # of each step the slots and how many tokens ran in them

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)

    def step(self, rows: list[SpiedRow]) -> native.Step:
        step = self._context.step([spied.row for spied in rows])
        self.steps.append([(spied.slot, spied.n_tokens) for spied in rows])
        if step.status == "ok":
            for i, spied in enumerate(rows):
                if spied.sampler is not None and (kept := self._kept.get(id(spied.sampler))) is not None:
                    kept.append(self._context.logits(i))
        return step

    def sample_stored(self, sampler: Any, logits: bytes, logprobs: int | None) -> native.Step:
        if (kept := self._kept.get(id(sampler))) is not None:
            kept.append(np.frombuffer(logits, np.float32))
        return self._context.sample_stored(sampler, logits, logprobs)


class SpiedCore:
    """The native module with a context that remembers."""

    def __init__(self) -> None:
        self.kept: dict[int, list[Logits]] = {}

    def Context(self, *args: Any, **options: Any) -> SpiedContext:  # noqa: N802 - named as the core names it
        return SpiedContext(native.Context(*args, **options), self.kept)

    def devices(self) -> list[native.Device]:
        return native.devices()

    def Row(  # noqa: N802
        self, slot: int, pos: int, tokens: list[int], sampler: Any = None, logprobs: Any = None, output: bool = False
    ) -> SpiedRow:
        return SpiedRow(native.Row(slot, pos, tokens, sampler, logprobs, output), slot, len(tokens), sampler)


def sampler(model: native.Model, tokens: tuple[int, ...], *, seed: int = 0, temperature: float = 0.0) -> native.Sampler:
    params = native.SamplerParams()
    params.seed, params.temperature = seed, temperature
    made = native.Sampler(model.vocab, params)
    made.accept_prompt(list(tokens))
    return made


def request(model: native.Model, tokens: tuple[int, ...], **options: Any) -> Request:
    chosen = sampler(model, tokens, seed=options.pop("seed", 0), temperature=options.pop("temperature", 0.0))
    values: dict[str, Any] = {
        "sampling": Sampling(), "sampler": chosen, "max_tokens": 16, "stop_tokens": frozenset(),
    }  # fmt: skip
    return Request(tokens, **(values | options))


class Rig:
    """A loop on a real context. Time passes only in ticks."""

    def __init__(self, model: native.Model, *, cache: Binding | None = None, **settings: Any) -> None:
        self.now = 0.0
        self.model = model
        self._core = SpiedCore()
        options: dict[str, Any] = {"slots": 4, "context_size": 1024, "threads": 1, "debug": True}
        self.settings = EngineSettings(**(options | settings))
        self.loop = open_loop(cast(Core, self._core), model, self.settings, cache=cache, clock=lambda: self.now)
        self.context = cast(SpiedContext, self.loop.context)
        self.sinks: list[Taken] = []
        self.sequences: dict[RequestId, Sequence] = {}
        self._ids = itertools.count(1)

    def __enter__(self) -> Rig:
        return self

    def __exit__(self, *exc: object) -> None:
        self.loop.shut()

    @property
    def counters(self) -> Any:
        return self.loop.meter.counters

    def submit(self, tokens: tuple[int, ...], **options: Any) -> Taken:
        sink = Taken(id=RequestId(next(self._ids)))
        wanted = request(self.model, tokens, **options)
        self._core.kept[id(wanted.sampler)] = sink.logits
        seq = Sequence(sink.id, wanted, sink, now=self.now)
        self.sinks.append(sink)
        self.sequences[sink.id] = seq
        self.loop.gate.enter()
        self.loop.mailbox.post(Submit(seq))
        return sink

    def cancel(self, sink: Taken) -> None:
        self.loop.mailbox.post(Cancel(sink.id))

    def tick(self, n: int = 1) -> bool:
        more = True
        for _ in range(n):
            more = self.loop.tick()
            self.now += 0.01
        return more

    def drain(self, most: int = 20_000) -> None:
        for _ in range(most):
            if not self.tick():
                self.check_idle()
                return
        raise AssertionError("the engine did not come to rest")

    def run(self, tokens: tuple[int, ...], **options: Any) -> Taken:
        """Submit one request and run until nothing is left to do."""
        sink = self.submit(tokens, **options)
        self.drain()
        return sink

    def check_idle(self) -> None:
        """What must hold when nothing is open: one end each, nothing held, every row in a request's books."""
        assert all(len(sink.ends) == 1 for sink in self.sinks)
        assert self.loop.residents.n_running == 0
        assert self.loop.gate.n_open == 0
        assert not self.loop.scheduler.open_sequences()
        assert self.counters.ledger_faults == 0
        assert self.counters.queued == sum(self.counters.ended.values()) == len(self.sinks)
        self.check_rows()

    def check_rows(self) -> None:
        """prompt - cached + completion, less what never ran, and what ran twice: all that the core counted."""
        wanted = self.counters.rows_again
        for sink in self.sinks:
            (end,) = sink.ends
            seq = self.sequences[sink.id]
            if isinstance(end, Done):
                usage = end.usage
                wanted += usage.prompt_tokens - usage.cached_tokens + usage.completion_tokens
            else:
                wanted += seq.n_tokens - seq.n_cached
            wanted -= n_unrun(seq)
            if isinstance(end, Done) and end.reason is not FinishReason.CANCELLED:
                # A token sampled last never runs; a stop token was sampled after all that counts had run.
                assert n_unrun(seq) == (end.reason is FinishReason.LENGTH)
        assert wanted == self.context.n_rows_decoded


def n_unrun(seq: Sequence) -> int:
    """Tokens of an ended sequence that the core never saw: the last one, or all that a cancel left."""
    return seq.n_tokens - max(seq.n_decoded, seq.n_cached)
