"""The scheduler: who waits, who has a slot, what the next tick runs and what its tokens mean.

Owns every open sequence and all decisions: admission, reuse, eviction, preemption, deadlines, cancels, budgets, stops.
Calls nothing native and reads no clock: `loop` does what is decided and says what time it is. Every sequence ends
through `_end`, exactly once.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from heapq import heappop, heappush
from typing import NamedTuple, TypeAlias

from kvasir.engine.core import Logprobs
from kvasir.engine.events import Admitted, Diverged, Ended, FirstToken, Meter, Queued
from kvasir.engine.gate import Gate
from kvasir.engine.mailbox import Outbox
from kvasir.engine.plan import Budget, Plan, Strategy, View
from kvasir.engine.queue import WaitingQueue
from kvasir.engine.request import Done, Event, Failed, RequestId, Tokens
from kvasir.engine.residents import Placement, Resident, Residents, Reuse, n_cells_of
from kvasir.engine.sequence import RUNNABLE, Sequence, State
from kvasir.engine.strategies import DEFAULT, fault_of, feed_starved
from kvasir.errors import BadGrammar, DeadlineExceeded, KvasirError
from kvasir.types import FinishReason

log = logging.getLogger(__name__)

# Cells kept free for each running stream when another is admitted: about a second of tokens on a CPU.
GROWTH = 16
# Prompts shorter than this say nothing about a client's habits.
LONG_PROMPT = 256

Batch: TypeAlias = list[tuple[Sequence, int]]  # sequences and how many of their next tokens to run


class Limits(NamedTuple):
    """What the context allows."""

    n_seq_tokens: int  # cells one sequence may use
    n_pool: int | None  # cells all sequences share; None where every slot has its own
    n_rows: int  # rows of one pass over the weights
    n_prefill: int  # of these, for prompts beside streams that ran before one of them came
    n_chunk: int  # of these, for prompts otherwise


class Admission(NamedTuple):
    """A sequence that gets a slot now: where, with what reuse, and which parked residents must go for it."""

    sequence: Sequence
    placement: Placement
    reuse: Reuse
    evicts: list[Resident]


class Outcome(NamedTuple):
    """What a batch brought: sequences that ran with what was sampled after them, and sequences that failed."""

    ran: list[tuple[Sequence, int | None, Logprobs | None, str | None]]
    failed: list[tuple[Sequence, KvasirError]]


class Scheduler:
    """Decides; engine thread only."""

    def __init__(
        self,
        limits: Limits,
        residents: Residents,
        queue: WaitingQueue,
        strategy: Strategy,
        *,
        outbox: Outbox,
        meter: Meter,
        gate: Gate,
        key_of: Callable[[Sequence], bytes | None] = lambda seq: None,
    ) -> None:
        self.limits = limits
        self.residents = residents
        self.waiting = queue
        self.strategy = strategy
        self.active: dict[RequestId, Sequence] = {}  # has a slot and is not DONE, oldest admission first
        self.ended: list[Sequence] = []  # DONE, but its slot still holds KV
        self._open: dict[RequestId, Sequence] = {}
        self._fresh: set[RequestId] = set()  # submitted since the last plan
        self._deadlines: list[tuple[float, RequestId]] = []
        self._outbox = outbox
        self._meter = meter
        self._gate = gate
        self._key_of = key_of
        self._warned = False

    @property
    def has_work(self) -> bool:
        """Whether another tick has anything to do."""
        return bool(self.active or self.ended or len(self.waiting))

    @property
    def cells_used(self) -> int:
        """Cells that hold tokens, by the ledgers; shared ones count once where the layout shares them."""
        return self.residents.n_cells(shared=self.limits.n_pool is not None)

    def open_sequences(self) -> list[Sequence]:
        """Every sequence that has had no terminal event yet."""
        return list(self._open.values())

    # Coming and going

    def submit(self, seq: Sequence) -> None:
        """Let a new sequence wait for a slot."""
        self._open[seq.id] = seq
        self._fresh.add(seq.id)
        self.waiting.add(seq)
        if seq.deadline is not None:
            heappush(self._deadlines, (seq.deadline, seq.id))
        self._meter.queued(Queued(seq.id, seq.n_prompt, seq.request.priority))

    def cancel(self, request_id: RequestId, *, now: float) -> None:
        """End a request wherever it stands; one that has ended already is left alone."""
        seq = self._open.get(request_id)
        if seq is not None:
            self._finish(seq, FinishReason.CANCELLED, now=now)

    def expire(self, *, now: float) -> None:
        """Fail the requests whose deadline has passed, waiting or running."""
        while self._deadlines and self._deadlines[0][0] <= now:
            seq = self._open.get(heappop(self._deadlines)[1])
            if seq is not None:
                wanted = seq.request.deadline_s
                where = "in the queue" if seq.state is State.WAITING else f"after {seq.n_generated} tokens"
                self.fail(seq, DeadlineExceeded(f"the deadline of {wanted:g} s passed {where}."), now=now)

    def fail(self, seq: Sequence, error: KvasirError, *, now: float) -> None:
        """End a sequence with an error of its own."""
        self._end(seq, Failed(error), type(error).__name__, now=now)

    def next_admission(self, *, now: float) -> Admission | None:
        """Return who gets a slot next, if there are a slot and cells; the caller carries it out before asking again.

        The first in line is never overtaken by a smaller one behind it: a large request would otherwise starve.
        """
        if not self.residents.has_place or (seq := self.waiting.best(now=now)) is None:
            return None
        reuse = self.residents.reuse(seq)
        # Whoever waits for a leader takes any slot: what is parked there would be replaced anyway.
        placement = self.residents.place(reuse if reuse.leader is None else Reuse())
        assert placement is not None
        evicts = self._room_for(seq, reuse, placement)
        if evicts is None:
            if self.active:
                return None  # somebody will end, or be preempted for the others' sake
            # Alone it fits: everything parked goes, its own source too.
            evicts, reuse, placement = self.residents.parked, Reuse(), Placement(0)
        self.waiting.remove(seq)
        if seq.id not in self._fresh:
            seq.came_at = now
        self._meter.counters.aged += self.waiting.outranks(seq)
        self._note_divergence(seq)
        return Admission(seq, placement, reuse, evicts)

    def _room_for(self, seq: Sequence, reuse: Reuse, placement: Placement) -> list[Resident] | None:
        """Choose what to evict so that the rest of this prompt finds cells; None where that is not enough.

        Cells that running prompts have yet to fill are theirs, and every stream may grow a little: a request admitted
        into the last cell would only be preempted again.
        """
        evicts = [placement.evicts] if placement.evicts is not None else []
        if self.limits.n_pool is None:
            return evicts
        promised = sum(max(other.n_left - other.n_loaded, GROWTH) for other in self.active.values())
        wanted = seq.n_tokens - reuse.n_expected + 1 + promised
        if placement.takes is not None:
            wanted -= placement.takes.n_live - reuse.n_tokens  # cut off when it is taken
        kept = [resident for resident in self.residents if resident not in evicts]
        source = reuse.source if reuse.leader is None else None
        while self.limits.n_pool - n_cells_of(kept) < wanted:
            spare = [resident for resident in kept if resident.is_parked and resident is not source]
            if not spare:
                return None
            least = min(spare, key=lambda resident: resident.used_at)
            kept.remove(least)
            evicts.append(least)
        return evicts

    def _note_divergence(self, seq: Sequence) -> None:
        """Tell when a client's prompts part early: a clock or a random id near the start costs it all reuse."""
        match = next(iter(self.residents.matches(seq)), None)
        if match is None:
            return
        shorter = min(seq.n_tokens, len(match.holder.tokens))
        if shorter >= LONG_PROMPT and match.n_tokens < shorter // 2:
            there, here = match.holder.tokens[match.n_tokens], seq.tokens[match.n_tokens]
            self._meter.diverged(Diverged(seq.id, seq.request.scope, match.n_tokens, there, here))

    def announce(self, seq: Sequence, *, n_tokens: int, source: str) -> None:
        """Tell that an admitted sequence is ready to run, and how much of it came from where."""
        assert seq.slot is not None
        assert seq.admitted_at is not None
        self._meter.admitted(Admitted(seq.id, seq.slot, n_tokens, source, seq.admitted_at - seq.queued_at))

    def victim(self) -> Sequence | None:
        """Return whom to preempt: the youngest of the lowest priority; nobody if only one runs."""
        if len(self.active) < 2:
            return None
        return min(self.active.values(), key=lambda seq: (seq.request.priority, -seq.id))

    def requeue(self, seq: Sequence) -> None:
        """Put a preempted sequence back, ahead of those that came after it."""
        del self.active[seq.id]
        seq.preempt()
        self.waiting.add_back(seq)

    def those(self, state: State) -> list[Sequence]:
        """Sequences with a slot that stand in this state."""
        return [seq for seq in self.active.values() if seq.state is state]

    # Planning

    def plan(self) -> Batch:
        """Ask the strategy what to run; rows come in slot order.

        The split layout needs that order: llama.cpp runs those rows of neighbouring slots together that are equally
        many. Streams without a gap between them are one pass over the weights, a chunk beside them is one more.
        """
        self._fresh.clear()
        active = self.active
        if self.strategy is DEFAULT and len(active) <= self.limits.n_rows and all(map(_decodes, active.values())):
            for seq in active.values():
                seq.n_skipped = 0
            return sorted([(seq, 1) for seq in active.values()], key=_slot_of)  # the default runs every stream
        runnable = tuple([seq.view() for seq in active.values() if seq.state in RUNNABLE])
        if not runnable:
            return []  # no strategy need think of a tick in which all wait for files
        view = View(runnable, len(self.waiting))
        budget = self._budget()
        plan = feed_starved(asked := self._ask(view, budget), view, budget)
        self._meter.counters.rows_forced += plan is not asked and set(plan.rows) != set(asked.rows)
        return self._batch(plan)

    def _budget(self) -> Budget:
        limits = self.limits
        streams = [seq.first_token_at for seq in self.those(State.DECODE) if seq.first_token_at is not None]
        prompts = [seq.came_at for seq in self.those(State.PREFILL)]
        n_prefill = limits.n_prefill if are_late(prompts, streams) else limits.n_chunk
        return Budget(limits.n_rows, min(n_prefill, limits.n_rows))

    def _ask(self, view: View, budget: Budget) -> Plan:
        """Return the strategy's plan, or the default's where that one is broken: a bad strategy stops nobody."""
        if self.strategy is DEFAULT:
            return DEFAULT.plan(view, budget)
        try:
            plan = self.strategy.plan(view, budget)
            fault = fault_of(plan, view, budget)
        except Exception as error:
            fault = f"it raised {error!r}"
        if fault is None:
            return plan
        self._meter.counters.plans_refused += 1
        if not self._warned:
            log.error("strategy %r is wrong: %s. The default plans instead; this is said once.", self.strategy, fault)
            self._warned = True
        return DEFAULT.plan(view, budget)

    def _batch(self, plan: Plan) -> Batch:
        active = self.active
        if len(plan.rows) < len(active):
            for seq in active.values():
                seq.n_skipped += seq.state in RUNNABLE
        batch = [(seq := active[row.id], _up_to_stop(seq, row.n_tokens)) for row in plan.rows]
        for seq, _ in batch:
            seq.n_skipped = 0
        batch.sort(key=_slot_of)
        return batch

    # What came of it

    def apply(self, outcome: Outcome, *, now: float) -> None:
        """Take the sampled tokens; end what stopped, is full or failed."""
        for seq, token, logprobs, error in outcome.ran:
            if token is not None:
                self._take(seq, token, logprobs, now=now)
            elif error is not None:
                self.fail(seq, BadGrammar(f"the next token cannot be sampled: {error}."), now=now)
            else:  # it only read
                self._finish(seq, FinishReason.LENGTH, now=now)
        for seq, failure in outcome.failed:
            seq.keeps_kv = False
            self.fail(seq, failure, now=now)

    def _take(self, seq: Sequence, token: int, logprobs: Logprobs | None, *, now: float) -> None:
        if token in seq.request.stop_tokens:
            self._finish(seq, FinishReason.STOP, stop_token=token, now=now)
            return
        if seq.first_token_at is None:
            self._meter.first_token(FirstToken(seq.id, now - seq.queued_at))
        seq.took(token, now=now)
        self._outbox.put(seq, Tokens((token,), (logprobs,)))
        if seq.is_full(self.limits.n_seq_tokens):
            self._finish(seq, FinishReason.LENGTH, now=now)

    def _finish(self, seq: Sequence, reason: FinishReason, *, stop_token: int | None = None, now: float) -> None:
        seq.ended_at = now
        self._end(seq, Done(reason, stop_token, seq.usage(), seq.timings(), self._key_of(seq)), reason.value, now=now)

    def _end(self, seq: Sequence, event: Event, how: str, *, now: float) -> None:
        """End a sequence: the one place that does, and the one terminal event it gets."""
        if seq.state is State.WAITING:
            self.waiting.remove(seq)
        else:
            del self.active[seq.id]
            self.ended.append(seq)
        seq.ended_at = now
        seq.move(State.DONE)
        del self._open[seq.id]
        self._gate.leave(now=now)
        self._outbox.put(seq, event)
        self._meter.ended(Ended(seq.id, how, seq.n_prompt, seq.n_cached, seq.n_generated, seq.n_again))


def are_late(prompts: list[float], streams: list[float]) -> bool:
    """Whether a prompt came after the first token of some stream, and so has to spare it.

    To the streams of its own burst a prompt owes nothing: the burst is over soonest if it is read in whole chunks.
    """
    return bool(prompts and streams) and min(streams) < max(prompts)


def _up_to_stop(seq: Sequence, n_tokens: int) -> int:
    return (
        n_tokens if seq.stop_at is None or seq.stop_at <= seq.n_decoded else min(n_tokens, seq.stop_at - seq.n_decoded)
    )


def _decodes(seq: Sequence) -> bool:
    return seq.state is State.DECODE


def _slot_of(planned: tuple[Sequence, int]) -> int:
    slot = planned[0].slot
    assert slot is not None
    return slot
