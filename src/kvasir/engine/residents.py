"""Residents: what lives in each slot's KV memory, running or parked, and which slot a new prompt should take.

Owns the slot ids, the ledger of every slot and the radix trees over them, one tree per scope. Calls nothing native:
`reuse`, `place` and `least_worth` decide, `loop` moves the memory and then says so (`occupy`, `park`, `leave`). A slot
is free, or held by a running sequence, or parked: its sequence has ended and its KV is still live for whoever begins
the same.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from kvasir.engine.radix import Match, RadixTree, common_prefix
from kvasir.engine.sequence import Sequence, State

# Waiting for another's prefill pays from about here: below, computing the difference takes less than one tick.
MIN_FOLLOW = 32


class Segment(NamedTuple):
    """Cells [start, end) that the resident `origin` computed; several residents may hold them."""

    origin: int
    start: int
    end: int


_origins = itertools.count(1)


class Resident:
    """One slot's ledger. While its sequence runs, `tokens` is the sequence's own list and grows with it."""

    __slots__ = (
        "_n_parked",
        "editor",
        "is_open",
        "origin",
        "scope",
        "segments",
        "sequence",
        "slot",
        "tokens",
        "used_at",
    )

    def __init__(self, slot: int, sequence: Sequence, *, now: float) -> None:
        self.slot = slot
        self.sequence: Sequence | None = sequence
        self.scope = sequence.request.scope
        self.is_open = sequence.request.cache  # whether others may share it
        self.editor: str | None = None  # who had tokens cut out of it: only its requests may go on from it
        self.tokens = sequence.tokens
        self.used_at = now
        self.origin = next(_origins)
        self.segments: list[Segment] = []  # what it was given; the rest of its cells it computed
        self._n_parked = 0

    @property
    def n_live(self) -> int:
        """Tokens of it that are in KV memory now."""
        return self._n_parked if self.sequence is None else self.sequence.n_decoded

    @property
    def n_held(self) -> int:
        """Cells it holds, those of a restore that does not count yet included."""
        return self.n_live + (0 if self.sequence is None else self.sequence.n_loaded)

    @property
    def is_parked(self) -> bool:
        """Whether its sequence has ended."""
        return self.sequence is None

    @property
    def is_coming(self) -> bool:
        """Whether more of its known tokens will be in memory soon."""
        return self.sequence is not None and self.sequence.state in (State.PREFILL, State.FOLLOW, State.LOADING)

    def park(self, *, now: float) -> None:
        """Outlive the sequence with what is in memory of it."""
        assert self.sequence is not None
        self._n_parked = self.sequence.n_decoded
        self.tokens = self.tokens[: self._n_parked]
        self.sequence = None
        self.used_at = now

    def give(self, segments: list[Segment], n_tokens: int) -> None:
        """Note that its first `n_tokens` cells are these, which another computed."""
        cut = [segment._replace(end=min(segment.end, n_tokens)) for segment in segments]
        self.segments = [segment for segment in cut if segment.end > segment.start]

    def edit(self, editor: str, tokens: list[int], *, start: int) -> None:
        """Become its editor's own: `tokens` are what is left of a parked one, its cells from `start` on its alone."""
        self.give(self.cells(), start)
        self.editor, self.is_open = editor, False
        self.origin = next(_origins)
        self.tokens, self._n_parked = tokens, len(tokens)

    def cells(self) -> list[Segment]:
        """Every cell it holds, by who computed it."""
        start = self.segments[-1].end if self.segments else 0
        own = Segment(self.origin, start, self.n_held)
        return [*self.segments, own] if own.end > own.start else self.segments


class Reuse(NamedTuple):
    """What of a prompt need not be computed: `n_tokens` of `source` now, or `n_coming` of `leader` once it has them."""

    source: Resident | None = None
    n_tokens: int = 0
    leader: Resident | None = None
    n_coming: int = 0

    @property
    def n_expected(self) -> int:
        """Tokens that will not be computed, sooner or later."""
        return self.n_coming if self.leader is not None else self.n_tokens


class Placement(NamedTuple):
    """The slot a prompt takes.

    `takes`: a parked resident to continue where it is. `evicts`: a parked resident that has to go first. At most one.
    """

    slot: int
    takes: Resident | None = None
    evicts: Resident | None = None


class Residents:
    """The slots of one context. Engine thread only."""

    def __init__(self, n_slots: int, *, whole_only: bool = False) -> None:
        self.n_slots = n_slots
        self._whole_only = whole_only  # recurrent state can be continued from its end and nowhere else
        self._slots: list[Resident | None] = [None] * n_slots
        self._trees: dict[str | None, RadixTree[Resident]] = {}

    def __iter__(self) -> Iterator[Resident]:
        return (resident for resident in self._slots if resident is not None)

    @property
    def parked(self) -> list[Resident]:
        """Residents whose sequence has ended."""
        return [resident for resident in self._slots if resident is not None and resident.is_parked]

    @property
    def n_running(self) -> int:
        """Slots on loan to sequences."""
        return sum(resident is not None and not resident.is_parked for resident in self._slots)

    @property
    def has_place(self) -> bool:
        """Whether another sequence can have a slot, a parked one's included."""
        return any(resident is None or resident.is_parked for resident in self._slots)

    def matches(self, seq: Sequence) -> list[Match[Resident]]:
        """Residents of its scope that begin like it, best first; none for a request that wants no reuse."""
        tree = self._trees.get(seq.request.scope)
        if tree is None or not seq.request.cache:
            return []
        return [match for match in tree.matches(seq.tokens) if match.holder.sequence is not seq]

    def reuse(self, seq: Sequence) -> Reuse:
        """Find the longest live prefix; waiting for one in the making pays if it is longer by `MIN_FOLLOW`.

        Who waits already waits for the last token of it.
        """
        if (edited := self._edited_for(seq)) is not None:
            return edited
        matches = self.matches(seq)
        source, n_tokens = self._best_now(seq, matches)
        leader, n_coming = self._best_coming(seq, matches)
        if leader is None or n_coming < n_tokens + (1 if seq.state is State.FOLLOW else MIN_FOLLOW):
            leader, n_coming = None, 0
        return Reuse(source, n_tokens, leader, n_coming)

    def _edited_for(self, seq: Sequence) -> Reuse | None:
        owner = seq.request.owner
        for resident in self.parked if owner is not None else ():
            if resident.editor == owner and (
                n_tokens := self.usable(seq, Match(resident, common_prefix(resident.tokens, seq.tokens)))
            ):
                return Reuse(resident, n_tokens)
        return None

    def holding(self, tokens: list[int], *, scope: str | None, owner: str) -> Resident | None:
        """Return a parked resident whose KV is of exactly these tokens, the owner's own one first."""
        for resident in sorted(self.parked, key=lambda resident: resident.editor is None):
            mine = resident.editor == owner or (resident.is_open and resident.scope == scope)
            if mine and resident.n_live == len(tokens) and resident.tokens == tokens:
                return resident
        return None

    def edit(self, resident: Resident, owner: str, tokens: list[int], *, start: int) -> None:
        """Note that a parked resident was cut at `start`, to these tokens; from now on it is its owner's alone."""
        self._leave_tree(resident)
        resident.edit(owner, tokens, start=start)

    def place(self, reuse: Reuse) -> Placement | None:
        """Choose the slot that reuses most and destroys least; None while every slot runs.

        Score = tokens reused - tokens destroyed. A free slot destroys nothing; a parked one loses what the prompt does
        not continue. So a prompt that shares a system prompt never evicts a long conversation while a slot is free.
        An edited one is continued where it is: a copy would not be known for what it is.
        """
        if reuse.source is not None and reuse.source.editor is not None:
            return Placement(reuse.source.slot, takes=reuse.source)
        options = [self._option(slot, reuse) for slot in range(self.n_slots)]
        best = max((option for option in options if option is not None), key=lambda option: option[0], default=None)
        return None if best is None else best[1]

    def usable(self, seq: Sequence, match: Match[Resident]) -> int:
        """Tokens of a match that are in memory and can be continued; one at least must run to have logits."""
        n_tokens = min(match.n_tokens, match.holder.n_live, seq.n_tokens - 1)
        if self._whole_only and n_tokens != match.holder.n_live:
            return 0
        return n_tokens

    def least_worth(self) -> Resident | None:
        """Return the parked resident to give up first: the longest unused."""
        return min(self.parked, key=lambda resident: resident.used_at, default=None)

    def occupy(self, resident: Resident) -> None:
        """Let a running sequence have its slot, which is free; its whole prompt can be waited for from now on."""
        assert self._slots[resident.slot] is None, f"slot {resident.slot} is held"
        self._slots[resident.slot] = resident
        self._enter(resident)

    def park(self, resident: Resident, *, now: float) -> None:
        """Keep an ended sequence's KV for whoever begins the same."""
        self._leave_tree(resident)
        resident.park(now=now)
        self._enter(resident)

    def leave(self, resident: Resident) -> None:
        """Free a slot whose memory is empty or taken over."""
        assert self._slots[resident.slot] is resident
        self._leave_tree(resident)
        self._slots[resident.slot] = None

    def of(self, seq: Sequence) -> Resident:
        """Return the resident of a sequence that has a slot."""
        assert seq.slot is not None
        resident = self._slots[seq.slot]
        assert resident is not None
        assert resident.sequence is seq
        return resident

    def n_cells(self, *, shared: bool) -> int:
        """Count cells in use; cells that several residents hold count once where the layout shares them."""
        return n_cells_of(self) if shared else sum(resident.n_held for resident in self)

    def _best_now(self, seq: Sequence, matches: list[Match[Resident]]) -> tuple[Resident | None, int]:
        best, n_best = None, 0
        for match in matches:
            n_tokens = self.usable(seq, match)
            # Of equal ones a parked resident that would be continued whole: it moves no memory at all.
            if n_tokens > n_best or (n_tokens == n_best and n_tokens and match.holder.is_parked):
                best, n_best = match.holder, n_tokens
        return best, n_best

    def _best_coming(self, seq: Sequence, matches: list[Match[Resident]]) -> tuple[Resident | None, int]:
        if self._whole_only:
            return None, 0
        # Only those admitted before it: two that waited for each other would wait for ever.
        mine = None if seq.slot is None else self.of(seq).origin
        for match in matches:
            if match.holder.is_coming and (mine is None or match.holder.origin < mine):
                return match.holder, min(match.n_tokens, seq.n_tokens - 1)
        return None, 0

    def _option(self, slot: int, reuse: Reuse) -> tuple[tuple[int, int, int], Placement] | None:
        """Score one slot for a prompt: reused - destroyed; of equals one that moves no memory; then the lowest id."""
        held = self._slots[slot]
        if held is None:
            return (reuse.n_tokens, 0, -slot), Placement(slot)
        if not held.is_parked:
            return None
        if held is reuse.source:
            destroyed = held.n_live - reuse.n_tokens
            return (reuse.n_tokens - destroyed, 1, -slot), Placement(slot, takes=held)
        return (reuse.n_tokens - held.n_live, 0, -slot), Placement(slot, evicts=held)

    def _enter(self, resident: Resident) -> None:
        if resident.is_open:
            self._trees.setdefault(resident.scope, RadixTree()).insert(resident)

    def _leave_tree(self, resident: Resident) -> None:
        if not resident.is_open:
            return
        tree = self._trees[resident.scope]
        tree.remove(resident)
        if not len(tree):
            del self._trees[resident.scope]


def n_cells_of(residents: Iterable[Resident]) -> int:
    """Count the cells these residents hold, shared ones once."""
    ends: dict[tuple[int, int], int] = {}
    for resident in residents:
        for segment in resident.cells():
            key = (segment.origin, segment.start)
            ends[key] = max(ends.get(key, 0), segment.end)
    return sum(end - start for (_, start), end in ends.items())
