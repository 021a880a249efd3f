"""What every process that used one cache folder counted, so that one of them can tell of them all.

    <folder>/stats/<host>-<pid>-<born>-<n>.json   a cache that is open, or whose process was killed
    <folder>/stats/total.json                     all that ended, added up
    <folder>/stats/LOCK                           held while adding up

Counts only: no row depends on them, nothing is synced, and no fault of the disk leaves this file.
"""

from __future__ import annotations

import fcntl
import secrets
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec

from kvasir.cache import CacheStats, TierStats
from kvasir.cache.owner import Owner, is_dead, me
from kvasir.cache.tiers import RAM

TOTAL = "total.json"
# Rows whose hits are remembered, latest first to stay: 300 kB of names at most.
MOST_HITS = 4096
# Models whose prefill speed is remembered, latest first to stay.
MOST_SPEEDS = 256
# A process of another host cannot be looked up; one that has noted nothing for so long is taken for ended.
SILENT_S = 3600.0
# Adding up takes milliseconds; whoever cannot get the lock in this time leaves it to the next.
LOCK_WAIT_S = 1.0


class Counted(msgspec.Struct, frozen=True, kw_only=True):
    """What one process counted, or several together. `folded` names files that are already in the sum."""

    stats: CacheStats = msgspec.field(default_factory=CacheStats)
    hits: dict[str, int] = {}  # by row key
    speeds: dict[str, float] = {}  # tokens per second of a prefill, by the root key of a space
    folded: tuple[str, ...] = ()


NOTHING = Counted()
NO_SPEEDS: Mapping[str, float] = {}


class History:
    """The counts under one cache folder, seen from one open cache. One thread at a time."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder / "stats"
        self._own = f"{me()}-{secrets.token_hex(4)}.json"

    def note(self, stats: CacheStats, speeds: Mapping[str, float] = NO_SPEEDS) -> None:
        """Write down what was counted until now, for other processes to see."""
        with suppress(OSError):
            self._write(self._own, Counted(stats=stats, speeds=dict(speeds)))

    def end(self, stats: CacheStats, hits: Mapping[str, int], speeds: Mapping[str, float] = NO_SPEEDS) -> None:
        """Add to the sum what this process counted, and what killed ones had noted."""
        with suppress(OSError):
            self._write(self._own, Counted(stats=_without_tiers(stats), hits=dict(hits), speeds=dict(speeds)))
            with self._locked() as is_ours:
                if is_ours:
                    self._fold()

    def others(self) -> Counted:
        """The sum of everyone but this process, as of their last note."""
        found = {name: self._read(name) for name in self._names() if name != self._own}
        # Read last: what it says is folded was read above, and must not be counted twice.
        total = self._read(TOTAL) or NOTHING
        for name, counted in found.items():
            if counted is not None and name not in total.folded:
                ended = msgspec.structs.replace(counted, stats=_without_tiers(counted.stats))
                total = _joined(total, ended if self._is_over(name) else counted)
        return total

    def _fold(self) -> None:
        total, names = self._read(TOTAL) or NOTHING, self._names()
        folded = [name for name in names if name in total.folded]
        for name in names:
            if name not in folded and (name == self._own or self._is_over(name)):
                total = _joined(total, self._read(name) or NOTHING)
                folded.append(name)
        self._write(TOTAL, msgspec.structs.replace(total, folded=tuple(folded)))
        left = [path.name for path in self._folder.glob("*.tmp") if self._is_over(path.name)]
        for name in (*folded, *left):
            (self._folder / name).unlink(missing_ok=True)

    def _names(self) -> list[str]:
        with suppress(OSError):
            return sorted(path.name for path in self._folder.glob("*-*.json"))
        return []

    def _is_over(self, name: str) -> bool:
        owner = Owner.parse(name)
        if owner is None or is_dead(owner):
            return True
        if owner.host == me().host:
            return False
        try:
            return (self._folder / name).stat().st_mtime + SILENT_S < time.time()
        except OSError:
            return False

    def _read(self, name: str) -> Counted | None:
        with suppress(OSError, msgspec.DecodeError):
            return msgspec.json.decode((self._folder / name).read_bytes(), type=Counted)
        return None

    def _write(self, name: str, counted: Counted) -> None:
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        temp = self._folder / f"{self._own}.tmp"
        temp.write_bytes(msgspec.json.encode(counted))
        temp.replace(self._folder / name)

    @contextmanager
    def _locked(self) -> Iterator[bool]:
        deadline = time.monotonic() + LOCK_WAIT_S
        with (self._folder / "LOCK").open("ab") as file:  # closing it lets the next in
            while not (is_ours := _try_lock(file)) and time.monotonic() < deadline:
                time.sleep(0.01)
            yield is_ours


def plus(one: CacheStats, other: CacheStats) -> CacheStats:
    """Both together. Each process has memory of its own, but the files are everyone's: those stay as `one` saw them."""
    shared = ("tiers", "bytes_ramfile", "bytes_disk")
    names = [name for name in CacheStats.__struct_fields__ if name not in shared]
    sums = {name: _sum(getattr(one, name), getattr(other, name)) for name in names}
    return msgspec.structs.replace(one, **sums, tiers=one.tiers | {RAM: _ram(one, other)})


def _ram(*each: CacheStats) -> TierStats:
    tiers = [stats.tiers[RAM] for stats in each if RAM in stats.tiers]
    return TierStats(
        rows=sum(tier.rows for tier in tiers),
        bytes=sum(tier.bytes for tier in tiers),
        quota=sum(tier.quota for tier in tiers),
    )


def _sum(one: Any, other: Any) -> Any:
    if isinstance(one, dict):
        return {name: one.get(name, 0) + other.get(name, 0) for name in one | other}
    return one + other


def _joined(total: Counted, one: Counted) -> Counted:
    # What was hit last goes to the end, and stays when there are too many.
    hits = {key: n for key, n in total.hits.items() if key not in one.hits} | _added(total.hits, one.hits)
    speeds = {root: speed for root, speed in total.speeds.items() if root not in one.speeds} | one.speeds
    return msgspec.structs.replace(
        total,
        stats=plus(total.stats, one.stats),
        hits=dict(list(hits.items())[-MOST_HITS:]),
        speeds=dict(list(speeds.items())[-MOST_SPEEDS:]),
    )


def _added(before: Mapping[str, int], hits: Mapping[str, int]) -> dict[str, int]:
    return {key: n + before.get(key, 0) for key, n in hits.items()}


def _without_tiers(stats: CacheStats) -> CacheStats:
    """The counts alone: a process that ended holds nothing."""
    return msgspec.structs.replace(stats, tiers={}, bytes_ram=0, bytes_ramfile=0, bytes_disk=0, queued_bytes=0)


def _try_lock(file: Any) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
