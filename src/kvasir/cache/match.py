"""A match: the rows a search found, held against eviction until it is released."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Self

from kvasir.cache.index import Index
from kvasir.cache.key import Key, Space
from kvasir.cache.row import Miss, Needs, Part, Row
from kvasir.cache.tiers import ORDER


class Lease:
    """Rows held against eviction by this process. A context manager; releasing twice is harmless."""

    def __init__(self, index: Index, keys: Iterable[Key]) -> None:
        self._index = index
        self._keys = index.lease(keys)

    @property
    def keys(self) -> list[Key]:
        """Keys of the rows held."""
        return list(self._keys)

    def release(self) -> None:
        """Let the rows go."""
        keys, self._keys = self._keys, []
        self._index.release(keys)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


class Match:
    """What a search found: rows in order, leased. `n_tokens` 0 means cold; `why` says why there is not more.

    A context manager: leaving it releases the rows. Rows with `Needs.chain` follow one another from token 0; without,
    there is one row, and it restores the whole prefix. Only with `Needs.trim` may the last row's end lie beyond
    `n_tokens`: after importing it, drop the cells from `n_tokens` on.
    """

    def __init__(
        self, space: Space, needs: Needs, rows: list[Row], lease: Lease, *, n_tokens: int, why: Miss | None
    ) -> None:
        self.space = space
        self.needs = needs
        self.rows = rows
        self.lease = lease
        self.n_tokens = n_tokens
        self.why = why

    @property
    def key(self) -> Key | None:
        """Key of the last row."""
        return self.rows[-1].key if self.rows else None

    @property
    def tier(self) -> str | None:
        """The slowest tier a row must come from."""
        return max((row.tier for row in self.rows), key=ORDER.index, default=None)

    @property
    def bytes_to_read(self) -> int:
        """Bytes that must come from files; an upper bound while headers are unread."""
        return sum(n_bytes_needed(row, self.wants(row)) for row in self.rows if row.tier != ORDER[0])

    def wants(self, row: Row) -> frozenset[str]:
        """Which parts of a row this restore needs, of those it may have."""
        return parts_needed(row, self.rows[-1].end, self.needs)

    def release(self) -> None:
        """Let the rows go. Harmless twice."""
        self.lease.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


def parts_needed(row: Row, end: int, needs: Needs) -> frozenset[str]:
    """The parts a restore up to `end` needs of a row."""
    wanted = {Part.BASE} if needs.chain else set()
    if row.end > end - needs.window_tokens:
        wanted.add(Part.WINDOW)
    if needs.state and row.end == end:
        wanted.add(Part.STATE)
    return frozenset(wanted)


def n_bytes_needed(row: Row, wanted: frozenset[str]) -> int:
    """Bytes of those parts; the whole row while its header is unread."""
    return row.n_bytes if row.parts is None else sum(n for part, n in row.parts.items() if part in wanted)
