"""Slots: which llama.cpp sequence ids are on loan.

Owns the free list and nothing native: whoever releases a slot has emptied its memory first. The lowest free id is
lent first, because in the split layout sequences of consecutive low ids share one pass over the weights, and every
hole splits it. Keeping ended sequences live for reuse (parked) will hold slots here between `release` and `take`.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush


class SlotPool:
    """Lends the ids 0 to n_slots - 1."""

    def __init__(self, n_slots: int) -> None:
        self.n_slots = n_slots
        self._free = list(range(n_slots))
        heapify(self._free)

    @property
    def n_free(self) -> int:
        """Ids that can be taken."""
        return len(self._free)

    @property
    def n_used(self) -> int:
        """Ids on loan."""
        return self.n_slots - len(self._free)

    def take(self) -> int:
        """Lend the lowest free id; the caller has seen that there is one."""
        return heappop(self._free)

    def release(self, slot: int) -> None:
        """Take an id back, whose memory is empty."""
        assert slot in range(self.n_slots), f"there is no slot {slot}"
        assert slot not in self._free, f"slot {slot} is not on loan"
        heappush(self._free, slot)
