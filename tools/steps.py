"""What every build step shares: the cache folder, locks, one-line failures, and running programs in sight.

Owns the rule that standard output carries the answer alone (a folder, a key) and everything for people goes to
standard error. A fault of the world becomes `Failure`, which the command prints as one line. Standard library only:
this runs before anything is installed.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import subprocess
import sys
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

# Enough of a failed program's output to find the reason in; the user has already seen all of it.
KEPT_LINES = 400


class Failure(Exception):
    """A build step cannot go on; the text is the one line the user reads."""


def say(text: str) -> None:
    """Tell the user what happens now."""
    print(f"kvasir: {text}", file=sys.stderr, flush=True)


def build_home(environ: Mapping[str, str] = os.environ) -> Path:
    """The folder that build products of all clones share; not yet made."""
    if home := environ.get("KVASIR_HOME"):
        return Path(home).expanduser() / "build"
    cache = environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(cache).expanduser() / "kvasir" / "build"


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the right to write `folder`, across processes; blocks until it is free. A killed holder frees it."""
    path = folder.parent / f"{folder.name}.lock"
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"another build is writing {folder}; waiting for it")
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def disk_faults(folder: Path) -> Iterator[None]:
    """Turn a full disk or a folder that cannot be written into a `Failure` that names the folder."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise no_space(folder) from error
        if error.errno in (errno.EACCES, errno.EROFS, errno.EPERM, errno.ENOTDIR, errno.EEXIST):
            raise Failure(f"cannot write {error.filename or folder}; set KVASIR_HOME to a folder you own") from error
        raise


def no_space(folder: Path) -> Failure:
    """The full-disk failure, the same line wherever the space ran out."""
    return Failure(f"no space left on the disk of {folder}; free about 1 GB or set KVASIR_HOME to another disk")


def run_in_sight(command: Sequence[str | Path], *, what: str, folder: Path) -> None:
    """Run a program, its output passed on line by line. Raises `Failure` with what failed and, if known, why."""
    kept: deque[str] = deque(maxlen=KEPT_LINES)
    with subprocess.Popen(
        [str(part) for part in command],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    ) as program:
        assert program.stdout is not None
        for line in program.stdout:
            kept.append(line)
            sys.stderr.write(line)
            sys.stderr.flush()
    if program.returncode != 0:
        raise reason_of(kept, what=what, folder=folder)


def reason_of(lines: Sequence[str] | deque[str], *, what: str, folder: Path) -> Failure:
    """The failure that a program's last lines stand for."""
    text = "".join(lines)
    if os.strerror(errno.ENOSPC) in text:
        return no_space(folder)
    if "Killed signal terminated program" in text or "signal: Killed" in text:
        return Failure(f"{what} ran out of memory; set CMAKE_BUILD_PARALLEL_LEVEL=1 and run it again (it resumes)")
    return Failure(f"{what} failed; the compiler's or CMake's reason is above this line (folder: {folder})")
