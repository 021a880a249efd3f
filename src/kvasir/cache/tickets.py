"""Tickets: the right to publish one row to one tier, for a while.

A ticket lives for a time that every stage of a publish renews; a writer that comes back late finds its ticket gone and
must not make its row visible. Also knows which saves are still on their way, so that a search may wait for one.
Within one process; between processes the temporary file's name and age say the same (`recovery.py`).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from kvasir.cache.key import Key


class Ticket:
    """The right to publish `key` to `tier`."""

    def __init__(self, tickets: Tickets, key: Key, tier: str) -> None:
        self._tickets = tickets
        self.key = key
        self.tier = tier

    def still_mine(self) -> bool:
        """Renew the ticket; False if it lapsed or went to someone else."""
        return self._tickets.renew(self)

    def close(self) -> None:
        """Give the ticket back. Idempotent."""
        self._tickets.give_back(self)


class Tickets:
    """All tickets and all saves on their way. Any thread."""

    def __init__(self, ttl_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._ttl_s = ttl_s
        self._clock = clock
        self._changed = threading.Condition()
        self._out: dict[tuple[Key, str], tuple[Ticket, float]] = {}
        self._pending: dict[Key, int] = {}

    def reserve(self, key: Key, tier: str) -> Ticket | None:
        """A ticket, unless someone holds a live one for the same row and tier."""
        with self._changed:
            _, until = self._out.get((key, tier), (None, 0.0))
            if until > self._clock():
                return None
            ticket = Ticket(self, key, tier)
            self._out[key, tier] = (ticket, self._clock() + self._ttl_s)
            return ticket

    def renew(self, ticket: Ticket) -> bool:
        """See `Ticket.still_mine`."""
        with self._changed:
            holder, until = self._out.get((ticket.key, ticket.tier), (None, 0.0))
            if holder is not ticket or until <= self._clock():
                return False
            self._out[ticket.key, ticket.tier] = (ticket, self._clock() + self._ttl_s)
            return True

    def give_back(self, ticket: Ticket) -> None:
        """See `Ticket.close`."""
        with self._changed:
            holder, _ = self._out.get((ticket.key, ticket.tier), (None, 0.0))
            if holder is ticket:
                del self._out[ticket.key, ticket.tier]

    def begin(self, key: Key) -> None:
        """A save of this row was accepted."""
        with self._changed:
            self._pending[key] = self._pending.get(key, 0) + 1

    def settle(self, key: Key) -> None:
        """A save of this row ended, well or not; whoever waits for it looks again."""
        with self._changed:
            left = self._pending.pop(key, 1) - 1
            if left:
                self._pending[key] = left
            self._changed.notify_all()

    def is_pending(self, key: Key) -> bool:
        """Whether a save of this row is on its way."""
        with self._changed:
            return key in self._pending

    def wait(self, key: Key, timeout_s: float) -> bool:
        """Wait until no save of this row is on its way; False if time ran out first."""
        with self._changed:
            return self._changed.wait_for(lambda: key not in self._pending, timeout_s)
