"""What is in the cache, whether it is whole, and making it smaller: the operator's side. Never on the engine's path."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import msgspec

from kvasir.cache.fetch import Fetcher
from kvasir.cache.key import Key, Space
from kvasir.cache.row import Row
from kvasir.cache.stats import CacheStats, TierStats
from kvasir.cache.store import Store
from kvasir.cache.tiers import RAM, FileTier


class Listed(msgspec.Struct, frozen=True, kw_only=True):
    """One row as `kvasir cache ls` shows it."""

    key: str
    parent: str
    space: str
    depth: int
    start: int
    end: int
    tier: str
    bytes: int
    hits: int
    last_used: float
    leases: int
    status: str  # "available", or "saving" while a copy is on its way to a file
    reason: str | None
    path: str | None
    holds: str = "kv"  # or "logits": what the model said after the prefix, in a space beside that of its KV


class Verified(msgspec.Struct, frozen=True, kw_only=True):
    """What `verify` found."""

    rows: int
    bytes: int
    bad: tuple[str, ...] = ()  # keys; removed, or unreadable now


class Report:
    """Over one store."""

    def __init__(self, store: Store, fetcher: Fetcher) -> None:
        self._store = store
        self._fetcher = fetcher

    def stats(self, queued_bytes: int) -> CacheStats:
        """See `Cache.stats`."""
        tiers = {RAM: TierStats(rows=self._rows(RAM), bytes=self._store.ram.used, quota=self._store.ram.quota)}
        for tier in self._store.tiers.values():
            tiers[tier.name] = TierStats(rows=self._rows(tier.name), bytes=self._used(tier), quota=tier.quota)
        return self._store.counters.snapshot(tiers, queued_bytes)

    def ls(self) -> list[Listed]:
        """See `Cache.ls`."""
        rows = {row.key: row for row in self._store.index.rows()}
        children: dict[Key, list[Row]] = {}
        for row in rows.values():
            children.setdefault(row.parent, []).append(row)
        tops = [row for row in rows.values() if row.parent not in rows]
        return [self._listed(row, depth) for row, depth in _tree(tops, children)]

    def verify(self, progress: Callable[[int, int], None] | None) -> Verified:
        """See `Cache.verify`."""
        copies = [(row, tier) for tier in self._store.tiers.values() for row in self._store.index.rows(tier.name)]
        bad: list[str] = []
        n_bytes = 0
        for at, (row, tier) in enumerate(copies, 1):
            if self._fetcher.check(row.name, tier):
                n_bytes += row.n_bytes
            else:
                bad.append(row.key.hex())
            if progress is not None:
                progress(at, len(copies))
        return Verified(rows=len(copies), bytes=n_bytes, bad=tuple(bad))

    def prune(self, keep_bytes: int | None, older_than_s: float | None) -> int:
        """See `Cache.prune`."""
        freed = 0
        for tier in (RAM, *self._store.tiers):
            if older_than_s is not None:
                freed += self._store.drop(tier, 1 << 62, older_than=self._store.clock() - older_than_s)
            if keep_bytes is not None:
                freed += self._store.drop(tier, self._store.index.used(tier)[1] - keep_bytes)
        return freed

    def clear(self, space: Space | None) -> int:
        """See `Cache.clear`."""
        freed = 0
        roots = None if space is None else (space.root, space.outputs.root)
        for row in self._store.index.rows():
            if row.leases == 0 and (roots is None or row.name.space in roots):
                freed += sum(self._store.forget(row.name, tier) for tier in row.tiers)
        return freed

    def _rows(self, tier: str) -> int:
        return self._store.index.used(tier)[0]

    def _used(self, tier: FileTier) -> int:
        """All processes' bytes; ours alone if the shared count cannot be read."""
        try:
            with tier.ledger.held():
                return tier.ledger.used()
        except OSError:
            return self._store.index.used(tier.name)[1]

    def _listed(self, row: Row, depth: int) -> Listed:
        files = [self._store.tiers[tier] for tier in row.tiers if tier in self._store.tiers]
        return Listed(
            key=row.key.hex(),
            parent=row.parent.hex(),
            space=row.name.space.hex(),
            depth=depth,
            start=row.start,
            end=row.end,
            tier=row.tier,
            bytes=row.n_bytes,
            hits=row.hits,
            last_used=row.last_used,
            leases=row.leases,
            status="saving" if self._store.tickets.is_pending(row.key) else "available",
            reason=row.reason,
            path=files[0].layout.path(row.name) if files else None,
            holds="logits" if row.name.is_logits else "kv",
        )


def _tree(tops: list[Row], children: dict[Key, list[Row]]) -> Iterator[tuple[Row, int]]:
    """Depth first, without recursion: chains are hundreds of rows long."""
    stack = [(row, 0) for row in sorted(tops, key=lambda row: -row.last_used)]
    stack.reverse()
    while stack:
        row, depth = stack.pop()
        yield row, depth
        below = sorted(children.get(row.key, ()), key=lambda each: each.end)
        stack.extend((each, depth + 1) for each in reversed(below))
