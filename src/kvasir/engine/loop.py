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

from kvasir.engine.core import Context, Core
from kvasir.engine.events import EngineStats, Meter, Ticked
from kvasir.engine.gate import Gate
from kvasir.engine.mailbox import Call, Cancel, Letter, Mailbox, Outbox, Submit
from kvasir.engine.queue import WaitingQueue
from kvasir.engine.runner import Runner
from kvasir.engine.scheduler import Batch, Limits, Outcome, Scheduler
from kvasir.engine.sequence import Sequence, State
from kvasir.engine.settings import EngineSettings
from kvasir.engine.slots import SlotPool
from kvasir.engine.strategies import strategy_of
from kvasir.errors import Closed, EngineStopped

log = logging.getLogger(__name__)

CLOSED = "the engine was closed."


class Loop:
    """One context, its sequences and its ticks. All methods but `stop` and `stats` are for one thread."""

    def __init__(
        self,
        core: Core,
        context: Context,
        settings: EngineSettings,
        *,
        n_seq_tokens: int,
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
        self._cells_used = 0
        self.runner = Runner(core, context, clock=clock)
        limits = Limits(
            n_seq_tokens=n_seq_tokens,
            n_pool=context.n_ctx if context.kv_unified and context.memory.kind != "recurrent" else None,
            n_rows=min(context.n_ubatch, context.n_batch),
            n_prefill=settings.prefill_budget,
            n_chunk=settings.chunk_tokens,
        )
        self.scheduler = Scheduler(
            limits,
            SlotPool(settings.slots),
            WaitingQueue(aging_s=settings.aging_s),
            strategy_of(settings.strategy),
            outbox=self.outbox,
            meter=self.meter,
            gate=self.gate,
        )

    def tick(self) -> bool:
        """Make at most one token for everyone who is ready; return False when nothing is left to do."""
        started = self.clock()
        self._mail(started)
        admitted = self._finish(started)
        self._resolve(admitted)
        batch = self.scheduler.plan()
        n_decodes = sum(seq.state is State.DECODE for seq, _ in batch)  # before the step moves them on
        native_s = self.runner.native_s
        outcome = self._step(batch)
        ran = self.clock()
        self.scheduler.apply(outcome, now=ran)
        self._send(ran)
        self._offer()
        self._cells_used = self.scheduler.cells_used
        if batch:
            native_s = self.runner.native_s - native_s
            self._observe(batch, n_decodes, ran - started - native_s, native_s, self.clock() - ran)
        if self.settings.debug:
            self.check()
        return self.scheduler.has_work

    def _mail(self, now: float) -> None:
        """Take in new requests, cancels and calls, and notice deadlines."""
        for letter in self.mailbox.take():
            self._open_letter(letter, now)
        self.scheduler.expire(now=now)

    def _finish(self, now: float) -> list[Sequence]:
        """Release what ended, admit who waits."""
        scheduler = self.scheduler
        if scheduler.ended:
            for seq in scheduler.ended:
                self.runner.forget(seq)
                scheduler.release(seq)
            scheduler.ended.clear()
        return scheduler.admit(now=now) if len(scheduler.waiting) else []

    def _resolve(self, admitted: list[Sequence]) -> None:
        """Find what of each admitted prompt need not be computed.

        Every prompt is cold here. A live prefix to share or a stored one to restore sets `n_cached` and `n_decoded`
        at this point, before the sequence is first planned.
        """
        for seq in admitted:
            self.scheduler.announce(seq, source="cold")

    def _step(self, batch: Batch) -> Outcome:
        return self.runner.run(batch, self.scheduler.active.values()) if batch else Outcome([], [])

    def _send(self, now: float) -> None:
        """Deliver this tick's events; a sink that raises has its request cancelled."""
        for seq in self.outbox.flush():
            self.meter.counters.sinks_broken += 1
            self.scheduler.cancel(seq.id, now=now)

    def _offer(self) -> None:
        """Offer full blocks to the cache: nothing decodes now, so memory may be copied. There is no cache yet."""

    def _observe(self, batch: Batch, n_decodes: int, plan_s: float, native_s: float, apply_s: float) -> None:
        scheduler, counters = self.scheduler, self.meter.counters
        counters.retries = self.runner.n_retries
        n_prefills = sum(n_tokens for _, n_tokens in batch) - n_decodes
        self.meter.ticked(
            Ticked(
                n=counters.ticks,
                n_decode_rows=n_decodes,
                n_prefill_rows=n_prefills,
                n_active=len(scheduler.active),
                n_waiting=len(scheduler.waiting),
                cells_used=self._cells_used,
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
        for seq in self.scheduler.open_sequences():
            self.scheduler.fail(seq, EngineStopped(why), now=now)
        self.outbox.flush()
        self.context.close()

    def check(self) -> None:
        """Compare every ledger with the native memory. A difference is a fault of ours: fatal in debug, else mended.

        Mending is possible because this also runs when idle, when nothing in memory is anybody's.
        """
        live = [*self.scheduler.active.values(), *self.scheduler.ended]
        fault = self.runner.fault(live, self.settings.slots)
        if fault is None:
            return
        self.meter.counters.ledger_faults += 1
        assert not self.settings.debug, fault
        log.error("the ledger is wrong: %s", fault)
        if not live:
            self.context.memory.clear()

    def stats(self) -> EngineStats:
        """Take a snapshot; any thread."""
        scheduler, meter = self.scheduler, self.meter
        counters = replace(meter.counters, ended=dict(meter.counters.ended))
        return EngineStats(
            slots=self.settings.slots,
            slots_used=scheduler.slots.n_used,
            queue=len(scheduler.waiting),
            max_queue=self.settings.max_queue,
            cells=self._n_cells,
            cells_used=self._cells_used,
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
