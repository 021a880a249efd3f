"""The cache's settings: one frozen value, checked when it is made. Reads no environment and makes no folder."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import msgspec

from kvasir.errors import BadOption

MIB = 1 << 20
GIB = 1 << 30

# 64, 128, 256 and 512 were compared: saving and restoring cost least here, by little; fewer tokens mean more files and
# syncs, more mean longer copies between two decodes and longer tails. The figures are in docs/adr/0006-block-size.md.
BLOCK_TOKENS = 256

Sample = Callable[[], tuple[int, int]]
"""Tells how full memory is: bytes used, bytes in all."""


def default_ram_bytes() -> int:
    """An eighth of the machine's memory, 2 GiB at most: the model comes first."""
    try:
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError):
        memory = 8 * GIB
    return min(2 * GIB, memory // 8)


class CacheSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Where rows live, how many bytes each place may take, and who moves them.

    A tier whose folder is None, or whose bytes are 0, does not exist. tmpfs is off by default: the page cache already
    serves hot disk files at memory speed, containers give `/dev/shm` 64 MB, and what it takes the model cannot have.
    """

    ram_bytes: int = msgspec.field(default_factory=default_ram_bytes)
    tmpfs_dir: Path | None = None
    tmpfs_bytes: int = 1 * GIB
    disk_dir: Path | None = None
    disk_bytes: int = 10 * GIB
    # Publishing stops where it would leave less than this share of the file system to everyone else.
    free_share: float = 0.05
    block_tokens: int = BLOCK_TOKENS
    writer_threads: int = 2
    writer_queue_bytes: int = 512 * MIB
    reader_threads: int = 4  # they wait for the medium and for fresh memory more than they compute
    reservation_ttl_s: float = 60.0
    pressure: Literal["none", "psutil", "nvml"] | Sample = "none"
    pressure_high: float = 0.85
    pressure_low: float = 0.75
    pressure_interval_s: float = 5.0

    def __post_init__(self) -> None:
        for name in ("ram_bytes", "tmpfs_bytes", "disk_bytes"):
            _check(name, getattr(self, name) >= 0, getattr(self, name), "0 or more")
        for name in ("block_tokens", "writer_threads", "writer_queue_bytes", "reader_threads"):
            _check(name, getattr(self, name) >= 1, getattr(self, name), "1 or more")
        for name in ("reservation_ttl_s", "pressure_interval_s"):
            _check(name, getattr(self, name) > 0, getattr(self, name), "more than 0")
        same = self.tmpfs_dir is not None and self.tmpfs_dir == self.disk_dir
        _check("tmpfs_dir", not same, str(self.tmpfs_dir), "another folder than disk_dir")
        _check("free_share", 0 <= self.free_share < 1, self.free_share, "from 0 to below 1")
        ordered = 0 < self.pressure_low <= self.pressure_high <= 1
        _check("pressure_low", ordered, self.pressure_low, "above 0 and not above pressure_high, which is at most 1")
        known = callable(self.pressure) or self.pressure in ("none", "psutil", "nvml")
        _check("pressure", known, self.pressure, "'none', 'psutil', 'nvml' or a function that returns (used, total)")


def _check(name: str, good: bool, got: object, wanted: str) -> None:
    if not good:
        raise BadOption(f"{name} must be {wanted}, got {got!r}.")
