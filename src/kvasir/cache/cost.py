"""Is a restore worth it? Measured read speed of each tier against measured prefill speed of each model.

Unmeasured means yes: the first restore is the measurement. A refusal is not forever either: a figure nobody renewed for
`STALE_S` is forgotten, so a disk that recovered is tried again. Any thread; moves no bytes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import NamedTuple, TypeVar

from kvasir.cache.key import Key

Name = TypeVar("Name", bound=Hashable)

# How much a new measurement counts; recent ones decide, one outlier does not.
WEIGHT = 0.3
STALE_S = 30.0
# Reads below this say more about latency than about speed.
LEAST_BYTES = 64 << 10


class Piece(NamedTuple):
    """A row to restore: how many tokens it spares, how many bytes must come from where."""

    n_tokens: int
    tier: str
    n_bytes: int


class CostModel:
    """Speeds, as moving averages."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._read: dict[str, tuple[float, float]] = {}
        self._prefill: dict[Key, tuple[float, float]] = {}

    def read(self, tier: str, n_bytes: int, seconds: float) -> None:
        """A tier delivered so many bytes in so long."""
        if n_bytes >= LEAST_BYTES:
            self._learn(self._read, tier, n_bytes / max(seconds, 1e-9))

    def computed(self, space: Key, n_tokens: int, seconds: float) -> None:
        """A prefill of so many tokens took so long."""
        if n_tokens > 0 and seconds > 0:
            self._learn(self._prefill, space, n_tokens / seconds)

    def expect(self, space: Key, speed: float) -> None:
        """Take over a prefill speed, in tokens per second, that an earlier process measured."""
        if speed > 0:
            self._learn(self._prefill, space, speed)

    def prefill_speeds(self) -> dict[Key, float]:
        """Tokens per second of each space, measured or expected."""
        with self._lock:
            return {space: speed for space, (speed, _) in self._prefill.items()}

    def compute_s(self, space: Key, n_tokens: int) -> float | None:
        """How long a prefill would take; None while unmeasured."""
        with self._lock:
            speed, _ = self._prefill.get(space, (0.0, 0.0))
        return n_tokens / speed if speed else None

    def read_speeds(self) -> Mapping[str, float]:
        """Bytes per second of each tier measured recently."""
        with self._lock:
            fresh = self._clock() - STALE_S
            return {tier: speed for tier, (speed, at) in self._read.items() if at >= fresh}

    def worth_reading(self, space: Key, pieces: Sequence[Piece]) -> int:
        """How many of the pieces, from the first on, are restored faster than computed."""
        per_token = self.compute_s(space, 1)
        speeds = self.read_speeds()
        if per_token is None:
            return len(pieces)
        read_s = compute_s = 0.0
        best = 0
        for at, piece in enumerate(pieces, 1):
            read_s += piece.n_bytes / speeds.get(piece.tier, float("inf"))
            compute_s += piece.n_tokens * per_token
            if read_s <= compute_s:
                best = at
        return best

    def _learn(self, figures: dict[Name, tuple[float, float]], name: Name, speed: float) -> None:
        with self._lock:
            old, at = figures.get(name, (0.0, 0.0))
            now = self._clock()
            known = old and (figures is self._prefill or now - at <= STALE_S)
            figures[name] = (old + WEIGHT * (speed - old) if known else speed, now)
