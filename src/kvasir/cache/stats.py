"""Counters that are always on, and the snapshot a caller gets. erllama's names where it had one."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping
from typing import Any

import msgspec


class TierStats(msgspec.Struct, frozen=True, kw_only=True):
    """One tier now. `bytes` of a file tier counts all processes' files, headers included."""

    rows: int
    bytes: int
    quota: int


class CacheStats(msgspec.Struct, frozen=True, kw_only=True):
    """What the cache did since it was opened, and holds now."""

    hits_exact: int = 0  # everything asked for was there
    hits_resume: int = 0  # the row `parent_key` named
    hits_longest_prefix: int = 0
    hits_logits: int = 0  # first tokens that came from stored logits
    misses: int = 0  # nothing to restore
    saves_cold: int = 0
    saves_continued: int = 0
    saves_finish: int = 0
    saves_evict: int = 0
    saves_shutdown: int = 0
    saves_dropped: int = 0  # a full queue, no room, or a failing disk
    duplicate_dropped: int = 0  # offered, but already here
    evictions: int = 0
    corrupt_files: int = 0
    longest_prefix_probes: int = 0  # looks at a file system during searches
    promotions: int = 0  # copied to RAM by a hit
    demotions: int = 0  # moved to a slower tier to make room
    adopted: int = 0  # files another process or an earlier run left, taken over
    swept: int = 0  # temporaries, bad files and other versions deleted
    lost_tickets: int = 0  # publishes given up because they took too long
    vanished: int = 0  # rows another process removed before we read them
    refused_slower: int = 0
    refused_needs: int = 0
    read_errors: int = 0
    write_errors: int = 0
    pressure_evictions: int = 0
    bytes_written: int = 0
    bytes_read: int = 0
    tokens_restored: int = 0
    export_ns: int = 0
    publish_ns: int = 0
    read_ns: int = 0
    import_ns: int = 0
    search_ns: int = 0
    prefill_saved_s: float = 0.0
    misses_by_reason: dict[str, int] = {}
    short_by_reason: dict[str, int] = {}  # hits that could have been longer
    errors_by_code: dict[str, int] = {}  # by tier, call and errno: "disk write ENOSPC"
    bytes_ram: int = 0
    bytes_ramfile: int = 0
    bytes_disk: int = 0
    tiers: dict[str, TierStats] = {}
    queued_bytes: int = 0

    @property
    def hits(self) -> int:
        """Searches that found something."""
        return self.hits_exact + self.hits_resume + self.hits_longest_prefix

    @property
    def hit_ratio(self) -> float:
        """Hits among searches; 0 before the first."""
        return self.hits / (self.hits + self.misses) if self.hits + self.misses else 0.0


_TABLES = ("misses_by_reason", "short_by_reason", "errors_by_code")


class Counters:
    """Where the parts of the cache count. Any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._tables: dict[str, Counter[str]] = {name: Counter() for name in _TABLES}
        self._saved_s = 0.0

    def add(self, name: str, n: int = 1) -> None:
        """Count."""
        with self._lock:
            self._counts[name] += n

    def add_to(self, table: str, name: str) -> None:
        """Count in one of the tables."""
        with self._lock:
            self._tables[table][name] += 1

    def saved(self, seconds: float) -> None:
        """Add seconds of prefill that a restore made unnecessary."""
        with self._lock:
            self._saved_s += seconds

    def snapshot(self, tiers: Mapping[str, TierStats], queued_bytes: int) -> CacheStats:
        """All counts, and the tiers as they are now."""
        with self._lock:
            counts: dict[str, Any] = dict(self._counts)
            counts |= {name: dict(table) for name, table in self._tables.items()}
            saved_s = self._saved_s
        held = {name: tier.bytes for name, tier in tiers.items()}
        return CacheStats(
            **counts,
            prefill_saved_s=saved_s,
            bytes_ram=held.get("ram", 0),
            bytes_ramfile=held.get("tmpfs", 0),
            bytes_disk=held.get("disk", 0),
            tiers=dict(tiers),
            queued_bytes=queued_bytes,
        )
