"""Who goes first: the rows of one tier in the order of their worth. Not thread-safe: the index's lock guards it.

A heap of what each row was worth when it was last weighed. Worth only grows (a touch), so a row met at the top is
weighed again and pushed back if it grew: touching a row costs nothing here. A row that may not go now (a lease, a
child) leaves the heap and comes back when the index says that the reason is gone.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator
from itertools import count

from kvasir.cache.key import Key


class Order:
    """The eviction order of one tier. `weigh` returns a row's worth now, or None if the tier has it no more."""

    def __init__(self, weigh: Callable[[Key], float | None]) -> None:
        self._weigh = weigh
        self._heap: list[tuple[float, int, Key]] = []
        self._new: list[Key] = []  # weighed when someone asks, so that adding a row costs nothing
        self._held_back: set[Key] = set()
        self._ticks = count()

    def push(self, key: Key) -> None:
        """A row that is in the tier now."""
        self._new.append(key)

    def hold_back(self, key: Key) -> None:
        """A row that came from `ascending` but may not go."""
        self._held_back.add(key)

    def let_back(self, key: Key) -> None:
        """Whatever held the row back may be gone."""
        if key in self._held_back:
            self._held_back.discard(key)
            self.push(key)

    def ascending(self) -> Iterator[Key]:
        """Rows, least worth first, each taken out of the order: push it back, hold it back, or remove the row."""
        while self._heap or self._new:
            self._weigh_new()
            if not self._heap:
                return
            stored, _, key = heapq.heappop(self._heap)
            worth = self._weigh(key)
            if worth is not None and worth > stored:
                heapq.heappush(self._heap, (worth, next(self._ticks), key))
            elif worth is not None:
                yield key

    def compact(self, keys: Iterable[Key], n_keys: int) -> None:
        """Forget entries of rows long gone, once they outnumber the living."""
        if len(self._heap) + len(self._new) > 2 * n_keys + 64:
            self._heap.clear()
            self._new = [key for key in keys if key not in self._held_back]

    def _weigh_new(self) -> None:
        if not self._new:
            return
        weighed = [(worth, next(self._ticks), key) for key in self._new if (worth := self._weigh(key)) is not None]
        self._new.clear()
        if len(weighed) > len(self._heap) // 8:
            self._heap.extend(weighed)
            heapq.heapify(self._heap)
        else:
            for each in weighed:
                heapq.heappush(self._heap, each)
