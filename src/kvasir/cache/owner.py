"""Who is writing a temporary file: this process, another one, or one that died.

A temporary's name says host, process and the process's start, so that a number the system gave to someone else since
is not mistaken for the writer. Processes of another host or container cannot be looked up: for them only time tells.
"""

from __future__ import annotations

import os
import platform
from contextlib import suppress
from functools import cache
from hashlib import blake2b
from pathlib import Path
from typing import NamedTuple

import psutil


class Owner(NamedTuple):
    """A process, named so that no other one can have the name."""

    host: str
    pid: int
    born: int

    def __str__(self) -> str:
        return f"{self.host}-{self.pid}-{self.born}"

    @classmethod
    def parse(cls, text: str) -> Owner | None:
        """The owner in a temporary's name, or None if we did not write that name."""
        host, *rest = text.split("-")
        if len(rest) < 2 or not all(each.isdigit() for each in rest[:2]):
            return None
        return cls(host, int(rest[0]), int(rest[1]))


def me() -> Owner:
    """This process."""
    return _owner(os.getpid())


def is_dead(owner: Owner) -> bool:
    """Whether the process is certainly gone; False where we cannot know."""
    return owner.host == _host() and _born(owner.pid) != owner.born


@cache
def _owner(pid: int) -> Owner:
    return Owner(_host(), pid, _born(pid) or 0)


@cache
def _host() -> str:
    """A short name of this boot of this machine, as this container sees its processes."""
    facts = [platform.node(), _read(Path("/proc/sys/kernel/random/boot_id"))]
    with suppress(OSError):
        facts.append(str(Path("/proc/self/ns/pid").readlink()))
    return blake2b("".join(facts).encode(), digest_size=4).hexdigest()


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def _born(pid: int) -> int | None:
    """When a process started, in ticks that never change while it lives; None if there is none."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    except (OSError, ValueError, IndexError):
        pass
    try:
        return int(psutil.Process(pid).create_time())
    except psutil.Error:
        return None
