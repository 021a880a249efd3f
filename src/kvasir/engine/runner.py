"""The runner: a batch of sequences becomes one native step, and the ledgers learn what ran.

The only place that calls `context.step`, and the only one that changes native memory. Decides nothing but how to go
on after a step that failed: it halves the batch until the part that cannot run stands alone, so that no sequence
fails because of another.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from kvasir.engine.core import Context, Core, Step
from kvasir.engine.scheduler import Batch, Outcome
from kvasir.engine.sequence import Sequence
from kvasir.errors import ContextFull, KvasirError, ModelError

log = logging.getLogger(__name__)

# How often a sequence that failed alone starts again from its first token, where a failure costs the whole state
# (recurrent memory). Without a bound one that always fails at the same place would start again for ever; more than
# the halvings of a usual chunk (512 is nine of them), so that a chunk too large still finds its size.
MAX_FAULTS = 12


class Runner:
    """Runs batches on one context; engine thread only."""

    def __init__(self, core: Core, context: Context, *, clock: Callable[[], float]) -> None:
        self._row = core.Row
        self._context = context
        self._memory = context.memory
        self._clock = clock
        # After a failed step recurrent state is suspect, also of sequences that were not in the batch.
        self._loses_all = self._memory.kind in ("recurrent", "hybrid")
        self.native_s = 0.0  # spent inside the core, ever
        self.n_rows = 0  # rows of steps that succeeded: the sum of all ledgers' n_rows
        self.n_rows_lost = 0  # rows the core counted in steps that failed
        self.n_retries = 0

    def run(self, batch: Batch, active: Iterable[Sequence]) -> Outcome:
        """Decode the next tokens of these sequences, one native call unless it fails. Blocks without the GIL."""
        outcome = Outcome([], [])
        self._run(batch, outcome, active)
        return outcome

    def forget(self, seq: Sequence) -> None:
        """Free the cells of a sequence."""
        assert seq.slot is not None
        self._memory.remove(seq.slot, 0, None)

    def fault(self, active: Iterable[Sequence], n_slots: int) -> str | None:
        """Compare the ledgers with the native memory; say what differs, if anything does."""
        ledger = {seq.slot: seq.n_decoded for seq in active}
        for slot in range(n_slots):
            n_cells = self._length(slot)
            if n_cells != ledger.get(slot, 0):
                return f"slot {slot} holds {n_cells} tokens, its ledger says {ledger.get(slot, 0)}"
        counted = self._context.n_rows_decoded
        if counted != self.n_rows + self.n_rows_lost:
            return f"the core decoded {counted} rows, the ledgers say {self.n_rows} and {self.n_rows_lost} lost"
        return None

    def _run(self, batch: Batch, outcome: Outcome, active: Iterable[Sequence]) -> None:
        step = self._step(batch)
        if not isinstance(step, _Fault):
            for seq, n_tokens in batch:
                seq.ran(n_tokens)
                self.n_rows += n_tokens
            sequences = [seq for seq, _ in batch]
            outcome.ran.extend(zip(sequences, step.tokens, step.logprobs, step.errors, strict=True))
            return
        self._recover(step, batch, active)
        if step.status == "aborted":
            return  # nothing is wrong with the batch; if the engine is not closing, the next tick runs it again
        log.warning("a step of %d sequences failed: %s", len(batch), step.error)
        halves = self._halves(batch)
        if not halves:
            outcome.failed.append((batch[0][0], step.error))
        for half in halves:
            self.n_retries += 1
            self._run([(seq, min(n_tokens, seq.n_left)) for seq, n_tokens in half], outcome, active)

    def _step(self, batch: Batch) -> Step | _Fault:
        """Make one native call; return what it did, or why it did nothing."""
        rows = [self._row_of(seq, n_tokens) for seq, n_tokens in batch]
        started = self._clock()
        try:
            step: Step = self._context.step(rows)
        except KvasirError as error:
            return _Fault("refused", error)
        finally:
            self.native_s += self._clock() - started
        return step if step.status == "ok" else _Fault(step.status, self._error_of(step.status, batch))

    def _row_of(self, seq: Sequence, n_tokens: int) -> Any:
        """The row that runs the next tokens; it samples only after the last of them all."""
        at = seq.n_decoded
        if at + n_tokens < seq.n_tokens:
            return self._row(seq.slot, at, seq.tokens[at : at + n_tokens])
        return self._row(seq.slot, at, seq.tokens[at:], seq.sampler, seq.logprobs)

    def _error_of(self, status: str, batch: Batch) -> KvasirError:
        n_tokens = sum(n for _, n in batch)
        if status == "no_room":
            used, cells = self._memory.used_cells, self._memory.n_cells
            return ContextFull(
                f"{n_tokens} tokens found no room: {used} of {cells} cells are in use. Load with a larger "
                "context_size or fewer slots.",
                n_tokens=used + n_tokens,
                limit=cells,
            )
        return ModelError(f"the decode of {n_tokens} tokens failed in the native core ({status}); see the log.")

    def _recover(self, fault: _Fault, batch: Batch, active: Iterable[Sequence]) -> None:
        """Bring the ledgers in line with what the failed step left in memory."""
        self.n_rows_lost = self._context.n_rows_decoded - self.n_rows
        if not self._loses_all:
            for seq, _ in batch:
                self._resync(seq)
        elif fault.status == "failed":
            self._memory.clear()
            for seq in active:
                seq.rewind()
            if len(batch) == 1:
                batch[0][0].n_faults += 1

    def _resync(self, seq: Sequence) -> None:
        """Adopt what is in memory. A last token that ran without being sampled is dropped, to run again."""
        if self._length(seq.slot) >= seq.n_tokens and not self._memory.remove(seq.slot, seq.n_tokens - 1, None):
            self._memory.remove(seq.slot, 0, None)
        seq.resume_at(self._length(seq.slot))

    def _halves(self, batch: Batch) -> list[Batch]:
        """Split a batch in two, or cut a lone chunk to its first half; nothing if there is nothing left to try."""
        if len(batch) > 1:
            middle = len(batch) // 2
            return [batch[:middle], batch[middle:]]
        seq, n_tokens = batch[0]
        return [[(seq, n_tokens // 2)]] if n_tokens > 1 and seq.n_faults < MAX_FAULTS else []

    def _length(self, slot: int | None) -> int:
        last = self._memory.pos_max(slot)
        return 0 if last is None else int(last) + 1


class _Fault(NamedTuple):
    """A step that did nothing usable: the core's status, or "refused" where it raised."""

    status: str
    error: KvasirError
