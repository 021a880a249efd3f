"""Search: the longest stored prefix of a prompt that a restore can use, and why it is not longer.

Blocks are found by key, first in the index, then by one `stat` per file tier; tails by where the rows that follow a
prefix end (one listing), which makes their keys: so no token is compared and no file opened. Where a restore needs a
window or a state, headers of the candidates are read until one has it. Decides; `fetch.py` touches the file systems.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from kvasir.cache.cost import Piece
from kvasir.cache.fetch import Fetcher
from kvasir.cache.key import Key, Space, pack
from kvasir.cache.match import n_bytes_needed, parts_needed
from kvasir.cache.row import Miss, Needs, Part, Row, RowName, Why
from kvasir.cache.store import Store

# Rows whose tokens are compared, and headers read for that, for one that only begins as the prompt does.
COMPARED = 32
HEADERS_READ = 8


class Found(NamedTuple):
    """Rows to restore, in order, how many tokens they give, and why not more."""

    rows: list[Row]
    n_tokens: int
    why: Miss | None


class _Shared(NamedTuple):
    """A stored row that follows the prompt for a while."""

    row: Row
    n_common: int  # tokens, less than the row has


class Search:
    """One search. `n_wanted` tokens at most are looked for."""

    def __init__(
        self,
        store: Store,
        fetcher: Fetcher,
        space: Space,
        tokens: Sequence[int],
        needs: Needs,
        n_wanted: int,
        block: int,
    ) -> None:
        self._store = store
        self._fetcher = fetcher
        self._space = space
        self._tokens = tokens[:n_wanted]
        self._needs = needs
        self._n_wanted = n_wanted
        ends = range(block, n_wanted + 1, block)
        # at[i] is the key of i full blocks; at[0] the root.
        self._at = [space.root, *space.keys_at(self._tokens, ends)]
        self._blocks = [
            RowName(space.root, key, parent, end - block, end)
            for parent, key, end in zip(self._at, self._at[1:], ends, strict=False)
        ]
        self._block = block

    def run(self) -> Found:
        """Search, check what a restore needs, and weigh it against computing."""
        n_run = self._run_of_blocks() if self._needs.chain else len(self._blocks)
        best: list[Row] = []
        short = False
        for rows in self._candidates(n_run):
            if self._usable(rows):
                best = rows
                break
            short = True
        if refused := self._weighed(best):
            return refused
        if short:
            self._store.counters.add("refused_needs")
            return Found(best, _end(best), self._miss(best, Why.NEEDS))
        return self._trimmed(best) or Found(best, _end(best), self._explain(best, n_run))

    def resume(self, key: Key) -> Found | None:
        """The row with this key, if the prompt begins with its prefix and a restore can use it; no search."""
        row = self._store.index.get(key)
        if row is None or row.end > self._n_wanted or self._space.key(self._tokens[: row.end]) != key:
            return None
        rows = self._chain_to(row) if self._needs.chain else [row]
        if not rows or not self._usable(rows):
            return None
        return self._weighed(rows) or Found(rows, _end(rows), self._explain(rows, len(self._blocks)))

    def _run_of_blocks(self) -> int:
        n_run = 0
        while n_run < len(self._blocks):
            n_run += self._store.index.run(self._blocks[n_run:])
            if n_run == len(self._blocks) or not self._fetcher.discover(self._blocks[n_run]):
                break
        return n_run

    def _candidates(self, n_run: int) -> Iterator[list[Row]]:
        """What a restore could use, longest first."""
        return self._chains(n_run) if self._needs.chain else self._alone()

    def _chains(self, n_run: int) -> Iterator[list[Row]]:
        """At each boundary its tails, then the block that ends there, with all blocks before."""
        chain = self._rows(self._blocks[:n_run])
        for n_blocks in range(len(chain), -1, -1):
            for tail in self._tails([n_blocks]):
                if rows := self._rows([tail]):
                    yield chain[:n_blocks] + rows
            if n_blocks:
                yield chain[:n_blocks]

    def _alone(self) -> Iterator[list[Row]]:
        """Every row that ends within the prompt, wherever it starts."""
        for name in self._tails(range(len(self._at))):
            if rows := self._rows([name]):
                yield rows

    def _tails(self, boundaries: Iterable[int]) -> list[RowName]:
        """Names that rows after these boundaries would have if they were the prompt's own, longest first.

        What follows a prefix is known by where it ends; the prompt's tokens up to there make the key.
        """
        root, block = self._space.root, self._block
        fitting = [
            (end, at) for at in boundaries for end in self._fetcher.ends(root, self._at[at]) if end <= self._n_wanted
        ]
        ends = sorted({end for end, _ in fitting})
        keys = dict(zip(ends, self._space.keys_at(self._tokens, ends), strict=True))
        names = [RowName(root, keys[end], self._at[at], at * block, end) for end, at in fitting if end > at * block]
        return sorted(names, key=lambda name: -name.end)

    def _rows(self, names: list[RowName]) -> list[Row]:
        """These rows, as far as they are there from the first on."""
        rows = []
        for name in names:
            if (row := self._fetcher.find(name)) is None:
                break
            rows.append(row)
        return rows

    def _chain_to(self, row: Row) -> list[Row]:
        """The rows from token 0 to this one, by the index alone; nothing if one is missing."""
        rows = [row]
        while rows[-1].start:
            before = self._store.index.get(rows[-1].parent)
            if before is None or before.end != rows[-1].start:
                return []
            rows.append(before)
        return rows[::-1]

    def _usable(self, rows: list[Row]) -> bool:
        """Whether the rows have the window and state that a restore at their end needs; reads headers for that."""
        end = rows[-1].end
        for at in range(len(rows) - 1, -1, -1):
            wanted = parts_needed(rows[at], end, self._needs) - {Part.BASE}
            if not wanted:
                break
            facts = self._fetcher.facts(rows[at].name)
            if facts is None or not wanted <= facts.parts.keys():
                return False
            rows[at] = self._store.index.get(rows[at].key) or rows[at]
        return True

    def _weighed(self, rows: list[Row]) -> Found | None:
        """What is left of the rows where reading them all is slower than computing; None where it is not."""
        per_row = self._needs.chain
        pieces = [
            Piece(
                n_tokens=row.end - row.start if per_row else row.end,
                tier=row.tier,
                n_bytes=n_bytes_needed(row, parts_needed(row, rows[-1].end, self._needs)),
            )
            for row in rows
        ]
        n_worth = self._store.cost.worth_reading(self._space.root, pieces)
        if n_worth == len(rows):
            return None
        self._store.counters.add("refused_slower")
        whole_only = self._needs.state or self._needs.window_tokens > 0 or not per_row
        kept = [] if whole_only else rows[:n_worth]
        return Found(kept, _end(kept), self._miss(kept, Why.SLOWER))

    def _trimmed(self, rows: list[Row]) -> Found | None:
        """A longer match by the beginning of one more row, whose rest the engine drops; None if there is none."""
        n_blocks = _end(rows) // self._block
        if not self._needs.trim or (shared := self._longest_shared(n_blocks)) is None:
            return None
        n_tokens = n_blocks * self._block + shared.n_common
        longer = [*rows[:n_blocks], shared.row]
        if n_tokens <= _end(rows) or self._weighed(longer) is not None:
            return None
        differs = Miss(Why.DIFFERS, self._n_wanted, n_tokens, n_tokens)
        return Found(longer, n_tokens, None if n_tokens == self._n_wanted else differs)

    def _miss(self, rows: list[Row], why: Why, token: int | None = None) -> Miss:
        return Miss(why, self._n_wanted, _end(rows), token)

    def _explain(self, rows: list[Row], n_run: int) -> Miss | None:
        n_found = _end(rows)
        if n_found == self._n_wanted:
            return None
        if n_run < len(self._blocks) and self._fetcher.was_corrupt(self._blocks[n_run].key):
            return self._miss(rows, Why.CORRUPT)
        n_blocks = n_found // self._block
        shared = self._longest_shared(n_blocks)
        if shared is None:
            return self._miss(rows, Why.SCOPE if not rows and self._in_other_space() else Why.ABSENT)
        at = n_blocks * self._block + shared.n_common
        return self._miss(rows, Why.TOO_SHORT) if at >= self._n_wanted else self._miss(rows, Why.DIFFERS, at)

    def _longest_shared(self, n_blocks: int) -> _Shared | None:
        """The row after so many blocks that follows the prompt longest before it goes another way."""
        rest = pack(self._tokens[n_blocks * self._block :])
        best: _Shared | None = None
        unread = HEADERS_READ
        for row in self._store.index.children(self._at[n_blocks], COMPARED):
            tokens = row.tokens
            if tokens is None and unread:
                unread -= 1
                facts = self._fetcher.facts(row.name)
                tokens = facts.tokens if facts else None
            if tokens is not None and (common := _common(rest, tokens)) < len(tokens) // 4:
                best = max(best or _Shared(row, 0), _Shared(row, common), key=lambda each: each.n_common)
        return best

    def _in_other_space(self) -> bool:
        """Whether another space that this process knows has the prompt's beginning."""
        ours = (self._space.root, self._space.outputs.root)
        others = [space for root, space in list(self._store.spaces.items())[-COMPARED:] if root not in ours]
        return any(self._begins_in(space) for space in others)

    def _begins_in(self, space: Space) -> bool:
        index = self._store.index
        if len(self._tokens) >= self._block and index.has(space.key(self._tokens[: self._block])):
            return True
        children = index.children(space.root, COMPARED)
        packed = pack(self._tokens)
        return any(row.start == 0 and row.tokens is not None and packed.startswith(row.tokens) for row in children)


def _end(rows: list[Row]) -> int:
    return rows[-1].end if rows else 0


def _common(one: bytes, other: bytes) -> int:
    """How many packed tokens two spans share from their beginning."""
    n = min(len(one), len(other))
    if one[:n] == other[:n]:
        return n // 4
    return next(at for at in range(0, n, 4) if one[at : at + 4] != other[at : at + 4]) // 4
