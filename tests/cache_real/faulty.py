"""Disks that fail or wait, below a real cache: system calls replaced, or a small file system mounted.

Mounting needs rights that not every machine gives. Without them the same errors are injected where the system would
return them, so that no test is skipped.
"""

from __future__ import annotations

import errno
import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from kvasir.cache.files import Files


class SlowFiles(Files):
    """Reads that take their time: `seconds` each, whatever their length."""

    def __init__(self, seconds: float = 0.0) -> None:
        self.seconds = seconds
        self.n_slow = 0

    def pread(self, fd: int, n_bytes: int, offset: int) -> bytes:
        if self.seconds and n_bytes > 64:  # not the ledger's count
            self.n_slow += 1
            time.sleep(self.seconds)
        return super().pread(fd, n_bytes, offset)


class FailingFiles(Files):
    """Calls that change the disk fail with `code` while there is one."""

    def __init__(self, code: int | None = None) -> None:
        self.code = code

    def _fail(self, path: str = "") -> None:
        if self.code is not None:
            raise OSError(self.code, os.strerror(self.code), path)

    def create(self, path: str) -> int:
        self._fail(path)
        return super().create(path)

    def allocate(self, fd: int, n_bytes: int) -> None:
        self._fail()
        super().allocate(fd, n_bytes)

    def link(self, source: str, target: str) -> None:
        self._fail(target)
        super().link(source, target)

    def mkdir(self, path: str) -> bool:
        self._fail(path)
        return super().mkdir(path)

    def lock_file(self, path: str) -> int:
        self._fail(path)
        return super().lock_file(path)


@dataclass
class Disk:
    """A file system of a few kilobytes that can be filled, made read-only, and relieved; real if we may mount."""

    folder: Path
    files: FailingFiles | None

    def fill(self) -> None:
        if self.files is not None:
            self.files.code = errno.ENOSPC
            return
        with (self.folder / "others").open("wb", buffering=0) as file, suppress(OSError):
            while True:
                file.write(bytes(4096))

    def close_to_writes(self) -> None:
        """Allow no more changes; nobody may have a file open for writing now."""
        if self.files is not None:
            self.files.code = errno.EROFS
        else:
            assert _mount("-o", "remount,ro", str(self.folder))

    def relieve(self) -> None:
        if self.files is not None:
            self.files.code = None
            return
        assert _mount("-o", "remount,rw", str(self.folder))
        (self.folder / "others").unlink(missing_ok=True)


@contextmanager
def small_disk(folder: Path, size: str = "1m") -> Iterator[Disk]:
    folder.mkdir()
    if _mount("-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)):
        try:
            yield Disk(folder, None)
        finally:
            subprocess.run(["umount", "--lazy", str(folder)], check=True, timeout=30)
    else:
        yield Disk(folder, FailingFiles())


def _mount(*options: str) -> bool:
    try:
        return subprocess.run(["mount", *options], capture_output=True, timeout=30).returncode == 0
    except OSError:
        return False
