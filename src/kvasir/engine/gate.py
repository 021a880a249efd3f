"""The gate: how many requests may be open at once, seen from every submitting thread.

Owns the count and the guess of when a place will be free. Bounds open requests to slots + max_queue rather than the
queue alone, so that a burst on an idle engine is not refused while its slots are still being handed out.
"""

from __future__ import annotations

from threading import Lock

from kvasir.errors import QueueFull

# How much the newest interval between two ends counts in the running mean: about the last eight decide.
WEIGHT = 0.125
FIRST_GUESS_S = 1.0
LONGEST_S = 60.0


class Gate:
    """Counts open requests; any thread may enter, the engine thread lets them leave."""

    def __init__(self, n_places: int, *, max_queue: int) -> None:
        self._lock = Lock()
        self._n_places = n_places
        self._max_queue = max_queue
        self._interval_s = FIRST_GUESS_S
        self._left_at: float | None = None
        self.n_open = 0
        self.n_refused = 0

    def enter(self) -> None:
        """Count one more open request, or raise `QueueFull` with a guess of when to try again."""
        with self._lock:
            if self.n_open < self._n_places:
                self.n_open += 1
                return
            self.n_refused += 1
            retry_after_s = round(min(self._interval_s, LONGEST_S), 3)
        raise QueueFull(
            f"the queue is full: {self._max_queue} requests are waiting. Try again in about {retry_after_s:.1f} s "
            "or load the model with a larger max_queue.",
            retry_after_s=retry_after_s,
        )

    def leave(self, *, now: float) -> None:
        """Count one open request less, and learn from how long that took."""
        with self._lock:
            self.n_open -= 1
            if self._left_at is not None:
                self._interval_s += WEIGHT * (max(now - self._left_at, 0.001) - self._interval_s)
            self._left_at = now
