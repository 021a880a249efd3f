"""Offers: what slots hold goes to the cache. Full blocks while a sequence runs, the rest when it leaves its slot.

Everything here runs on the engine thread between two decodes, so that memory may be copied; what is handed over is
owned bytes. Decides when a span, a snapshot or logits are worth it; how rows are stored is the cache's affair.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from time import perf_counter_ns
from typing import NamedTuple

from kvasir.cache import Cache, Key, Needs, Reason, SaveRules, Space, cold_end, continued_end, last_end
from kvasir.engine.core import Context
from kvasir.engine.sequence import Sequence
from kvasir.errors import KvasirError

log = logging.getLogger(__name__)

# Blocks exported in one tick beside running streams; the rest follow in the next ticks.
EXPORT_BLOCKS = 4
# Logits are kept with a prompt where they add at most a thirty-second to what its computed tokens take.
LOGITS_SHARE = 32


class Binding(NamedTuple):
    """A cache and how one model uses it: when to save, and the space of a scope, given the cells of one sequence."""

    cache: Cache
    rules: SaveRules
    space: Callable[[str | None, int], Space]


@dataclass(slots=True)
class Saved:
    """What of one sequence the cache has been offered."""

    space: Space
    n_offered: int = 0  # tokens, a whole number of blocks, that are offered or were restored
    is_known: bool = False  # whether the cache had all of the prompt, if not always in a form to restore
    checkpoints: list[int] = field(default_factory=list)  # positions where a snapshot is to be taken
    logits: bytes | None = None  # what the model said after the prompt, until it is decided whether to keep that


class Offers:
    """Offers of one context."""

    def __init__(self, binding: Binding, context: Context, needs: Needs) -> None:
        self._cache = binding.cache
        self._rules = binding.rules
        self._block_tokens = binding.cache.block_tokens
        self._context = context
        self._memory = context.memory
        self._kind = str(context.memory.kind)
        self._needs = needs
        self._n_logits_bytes = 4 * int(context.model.vocab.n_tokens)
        self._token_bytes = 0.0  # of the last row that was copied out, for each of its tokens
        self._space_of = binding.space
        self._n_ctx_seq = context.n_ctx_seq
        self._spaces: dict[str | None, Space] = {}
        self._saved: dict[int, Saved] = {}

    def space_of(self, seq: Sequence) -> Space:
        """The space of a sequence's rows."""
        return self._saved_of(seq).space

    def restored(self, seq: Sequence, n_tokens: int, *, is_known: bool) -> None:
        """Note that the first tokens of a sequence came from the cache: they need no offer."""
        saved = self._saved_of(seq)
        saved.is_known = is_known
        saved.n_offered = n_tokens - n_tokens % self._block_tokens

    def forget(self, seq: Sequence) -> None:
        """Forget what was noted of a sequence that has ended or was preempted."""
        self._saved.pop(seq.id, None)

    def started(self, seq: Sequence) -> None:
        """Note where a sequence begins to run: snapshots are taken from there on."""
        if seq.cacheable:
            self._await_next(seq, self._saved_of(seq))

    def offer(self, seq: Sequence, *, most_blocks: int | None) -> None:
        """Offer the full blocks that a sequence has computed since it was last asked, as far as the rules want them."""
        if not seq.cacheable:
            return
        saved = self._saved_of(seq)
        if seq.n_decoded <= seq.n_prompt:
            end, reason = min(cold_end(seq.n_prompt, self._rules), seq.n_decoded), Reason.COLD
        else:
            end = continued_end(seq.n_decoded, saved.n_offered, self._rules, block_tokens=self._block_tokens)
            reason = Reason.CONTINUED
        n_blocks = 0
        while saved.n_offered + self._block_tokens <= end and (most_blocks is None or n_blocks < most_blocks):
            self._offer_span(seq, saved, saved.n_offered, saved.n_offered + self._block_tokens, reason)
            saved.n_offered += self._block_tokens
            n_blocks += 1
        self._snapshot(seq, saved)
        self._offer_logits(seq, saved)

    def keep(self, seq: Sequence, reason: Reason) -> None:
        """Offer all that is in memory of a sequence, to its last token."""
        saved = self._saved_of(seq)
        end = last_end(seq.n_decoded, 0, self._rules)
        if not (seq.cacheable and end):
            return
        for start in range(saved.n_offered, end, self._block_tokens):
            self._offer_span(seq, saved, start, min(start + self._block_tokens, end), reason)
        saved.n_offered = end - end % self._block_tokens
        self._offer_logits(seq, saved)

    def _snapshot(self, seq: Sequence, saved: Saved) -> None:
        """Keep the state of a sequence that stands exactly where the rules want one."""
        at = seq.n_decoded
        if at in saved.checkpoints:
            self._offer_span(seq, saved, (at - 1) // self._block_tokens * self._block_tokens, at, Reason.COLD)
        self._await_next(seq, saved)

    def _await_next(self, seq: Sequence, saved: Saved) -> None:
        """Let a sequence run to its next checkpoint and no further."""
        saved.checkpoints = [at for at in saved.checkpoints if at > seq.n_decoded]
        seq.stop_at = saved.checkpoints[0] if saved.checkpoints else None

    def prompt_ran(self, seq: Sequence, row: int) -> None:
        """Hold what the model says after a prompt whose last token was row `row` of the step just made."""
        least = max(2, self._rules.cold_min_tokens)
        if not seq.cacheable or seq.n_prompt < least or self._worth_logits(seq) is False:
            return
        try:
            logits = self._context.logits(row)
        except KvasirError as error:  # costs a first token some day, and no answer now
            log.warning("the logits after a prompt could not be kept: %s", error)
            return
        if (logits == logits).all():  # no NaN: nobody could sample from that
            self._saved_of(seq).logits = logits.tobytes()

    def _offer_logits(self, seq: Sequence, saved: Saved) -> None:
        is_worth = self._worth_logits(seq) if saved.logits is not None else None
        if is_worth is None:
            return
        if is_worth and saved.logits is not None:
            self._cache.offer_logits(saved.space, seq.tokens[: seq.n_prompt], saved.logits)
        saved.logits = None

    def _worth_logits(self, seq: Sequence) -> bool | None:
        """Whether they cost little beside the prompt's KV, or the prompt came a second time; None while unknown."""
        if self._saved_of(seq).is_known:
            return True
        n_bytes = (seq.n_prompt - seq.n_cached) * self._token_bytes
        return self._n_logits_bytes * LOGITS_SHARE <= n_bytes if self._token_bytes else None

    def key_of(self, seq: Sequence) -> Key | None:
        """Name what a sequence that ends now leaves behind; None where it leaves nothing."""
        is_early = seq.n_decoded < seq.n_prompt == seq.n_cached  # its first token came before its rows
        end = last_end(seq.n_prompt if is_early else seq.n_decoded, 0, self._rules)
        return self._saved_of(seq).space.key(seq.tokens[:end]) if seq.cacheable and end else None

    def computed(self, n_tokens: int, seconds: float) -> None:
        """Report what computing costs: one side of the question whether a restore is worth it."""
        for space in self._spaces.values():
            self._cache.computed(space, n_tokens, seconds)

    def _offer_span(self, seq: Sequence, saved: Saved, start: int, end: int, reason: Reason) -> None:
        if self._cache.has(saved.space.key(seq.tokens[:end])):
            return
        started = perf_counter_ns()
        parts = self._export(seq, start, end)
        self._cache.timed("export", perf_counter_ns() - started)
        if parts is not None:
            self._token_bytes = sum(map(len, parts.values())) / (end - start)
            self._cache.offer(saved.space, seq.tokens, start=start, end=end, parts=parts, reason=reason)

    def _export(self, seq: Sequence, start: int, end: int) -> dict[str, bytes] | None:
        """Copy a span out of memory; None where this memory has nothing there that could be restored."""
        memory, slot, parts = self._memory, seq.slot, {}
        try:
            if self._needs.chain:
                parts["base"] = memory.export_span(slot, start, end)
            if self._kind == "window":
                parts["window"] = memory.export_span(slot, start, end, "window")
            if self._needs.state and end == seq.n_decoded:
                parts["state"] = memory.state(slot, partial=self._kind == "hybrid")
        except KvasirError as error:
            log.debug("a span of %d tokens is not kept: %s", end - start, error)
            return None
        return parts or None

    def _saved_of(self, seq: Sequence) -> Saved:
        saved = self._saved.get(seq.id)
        if saved is None:
            scope = seq.request.scope
            if scope not in self._spaces:
                self._spaces[scope] = self._space_of(scope, self._n_ctx_seq)
            saved = self._saved[seq.id] = Saved(self._spaces[scope])
            if self._needs.state and seq.request.cache:
                saved.checkpoints = self._checkpoints(seq)
        return saved

    def _checkpoints(self, seq: Sequence) -> list[int]:
        """Where a next prompt may part from this one, and where this same prompt would go on.

        A hybrid's block may be stored already, without a state, by a prompt that ran over its end: one token before it,
        the snapshot is a row of its own.
        """
        parting = {cold_end(seq.n_prompt, self._rules), min(seq.request.checkpoint or 0, seq.n_prompt - 1)}
        apart = {at - (self._needs.chain and at % self._block_tokens == 0) for at in parting}
        return sorted(at for at in apart | {seq.n_prompt - 1} if at >= max(1, self._rules.min_tokens))
