"""The index: which rows exist, in which tiers, who holds them and who is writing them.

Owns the only mutable map of keys, behind one lock; any thread. Knows nothing of files or bytes: a tier moves them,
`publish.py` announces what is whole, `keeper.py` acts on what `take_victims` chose. A row is known by its key; the same
key with another span (another block size's) is another row's business and is refused.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice
from typing import NamedTuple

from kvasir.cache.key import Key
from kvasir.cache.order import Order
from kvasir.cache.policy import worth
from kvasir.cache.row import Row, RowName
from kvasir.cache.tiers import ORDER, Found

_NONE: dict[Key, None] = {}
_NO_ENDS: dict[int, int] = {}


class Facts(NamedTuple):
    """What a row's header says and its name does not."""

    parts: Mapping[str, int]
    tokens: bytes
    reason: str


class Victim(NamedTuple):
    """A copy the index gave up; the caller must now move or delete its bytes."""

    name: RowName
    n_bytes: int
    facts: Facts | None
    last_used: float
    tiers: tuple[str, ...]  # that still have it


class _Entry:
    __slots__ = ("copies", "facts", "hits", "last_used", "name")

    def __init__(self, name: RowName) -> None:
        self.name = name
        self.copies: dict[str, int] = {}
        self.facts: Facts | None = None
        self.hits = 0
        self.last_used = 0.0


class Index:
    """The map. Every method is atomic and short."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._rows: dict[Key, _Entry] = {}
        self._children: dict[Key, dict[Key, None]] = {}
        self._ends: dict[Key, dict[int, int]] = {}
        # Beside the rows, not in them: a row may be lost and come back while its lease is out.
        self._leases: dict[Key, int] = {}
        self._orders = {tier: Order(self._weigher(tier)) for tier in ORDER}
        self._kv = (1, 1 << 14)  # tokens and bytes of the KV row added last
        self._bytes = dict.fromkeys(ORDER, 0)
        self._count = dict.fromkeys(ORDER, 0)

    def add(self, name: RowName, tier: str, n_bytes: int, *, last_used: float, facts: Facts | None = None) -> bool:
        """Make a copy visible (or note its new size); False if the key is taken by another span."""
        with self._lock:
            return self._add(name, tier, n_bytes, last_used, facts) is not None

    def add_found(self, tier: str, found: Iterable[Found]) -> int:
        """Make copies visible that a look at a tier found; returns how many were news."""
        with self._lock:
            return sum(self._add(each.name, tier, each.n_bytes, each.last_used, None) is True for each in found)

    def remove(self, key: Key, tier: str) -> bool:
        """Forget a copy, leased or not: its bytes are gone or bad. False if the index had none."""
        with self._lock:
            return self._remove(key, tier)

    def learn(self, key: Key, facts: Facts) -> None:
        """Remember what a row's header said."""
        with self._lock:
            if (entry := self._rows.get(key)) is not None:
                entry.facts = facts

    def get(self, key: Key) -> Row | None:
        """A snapshot of one row."""
        with self._lock:
            entry = self._rows.get(key)
            return None if entry is None else self._snapshot(entry)

    def has(self, key: Key, tier: str | None = None) -> bool:
        """Whether a row, or a copy in one tier, is known."""
        with self._lock:
            entry = self._rows.get(key)
            return entry is not None and (tier is None or tier in entry.copies)

    def run(self, names: Sequence[RowName]) -> int:
        """How many of these rows, from the first on, are known."""
        with self._lock:
            for at, name in enumerate(names):
                entry = self._rows.get(name.key)
                if entry is None or entry.name != name:
                    return at
            return len(names)

    def children(self, parent: Key, most: int) -> list[Row]:
        """Rows that follow a prefix; so many at most, the newest."""
        with self._lock:
            newest = islice(reversed(self._children.get(parent, _NONE)), most)
            return [self._snapshot(self._rows[key]) for key in newest]

    def ends(self, parent: Key) -> set[int]:
        """Where the rows that follow a prefix end: few numbers, however many rows."""
        with self._lock:
            return set(self._ends.get(parent, _NO_ENDS))

    def rows(self, tier: str | None = None) -> list[Row]:
        """Snapshots of all rows, or of one tier's."""
        with self._lock:
            entries = self._rows.values()
            return [self._snapshot(entry) for entry in entries if tier is None or tier in entry.copies]

    def lease(self, keys: Iterable[Key]) -> list[Key]:
        """Hold rows against eviction; returns those that exist. Give each back with `release`."""
        with self._lock:
            held = [key for key in keys if key in self._rows]
            for key in held:
                self._leases[key] = self._leases.get(key, 0) + 1
            return held

    def release(self, keys: Iterable[Key]) -> None:
        """Give leases back."""
        with self._lock:
            for key in keys:
                left = self._leases.pop(key) - 1
                if left:
                    self._leases[key] = left
                self._let_back(key)

    def touch(self, keys: Iterable[Key], now: float, *, hits: int = 1) -> None:
        """Rows were used."""
        with self._lock:
            for key in keys:
                if (entry := self._rows.get(key)) is not None:
                    entry.hits += hits
                    entry.last_used = max(entry.last_used, now)

    def take_victims(self, tier: str, n_bytes: int, *, older_than: float | None = None) -> list[Victim]:
        """Give up copies of a tier, least worth first, until so many bytes are free; fewer if no more may go.

        Never a leased row, and never a row before the rows that follow it, so chains shrink from their ends.
        `older_than` spares rows used since.
        """
        with self._lock:
            order, victims, freed, spared = self._orders[tier], [], 0, []
            for key in order.ascending() if n_bytes > 0 else ():
                entry = self._rows[key]
                if not self._may_go(entry, tier):
                    order.hold_back(key)
                elif older_than is not None and entry.last_used >= older_than:
                    spared.append(key)
                else:
                    size = entry.copies[tier]
                    self._remove(key, tier)
                    victims.append(Victim(entry.name, size, entry.facts, entry.last_used, tuple(entry.copies)))
                    freed += size
                if freed >= n_bytes:
                    break
            for key in spared:
                order.push(key)
            return victims

    def used(self, tier: str) -> tuple[int, int]:
        """Rows and bytes of a tier, as far as this process knows."""
        with self._lock:
            return self._count[tier], self._bytes[tier]

    def spaces(self) -> set[Key]:
        """Root keys of the spaces that have rows."""
        with self._lock:
            return {entry.name.space for entry in self._rows.values()}

    def _add(self, name: RowName, tier: str, n_bytes: int, last_used: float, facts: Facts | None) -> bool | None:
        """Whether the copy is news; None if the key is taken by another span."""
        entry = self._rows.get(name.key)
        if entry is None:
            entry = self._rows[name.key] = _Entry(name)
            self._be_child(name)
        elif entry.name != name:
            return None
        elif tier not in entry.copies:
            self._let_back(name.key)
        is_new = tier not in entry.copies
        self._bytes[tier] += n_bytes - entry.copies.get(tier, 0)
        entry.copies[tier] = n_bytes
        entry.last_used = max(entry.last_used, last_used)
        entry.facts = facts or entry.facts
        if not name.is_logits:
            self._kv = (name.n_tokens, n_bytes)
        if is_new:
            self._count[tier] += 1
            self._orders[tier].push(name.key)
        return is_new

    def _remove(self, key: Key, tier: str) -> bool:
        entry = self._rows.get(key)
        if entry is None or tier not in entry.copies:
            return False
        self._bytes[tier] -= entry.copies.pop(tier)
        self._count[tier] -= 1
        if not entry.copies:
            del self._rows[key]
            self._be_no_child(entry.name)
        self._let_back(entry.name.parent)
        order = self._orders[tier]
        order.compact((k for k, e in self._rows.items() if tier in e.copies), self._count[tier])
        return True

    def _be_child(self, name: RowName) -> None:
        siblings = self._children.get(name.parent)
        if siblings is None:
            self._children[name.parent] = {name.key: None}
            self._ends[name.parent] = {name.end: 1}
        else:
            siblings[name.key] = None
            ends = self._ends[name.parent]
            ends[name.end] = ends.get(name.end, 0) + 1

    def _be_no_child(self, name: RowName) -> None:
        siblings, ends = self._children[name.parent], self._ends[name.parent]
        del siblings[name.key]
        ends[name.end] -= 1
        if not ends[name.end]:
            del ends[name.end]
        if not siblings:
            del self._children[name.parent], self._ends[name.parent]

    def _may_go(self, entry: _Entry, tier: str) -> bool:
        if entry.name.key in self._leases:
            return False
        children = self._children.get(entry.name.key)
        if not children or len(entry.copies) == 1:
            return not children
        return not any(tier in self._rows[key].copies for key in children)

    def _let_back(self, key: Key) -> None:
        for order in self._orders.values():
            order.let_back(key)

    def _weigher(self, tier: str) -> Callable[[Key], float | None]:
        def weigh(key: Key) -> float | None:
            entry = self._rows.get(key)
            if entry is None or tier not in entry.copies:
                return None
            # Logits spare no tokens by themselves; weighed as KV is, they go when the KV of their time goes.
            n_tokens, size = self._kv if entry.name.is_logits else (entry.name.n_tokens, entry.copies[tier])
            return worth(last_used=entry.last_used, hits=entry.hits, n_tokens=n_tokens, n_bytes=size)

        return weigh

    def _snapshot(self, entry: _Entry) -> Row:
        tiers = tuple(tier for tier in ORDER if tier in entry.copies)
        facts = entry.facts
        return Row(
            name=entry.name,
            tier=tiers[0],
            tiers=tiers,
            n_bytes=max(entry.copies.values()),
            parts=facts.parts if facts else None,
            tokens=facts.tokens if facts else None,
            hits=entry.hits,
            last_used=entry.last_used,
            reason=str(facts.reason) if facts else None,
            leases=self._leases.get(entry.name.key, 0),
        )
