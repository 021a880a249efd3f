"""Warm: the bridge between slots and blocks. Restores stored prefixes into slots; the way back is `offers.py`.

Rows are imported on the engine thread between two decodes, when memory may be written; searching and reading happen on
threads beside it. A restore is exact or is given up: what cannot be brought back whole is computed.

    plain      a row is the KV of its tokens; any number of them can be appended
    window     the same, and besides the window part of the last rows
    recurrent  a row is a snapshot of the whole state after its last token
    hybrid     the KV of its tokens, and a snapshot where the sequence stood at the row's end
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from time import perf_counter_ns
from typing import NamedTuple

from kvasir.cache import Key, Loading, Match, Needs, Space, Why
from kvasir.engine.core import Context
from kvasir.engine.offers import Binding, Offers
from kvasir.engine.sequence import Sequence
from kvasir.errors import KvasirError

log = logging.getLogger(__name__)

# Tokens imported in one tick beside running streams. Copying them takes a few milliseconds, less than a decode.
IMPORT_TOKENS = 2048
# How long an admission waits for a search: those that need no slow disk are over by then, and it is less than a decode.
SEARCH_S = 0.005
# A stored prefix must spare at least this many tokens more than what is live, or computing them is as quick; fewer only
# where a model's `min_tokens` says that fewer are worth it.
MIN_GAIN = 32


@dataclass(slots=True)
class Restore:
    """A stored prefix on its way into a slot."""

    match: Match
    loading: Loading | None  # None: nothing is read before the first token is said, which may be the last
    n_done: int = 0  # tokens in the slot already: shared live, or imported
    logits: bytes | None = None  # what the model says after the whole prompt
    next_row: int = 0

    @property
    def is_known(self) -> bool:
        """Whether all of the prompt was stored: found, or the beginning of a row that goes on behind it."""
        return self.match.why is None or self.match.why.why is Why.TOO_SHORT

    def release(self) -> None:
        """Let the rows go, and read no more of them."""
        if self.loading is not None:
            self.loading.stop()
        self.match.release()


class Piece(NamedTuple):
    """The KV of one row on its way into one part of the memory."""

    part: str
    start: int
    end: int
    payload: bytes


class Warm:
    """Restores for one context, and its offers."""

    def __init__(self, binding: Binding, context: Context) -> None:
        memory = context.memory
        self.cache = binding.cache
        self.rules = binding.rules
        self.block_tokens = binding.cache.block_tokens
        self._n_logits_bytes = 4 * int(context.model.vocab.n_tokens)
        self._memory = memory
        self._kind = str(memory.kind)
        self._restores: dict[int, Restore] = {}
        self._searches: dict[int, Future[Restore | None]] = {}
        self._searchers = ThreadPoolExecutor(2, "kvasir-search")
        self.n_imported = 0  # tokens, ever; those of a window again
        self.needs = Needs(
            chain=self._kind != "recurrent",
            window_tokens=int(memory.window) if self._kind == "window" else 0,
            state=self._kind in ("recurrent", "hybrid"),
            trim=self._kind == "plain",
        )
        self.offers = Offers(binding, context, self.needs)

    def find(self, seq: Sequence, *, n_live: int) -> bool | None:
        """Look for a stored prefix longer than what is live, and begin to read it; None while the search goes on.

        Searches on a thread of its own, for it looks at file systems; the engine waits `SEARCH_S` at most.
        """
        space = self.offers.space_of(seq)
        self._searches[seq.id] = self._searchers.submit(self._search, space, seq, n_live)
        wait([self._searches[seq.id]], SEARCH_S)
        return self.found(seq)

    def is_searching(self, seq: Sequence) -> bool:
        """Say whether the outcome of a search is still to be asked for."""
        return seq.id in self._searches

    def found(self, seq: Sequence) -> bool | None:
        """Say whether a search found what is worth a restore; None while it goes on."""
        search = self._searches[seq.id]
        if not search.done():
            return None
        del self._searches[seq.id]
        try:
            restore = search.result()
        except Exception:  # a fault of the cache costs a hit, never an answer
            log.exception("a search of the cache failed; the prompt is computed")
            return False
        if restore is not None:
            self._restores[seq.id] = restore
        return restore is not None

    def _search(self, space: Space, seq: Sequence, n_live: int) -> Restore | None:
        parent = seq.request.parent_key
        logits = self._stored_logits(space, seq)
        match = self.cache.longest(
            space,
            seq.tokens,
            needs=self.needs,
            most=seq.n_tokens - (logits is None),  # without them the last token must run, for what comes after it
            min_tokens=self.rules.min_tokens,
            parent_key=None if parent is None else Key(parent),
            session_resume_wait_ms=self.rules.session_resume_wait_ms,
        )
        if match.n_tokens < n_live + min(MIN_GAIN, max(1, self.rules.min_tokens)):
            match.release()
            return None
        return Restore(match, self.cache.read(match) if logits is None else None, logits=logits)

    def _stored_logits(self, space: Space, seq: Sequence) -> bytes | None:
        if seq.n_generated or seq.only_reads or seq.n_prompt < max(2, self.rules.min_tokens):
            return None
        logits = self.cache.logits(space, seq.tokens)
        return logits if logits is not None and len(logits) == self._n_logits_bytes else None

    def take_logits(self, seq: Sequence) -> bytes | None:
        """What the model says after this prompt, if a search found that; once."""
        restore = self._restores[seq.id]
        logits, restore.logits = restore.logits, None
        if logits is not None:
            self.cache.used_logits()
        return logits

    def spared(self, seq: Sequence) -> None:
        """Report that a sequence ended with its first token: what it spared is no less than with its rows."""
        self.cache.spared(self.offers.space_of(seq), seq.n_prompt)

    def begins_at(self, seq: Sequence, n_live: int) -> int:
        """Say how much of a live prefix can stand under the rows that follow: whole rows only, and plain KV only."""
        restore = self._restores[seq.id]
        if self._kind != "plain":
            return 0
        n_done = restore.next_row = 0
        for row in restore.match.rows:
            if row.end > min(n_live, restore.match.n_tokens):
                break
            n_done, restore.next_row = row.end, restore.next_row + 1
        restore.n_done = n_done
        return n_done

    def advance(self, seq: Sequence, *, most_tokens: int | None) -> int | None:
        """Import what has been read, at most so many tokens in this tick.

        Returns the tokens that are in the slot once nothing more will come, None while the restore goes on.
        """
        restore = self._restores[seq.id]
        if restore.loading is None:
            restore.loading = self.cache.read(restore.match)
        is_whole = restore.loading.ready()
        if not is_whole and self._kind != "plain":
            return None
        # Plain rows are appended while those behind them are still being read.
        parts = restore.loading.result() if is_whole else restore.loading.arrived()
        if not is_whole and len(parts) == restore.next_row:
            return None
        started = perf_counter_ns()
        try:
            done = self._import(seq, restore, parts, most_tokens, is_whole=is_whole)
        except KvasirError as error:  # bytes that do not fit this context: computed instead
            log.warning("a stored prefix of %d tokens could not be restored: %s", restore.match.n_tokens, error)
            self._give_up(seq, restore)
            done = True
        self.cache.timed("import", perf_counter_ns() - started)
        seq.n_decoded = restore.n_done
        if not done:
            return None
        self.offers.restored(seq, restore.n_done, is_known=restore.is_known)
        self.drop(seq)
        return restore.n_done

    def drop(self, seq: Sequence) -> None:
        """Let go of a search, or of a restore that is complete or no longer wanted."""
        search = self._searches.pop(seq.id, None)
        if search is not None:
            search.add_done_callback(_release)
        restore = self._restores.pop(seq.id, None)
        if restore is not None:
            restore.release()

    def forget(self, seq: Sequence) -> None:
        """Forget all about a sequence that has ended or was preempted."""
        self.drop(seq)
        self.offers.forget(seq)

    def close(self) -> None:
        """Let the search thread end. What it looks for now is let go when it has it."""
        for search in self._searches.values():
            search.add_done_callback(_release)
        self._searchers.shutdown(wait=False, cancel_futures=True)

    def _import(
        self, seq: Sequence, restore: Restore, parts: list[Mapping[str, bytes]], most: int | None, *, is_whole: bool
    ) -> bool:
        """Import rows that are there; True once nothing more will be imported."""
        assert seq.slot is not None
        if self._kind == "plain":
            return not self._append(seq, restore, parts, most) or (is_whole and restore.next_row >= len(parts))
        # The others are whole or nothing: their memory says where it ends only once every part is there.
        complete = len(parts) == len(restore.match.rows) > 0
        fits = self._import_whole(seq, restore, parts, most) if complete else False
        if fits is None:
            return False
        if fits:
            seq.n_loaded, restore.n_done = 0, restore.match.rows[-1].end
        else:
            self._give_up(seq, restore)
        return True

    def _append(self, seq: Sequence, restore: Restore, parts: list[Mapping[str, bytes]], most: int | None) -> bool:
        """Append rows of plain KV, as many as this tick may; False where they do not fit any more."""
        batch = within(_pieces(restore, parts, "base")[restore.next_row :], most)
        if not batch:
            return True
        if not self._import_pieces(seq, batch):
            return False
        restore.next_row += len(batch)
        end = batch[-1].end
        restore.n_done = min(end, restore.match.n_tokens)
        if restore.n_done < end:  # the last row goes on differently than the prompt
            self._memory.remove(seq.slot, restore.n_done, None)
        return True

    def _import_whole(
        self, seq: Sequence, restore: Restore, parts: list[Mapping[str, bytes]], most: int | None
    ) -> bool | None:
        """Import the KV of all rows, as much of it as this tick may, then what makes it count: a window, a state.

        None while that goes on, False where it does not fit.
        """
        if self._kind == "recurrent":
            return bool(self._memory.set_state(seq.slot, parts[-1]["state"]))
        if not seq.n_loaded:  # nothing is there yet, or not any more: a step that failed may have cost all memory
            restore.next_row = 0
        bases = _pieces(restore, parts, "base")
        pieces = [*bases, *_pieces(restore, parts, "window")]
        batch = within(pieces[restore.next_row :], most)
        for part in ("base", "window"):
            if not self._import_pieces(seq, [piece for piece in batch if piece.part == part]):
                return False
        restore.next_row += len(batch)
        seq.n_loaded = bases[min(restore.next_row, len(bases)) - 1].end
        if restore.next_row < len(pieces):
            return None
        return self._kind == "window" or bool(self._memory.set_state(seq.slot, parts[-1]["state"], partial=True))

    def _import_pieces(self, seq: Sequence, pieces: list[Piece]) -> bool:
        """Append pieces of one part of the memory; False where there is no room."""
        if not pieces:
            return True
        first, last = pieces[0], pieces[-1]
        self.n_imported += last.end - first.start
        payloads = [piece.payload for piece in pieces]
        return bool(self._memory.import_span(seq.slot, first.start, payloads, first.part))

    def _give_up(self, seq: Sequence, restore: Restore) -> None:
        """Empty the slot; the prompt runs from its first token."""
        self._memory.remove(seq.slot, 0, None)
        seq.n_loaded = restore.n_done = 0


def within(pieces: list[Piece], most: int | None) -> list[Piece]:
    """The first pieces, of so many tokens together at most; one at least."""
    n_tokens = 0
    for n_pieces, piece in enumerate(pieces):
        n_tokens += piece.end - piece.start
        if most is not None and n_tokens > most and n_pieces:
            return pieces[:n_pieces]
    return pieces


def _pieces(restore: Restore, parts: list[Mapping[str, bytes]], part: str) -> list[Piece]:
    rows = zip(restore.match.rows, parts, strict=False)
    return [Piece(part, row.start, row.end, there[part]) for row, there in rows if part in there]


def _release(search: Future[Restore | None]) -> None:
    """Let the rows go that a search found for somebody who is gone."""
    if not search.cancelled() and search.exception() is None and (restore := search.result()) is not None:
        restore.release()
