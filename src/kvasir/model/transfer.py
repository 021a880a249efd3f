"""Moving a model's bytes: progress, room on the disk, hashes, and writes that survive a power cut.

The small acts that both sources (`hub.py`, `pypi.py`) and the store share. Decides nothing about what is fetched,
from where, or where it is kept.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

from kvasir.errors import ModelNotFound, NoSpace, StoreError


class Progress(Protocol):
    """Called as bytes arrive, a few times a second; an exception it raises ends the download."""

    def __call__(self, done: int, total: int | None) -> None:
        """Say that `done` bytes of `total` are here; None where nobody knows how many there will be."""


def silent(done: int, total: int | None) -> None:
    """Report nothing."""


def check_room(folder: Path, n_bytes: int, *, what: str) -> None:
    """Raise `NoSpace` unless the folder's disk has room for this many bytes more."""
    free = shutil.disk_usage(folder).free
    if free < n_bytes:
        raise NoSpace(
            f"{what} needs {megabytes(n_bytes)} more in {folder}, which has {megabytes(free)} free;"
            " make room or move the store with KVASIR_HOME."
        )


@contextlib.contextmanager
def disk_errors(home: Path) -> Iterator[None]:
    """Turn what a disk can refuse, below this folder, into store errors."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise NoSpace(f"the disk of {home} is full; make room or move the store with KVASIR_HOME.") from error
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST):
            raise StoreError(
                f"the model store {home} cannot be used ({error.strerror}); move it with KVASIR_HOME."
            ) from error
        raise StoreError(f"the model store {home} failed: {error}.") from error


def sha256_of(path: Path) -> str:
    """Hash a whole file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sync(path: Path) -> None:
    """Make a file's bytes, or a folder's names, survive a power cut."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_whole(path: Path, data: bytes) -> None:
    """Replace a small file so that a reader sees the old bytes or the new ones, never a mix."""
    temp = path.with_name(f"{path.name}.{os.getpid()}.new")
    temp.write_bytes(data)
    sync(temp)
    temp.replace(path)


def megabytes(n_bytes: int) -> str:
    """A size as a person reads it."""
    return f"{n_bytes / 1e9:,.1f} GB" if n_bytes >= 10**9 else f"{n_bytes / 1e6:,.1f} MB"


def listed(names: list[str], *, most: int = 8) -> str:
    """Names for an error's end: the first few, and how many more there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def missing_inside(what: str, wanted: str, names: list[str], hint: str) -> ModelNotFound:
    """The error for a file that a repository or package does not hold."""
    held = f"; it holds {listed(names)}" if names else ", nor any other model"
    return ModelNotFound(f"{what} has no {wanted!r}{held}.{hint}")
