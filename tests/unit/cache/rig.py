"""What the cache's tests share: spaces, rows with known bytes, a system whose calls can be made to fail."""

from __future__ import annotations

import errno
import hashlib
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from kvasir.cache import Cache, CacheSettings, Key, Match, Reason, Space, spans
from kvasir.cache.files import Files

BLOCK = 16
KIB = 1 << 10
MIB = 1 << 20


def space(name: str = "model") -> Space:
    return Space(hashlib.sha256(name.encode()).digest(), 1, 1, hashlib.sha256(b"context").digest())


def payload(tokens: Sequence[int], start: int, end: int, n_bytes: int = 4096, part: str = "base") -> bytes:
    """Bytes that a row of these tokens must have and no other row has."""
    seed = hashlib.sha256(repr((list(tokens[:end]), start, part)).encode()).digest()
    return (seed * (n_bytes // 32 + 1))[:n_bytes]


def settings(folder: Path | None, **changes: Any) -> CacheSettings:
    plain: dict[str, Any] = {
        "ram_bytes": 8 * MIB,
        "disk_dir": folder,
        "disk_bytes": 64 * MIB,
        "free_share": 0.0,
        "block_tokens": BLOCK,
        "writer_threads": 1,
    }
    return CacheSettings(**(plain | changes))


def offer_all(
    cache: Cache,
    tokens: Sequence[int],
    *,
    where: Space | None = None,
    n_bytes: int = 4096,
    reason: Reason = Reason.COLD,
    parts: tuple[str, ...] = ("base",),
    n_saved: int = 0,
) -> list[Key]:
    """Offer a sequence as the engine does: its blocks, then its tail."""
    return [
        cache.offer(
            where or space(),
            tokens,
            start=start,
            end=end,
            parts={part: payload(tokens, start, end, n_bytes, part) for part in parts},
            reason=reason,
        )
        for start, end in spans(n_saved, len(tokens), cache.block_tokens)
    ]


def check(cache: Cache, match: Match, tokens: Sequence[int], n_bytes: int = 4096) -> int:
    """Read a match, compare every byte with what was offered, release; returns the tokens that arrived."""
    with match:
        got = cache.read(match).result(30)
        for row, parts in zip(match.rows, got, strict=False):
            assert parts, "a row without parts"
            for name, content in parts.items():
                assert content == payload(tokens, row.start, row.end, n_bytes, name), "a wrong byte was served"
        return match.rows[len(got) - 1].end if got else 0


def row_files(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.row"))


def temp_files(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.tmp"))


def tree_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in row_files(folder))


WRITES = (
    "create",
    "allocate",
    "write",
    "fsync",
    "sync_folder",
    "link",
    "unlink",
    "mkdir",
    "pwrite",
    "lock_file",
    "lock",
)
READS = ("open", "pread", "stat", "scandir", "size")
CALLS = (*WRITES, *READS, "utime", "free_bytes")


class FaultyFiles(Files):
    """The real system, until told that a call fails or takes its time."""

    def __init__(self) -> None:
        self.failing: dict[str, int] = {}
        self.delay_s: dict[str, float] = {}
        self.calls: Counter[str] = Counter()
        self.failures: Counter[str] = Counter()

    def fail(self, call: str, code: int) -> None:
        self.failing[call] = code

    def heal(self) -> None:
        self.failing.clear()
        self.delay_s.clear()


def _wrapped(call: str) -> Callable[..., Any]:
    real = getattr(Files, call)

    def method(self: FaultyFiles, *args: Any) -> Any:
        self.calls[call] += 1
        if delay := self.delay_s.get(call):
            time.sleep(delay)
        if code := self.failing.get(call):
            self.failures[call] += 1
            raise OSError(code, os.strerror(code))
        return real(self, *args)

    return method


for _call in CALLS:
    setattr(FaultyFiles, _call, _wrapped(_call))


class GatedFiles(Files):
    """The real system, but no sync ends while the gate is shut."""

    def __init__(self) -> None:
        self.waits = threading.Event()  # someone stands at the gate
        self._gate = threading.Event()
        self._gate.set()

    def shut(self) -> None:
        self._gate.clear()

    def open_gate(self) -> None:
        self._gate.set()

    def fsync(self, fd: int) -> None:
        if not self._gate.is_set():
            self.waits.set()
            assert self._gate.wait(60)
        super().fsync(fd)


CODES = (errno.ENOSPC, errno.EIO, errno.EACCES, errno.EROFS)


class Clock:
    """Time that moves when told."""

    def __init__(self, now: float = 1_000_000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now
