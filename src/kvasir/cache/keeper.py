"""The keeper: one thread that tends the tiers from time to time.

Takes over a tier at the start and again after it failed, clears up after dead writers, and gives memory back under
pressure. Every step may fail without stopping the next.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from functools import partial

from kvasir.cache.pressure import excess, sampler
from kvasir.cache.recovery import sweep
from kvasir.cache.settings import CacheSettings
from kvasir.cache.store import Store
from kvasir.cache.tiers import RAM, TMPFS, FileTier

_log = logging.getLogger(__name__)


class Keeper:
    """Tends one store."""

    def __init__(self, store: Store, settings: CacheSettings) -> None:
        self._store = store
        self._ttl_s = settings.reservation_ttl_s
        self._settings = settings
        self._sample = sampler(settings)
        self._unknown = set(store.tiers)  # file tiers not taken over yet
        self._stop = threading.Event()
        pause = min(self._ttl_s / 2, settings.pressure_interval_s if self._sample else self._ttl_s / 2)
        self._thread = threading.Thread(target=self._run, args=(pause,), name="kvasir-cache-keeper", daemon=True)

    def start(self) -> None:
        """Take over the tiers now, then tend them in the background."""
        self.tend()
        self._thread.start()

    def tend(self) -> None:
        """One round."""
        for tier in self._store.tiers.values():
            self._guarded(tier, partial(self._tend_tier, tier))
        if self._sample is not None:
            self._relieve()

    def close(self) -> None:
        """Stop tending. Idempotent."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self, pause_s: float) -> None:
        while not self._stop.wait(pause_s):
            self.tend()

    def _tend_tier(self, tier: FileTier) -> None:
        if tier.name in self._unknown:
            self._store.recover(tier)
            self._unknown.discard(tier.name)
            return
        with tier.ledger.held():
            done = sweep(tier, self._store.index, ttl_s=self._ttl_s, now=self._store.clock())
        for name, n in (("adopted", done.adopted), ("swept", done.swept), ("corrupt_files", done.corrupt)):
            self._store.counters.add(name, n)

    def _guarded(self, tier: FileTier, work: Callable[[], None]) -> None:
        try:
            work()
            self._store.faults.works(tier.name, "tend")
        except OSError as error:
            self._store.faults.report(tier.name, "tend", error)

    def _relieve(self) -> None:
        """Give memory back: RAM rows first, then tmpfs, which is memory too."""
        assert self._sample is not None
        try:
            need = excess(self._sample, self._settings)
        except Exception:
            _log.exception("the source of memory pressure failed; no row is given up for it")
            return
        for tier in (RAM, TMPFS):
            if need > 0 and (tier == RAM or tier in self._store.tiers):
                before = self._store.index.used(tier)[0]
                freed = self._store.relieve(tier, need)
                self._store.counters.add("pressure_evictions", before - self._store.index.used(tier)[0])
                need -= freed
