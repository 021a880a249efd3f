"""Faults of a disk: counted every time, logged once, and logged again when they are over."""

from __future__ import annotations

import errno
import logging
import threading

from kvasir.cache.stats import Counters

_log = logging.getLogger(__name__)


class Faults:
    """What is wrong now, per tier and kind of work. Any thread."""

    def __init__(self, counters: Counters) -> None:
        self._counters = counters
        self._lock = threading.Lock()
        self._standing: dict[tuple[str, str], set[int]] = {}

    def report(self, tier: str, work: str, error: OSError) -> None:
        """Work on a tier failed; the cache goes on without it."""
        code = error.errno or 0
        self._counters.add("write_errors" if work in ("write", "tend") else "read_errors")
        self._counters.add_to("errors_by_code", f"{tier} {work} {errno.errorcode.get(code, 'error')}")
        with self._lock:
            standing = self._standing.setdefault((tier, work), set())
            is_news = code not in standing
            standing.add(code)
        if is_news:
            _log.warning(
                "the cache cannot %s its %s tier: %s. Answers are not affected; what fails is computed again. "
                "This is logged once until it works again.",
                work,
                tier,
                error,
            )

    def works(self, tier: str, work: str) -> None:
        """Work on a tier succeeded."""
        if (tier, work) not in self._standing:
            return
        with self._lock:
            was_broken = self._standing.pop((tier, work), None)
        if was_broken:
            _log.info("the cache can %s its %s tier again", work, tier)
