"""The facade: one object that searches, reads, saves and reports.

Joins index, tiers, writers and readers; owns the threads. No fault of a disk leaves it: a search that cannot look
finds less, a row that cannot be read ends a result, a save that cannot be written is counted. Opening is the exception:
settings that make no sense raise `BadOption`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Literal, Self

from kvasir.cache.cost import Piece
from kvasir.cache.fetch import Fetcher
from kvasir.cache.files import Files
from kvasir.cache.index import Facts
from kvasir.cache.keeper import Keeper
from kvasir.cache.key import Key, Space, pack
from kvasir.cache.loading import Loading
from kvasir.cache.match import Lease, Match
from kvasir.cache.publish import Sealed, Stage
from kvasir.cache.report import Listed, Report, Verified
from kvasir.cache.row import Miss, Needs, Part, Reason, Row, RowName, Why
from kvasir.cache.search import Found, Search
from kvasir.cache.settings import CacheSettings
from kvasir.cache.stats import CacheStats
from kvasir.cache.store import Store
from kvasir.cache.tiers import DISK, RAM, TMPFS, FileTier
from kvasir.cache.writer import Pool

PLAIN = Needs()


class Cache:
    """Prefixes by key, in RAM, tmpfs and disk. Any thread; a context manager that closes.

    `offer`, `longest` and `read` are the engine's; the rest reports and tidies.
    """

    def __init__(self, settings: CacheSettings, store: Store, writers: Pool, readers: Pool) -> None:
        self.block_tokens = settings.block_tokens
        self._store = store
        self._fetcher = Fetcher(store)
        self._writers = writers
        self._readers = readers
        self._keeper = Keeper(store, settings)
        self._report = Report(store, self._fetcher)

    @classmethod
    def open(
        cls,
        settings: CacheSettings,
        *,
        clock: Callable[[], float] = time.time,
        files: Files | None = None,
        stage: Stage | None = None,
    ) -> Cache:
        """Open the tiers and take over what is in them: good rows adopted, temporaries and other versions deleted.

        A file tier that cannot be opened is reported, counted and tried again later; it never stops a start. `files`
        and `stage` are seams for tests: every system call, and every step of a publish.
        """
        writers = Pool("cache-writer", settings.writer_threads, settings.writer_queue_bytes)
        store = Store(
            ram_bytes=settings.ram_bytes,
            tiers=_file_tiers(settings, files or Files()),
            writers=writers,
            ttl_s=settings.reservation_ttl_s,
            clock=clock,
            stage=stage or _no_stage,
        )
        cache = cls(settings, store, writers, Pool("cache-reader", settings.reader_threads))
        cache._keeper.start()
        return cache

    def longest(
        self,
        space: Space,
        tokens: Sequence[int],
        *,
        needs: Needs = PLAIN,
        most: int | None = None,
        min_tokens: int = 1,
        parent_key: Key | None = None,
        session_resume_wait_ms: int = 500,
    ) -> Match:
        """Find the longest stored prefix of at most `most` tokens; its rows are leased until `match.release()`.

        `parent_key`, the key an earlier request left behind, skips the search if the prompt begins with that prefix,
        and waits up to `session_resume_wait_ms` for a save of it in flight; otherwise the search goes on without it.
        That wait, and `min_tokens`, below which nothing is searched for, are the rules of the model that asks.
        Looks at file systems (one `stat` and one listing per file tier), reads headers only where `needs` asks for it.
        """
        begun = time.perf_counter_ns()
        n_wanted = len(tokens) if most is None else max(0, min(most, len(tokens)))
        self._store.spaces.setdefault(space.root, space)
        if n_wanted < max(1, min_tokens):
            found, kind = Found([], 0, Miss(Why.TOO_SHORT, n_wanted, 0)), ""
        else:
            self._await_save(parent_key, session_resume_wait_ms / 1000)
            found, kind = self._search(space, tokens, needs, n_wanted, parent_key)
        match = self._leased(space, needs, found)
        self._count(match, kind if match.n_tokens < n_wanted else "hits_exact")
        self._store.counters.add("search_ns", time.perf_counter_ns() - begun)
        return match

    def read(self, match: Match) -> Loading:
        """Start reading a match's rows; RAM rows are there at once, files come by reader threads, in order.

        Hold the match until the result is imported. Never raises for a bad row: the result ends before it.
        """
        loading = Loading(match, self._loaded)
        loading.start(self._fetcher, self._readers)
        return loading

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
        """Take a row: the KV of tokens [start, end) of this sequence, whose first `end` tokens are given.

        At once into RAM, later by a writer thread into files. Never waits for a disk and never raises for one; a full
        queue drops the file copy and counts it. The bytes must be the caller's to give away. Returns the key of the
        prefix [0, end). The engine offers each block from a block boundary, and at the end a tail.
        """
        name = self._name(space, tokens, start, end)
        self._offer(name, space, tokens, parts, reason)
        return name.key

    def offer_logits(self, space: Space, tokens: Sequence[int], logits: bytes) -> None:
        """Take what the model says after these tokens, two at least: a row beside those of their KV."""
        name = self._logits_name(space, tokens)
        if not self.has(name.key):
            self._offer(name, space.outputs, tokens, {Part.LOGITS: logits}, Reason.COLD)

    def logits(self, space: Space, tokens: Sequence[int]) -> bytes | None:
        """What the model says after exactly these tokens, if that is kept and no slower to read than to compute.

        Looks at file systems and reads one small row; a bad one is removed. Whoever uses it says so: `used_logits`.
        """
        name = self._logits_name(space, tokens)
        if (row := self._fetcher.find(name)) is None:
            return None
        piece = Piece(n_tokens=len(tokens), tier=row.tier, n_bytes=row.n_bytes)
        if row.tier != RAM and not self._store.cost.worth_reading(space.root, [piece]):
            return None
        # So short a read says little of the tier's speed.
        parts = self._fetcher.load(name, lambda part: part == Part.LOGITS, is_measure=False)
        if parts is None or Part.LOGITS not in parts:
            return None
        self._store.index.touch([name.key], self._store.clock())
        return parts[Part.LOGITS]

    def used_logits(self) -> None:
        """Report that a first token came from stored logits."""
        self._store.counters.add("hits_logits")

    def limit(self, space: Space, tiers: Sequence[str]) -> None:
        """Say in which tiers the rows of a space may lie from now on; those that lie elsewhere stay and are found."""
        for each in (space, space.outputs):
            self._store.limit(each.root, tiers)

    def has(self, key: Key) -> bool:
        """Whether a row with this key is known here, in any tier."""
        return self._store.index.has(key)

    def lease(self, keys: Sequence[Key]) -> Lease:
        """Hold rows against eviction until `release()`."""
        return Lease(self._store.index, keys)

    def computed(self, space: Space, n_tokens: int, seconds: float) -> None:
        """Report how long a prefill took: one side of the cost model."""
        self._store.cost.computed(space.root, n_tokens, seconds)

    def spared(self, space: Space, n_tokens: int) -> None:
        """Report a prompt that needed neither a prefill nor a restore."""
        self._store.counters.saved(self._store.cost.compute_s(space.root, n_tokens) or 0.0)

    def expect(self, speeds: Mapping[str, float]) -> None:
        """Take over what an earlier process measured: tokens per second, by the root key of a space."""
        for root, speed in speeds.items():
            with suppress(ValueError):  # no key
                self._store.cost.expect(Key(bytes.fromhex(root)), speed)

    def prefill_speeds(self) -> dict[str, float]:
        """Tokens per second of a prefill, by the root key of a space: for a later process to `expect`."""
        return {root.hex(): speed for root, speed in self._store.cost.prefill_speeds().items()}

    def timed(self, what: Literal["export", "import"], ns: int) -> None:
        """Report time the engine spent copying rows out of or into a context."""
        self._store.counters.add(f"{what}_ns", ns)

    def stats(self) -> CacheStats:
        """Counters since the start, and the tiers now."""
        return self._report.stats(self._writers.queued_bytes)

    def ls(self) -> list[Listed]:
        """Every row, parents before children, with its depth in the tree."""
        return self._report.ls()

    def verify(self, progress: Callable[[int, int], None] | None = None) -> Verified:
        """Check every checksum of every file; bad rows are removed. `progress` gets rows done and rows in all."""
        return self._report.verify(progress)

    def prune(self, *, keep_bytes: int | None = None, older_than_s: float | None = None) -> int:
        """Evict rows unused for so long, then down to so many bytes per tier; returns the bytes freed."""
        return self._report.prune(keep_bytes, older_than_s)

    def clear(self, space: Space | None = None) -> int:
        """Delete every row that is not leased, or one space's; returns the bytes freed."""
        return self._report.clear(space)

    def sweep(self) -> None:
        """Do now what the keeper does from time to time: dead writers' leftovers, tiers that failed, pressure."""
        self._keeper.tend()

    def flush(self, timeout_s: float | None = None) -> bool:
        """Wait until everything offered is published or dropped; False if time ran out first."""
        return self._writers.flush(timeout_s)

    def close(self, drain_s: float = 10.0) -> None:
        """Save what only RAM has, drain the writers within a limit, and stop. Idempotent."""
        self._keeper.close()
        self._store.demote_rest()
        self._store.counters.add("saves_dropped", self._writers.close(drain_s))
        self._readers.close()
        for tier in self._store.tiers.values():
            tier.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _await_save(self, parent_key: Key | None, wait_s: float) -> None:
        if parent_key is not None and not self._store.index.has(parent_key):
            self._store.tickets.wait(parent_key, wait_s)

    def _search(
        self, space: Space, tokens: Sequence[int], needs: Needs, n_wanted: int, parent_key: Key | None
    ) -> tuple[Found, str]:
        search = Search(self._store, self._fetcher, space, tokens, needs, n_wanted, self.block_tokens)
        if parent_key is not None and (resumed := search.resume(parent_key)) is not None:
            return resumed, "hits_resume"
        return search.run(), "hits_longest_prefix"

    def _leased(self, space: Space, needs: Needs, found: Found) -> Match:
        """Hold the rows; one that was evicted since it was found ends the match before it."""
        lease = Lease(self._store.index, [row.key for row in found.rows])
        if len(lease.keys) == len(found.rows):
            return Match(space, needs, found.rows, lease, n_tokens=found.n_tokens, why=found.why)
        lease.release()
        why = Miss(Why.ABSENT, found.n_tokens, 0)
        return Match(space, needs, [], Lease(self._store.index, ()), n_tokens=0, why=why)

    def _count(self, match: Match, kind: str) -> None:
        counters = self._store.counters
        if match.rows:
            counters.add(kind)
            self._store.index.touch([row.key for row in match.rows], self._store.clock())
        else:
            counters.add("misses")
        if match.why is not None:
            counters.add_to("short_by_reason" if match.rows else "misses_by_reason", match.why.why.value)

    def _loaded(self, loading: Loading) -> None:
        n_good = len(loading.result())
        self._store.counters.add("read_ns", int(loading.seconds * 1e9))
        if n_good:
            n_tokens = min(loading.match.rows[n_good - 1].end, loading.match.n_tokens)
            self._store.counters.add("tokens_restored", n_tokens)
            self._store.counters.saved(self._store.cost.compute_s(loading.match.space.root, n_tokens) or 0.0)

    def _name(self, space: Space, tokens: Sequence[int], start: int, end: int) -> RowName:
        assert 0 <= start < end <= len(tokens), "a row is a span of the tokens given"
        ends = (start, end) if start else (end,)
        *before, key = space.keys_at(tokens[:end], ends)
        return RowName(space.root, key, before[0] if before else space.root, start, end)

    def _logits_name(self, space: Space, tokens: Sequence[int]) -> RowName:
        return RowName.of_logits(space.outputs.root, space.outputs.key(tokens), len(tokens))

    def _offer(
        self, name: RowName, space: Space, tokens: Sequence[int], parts: Mapping[str, bytes], reason: Reason
    ) -> None:
        self._store.spaces.setdefault(space.root, space)
        if self._is_saved(name.key):
            self._store.counters.add("duplicate_dropped")
            self._store.index.touch([name.key], self._store.clock(), hits=0)
            return
        self._store.counters.add(f"saves_{Reason(reason)}")
        span, now = pack(tokens[name.start : name.end]), int(self._store.clock())
        self._take(Sealed(name, space, span, parts, Reason(reason), now))

    def _is_saved(self, key: Key) -> bool:
        """Whether a row is where it would go: in a file, or on its way there, or in RAM if there are no files."""
        row: Row | None = self._store.index.get(key)
        if self._store.tickets.is_pending(key):
            return True
        if row is None:
            return False
        home = self._store.home_of(row.name.space)
        return home is None or any(tier in self._store.tiers for tier in row.tiers)

    def _take(self, row: Sealed) -> None:
        facts = Facts({part: len(content) for part, content in row.parts.items()}, row.tokens, row.reason)
        is_kept = self._store.keep(row.name, row.parts, facts)
        home = self._store.home_of(row.name.space)
        if home is not None:
            self._store.save(row, home)
        elif not is_kept:
            self._store.counters.add("saves_dropped")


def _file_tiers(settings: CacheSettings, files: Files) -> list[FileTier]:
    """The file tiers that exist, fastest first."""
    places = ((TMPFS, settings.tmpfs_dir, settings.tmpfs_bytes), (DISK, settings.disk_dir, settings.disk_bytes))
    return [
        FileTier(
            name,
            str(folder.absolute()),
            quota,
            block_tokens=settings.block_tokens,
            files=files,
            free_share=settings.free_share,
        )
        for name, folder, quota in places
        if folder is not None and quota > 0
    ]


def _no_stage(_: str) -> None:
    return
