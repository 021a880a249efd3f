"""How many bytes a file tier holds, counted once for all processes that share it.

    LOCK    used bytes u64 | its complement u64      under flock

Bytes are taken before a file is made and given back after it is gone, both under the lock, so the count is never less
than the truth, whoever is killed when. A count that does not read back is measured anew. Decides nothing.
"""

from __future__ import annotations

import errno
import os
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from kvasir.cache.files import Files, make_folders

_COUNT = struct.Struct("<QQ")
_ALL = (1 << 64) - 1

# Longest anyone holds the lock on purpose: a scan of 100,000 rows on a slow disk.
PATIENCE_S = 20.0


class Ledger:
    """The count of one root. `measure` adds up the files when the count cannot be trusted."""

    def __init__(self, root: str, files: Files, measure: Callable[[], int]) -> None:
        self._root = root
        self._path = f"{root}/LOCK"
        self._files = files
        self._measure = measure
        self._mutex = threading.RLock()
        self._depth = 0
        self._fd: int | None = None

    @contextmanager
    def held(self) -> Iterator[None]:
        """Keep every other thread and process from making or removing files here. Raises `OSError`."""
        with self._mutex:
            if self._depth == 0:
                self._enter()
            self._depth += 1
            try:
                yield
            finally:
                self._depth -= 1
                if self._depth == 0 and self._fd is not None:
                    self._files.unlock(self._fd)

    def used(self) -> int:
        """Bytes in use; inside `held` only."""
        assert self._fd is not None
        data = self._files.pread(self._fd, _COUNT.size, 0)
        if len(data) == _COUNT.size:
            used, complement = _COUNT.unpack(data)
            if used ^ complement == _ALL:
                return int(used)
        return self.recount()

    def add(self, n_bytes: int) -> None:
        """Take bytes, or give them back with a minus; inside `held` only."""
        self.settle(max(0, self.used() + n_bytes))

    def recount(self) -> int:
        """Measure the files and believe them; inside `held` only."""
        used = self._measure()
        self.settle(used)
        return used

    def settle(self, used: int) -> None:
        """Believe a count made under the lock; inside `held` only."""
        assert self._fd is not None
        self._files.pwrite(self._fd, _COUNT.pack(used, used ^ _ALL), 0)

    def close(self) -> None:
        """Let the file go. A later `held` opens it again."""
        with self._mutex:
            if self._fd is not None:
                self._files.close(self._fd)
                self._fd = None

    def _enter(self) -> None:
        """Lock the file that is under our name now: someone may have removed the folder, and the file with it."""
        while True:
            if self._fd is None:
                make_folders(self._files, self._root, self._root)
                self._fd = self._files.lock_file(self._path)
            self._wait(self._fd)
            if self._is_current(self._fd):
                return
            self._files.close(self._fd)
            self._fd = None

    def _wait(self, fd: int) -> None:
        """Poll, for a stopped process that holds the lock must cost us a save, not a thread."""
        deadline = time.monotonic() + PATIENCE_S
        pause = 0.0005
        while not self._files.lock(fd):
            if time.monotonic() > deadline:
                raise TimeoutError(errno.ETIMEDOUT, f"another process holds {self._path}")
            time.sleep(pause)
            pause = min(0.02, pause * 2)

    def _is_current(self, fd: int) -> bool:
        try:
            return os.path.samestat(os.fstat(fd), self._files.stat(self._path))
        except FileNotFoundError:
            return False
