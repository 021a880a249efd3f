"""Rows on their way from the tiers to the engine: read ahead by reader threads, handed over in order.

Never raises for a row that cannot be had: what comes before it is still good, and the result ends there.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from itertools import takewhile

from kvasir.cache.fetch import Fetcher
from kvasir.cache.match import Match
from kvasir.cache.row import Row
from kvasir.cache.writer import Pool

Parts = Mapping[str, bytes]


class Loading:
    """A match being read. Any thread may ask; asking never blocks except in `result`."""

    def __init__(self, match: Match, done: Callable[[Loading], None]) -> None:
        self.match = match
        self.seconds = 0.0  # of reading, added over threads
        self._done = done
        self._changed = threading.Condition()
        self._parts: list[Parts | None] = [None] * len(match.rows)
        self._left = len(match.rows)
        self._first_bad = len(match.rows)

    def start(self, fetcher: Fetcher, readers: Pool) -> None:
        """Take what RAM has now; queue the rest, in order."""
        for at, row in enumerate(self.match.rows):
            wanted = self.match.wants(row)
            if row.tier == "ram" and (parts := fetcher.from_ram(row.key, wanted.__contains__)) is not None:
                self._deliver(at, parts)
            elif not readers.submit(partial(self._read, at, row, fetcher, wanted)):
                self._deliver(at, None)
        if not self.match.rows:
            self._tell()

    @property
    def n_ready(self) -> int:
        """How many rows, from the first on, have arrived."""
        return len(self.arrived())

    def arrived(self) -> list[Parts]:
        """Parts of the rows, from the first on, that are there now."""
        with self._changed:
            there = takewhile(lambda parts: parts is not None, self._parts)
            return [parts for parts in there if parts is not None]

    def ready(self) -> bool:
        """Whether nothing more will come: `result` returns at once."""
        with self._changed:
            return self._left == 0 or self._arrived_to_bad()

    def result(self, timeout_s: float | None = None) -> list[Parts]:
        """Parts of each row, in order, as far as rows could be had; waits for them.

        Where a restore needs more than a chain (a window, a state) it is all or nothing: search again. Raises
        `TimeoutError`; the rows keep coming.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: self._left == 0 or self._arrived_to_bad(), timeout_s):
                raise TimeoutError(f"rows did not arrive within {timeout_s} s")
            good = [parts for parts in self._parts[: self._first_bad] if parts is not None]
        partial_ok = self.match.needs.chain and not self.match.needs.state and not self.match.needs.window_tokens
        return good if partial_ok or len(good) == len(self.match.rows) else []

    def stop(self) -> None:
        """Read no more: nobody waits for it. What has come counts as read."""
        with self._changed:
            if self._left and not self._arrived_to_bad():
                self._first_bad = next(at for at, parts in enumerate(self._parts) if parts is None)

    def _arrived_to_bad(self) -> bool:
        known_bad = self._first_bad < len(self._parts)
        return known_bad and all(parts is not None for parts in self._parts[: self._first_bad])

    def _read(self, at: int, row: Row, fetcher: Fetcher, wanted: frozenset[str]) -> None:
        if at >= self._first_bad:
            self._deliver(at, None)
            return
        begun = time.perf_counter()
        parts = fetcher.load(row.name, wanted.__contains__)
        self.seconds += time.perf_counter() - begun
        self._deliver(at, parts)

    def _deliver(self, at: int, parts: Parts | None) -> None:
        with self._changed:
            self._parts[at] = parts
            self._left -= 1
            if parts is None:
                self._first_bad = min(self._first_bad, at)
            self._changed.notify_all()
            is_end = self._left == 0
        if is_end:
            self._tell()

    def _tell(self) -> None:
        self._done(self)
