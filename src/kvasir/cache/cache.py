"""The facade: one object that searches, reads, saves and reports."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

from kvasir.cache.key import Key, Space
from kvasir.cache.row import Needs, Reason
from kvasir.cache.settings import CacheSettings


class Cache:
    """Signatures first: the bodies follow in the next commits."""

    block_tokens: int

    @classmethod
    def open(cls, settings: CacheSettings, *, clock: Callable[[], float] = time.time) -> Cache:
        """Open the tiers and recover what is in them."""
        raise NotImplementedError

    def longest(
        self,
        space: Space,
        tokens: Sequence[int],
        *,
        needs: Needs = Needs(),  # noqa: B008
        most: int | None = None,
        parent_key: Key | None = None,
    ) -> Match:
        """Find the longest stored prefix; its rows are leased until `match.release()`."""
        raise NotImplementedError

    def read(self, match: Match) -> Loading:
        """Start reading a match's rows in reader threads."""
        raise NotImplementedError

    def offer(
        self,
        space: Space,
        tokens: Sequence[int],
        *,
        start: int,
        end: int,
        parts: Mapping[str, bytes],
        reason: Reason,
    ) -> Key:
        """Take a row: at once into RAM, later into files. Never blocks on a disk, never raises for one."""
        raise NotImplementedError

    def has(self, key: Key) -> bool:
        """Whether a row with this key is known here."""
        raise NotImplementedError

    def computed(self, space: Space, n_tokens: int, seconds: float) -> None:
        """Report how long a prefill took: one side of the cost model."""
        raise NotImplementedError

    def timed(self, what: Literal["export", "import"], ns: int) -> None:
        """Report time the engine spent on rows."""
        raise NotImplementedError

    def flush(self, timeout_s: float | None = None) -> bool:
        """Wait until everything offered is published or dropped."""
        raise NotImplementedError

    def close(self, drain_s: float = 10.0) -> None:
        """Drain the writers within a limit and stop. Idempotent."""
        raise NotImplementedError


class Match:
    """What a search found. A context manager: leaving it releases the rows."""


class Loading:
    """Rows on their way: `ready()`, `n_ready`, `result()`."""
