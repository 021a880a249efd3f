"""What the engine tells about itself: an event value per tick and request step, counters, histograms, a snapshot.

Owns all figures. Always on, so everything here is a plain integer, float or list: no lock, no allocation beyond the
event itself. Written on the engine thread; `snapshot` may run on any, and then reads values of one tick or the next.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from kvasir.engine.request import RequestId

log = logging.getLogger(__name__)


class Ticked(NamedTuple):
    """One tick ran."""

    n: int
    n_decode_rows: int
    n_prefill_rows: int
    n_active: int
    n_waiting: int
    cells_used: int
    plan_s: float
    native_s: float
    apply_s: float


class Queued(NamedTuple):
    """A request waits for a slot."""

    id: RequestId
    n_prompt: int
    priority: int


class Admitted(NamedTuple):
    """A request got a slot and can run."""

    id: RequestId
    slot: int
    n_reused: int  # prompt tokens that need no decode
    source: str  # where they came from: "cold" (nowhere), "live" (a running sequence), "parked", "stored" (the cache)
    queue_s: float


class FirstToken(NamedTuple):
    """A request has its first token, this long after `submit`."""

    id: RequestId
    first_token_s: float


class Ended(NamedTuple):
    """A request is over: `how` is a finish reason, or the name of the error class."""

    id: RequestId
    how: str
    n_prompt: int
    n_cached: int
    n_generated: int
    n_again: int  # rows decoded a second time, after a preemption or a failed step


class Pressure(NamedTuple):
    """Cells ran out: a parked resident was given up, or a running request went back to the queue."""

    cells_used: int
    cells: int
    evicted_slot: int | None
    preempted: RequestId | None


class Diverged(NamedTuple):
    """A long prompt parts early from all that went before it in its scope: `n_common` tokens are the same, then
    `there` stood and now `here` stands. A date or an id near the start of a prompt does this, and costs all reuse.
    """

    id: RequestId
    scope: str | None
    n_common: int
    there: int
    here: int


# A factor of about two between bounds is as fine as a latency figure is ever read.
SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048)


class Histogram:
    """Counts by bound: `counts[i]` values were at most `bounds[i]`, the last one above all."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def add(self, value: float) -> None:
        """Count one value."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    @property
    def n(self) -> int:
        """How many values were counted."""
        return sum(self.counts)

    def copy(self) -> Histogram:
        """Return one that stands still."""
        twin = Histogram(self.bounds)
        twin.counts, twin.total = list(self.counts), self.total
        return twin


@dataclass(slots=True)
class Counters:
    """Everything counted since the engine opened."""

    ticks: int = 0
    prefill_rows: int = 0
    decode_rows: int = 0
    cached_tokens: int = 0
    queued: int = 0
    admitted: int = 0
    ended: dict[str, int] = field(default_factory=dict)  # by finish reason or error class
    plans_refused: int = 0  # plans of a strategy that broke a rule; the default planned instead
    rows_forced: int = 0  # plans changed because a sequence starved
    aged: int = 0  # admissions that age put before a higher priority
    retries: int = 0  # batches run again in halves
    shared_live: int = 0  # prompts that took KV from a running sequence
    shared_parked: int = 0  # prompts that took KV from one that had ended
    restored: int = 0  # prompts that took KV from the cache
    first_tokens_stored: int = 0  # prompts whose first token came from stored logits
    coalesced: int = 0  # prompts that waited for another's prefill and shared it
    shares_refused: int = 0  # reuse this kind of memory could not do exactly; the prompt ran cold
    parked: int = 0
    evicted: int = 0  # parked residents given up
    preempted: int = 0  # running requests that went back to the queue
    rows_again: int = 0  # rows decoded a second time because of that, or of a failed step
    shifted: int = 0  # spans cut out of a conversation's KV
    diverged: int = 0
    sinks_broken: int = 0
    ledger_faults: int = 0
    plan_s: float = 0.0
    native_s: float = 0.0
    apply_s: float = 0.0


@dataclass(frozen=True, slots=True)
class EngineStats:
    """A snapshot of one engine."""

    slots: int
    slots_used: int
    slots_parked: int
    queue: int
    max_queue: int
    cells: int
    cells_used: int
    layout: str
    rows_decoded: int  # by the engine's own books; equals the native count
    rows_lost: int  # of these, decoded in a step that failed
    requests_open: int
    requests_refused: int
    counters: Counters
    tick_s: Histogram
    tick_rows: Histogram
    queue_s: Histogram
    first_token_s: Histogram

    @property
    def python_share(self) -> float:
        """The part of all tick time that was not native."""
        spent = self.counters.plan_s + self.counters.native_s + self.counters.apply_s
        return (self.counters.plan_s + self.counters.apply_s) / spent if spent else 0.0


class Meter:
    """Takes every event, keeps the figures, and passes the event on if anybody listens."""

    def __init__(self, observe: Callable[[Any], None] | None = None) -> None:
        self.observe = observe
        self.counters = Counters()
        self.tick_s = Histogram(SECONDS)
        self.tick_rows = Histogram(ROWS)
        self.queue_s = Histogram(SECONDS)
        self.first_token_s = Histogram(SECONDS)

    def ticked(self, event: Ticked) -> None:
        """Count a tick, its rows and its time."""
        counters = self.counters
        counters.ticks += 1
        counters.prefill_rows += event.n_prefill_rows
        counters.decode_rows += event.n_decode_rows
        counters.plan_s += event.plan_s
        counters.native_s += event.native_s
        counters.apply_s += event.apply_s
        self.tick_s.add(event.plan_s + event.native_s + event.apply_s)
        self.tick_rows.add(event.n_prefill_rows + event.n_decode_rows)
        self._pass_on(event)

    def queued(self, event: Queued) -> None:
        """Count a request that waits."""
        self.counters.queued += 1
        self._pass_on(event)

    def admitted(self, event: Admitted) -> None:
        """Count an admission, its wait and its reuse."""
        self.counters.admitted += 1
        self.counters.cached_tokens += event.n_reused
        self.queue_s.add(event.queue_s)
        self._pass_on(event)

    def first_token(self, event: FirstToken) -> None:
        """Count the time to a first token."""
        self.first_token_s.add(event.first_token_s)
        self._pass_on(event)

    def pressed(self, event: Pressure) -> None:
        """Count what lack of cells cost."""
        self.counters.evicted += event.evicted_slot is not None
        self.counters.preempted += event.preempted is not None
        self._pass_on(event)

    def diverged(self, event: Diverged) -> None:
        """Count a prompt that parted early."""
        self.counters.diverged += 1
        self._pass_on(event)

    def ended(self, event: Ended) -> None:
        """Count how a request ended."""
        self.counters.rows_again += event.n_again
        self.counters.ended[event.how] = self.counters.ended.get(event.how, 0) + 1
        self._pass_on(event)

    def _pass_on(self, event: Any) -> None:
        if self.observe is None:
            return
        try:
            self.observe(event)
        except Exception:  # whoever watches must not be able to stop what is watched
            log.exception("the observer raised at %s and is called no more", type(event).__name__)
            self.observe = None
