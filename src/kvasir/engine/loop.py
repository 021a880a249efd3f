"""The loop: the thread that owns the context, and its tick.

Owns the order of things. Read `tick`; its lines are the chapters. Everything it calls runs on this one thread, so
nothing below needs a lock. `run` turns ticks into a thread's life and answers every open request when that ends.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

from kvasir.cache import Reason
from kvasir.engine.core import Context, Core
from kvasir.engine.events import EngineStats, Meter, Pressure, Ticked
from kvasir.engine.gate import Gate
from kvasir.engine.mailbox import Call, Cancel, Letter, Mailbox, Outbox, Submit
from kvasir.engine.offers import EXPORT_BLOCKS
from kvasir.engine.queue import WaitingQueue
from kvasir.engine.residents import Resident, Residents, Reuse
from kvasir.engine.runner import Runner
from kvasir.engine.scheduler import Admission, Batch, Limits, Outcome, Scheduler
from kvasir.engine.sequence import RUNNABLE, Sequence, State
from kvasir.engine.settings import EngineSettings
from kvasir.engine.strategies import strategy_of
from kvasir.engine.warm import IMPORT_TOKENS, Warm
from kvasir.errors import Closed, EngineStopped, KvasirError

log = logging.getLogger(__name__)

CLOSED = "the engine was closed."
# How often to look whether a file was read while nothing else is to do; shorter than any first token.
IDLE_S = 0.001
# Fewer rows take nearly as long as one: the last token of a restored prompt says nothing of the speed of a prefill.
MEASURED_ROWS = 64


class Loop:
    """One context, its sequences and its ticks. All methods but `stop` and `stats` are for one thread."""

    def __init__(
        self,
        core: Core,
        context: Context,
        settings: EngineSettings,
        *,
        n_seq_tokens: int,
        warm: Warm | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.mailbox = Mailbox()
        self.gate = Gate(settings.slots + settings.max_queue, max_queue=settings.max_queue)
        self.meter = Meter(settings.observe)
        self.outbox = Outbox()
        self.clock = clock
        self.settings = settings
        self.context = context
        self._n_cells = context.n_ctx
        self._layout = "unified" if context.kv_unified else "split"
        self.warm = warm
        prompt_ran = warm.offers.prompt_ran if warm is not None else None
        self.runner = Runner(core, context, clock=clock, prompt_ran=prompt_ran)
        self.residents = Residents(settings.slots, whole_only=context.memory.kind in ("recurrent", "hybrid"))
        self._shares_cells = context.kv_unified
        limits = Limits(
            n_seq_tokens=n_seq_tokens,
            n_pool=context.n_ctx if context.kv_unified and context.memory.kind != "recurrent" else None,
            n_rows=min(context.n_ubatch, context.n_batch),
            n_prefill=settings.prefill_budget,
            n_chunk=settings.chunk_tokens,
        )
        self.scheduler = Scheduler(
            limits,
            self.residents,
            WaitingQueue(aging_s=settings.aging_s),
            strategy_of(settings.strategy),
            outbox=self.outbox,
            meter=self.meter,
            gate=self.gate,
            **({"key_of": warm.offers.key_of} if warm is not None else {}),
        )

    def tick(self) -> bool:
        """Make at most one token for everyone who is ready; return False when nothing is left to do."""
        started = self.clock()
        self._mail(started)
        self._finish(started)
        self._resolve()
        batch = self._make_room(self.scheduler.plan())
        n_decodes = sum(seq.state is State.DECODE for seq, _ in batch)  # before the step moves them on
        native_s = self.runner.native_s
        outcome = self._step(batch)
        ran = self.clock()
        self.scheduler.apply(outcome, now=ran)
        self._send(ran)
        self._offer(batch)
        if batch:
            native_s = self.runner.native_s - native_s
            self._observe(batch, n_decodes, ran - started - native_s, native_s, self.clock() - ran)
        elif self.scheduler.active:
            self.mailbox.wait(IDLE_S)  # only restores are under way: files are being read
        if self.settings.debug:
            self.check()
        return self.scheduler.has_work

    def _mail(self, now: float) -> None:
        """Take in new requests, cancels and calls, and notice deadlines."""
        for letter in self.mailbox.take():
            self._open_letter(letter, now)
        self.scheduler.expire(now=now)

    def _finish(self, now: float) -> None:
        """Park or release what ended, admit who waits."""
        scheduler = self.scheduler
        if scheduler.ended:
            for seq in scheduler.ended:
                self._retire(self.residents.of(seq), now)
                seq.slot = None
            scheduler.ended.clear()
        while len(scheduler.waiting) and (admission := scheduler.next_admission(now=now)) is not None:
            self._admit(admission, now)

    def _retire(self, resident: Resident, now: float) -> None:
        """Keep the KV of an ended sequence: in the cache, and live for whoever begins the same."""
        seq = resident.sequence
        assert seq is not None
        self._keep(seq, Reason.FINISH)
        if seq.keeps_kv and seq.request.cache and seq.n_decoded:
            self.residents.park(resident, now=now)
            self.meter.counters.parked += 1
        else:
            self._empty(resident)

    def _admit(self, admission: Admission, now: float) -> None:
        """Carry out an admission: free its slot, then let it restore, continue a parked resident, follow, or run."""
        seq, placement, reuse, evicts = admission
        for resident in evicts:
            self._evict(resident)
        seq.admit(placement.slot, now=now)
        resident = Resident(placement.slot, seq, now=now)
        is_stored = self._find_stored(seq, reuse)  # None: the search goes on
        # Who was to follow a leader took any slot, perhaps its source's: that one is gone now.
        source = None if reuse.source in evicts else reuse.source
        n_live = reuse.n_tokens if source is not None else 0
        if is_stored and self.warm is not None:
            n_live = self.warm.begins_at(seq, n_live)
        if placement.takes is not None:
            seq.edited = placement.takes.editor is not None
            n_live = self._continue(placement.takes, resident, n_live)
        self._occupy(resident)
        if reuse.leader is not None and is_stored is False:
            self._follow(seq, reuse)
            return
        origin = "parked"
        if placement.takes is None:
            n_live, origin = self._share(resident, source, n_live)
        self._start_or_load(seq, n_live, origin, is_stored=is_stored)

    def _follow(self, seq: Sequence, reuse: Reuse) -> None:
        seq.n_awaited = reuse.n_expected
        seq.move(State.FOLLOW)

    def _start_or_load(self, seq: Sequence, n_live: int, origin: str, *, is_stored: bool | None) -> None:
        """Let a sequence run with what is live of it, unless the cache has more, or may have."""
        if is_stored is False or self.warm is None:
            self._start(seq, n_live, origin)
            return
        seq.n_decoded = self.warm.begins_at(seq, n_live) if is_stored else n_live
        seq.move(State.LOADING)

    def _find_stored(self, seq: Sequence, reuse: Reuse) -> bool | None:
        """Look in the cache for more than what is live, or soon will be; begin to read it."""
        if self.warm is None or not seq.request.cache or reuse.n_expected >= seq.n_tokens - 1:
            return False
        if reuse.source is not None and reuse.source.editor is not None:
            return False  # its KV stands for a longer text than its tokens say; what is stored would not go on from it
        return self.warm.find(seq, n_live=reuse.n_expected)

    def _continue(self, parked: Resident, resident: Resident, n_tokens: int) -> int:
        """Take over a parked resident's slot with its first tokens; return how many were kept."""
        if not self.runner.trim(parked.slot, n_tokens):
            self.meter.counters.shares_refused += 1
            n_tokens = 0
        resident.give(parked.cells(), n_tokens)
        if parked.editor is not None:
            resident.editor, resident.is_open = parked.editor, False
        self.residents.leave(parked)
        return n_tokens

    def _share(self, resident: Resident, source: Resident | None, n_tokens: int) -> tuple[int, str]:
        """Give a slot the first tokens of a live one; return how many it got, and where from."""
        if source is None or n_tokens == 0 or source.editor is not None:  # what was edited stays where it is
            return 0, "cold"
        if not self.runner.share(source.slot, resident.slot, n_tokens):
            self.meter.counters.shares_refused += 1
            return 0, "cold"
        if self._shares_cells:
            resident.give(source.cells(), n_tokens)
        source.used_at = resident.used_at
        return n_tokens, "parked" if source.is_parked else "live"

    def _resolve(self) -> None:
        """Let those run whose prefix is there: who waited for another's prefill, and whose rows have been read."""
        for seq in self.scheduler.those(State.FOLLOW):
            reuse = self.residents.reuse(seq)
            if reuse.leader is None:
                self._lead(seq, reuse)
        if self.warm is not None:
            self._load(self.warm)

    def _lead(self, seq: Sequence, reuse: Reuse) -> None:
        """Let a follower run with what its leader brought; where that is less than it was to be, the cache may help."""
        is_stored = self._find_stored(seq, reuse) if reuse.n_tokens < seq.n_awaited else False
        n_live = self.warm.begins_at(seq, reuse.n_tokens) if is_stored and self.warm is not None else reuse.n_tokens
        n_tokens, origin = self._share(self.residents.of(seq), reuse.source, n_live)
        self.meter.counters.coalesced += n_tokens > 0
        self._start_or_load(seq, n_tokens, origin, is_stored=is_stored)

    def _load(self, warm: Warm) -> None:
        """Import rows that have been read, so many tokens for all together while streams run; the oldest go first."""
        n_most = warm.n_imported + IMPORT_TOKENS if self._streams else None
        for seq in self.scheduler.those(State.LOADING):
            if warm.is_searching(seq) and not self._searched(seq, warm):
                continue
            if (logits := warm.take_logits(seq)) is not None:
                self._say_first(seq, logits)
                if seq.state is not State.LOADING:  # that was all it was asked for
                    warm.spared(seq)
                    continue
            n_left = None if n_most is None else n_most - warm.n_imported
            if n_left is not None and n_left < min(warm.block_tokens, IMPORT_TOKENS):
                continue  # not even a row: the next tick's
            restored = warm.advance(seq, most_tokens=n_left)
            if restored is not None:
                self._start(seq, restored, "stored")

    def _say_first(self, seq: Sequence, logits: bytes) -> None:
        """Send the first token of a prompt that has been computed before: it waits for no row."""
        seq.n_cached = seq.n_prompt  # nothing of it is computed, should it end with this token
        self.scheduler.announce(seq, n_tokens=seq.n_prompt, source="stored")
        outcome, now = self.runner.sample_stored(seq, logits), self.clock()
        self.meter.counters.first_tokens_stored += any(token is not None for _, token, _, _ in outcome.ran)
        self.scheduler.apply(outcome, now=now)
        self._send(now)

    def _searched(self, seq: Sequence, warm: Warm) -> bool:
        """Act on a search that took longer than an admission; True if a restore begins."""
        found = warm.found(seq)
        if found is None:
            return False
        resident, reuse = self.residents.of(seq), self.residents.reuse(seq)
        follows = not found and reuse.n_expected > seq.n_decoded  # or takes what came to be live meanwhile
        n_keep = warm.begins_at(seq, seq.n_decoded) if found else 0 if follows else seq.n_decoded
        if n_keep < seq.n_decoded and not self.runner.trim(resident.slot, n_keep):
            n_keep = warm.begins_at(seq, 0) if found else 0
        seq.n_decoded = n_keep
        resident.give(resident.segments, n_keep)
        if follows:
            self._follow(seq, reuse)
        elif not found:
            self._start(seq, n_keep, "parked" if n_keep else "cold")
        return found

    @property
    def _streams(self) -> bool:
        return any(seq.state is State.DECODE for seq in self.scheduler.active.values())

    def _start(self, seq: Sequence, n_tokens: int, source: str) -> None:
        seq.start(n_tokens)
        if self.warm is not None:
            self.warm.offers.started(seq)
        counters = self.meter.counters
        counters.shared_live += source == "live"
        counters.shared_parked += source == "parked" and n_tokens > 0
        counters.restored += source == "stored" and n_tokens > 0
        if seq.n_rows or not seq.n_generated:  # else it was, when it said its first token
            self.scheduler.announce(seq, n_tokens=n_tokens, source=source if n_tokens else "cold")

    def _occupy(self, resident: Resident) -> None:
        self.residents.occupy(resident)
        assert resident.sequence is not None
        self.scheduler.active[resident.sequence.id] = resident.sequence

    def _make_room(self, batch: Batch) -> Batch:
        """Free cells until the batch fits: parked residents first, then the youngest of the lowest priority."""
        n_pool = self.scheduler.limits.n_pool
        if n_pool is None or not batch:
            return batch
        n_most = sum(resident.n_held for resident in self.residents)
        while n_most + sum(n_tokens for _, n_tokens in batch) > n_pool:
            n_most = self.residents.n_cells(shared=True)
            if n_most + sum(n_tokens for _, n_tokens in batch) <= n_pool:
                break
            parked = self.residents.least_worth()
            if parked is not None:
                self._evict(parked)
            elif (victim := self.scheduler.victim()) is not None:
                self._preempt(victim)
                batch = [planned for planned in batch if planned[0] is not victim]
            else:
                break  # one sequence alone: the core will say what is wrong
        return batch

    def _evict(self, resident: Resident) -> None:
        """Give up a parked resident's cells."""
        self._empty(resident)
        self.meter.pressed(Pressure(self.scheduler.cells_used, self._n_cells, resident.slot, None))

    def _preempt(self, seq: Sequence) -> None:
        """Take slot and cells from a running sequence; it waits again, and goes on where it was."""
        self._keep(seq, Reason.EVICT)
        self._empty(self.residents.of(seq))
        self.scheduler.requeue(seq)
        self.meter.pressed(Pressure(self.scheduler.cells_used, self._n_cells, None, seq.id))

    def shift(self, owner: str, tokens: list[int], start: int, end: int, *, scope: str | None = None) -> bool:
        """Cut tokens [start, end) out of the parked KV of `tokens` and close the gap, for `owner` alone from now on.

        Between two ticks. False: no slot holds exactly these tokens, or this memory cannot be shifted.
        """
        resident = self.residents.holding(tokens, scope=scope, owner=owner)
        if resident is None or not self.context.memory.can_shift:
            return False
        try:
            self.runner.shift(resident.slot, start, end)
        except KvasirError as error:  # no room to part cells that others share
            log.warning("%d tokens could not be cut out of slot %d: %s", end - start, resident.slot, error)
            self._empty(resident)
            return False
        self.residents.edit(resident, owner, tokens[:start] + tokens[end:], start=start)
        self.meter.counters.shifted += 1
        return True

    def _empty(self, resident: Resident) -> None:
        self.runner.forget(resident.slot)
        self.residents.leave(resident)

    def _step(self, batch: Batch) -> Outcome:
        """Run the batch; where that cost memory, the ledgers of the slots follow."""
        if not batch:
            return Outcome([], [])
        n_retries, n_clears = self.runner.n_retries, self.runner.n_clears
        outcome = self.runner.run(batch, self.scheduler.active.values())
        if self.runner.n_retries > n_retries or self.runner.n_clears > n_clears:
            for resident in list(self.residents):
                if resident.is_parked and self.runner.n_clears > n_clears:
                    self.residents.leave(resident)
                resident.give(resident.segments, resident.n_live)
        return outcome

    def _send(self, now: float) -> None:
        """Deliver this tick's events; a sink that raises has its request cancelled."""
        for seq in self.outbox.flush():
            self.meter.counters.sinks_broken += 1
            self.scheduler.cancel(seq.id, now=now)

    def _offer(self, batch: Batch) -> None:
        """Offer full blocks to the cache: nothing decodes now, so memory may be copied."""
        if self.warm is None:
            return
        most_blocks = EXPORT_BLOCKS if self._streams else None
        for seq, _ in batch:
            if seq.slot is not None and seq.state in RUNNABLE:
                self.warm.offers.offer(seq, most_blocks=most_blocks)

    def _keep(self, seq: Sequence, reason: Reason) -> None:
        """Offer the cache all that is in memory of a sequence that leaves its slot."""
        if self.warm is not None:
            if seq.state is not State.LOADING:
                self.warm.offers.keep(seq, reason)
            self.warm.forget(seq)

    def _observe(self, batch: Batch, n_decodes: int, plan_s: float, native_s: float, apply_s: float) -> None:
        scheduler, counters = self.scheduler, self.meter.counters
        counters.retries = self.runner.n_retries
        n_prefills = sum(n_tokens for _, n_tokens in batch) - n_decodes
        if self.warm is not None and n_prefills >= MEASURED_ROWS and n_prefills > n_decodes:
            self.warm.offers.computed(n_prefills, native_s)
        self.meter.ticked(
            Ticked(
                n=counters.ticks,
                n_decode_rows=n_decodes,
                n_prefill_rows=n_prefills,
                n_active=len(scheduler.active),
                n_waiting=len(scheduler.waiting),
                # To count shared cells once takes as long as to plan: not for nobody.
                cells_used=scheduler.cells_used if self.meter.observe is not None else 0,
                plan_s=plan_s,
                native_s=native_s,
                apply_s=apply_s,
            )
        )

    def _open_letter(self, letter: Letter, now: float) -> None:
        if isinstance(letter, Submit):
            self.scheduler.submit(letter.sequence)
        elif isinstance(letter, Cancel):
            self.scheduler.cancel(letter.id, now=now)
        elif letter.future.set_running_or_notify_cancel():
            _answer(letter)

    # The thread's life

    def run(self) -> None:
        """Tick until closed, sleeping while there is nothing to do. Every open request is answered at the end."""
        try:
            while not self.mailbox.closed:
                if not self.tick():
                    self.check()
                    self.mailbox.wait()
        except BaseException as error:
            log.exception("the engine stopped because of an error that is a fault of ours")
            self.mailbox.close(f"the engine stopped: {type(error).__name__}: {error}")
        finally:
            self.shut()

    def stop(self, why: str = CLOSED) -> None:
        """Ask the thread to end, cutting a running decode short where that is safe. Any thread; does not wait."""
        with suppress(Closed):  # the thread has ended by itself
            self.context.abort()
        self.mailbox.close(why)

    def shut(self) -> None:
        """Answer everything that is open, then close the context."""
        why = self.mailbox.why_closed or CLOSED
        self.outbox.flush()
        for letter in self.mailbox.take():
            if isinstance(letter, Submit):
                self.scheduler.submit(letter.sequence)
            elif isinstance(letter, Call):
                letter.future.set_exception(EngineStopped(why))
        now = self.clock()
        ended = [(seq, Reason.FINISH) for seq in self.scheduler.ended]
        for seq, reason in ended + [(seq, Reason.SHUTDOWN) for seq in self.scheduler.open_sequences()]:
            self._keep_last(seq, reason)
        for seq in self.scheduler.open_sequences():
            self.scheduler.fail(seq, EngineStopped(why), now=now)
        self.outbox.flush()
        if self.warm is not None:
            self.warm.close()
        self.context.close()

    def _keep_last(self, seq: Sequence, reason: Reason) -> None:
        """Offer what is in memory at the end; nothing that goes wrong here may leave a request without its answer."""
        try:
            if seq.slot is not None:
                self._keep(seq, reason)
        except Exception:
            log.exception("the end of a sequence could not be kept")

    def check(self) -> None:
        """Compare every ledger with the native memory. A difference is a fault of ours: fatal in debug, else mended.

        Mending is possible because this also runs when idle, when nothing in memory is anybody's.
        """
        fault = self.runner.fault(self.residents, shared=self._shares_cells)
        if fault is None:
            return
        self.meter.counters.ledger_faults += 1
        assert not self.settings.debug, fault
        log.error("the ledger is wrong: %s", fault)
        if not self.scheduler.active:
            for resident in list(self.residents):
                self.residents.leave(resident)
            self.context.memory.clear()

    def stats(self) -> EngineStats:
        """Take a snapshot; any thread."""
        scheduler, meter = self.scheduler, self.meter
        counters = replace(meter.counters, ended=dict(meter.counters.ended))
        return EngineStats(
            slots=self.settings.slots,
            slots_used=self.residents.n_running,
            slots_parked=len(self.residents.parked),
            queue=len(scheduler.waiting),
            max_queue=self.settings.max_queue,
            cells=self._n_cells,
            cells_used=scheduler.cells_used,
            layout=self._layout,
            rows_decoded=self.runner.n_rows + self.runner.n_rows_lost,
            rows_lost=self.runner.n_rows_lost,
            requests_open=self.gate.n_open,
            requests_refused=self.gate.n_refused,
            counters=counters,
            tick_s=meter.tick_s.copy(),
            tick_rows=meter.tick_rows.copy(),
            queue_s=meter.queue_s.copy(),
            first_token_s=meter.first_token_s.copy(),
        )


def _answer(call: Call) -> None:
    try:
        call.future.set_result(call.do())
    except Exception as error:
        call.future.set_exception(error)
