"""Threads that carry bytes: writers bounded by bytes, readers in order of asking.

A job is a call that returns nothing and must not raise; what it could not do, it counts itself. Submitting never
blocks: a full queue says no. Knows no row and no tier.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

_log = logging.getLogger(__name__)

Job = Callable[[], None]


class _Waiting(NamedTuple):
    job: Job
    n_bytes: int


class Pool:
    """Daemon threads over one queue. `limit_bytes` bounds what waits and what is being worked on, together."""

    def __init__(self, name: str, n_threads: int, limit_bytes: int | None = None) -> None:
        self._changed = threading.Condition()
        self._queue: deque[_Waiting] = deque()
        self._limit = limit_bytes
        self._bytes = 0
        self._busy = 0
        self._closed = False
        self._threads = [
            threading.Thread(target=self._work, name=f"kvasir-{name}-{at}", daemon=True) for at in range(n_threads)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def queued_bytes(self) -> int:
        """Bytes that wait or are being worked on."""
        return self._bytes

    def submit(self, job: Job, n_bytes: int = 0) -> bool:
        """Queue a job; False if that would exceed the limit, or if the pool is closed."""
        with self._changed:
            if self._closed or (self._limit is not None and self._bytes + n_bytes > self._limit):
                return False
            self._bytes += n_bytes
            self._queue.append(_Waiting(job, n_bytes))
            self._changed.notify_all()
            return True

    def flush(self, timeout_s: float | None = None) -> bool:
        """Wait until nothing is queued or running; False if time ran out first."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._queue and not self._busy, timeout_s)

    def close(self, drain_s: float = 0.0) -> int:
        """Work on for so long, then forget the rest; returns how many jobs were forgotten. Idempotent."""
        deadline = time.monotonic() + drain_s
        self.flush(drain_s)
        with self._changed:
            self._closed = True
            forgotten = len(self._queue)
            self._queue.clear()
            self._changed.notify_all()
        for thread in self._threads:
            thread.join(max(0.05, deadline - time.monotonic()))
        return forgotten

    def _work(self) -> None:
        while (waiting := self._next()) is not None:
            try:
                waiting.job()
            except Exception:
                _log.exception("a cache job failed; the row it carried is not saved")
            with self._changed:
                self._busy -= 1
                self._bytes -= waiting.n_bytes
                self._changed.notify_all()

    def _next(self) -> _Waiting | None:
        with self._changed:
            self._changed.wait_for(lambda: self._queue or self._closed)
            if not self._queue:
                return None
            self._busy += 1
            return self._queue.popleft()
