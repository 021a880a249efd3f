"""The store: index and tiers joined. Puts rows into tiers, publishes them, and makes room by evicting and demoting.

Owns every move of a row between tiers. `keep` and `save` never touch a disk and never raise for one; what does touch
a disk runs on writer threads. Searching and reading are `search.py` and `fetch.py`, over the same index.
"""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from kvasir.cache.cost import CostModel
from kvasir.cache.faults import Faults
from kvasir.cache.index import Facts, Index, Victim
from kvasir.cache.key import Key, Space
from kvasir.cache.policy import room_needed
from kvasir.cache.publish import Outcome, Sealed, Stage, publish
from kvasir.cache.recovery import recover
from kvasir.cache.row import Reason, RowName
from kvasir.cache.stats import Counters
from kvasir.cache.tickets import Tickets
from kvasir.cache.tiers import DISK, RAM, TMPFS, FileTier, RamTier
from kvasir.cache.writer import Pool

# A full tier is looked at anew for other processes' rows at most this often.
RESCAN_S = 5.0
# Attempts at making room: other processes take what we free, and rows they used meanwhile are spared.
TRIES = 8

Clock = Callable[[], float]


class Store:
    """Rows and where they are."""

    def __init__(
        self,
        *,
        ram_bytes: int,
        tiers: Sequence[FileTier],
        writers: Pool,
        ttl_s: float,
        clock: Clock,
        stage: Stage,
    ) -> None:
        self.index = Index()
        self.tickets = Tickets(ttl_s)
        self.counters = Counters()
        self.faults = Faults(self.counters)
        self.cost = CostModel(clock)
        self.ram = RamTier(ram_bytes)
        self.tiers = {tier.name: tier for tier in tiers}
        self.spaces: dict[Key, Space] = {}
        self._limits: dict[Key, frozenset[str]] = {}  # tiers by space, where those are not all
        self.clock = clock
        self._ttl_s = ttl_s
        self._writers = writers
        self._stage = stage
        self._scanned: dict[str, float] = {}
        # Index and RAM change together: a row is never known here without its bytes.
        self._ram_moves = threading.RLock()

    def limit(self, space: Key, tiers: Sequence[str]) -> None:
        """Let rows of a space lie in these tiers only."""
        self._limits[space] = frozenset(tiers)

    def home_of(self, space: Key) -> FileTier | None:
        """Where a save of a space goes: the tier that survives most."""
        return self._tier(DISK, space) or self._tier(TMPFS, space)

    def _may_use(self, space: Key, tier: str) -> bool:
        allowed = self._limits.get(space)
        return allowed is None or tier in allowed

    def _tier(self, tier: str, space: Key) -> FileTier | None:
        return self.tiers.get(tier) if self._may_use(space, tier) else None

    def keep(self, name: RowName, parts: Mapping[str, bytes], facts: Facts | None) -> bool:
        """Hold a row in RAM, making room if that can be done; False if not."""
        if not self._may_use(name.space, RAM):
            return False
        n_bytes = sum(map(len, parts.values()))
        with self._ram_moves:
            need = room_needed(used=self.ram.used, incoming=n_bytes, quota=self.ram.quota)
            if need is None or (need and self.evict(RAM, need) < need):
                return False
            held = self.ram.put(name.key, parts)
            if held is None:
                return False
            if self.index.add(name, RAM, held, last_used=self.clock(), facts=facts):
                return True
            self.ram.take(name.key)
            return False

    def save(self, row: Sealed, tier: FileTier) -> bool:
        """Queue a row for a file tier; False, and counted, if the queue is full."""
        self.tickets.begin(row.name.key)
        if self._writers.submit(partial(self._publish_job, row, tier), row.n_bytes):
            return True
        self.tickets.settle(row.name.key)
        self.counters.add("saves_dropped")
        return False

    def evict(self, tier: str, n_bytes: int, *, older_than: float | None = None) -> int:
        """Free bytes of a tier, moving what exists nowhere else to a slower one; returns the bytes freed."""
        if tier == RAM:
            with self._ram_moves:
                return self._evict(tier, n_bytes, older_than, partial(self._evict_ram, below=TMPFS))
        return self._evict(tier, n_bytes, older_than, partial(self._evict_file, self.tiers[tier]))

    def relieve(self, tier: str, n_bytes: int) -> int:
        """Free bytes of memory. As `evict`, but nothing of RAM goes to tmpfs, which is memory too."""
        if tier != RAM:
            return self.evict(tier, n_bytes)
        with self._ram_moves:
            return self._evict(tier, n_bytes, None, partial(self._evict_ram, below=DISK))

    def drop(self, tier: str, n_bytes: int, *, older_than: float | None = None) -> int:
        """Delete copies of a tier without moving them anywhere; returns the bytes freed."""
        victims = self.index.take_victims(tier, n_bytes, older_than=older_than)
        return sum(self._delete(victim.name, tier, victim.n_bytes) for victim in victims)

    def forget(self, name: RowName, tier: str) -> int:
        """Delete one copy; returns the bytes freed."""
        row = self.index.get(name.key)
        known = row is not None and self.index.remove(name.key, tier)
        return self._delete(name, tier, row.n_bytes) if known and row is not None else 0

    def forget_if_gone(self, tier: FileTier) -> None:
        """Forget every copy in a tier whose folder someone removed."""
        if tier.is_gone():
            for row in self.index.rows(tier.name):
                self.counters.add("vanished", int(self.index.remove(row.key, tier.name)))

    def recover(self, tier: FileTier) -> None:
        """Learn what is in a file tier and clean it up."""
        self._scanned[tier.name] = self.clock()
        done = recover(tier, self.index, ttl_s=self._ttl_s, now=self.clock())
        self.counters.add("adopted", done.adopted)
        self.counters.add("swept", done.swept)
        self.counters.add("corrupt_files", done.corrupt)

    def demote_rest(self) -> None:
        """Queue every row that only RAM has: the last thing before a close."""
        for row in self.index.rows(RAM):
            held = self.ram.get(row.key, lambda _: True)
            if row.tiers == (RAM,) and held is not None and not self.tickets.is_pending(row.key):
                facts = Facts(row.parts or {}, row.tokens or b"", row.reason or "")
                self._demote(row.name, facts, held, self.home_of(row.name.space))

    def _evict(self, tier: str, n_bytes: int, older_than: float | None, move: Callable[[Victim], bool]) -> int:
        freed = 0
        for victim in self.index.take_victims(tier, n_bytes, older_than=older_than):
            if move(victim):
                freed += victim.n_bytes
                self.counters.add("evictions")
        return freed

    def _delete(self, name: RowName, tier: str, n_bytes: int) -> int:
        try:
            gone = self.ram.remove(name) if tier == RAM else self.tiers[tier].remove(name)
        except OSError as error:
            self.faults.report(tier, "write", error)
            return 0
        self.counters.add("evictions", int(gone))
        return n_bytes if gone else 0

    def _publish_job(self, row: Sealed, tier: FileTier) -> None:
        begun = time.perf_counter_ns()
        try:
            self._publish(row, tier)
            self.faults.works(tier.name, "write")
        except OSError as error:
            self.faults.report(tier.name, "write", error)
            self.counters.add("saves_dropped")
        finally:
            self.tickets.settle(row.name.key)
            self.counters.add("publish_ns", time.perf_counter_ns() - begun)

    def _publish(self, row: Sealed, tier: FileTier) -> None:
        ticket = None if self.index.has(row.name.key, tier.name) else self.tickets.reserve(row.name.key, tier.name)
        if ticket is None:
            self.counters.add("duplicate_dropped")
            return
        try:
            self._stage("reserved")
            outcome = self._publish_with_room(row, tier, partial(publish, row, tier, ticket, self._stage, self.clock))
            self._announce(row, tier, outcome)
        finally:
            ticket.close()

    def _publish_with_room(self, row: Sealed, tier: FileTier, attempt: Callable[[], Outcome]) -> Outcome:
        n_bytes = row.n_bytes + 4 * row.name.n_tokens + 1024
        for last in (False, True):
            if not self._make_room(tier, n_bytes):
                return Outcome.NO_ROOM
            try:
                outcome = attempt()
            except OSError as error:
                # A user's quota does not show in the free bytes that `_make_room` looked at: what we hold is ours to
                # give up. Not so for ENOSPC: the free bytes said otherwise, and giving rows up would only lose them.
                if last or error.errno != errno.EDQUOT or not self.evict(tier.name, n_bytes):
                    raise
                continue
            if outcome is not Outcome.NO_ROOM:
                return outcome
        return Outcome.NO_ROOM

    def _announce(self, row: Sealed, tier: FileTier, outcome: Outcome) -> None:
        if outcome is Outcome.NO_ROOM:
            self.counters.add("saves_dropped")
        elif outcome is Outcome.LOST:
            self.counters.add("lost_tickets")
            self.counters.add("saves_dropped")
        elif (found := tier.probe(row.name)) is not None:
            facts = Facts({name: len(part) for name, part in row.parts.items()}, row.tokens, row.reason)
            self.index.add(row.name, tier.name, found.n_bytes, last_used=self.clock(), facts=facts)
            if outcome is Outcome.ADOPTED:
                self.counters.add("adopted")
            else:
                self.counters.add("bytes_written", found.n_bytes)
            self._stage("announced")

    def _make_room(self, tier: FileTier, n_bytes: int) -> bool:
        if n_bytes > tier.quota:
            return False
        for _ in range(TRIES):
            short = tier.shortage(n_bytes)
            if short <= 0:
                return True
            if not self.evict(tier.name, short) and not self._rescan(tier):
                return False
        return tier.shortage(n_bytes) <= 0

    def _rescan(self, tier: FileTier) -> bool:
        """Look for rows we do not know: what fills the tier may be another process's."""
        if self.clock() - self._scanned.get(tier.name, 0.0) < RESCAN_S:
            return False
        before = self.index.used(tier.name)
        self.recover(tier)
        return self.index.used(tier.name) != before

    def _evict_ram(self, victim: Victim, below: str) -> bool:
        held = self.ram.take(victim.name.key)
        if held is None or victim.facts is None:
            return held is not None
        tmpfs = self._tier(TMPFS, victim.name.space) if below == TMPFS else None
        if tmpfs is not None and TMPFS not in victim.tiers:
            self._demote(victim.name, victim.facts, held, tmpfs)
        elif not victim.tiers and not self.tickets.is_pending(victim.name.key):
            self._demote(victim.name, victim.facts, held, self._tier(DISK, victim.name.space))
        return True

    def _evict_file(self, tier: FileTier, victim: Victim) -> bool:
        """Delete a file, unless another process used it since we last looked."""
        found = tier.probe(victim.name)
        if found is not None and found.last_used > victim.last_used + 1.0:
            self.index.add(victim.name, tier.name, found.n_bytes, last_used=found.last_used, facts=victim.facts)
            return False
        if tier.name == TMPFS and self._tier(DISK, victim.name.space) is not None and DISK not in victim.tiers:
            self._demote_file(victim, tier)
        return tier.remove(victim.name)

    def _demote_file(self, victim: Victim, tier: FileTier) -> None:
        try:
            header, parts = tier.load(victim.name, lambda _: True)
        except Exception:
            return
        self.spaces.setdefault(header.space.root, header.space)
        self._demote(victim.name, Facts(header.sizes, header.tokens, header.reason), parts, self.tiers[DISK])

    def _demote(self, name: RowName, facts: Facts, held: Mapping[str, bytes], tier: FileTier | None) -> None:
        space = self.spaces.get(name.space)
        if tier is None or space is None or held.keys() != facts.parts.keys():
            return
        row = Sealed(name, space, facts.tokens, held, Reason(facts.reason), int(self.clock()))
        if self.save(row, tier):
            self.counters.add("demotions")
