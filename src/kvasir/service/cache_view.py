"""The cache as users hold it: what it holds and counted, whether it is whole, and making it smaller.

`OpenCache` owns a `Cache` and lets its counters outlive it; `CacheView` is what commands call, `ModelCache` what
`Model.cache` gives out. Searching and saving are the engine's, and happen by themselves.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Self

import msgspec

from kvasir.cache import Cache, CacheSettings, CacheStats, Key, Listed, Verified
from kvasir.errors import BadOption
from kvasir.service.history import History, plus

if TYPE_CHECKING:
    from kvasir.model.tokenizer import Prompt
    from kvasir.service.model import Model

# How often a process writes down what it counted, so that `kvasir cache stats` shows a server that runs.
NOTE_S = 10.0
# A save is offered in the tick after its request ended (copying 100,000 tokens takes about a second), then written by
# another thread.
OFFER_WAIT_S = 5.0
WRITE_WAIT_S = 30.0


class OpenCache:
    """A cache and the record of what it counts. Close it.

    `record=False` leaves no trace in the counters: for a look from outside.
    """

    def __init__(self, cache: Cache, history: History | None, *, record: bool) -> None:
        self.cache = cache
        self.history = history
        self._records = record and history is not None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._note, name="kvasir-cache-stats", daemon=True)
        if self._records:
            self._thread.start()

    @classmethod
    def open(cls, settings: CacheSettings, *, record: bool = True) -> OpenCache:
        """Open a cache; its counters are kept beside the disk tier, if there is one."""
        has_disk = settings.disk_dir is not None and settings.disk_bytes > 0
        history = History(settings.disk_dir) if has_disk and settings.disk_dir is not None else None
        cache = Cache.open(settings)
        if record and history is not None:
            cache.expect(history.others().speeds)
        return cls(cache, history, record=record)

    def close(self) -> None:
        """Save what only memory has, then add up what was counted. Idempotent."""
        is_first = not self._stop.is_set()
        self._stop.set()
        # A model that is collected may be closed by whichever thread collects it, this one too.
        if self._thread.ident is not None and self._thread is not threading.current_thread():
            self._thread.join()
        self.cache.close()
        if is_first and self._records and self.history is not None:
            stats = self.cache.stats()
            hits = {row.key: row.hits for row in self.cache.ls() if row.hits} if stats.hits else {}
            self.history.end(stats, hits, self.cache.prefill_speeds())
            self.cache.close(drain_s=0)  # asking for its bytes opened the shared count again

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _note(self) -> None:
        assert self.history is not None
        while not self._stop.wait(NOTE_S):
            self.history.note(self.cache.stats(), self.cache.prefill_speeds())


class CacheView:
    """Reports on a cache and tidies it. Any thread; never in the way of requests that run."""

    def __init__(self, opened: OpenCache) -> None:
        self._cache = opened.cache
        self._history = opened.history

    def stats(self, *, all_processes: bool = False) -> CacheStats:
        """Return the counters since this cache was opened, and what its tiers hold now.

        With `all_processes`, the counters of everyone who ever used the folder are added: of running processes as of
        some seconds ago.
        """
        own = self._cache.stats()
        return plus(own, self._history.others().stats) if all_processes and self._history is not None else own

    def ls(self) -> list[Listed]:
        """Return every row, parents before children. Hits are this process's and those of processes that ended."""
        before = self._history.others().hits if self._history is not None else {}
        rows = self._cache.ls()
        return [msgspec.structs.replace(row, hits=row.hits + before.get(row.key, 0)) for row in rows]

    def verify(self, progress: Callable[[int, int], None] | None = None) -> Verified:
        """Check every checksum of every file; bad rows are removed. `progress` gets rows done and rows in all."""
        return self._cache.verify(progress)

    def prune(self, *, to_bytes: int | None = None, older_than_s: float | None = None) -> int:
        """Delete rows unused for so long, then the least useful until each tier holds `to_bytes`; returns bytes freed.

        Rows in use stay.
        """
        if to_bytes is None and older_than_s is None:
            raise BadOption("prune needs to_bytes or older_than_s, or it would delete nothing.")
        for name, value in (("to_bytes", to_bytes), ("older_than_s", older_than_s)):
            if value is not None and not value >= 0:
                raise BadOption(f"{name} must be 0 or more, got {value!r}.")
        return self._cache.prune(keep_bytes=to_bytes, older_than_s=older_than_s)

    def clear(self) -> int:
        """Delete every row that is not in use, of all models; returns the bytes freed. Counters stay."""
        return self._cache.clear()


class Warmed(msgspec.Struct, frozen=True, kw_only=True):
    """What `warm` did."""

    key: str
    tokens: int
    cached_tokens: int  # that were not computed again
    seconds: float
    was_there: bool  # nothing had to be saved
    path: str | None  # the file of the last row; None where it is in memory only


class ModelCache(CacheView):
    """The cache of an open model: `Model.cache`."""

    def __init__(self, opened: OpenCache, model: Model) -> None:
        super().__init__(opened)
        self._model = model

    def warm(self, prompt: Prompt, *, scope: str | None = None) -> Warmed:
        """Compute a prompt now and keep it, so that whoever begins with it later waits less. Blocks until it is saved.

        Raises `BadOption` for a prompt shorter than `min_tokens`, which is not kept.
        """
        begun = time.perf_counter()
        before = {row.key for row in self._cache.ls()}
        done = self._model.read(prompt, scope=scope).result()
        n_tokens = done.usage.prompt_tokens
        if done.key is None:
            least = self._model._settings.min_tokens
            raise BadOption(f"the prompt is {n_tokens} tokens; fewer than min_tokens ({least}) are not kept.")
        return Warmed(
            key=done.key,
            tokens=n_tokens,
            cached_tokens=done.usage.cached_tokens,
            seconds=time.perf_counter() - begun,
            was_there=done.key in before or done.usage.cached_tokens >= n_tokens - 1,
            path=self._path_when_saved(done.key),
        )

    def _path_when_saved(self, key: str) -> str | None:
        deadline = time.monotonic() + OFFER_WAIT_S
        while not self._cache.has(Key(bytes.fromhex(key))) and time.monotonic() < deadline:
            time.sleep(0.002)
        self._cache.flush(WRITE_WAIT_S)
        return next((row.path for row in self._cache.ls() if row.key == key), None)
