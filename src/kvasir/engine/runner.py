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
from kvasir.engine.residents import Residents
from kvasir.engine.scheduler import Batch, Outcome
from kvasir.engine.sequence import Sequence
from kvasir.errors import ContextFull, KvasirError, ModelError

log = logging.getLogger(__name__)

# How often a sequence may start again from its first token because a step failed that it was in. Without a bound, one
# that always fails at the same place would start again for ever.
MAX_FAULTS = 4


class Runner:
    """Runs batches on one context; engine thread only."""

    def __init__(
        self,
        core: Core,
        context: Context,
        *,
        clock: Callable[[], float],
        prompt_ran: Callable[[Sequence, int], None] | None = None,
    ) -> None:
        self._row = core.Row
        self._prompt_ran = prompt_ran  # told of a prompt's end and its row, while the row's logits are there
        self._context = context
        self._memory = context.memory
        self._clock = clock
        # After a failed step recurrent state is suspect, also of sequences that were not in the batch.
        self._loses_all = self._memory.kind in ("recurrent", "hybrid")
        self.native_s = 0.0  # spent inside the core, ever
        self.n_rows = 0  # rows of steps that succeeded: the sum of all ledgers' n_rows
        self.n_rows_lost = 0  # rows the core counted in steps that failed
        self.n_retries = 0
        self.n_clears = 0  # times all of the memory was given up

    def run(self, batch: Batch, active: Iterable[Sequence]) -> Outcome:
        """Decode the next tokens of these sequences, one native call unless it fails. Blocks without the GIL."""
        outcome = Outcome([], [])
        for part in _parts(batch):
            self._run([(seq, min(n_tokens, seq.n_left)) for seq, n_tokens in part], outcome, active)
        return outcome

    def sample_stored(self, seq: Sequence, logits: bytes) -> Outcome:
        """Sample the token after a prompt from what an earlier run of it left. Decodes nothing."""
        try:
            step: Step = self._context.sample_stored(seq.sampler, logits, seq.logprobs)
        except KvasirError as error:
            return Outcome([], [(seq, error)])
        return Outcome([(seq, step.tokens[0], step.logprobs[0], step.errors[0])], [])

    def forget(self, slot: int) -> None:
        """Free the cells of a slot."""
        self._memory.remove(slot, 0, None)

    def trim(self, slot: int, n_tokens: int) -> bool:
        """Cut a slot to its first tokens; False where this memory cannot, and then the slot is empty."""
        if self._memory.remove(slot, n_tokens, None):
            return True
        self.forget(slot)
        return False

    def share(self, source: int, slot: int, n_tokens: int) -> bool:
        """Give a slot the first tokens of another; False where this memory cannot exactly, and then it is empty."""
        return bool(self._memory.share(source, slot, n_tokens))

    def shift(self, slot: int, start: int, end: int) -> None:
        """Cut a span out of a slot and move what follows it up; where that fails, the slot has a hole and must go."""
        self._memory.remove(slot, start, end)
        self._memory.shift(slot, end, None, start - end)

    def fault(self, residents: Residents, *, shared: bool) -> str | None:
        """Compare the ledgers with the native memory; say what differs, if anything does."""
        ledger = {resident.slot: resident.n_live for resident in residents}
        # A memory of several parts says where a slot ends only once all parts of a restore are there.
        loading = {resident.slot for resident in residents if resident.n_held > resident.n_live}
        for slot in sorted(set(range(residents.n_slots)) - loading):
            n_tokens = self._length(slot)
            if n_tokens != ledger.get(slot, 0):
                return f"slot {slot} holds {n_tokens} tokens, its ledger says {ledger.get(slot, 0)}"
        if self._memory.kind != "recurrent":  # there a cell is a sequence, not a token
            used, booked = self._memory.used_cells, residents.n_cells(shared=shared)
            if used != booked:
                return f"{used} cells are in use, the ledgers say {booked}"
            n_cells, wanted = self._memory.n_cells, self._context.n_ctx
            if not used <= n_cells == wanted:
                return f"{used} of {n_cells} cells are in use, the context was made with {wanted}"
        counted = self._context.n_rows_decoded
        if counted != self.n_rows + self.n_rows_lost:
            return f"the core decoded {counted} rows, the ledgers say {self.n_rows} and {self.n_rows_lost} lost"
        return None

    def _run(self, batch: Batch, outcome: Outcome, active: Iterable[Sequence]) -> None:
        step = self._step(batch)
        if not isinstance(step, _Fault):
            self._note(batch, step, outcome)
            return
        self.n_rows_lost = self._context.n_rows_decoded - self.n_rows
        if step.status != "aborted":
            log.warning("a step of %d sequences came to nothing: %s", len(batch), step.error)
        if self._loses_all and step.status == "failed":
            self._start_again(batch, step, outcome, active)
            return
        for seq, _ in batch:
            self._resync(seq)
        if step.status != "aborted":  # else nothing is wrong with the batch, and the next tick runs it again
            self._retry(batch, step, outcome, active)

    def _note(self, batch: Batch, step: Step, outcome: Outcome) -> None:
        """Enter a step that succeeded in the ledgers."""
        rows = zip(batch, step.tokens, step.logprobs, step.errors, strict=True)
        for row, ((seq, n_tokens), token, logprobs, error) in enumerate(rows):
            seq.ran(n_tokens)
            self.n_rows += n_tokens
            if self._prompt_ran is not None and seq.n_decoded == seq.n_prompt == seq.n_tokens and error is None:
                self._prompt_ran(seq, row)
            if token is not None or error is not None or (seq.only_reads and not seq.n_left):
                seq.n_faults = 0
                outcome.ran.append((seq, token, logprobs, error))

    def _retry(self, batch: Batch, fault: _Fault, outcome: Outcome, active: Iterable[Sequence]) -> None:
        """Run the halves of a batch that failed; what cannot be halved fails."""
        halves = _halves(batch)
        if not halves:
            outcome.failed.append((batch[0][0], fault.error))
        for half in halves:
            self.n_retries += 1
            self._run([(seq, min(n_tokens, seq.n_left)) for seq, n_tokens in half], outcome, active)

    def _start_again(self, batch: Batch, fault: _Fault, outcome: Outcome, active: Iterable[Sequence]) -> None:
        """Clear the memory and run everything anew; those of the batch run alone until they have made a token.

        So the one at fault is found without a second batch having to fail with it.
        """
        self._memory.clear()
        self.n_clears += 1
        for seq in active:
            seq.rewind()
        for seq, _ in batch:
            self.n_retries += 1
            seq.n_faults += 1
        if len(batch) == 1 and batch[0][0].n_faults > MAX_FAULTS:
            outcome.failed.append((batch[0][0], fault.error))

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
        return self._row(seq.slot, at, seq.tokens[at:], seq.sampler, seq.logprobs, self._prompt_ran is not None)

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

    def _resync(self, seq: Sequence) -> None:
        """Adopt what is in memory. A last token that ran without being sampled is dropped, to run again."""
        if self._length(seq.slot) >= seq.n_tokens and not self._memory.remove(seq.slot, seq.n_tokens - 1, None):
            self._memory.remove(seq.slot, 0, None)
        seq.resume_at(self._length(seq.slot))

    def _length(self, slot: int | None) -> int:
        last = self._memory.pos_max(slot)
        return 0 if last is None else int(last) + 1


class _Fault(NamedTuple):
    """A step that did nothing usable: the core's status, or "refused" where it raised."""

    status: str
    error: KvasirError


def _parts(batch: Batch) -> list[Batch]:
    """All together, but those apart that were in a step that cost everybody's state."""
    if not any(seq.n_faults for seq, _ in batch):
        return [batch]
    together = [planned for planned in batch if not planned[0].n_faults]
    alone = [[planned] for planned in batch if planned[0].n_faults]
    return [together, *alone] if together else alone


def _halves(batch: Batch) -> list[Batch]:
    """Split a batch in two, or cut a lone chunk to its first half; nothing if there is nothing left to try."""
    if len(batch) > 1:
        middle = len(batch) // 2
        return [batch[:middle], batch[middle:]]
    seq, n_tokens = batch[0]
    return [[(seq, n_tokens // 2)]] if n_tokens > 1 else []
