"""The system calls a file tier makes, one method each, so that a test can make any of them fail or wait.

No policy: whatever the system says is raised as it came.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Sequence
from pathlib import Path

_NEW = os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC


class Files:
    """The real system. Methods are named after what they call."""

    def create(self, path: str) -> int:
        """A new file, open for writing; fails if the name is taken."""
        return os.open(path, _NEW, 0o600)

    def allocate(self, fd: int, n_bytes: int) -> None:
        """Give a file its full length now, so that a full disk says so before anything is written."""
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(fd, 0, n_bytes)
        else:
            os.ftruncate(fd, n_bytes)

    def write(self, fd: int, data: bytes) -> None:
        """All of it, however many calls the system needs."""
        view = memoryview(data)
        while view:
            view = view[os.write(fd, view) :]

    def fsync(self, fd: int) -> None:
        """Data and length are on the medium when this returns."""
        os.fsync(fd)

    def sync_folder(self, path: str) -> None:
        """Names in a folder are on the medium when this returns."""
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def link(self, source: str, target: str) -> None:
        """A second name, or `FileExistsError`: never replaces."""
        os.link(source, target)

    def unlink(self, path: str) -> None:
        """Take a name away."""
        os.unlink(path)  # noqa: PTH108

    def mkdir(self, path: str) -> bool:
        """Make one folder; False if it was there."""
        try:
            os.mkdir(path, 0o700)  # noqa: PTH102
        except FileExistsError:
            return False
        return True

    def rmdir(self, path: str) -> None:
        """Remove an empty folder."""
        os.rmdir(path)  # noqa: PTH106

    def scandir(self, path: str) -> Sequence[os.DirEntry[str]]:
        """What a folder holds; nothing if it is not there."""
        try:
            with os.scandir(path) as entries:
                return list(entries)
        except FileNotFoundError:
            return ()

    def open(self, path: str) -> int:
        """An existing file, for reading."""
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def pread(self, fd: int, n_bytes: int, offset: int) -> bytes:
        """Up to so many bytes from there; fewer only at the end of the file."""
        data = os.pread(fd, n_bytes, offset)
        while 0 < len(data) < n_bytes and (more := os.pread(fd, n_bytes - len(data), offset + len(data))):
            data += more
        return data

    def stat(self, path: str) -> os.stat_result:
        """Facts of a path."""
        return os.stat(path)  # noqa: PTH116

    def size(self, fd: int) -> int:
        """Length of an open file."""
        return os.fstat(fd).st_size

    def utime(self, path: str, when: float) -> None:
        """Set a file's last use."""
        os.utime(path, (when, when))

    def close(self, fd: int) -> None:
        """Close a descriptor."""
        os.close(fd)

    def free_bytes(self, path: str) -> tuple[int, int]:
        """Bytes free to us, and bytes in all, of the file system a folder is on."""
        facts = os.statvfs(path)
        return facts.f_bavail * facts.f_frsize, facts.f_blocks * facts.f_frsize

    def lock_file(self, path: str) -> int:
        """An open file to lock, made if need be."""
        return os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)

    def lock(self, fd: int) -> bool:
        """Try for the lock that all processes on this folder share; the system frees it when we die."""
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def unlock(self, fd: int) -> None:
        """Let the next process in."""
        fcntl.flock(fd, fcntl.LOCK_UN)

    def pwrite(self, fd: int, data: bytes, offset: int) -> None:
        """A few bytes in place."""
        os.pwrite(fd, data, offset)


def make_folders(files: Files, root: str, path: str) -> None:
    """Make `path` and what is missing between it and `root`, each durably named in its parent."""
    missing = []
    at = Path(path)
    while not at.is_dir() and str(at) != root and len(at.parts) > 1:
        missing.append(at)
        at = at.parent
    if str(at) == root and not at.is_dir():
        at.mkdir(parents=True, exist_ok=True, mode=0o700)
    for folder in reversed(missing):
        if files.mkdir(str(folder)):
            files.sync_folder(str(folder.parent))
