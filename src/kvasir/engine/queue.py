"""The waiting queue: who is next.

Owns the order: higher priorities first, first come first served within one, and age turns into priority, so that
nobody waits for ever. Only the head of each priority can be next, for it is the oldest there. Pure but for its deques.
"""

from __future__ import annotations

from collections import deque

from kvasir.engine.sequence import Sequence


class WaitingQueue:
    """Sequences without a slot."""

    def __init__(self, *, aging_s: float) -> None:
        self._aging_s = aging_s
        self._lines: dict[int, deque[Sequence]] = {}
        self._n = 0

    def __len__(self) -> int:
        return self._n

    def add(self, seq: Sequence) -> None:
        """Put a sequence behind all of its priority."""
        self._lines.setdefault(seq.request.priority, deque()).append(seq)
        self._n += 1

    def add_back(self, seq: Sequence) -> None:
        """Put a preempted sequence where its age belongs: before all of its priority that came later."""
        line = self._lines.setdefault(seq.request.priority, deque())
        at = next((i for i, other in enumerate(line) if other.id > seq.id), len(line))
        line.insert(at, seq)
        self._n += 1

    def remove(self, seq: Sequence) -> None:
        """Take a sequence out, wherever it stands; harmless if an admission that failed half way has done so."""
        line = self._lines.get(seq.request.priority)
        if line is None or seq not in line:
            return
        line.remove(seq)
        self._n -= 1
        if not line:
            del self._lines[seq.request.priority]

    def best(self, *, now: float) -> Sequence | None:
        """Return the next to be admitted, without removing it."""
        heads = [line[0] for line in self._lines.values()]
        if len(heads) < 2:
            return heads[0] if heads else None
        return max(heads, key=lambda seq: (seq.request.priority + (now - seq.queued_at) / self._aging_s, -seq.id))

    def outranks(self, seq: Sequence) -> bool:
        """Say whether somebody of higher priority waits, so that only age brought this one to the front."""
        return any(priority > seq.request.priority for priority in self._lines)
