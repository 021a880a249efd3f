"""Fetch: bytes and facts out of the tiers, fastest first; bad copies are removed, good ones promoted to RAM.

Nothing here raises for a fault of a disk or of a file: a row that cannot be had is None, counted, and the caller
computes. Any thread; blocks for the disk.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import TypeVar

from kvasir.cache.codec import Damaged, Header, OtherVersion
from kvasir.cache.index import Facts
from kvasir.cache.key import Key
from kvasir.cache.row import Row, RowName
from kvasir.cache.store import Store
from kvasir.cache.tiers import RAM, FileTier, Wanted

T = TypeVar("T")

# Keys whose row did not verify, remembered so that the next miss can say so.
_REMEMBERED = 4096


class Fetcher:
    """Reads for one store."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._corrupt: OrderedDict[Key, None] = OrderedDict()

    def load(self, name: RowName, wanted: Wanted, *, is_measure: bool = True) -> dict[str, bytes] | None:
        """The wanted parts of a row, verified, from the fastest tier that has them; a measure of that tier's speed."""
        row = self._store.index.get(name.key)
        if row is None or row.name != name:
            return None
        if RAM in row.tiers:
            parts = self.from_ram(name.key, wanted)
            if parts is not None:
                return parts
        for tier in self._tiers(row.tiers):
            loaded = self._guarded(name, tier, partial(self._from_file, name, tier, wanted, is_measure))
            if loaded is not None:
                return loaded
        return None

    def from_ram(self, key: Key, wanted: Wanted) -> dict[str, bytes] | None:
        """The wanted parts of a row if RAM has all of them; never blocks."""
        row = self._store.index.get(key)
        held = self._store.ram.get(key, wanted)
        if row is None or held is None or row.parts is None:
            return None
        return held if all(part in held for part in row.parts if wanted(part)) else None

    def facts(self, name: RowName) -> Facts | None:
        """What a row's header says; read once."""
        row = self._store.index.get(name.key)
        if row is None:
            return None
        if row.parts is not None and row.tokens is not None:
            return Facts(row.parts, row.tokens, row.reason or "")
        for tier in self._tiers(row.tiers):
            header = self._guarded(name, tier, partial(tier.header, name))
            if header is not None:
                return self._learn(header)
        return None

    def check(self, name: RowName, tier: FileTier) -> bool:
        """Whether a file's every checksum holds; a bad one is removed."""
        return self._guarded(name, tier, partial(tier.load, name, lambda _: True)) is not None

    def find(self, name: RowName) -> Row | None:
        """A row that is known here, or whose file another process wrote."""
        row = self._store.index.get(name.key)
        if row is None and self.discover(name):
            row = self._store.index.get(name.key)
        return row if row is not None and row.name == name else None

    def discover(self, name: RowName) -> bool:
        """Look for a row's file in the file tiers: another process may have written it."""
        for tier in self._store.tiers.values():
            self._store.counters.add("longest_prefix_probes")
            found = self._guarded(name, tier, partial(tier.probe, name), "look into")
            if found is not None and self._store.index.add(name, tier.name, found.n_bytes, last_used=found.last_used):
                self._store.counters.add("adopted")
                return True
        return False

    def ends(self, space: Key, parent: Key) -> set[int]:
        """Where rows that follow a prefix end: known ones, and tails in the file tiers."""
        ends = self._store.index.ends(parent)
        for tier in self._store.tiers.values():
            self._store.counters.add("longest_prefix_probes")
            try:
                ends |= tier.tail_ends(space, parent)
                self._store.faults.works(tier.name, "list")
            except OSError as error:
                self._store.faults.report(tier.name, "list", error)
        return ends

    def was_corrupt(self, key: Key) -> bool:
        """Whether a row with this key was removed because it did not verify."""
        return key in self._corrupt

    def _tiers(self, names: tuple[str, ...]) -> list[FileTier]:
        return [self._store.tiers[name] for name in names if name in self._store.tiers]

    def _from_file(self, name: RowName, tier: FileTier, wanted: Wanted, is_measure: bool) -> dict[str, bytes]:
        begun = time.perf_counter()
        header, parts = tier.load(name, wanted)
        seconds = time.perf_counter() - begun
        n_bytes = sum(map(len, parts.values()))
        if is_measure:
            self._store.cost.read(tier.name, n_bytes, seconds)
        self._store.counters.add("bytes_read", n_bytes)
        facts = self._learn(header)
        if parts and self._store.keep(name, parts, facts):
            self._store.counters.add("promotions")
        with suppress(OSError):
            tier.touch(name, self._store.clock())
        return parts

    def _learn(self, header: Header) -> Facts:
        facts = Facts(header.sizes, header.tokens, header.reason)
        self._store.spaces.setdefault(header.space.root, header.space)
        self._store.index.learn(header.name.key, facts)
        return facts

    def _guarded(self, name: RowName, tier: FileTier, work: Callable[[], T | None], what: str = "read") -> T | None:
        try:
            try:
                result = work()
            except Damaged as damage:
                self._remove_bad(name, tier, damage)
            except FileNotFoundError:
                self._forget(name, tier)
            else:
                self._store.faults.works(tier.name, what)
                return result
        except OSError as error:
            self._store.faults.report(tier.name, what, error)
        return None

    def _forget(self, name: RowName, tier: FileTier) -> None:
        if self._store.index.remove(name.key, tier.name):
            self._store.counters.add("vanished")
            self._store.forget_if_gone(tier)

    def _remove_bad(self, name: RowName, tier: FileTier, damage: Damaged) -> None:
        if self._store.index.remove(name.key, tier.name):  # two threads may read it at once; it is bad once
            self._store.counters.add("swept" if isinstance(damage, OtherVersion) else "corrupt_files")
        self._corrupt[name.key] = None
        while len(self._corrupt) > _REMEMBERED:
            self._corrupt.popitem(last=False)
        try:
            tier.remove(name)
        except OSError as error:
            self._store.faults.report(tier.name, "write", error)
