"""A disk that fails, fills, vanishes or crawls: the cache goes on, counts, logs once, and recovers by itself."""

from __future__ import annotations

import errno
import logging
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvasir.cache import Cache
from tests.unit.cache.rig import (
    BLOCK,
    CODES,
    KIB,
    READS,
    WRITES,
    FaultyFiles,
    check,
    offer_all,
    row_files,
    settings,
    space,
    temp_files,
    tree_bytes,
)

ROOT = Path(__file__).parents[2]
OLD = list(range(2 * BLOCK + 3))
NEW = list(range(1000, 1000 + 2 * BLOCK + 3))
LAST = list(range(2000, 2000 + 2 * BLOCK + 3))


def found(cache: Cache, tokens: list[int]) -> int:
    return check(cache, cache.longest(space(), tokens), tokens)


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.mark.parametrize("code", CODES, ids=errno.errorcode.get)
@pytest.mark.parametrize("call", WRITES)
def test_a_failing_write_costs_a_save_and_nothing_else(
    tmp_path: Path, call: str, code: int, caplog: pytest.LogCaptureFixture
) -> None:
    files = FaultyFiles()
    with Cache.open(settings(tmp_path, ram_bytes=0), files=files) as cache:
        offer_all(cache, OLD)
        cache.flush()
        shutil.rmtree(tmp_path / "v2-16" / "temp")  # so that folders must be made again
        if call == "lock_file":
            cache._store.tiers["disk"].close()
        files.fail(call, code)
        offer_all(cache, NEW)
        assert cache.flush(30)
        assert files.failures[call] > 0, "the fault was never met"
        assert cache.stats().write_errors > 0
        assert len(warnings(caplog)) == 1, "logged once"
        assert found(cache, OLD) == len(OLD), "reading goes on"
        files.heal()
        cache.sweep()
        offer_all(cache, NEW)
        offer_all(cache, LAST)
        assert cache.flush(30)
        assert found(cache, NEW) == len(NEW)
        assert found(cache, LAST) == len(LAST)
    after_a_restart(tmp_path)


@pytest.mark.parametrize("code", CODES, ids=errno.errorcode.get)
@pytest.mark.parametrize("call", READS)
def test_a_failing_read_is_a_miss(tmp_path: Path, call: str, code: int, caplog: pytest.LogCaptureFixture) -> None:
    files = FaultyFiles()
    with Cache.open(settings(tmp_path)) as first:
        offer_all(first, OLD)
    with Cache.open(settings(tmp_path, ram_bytes=0), files=files) as cache:
        files.fail(call, code)
        assert found(cache, OLD) in ((0, 2 * BLOCK, len(OLD)) if call in ("stat", "scandir") else (0,))
        assert found(cache, NEW) == 0
        assert files.failures[call] > 0
        assert cache.stats().read_errors > 0
        assert len(warnings(caplog)) == 1
        files.heal()
        assert found(cache, OLD) == len(OLD), "nothing was thrown away for a fault of the disk"
    after_a_restart(tmp_path)


@pytest.mark.parametrize("code", CODES, ids=errno.errorcode.get)
@pytest.mark.parametrize("call", ["utime", "free_bytes"])
def test_calls_that_only_advise_may_fail(tmp_path: Path, call: str, code: int) -> None:
    files = FaultyFiles()
    with Cache.open(settings(tmp_path, ram_bytes=0), files=files) as cache:
        files.fail(call, code)
        offer_all(cache, OLD)
        assert cache.flush(30)
        found(cache, OLD)
        assert files.failures[call] > 0
        files.heal()
        offer_all(cache, OLD)
        cache.flush()
        assert found(cache, OLD) == len(OLD)


@pytest.mark.parametrize("code", CODES, ids=errno.errorcode.get)
def test_a_disk_that_fails_at_the_start_is_taken_over_later(tmp_path: Path, code: int) -> None:
    with Cache.open(settings(tmp_path)) as first:
        offer_all(first, OLD)
    files = FaultyFiles()
    files.fail("lock_file", code)
    with Cache.open(settings(tmp_path), files=files) as cache:
        assert cache.stats().adopted == 0
        offer_all(cache, NEW)
        assert found(cache, NEW) == len(NEW), "RAM serves"
        files.heal()
        cache.sweep()
        assert cache.stats().adopted == 3
        assert found(cache, OLD) == len(OLD)


def after_a_restart(folder: Path) -> None:
    with Cache.open(settings(folder)) as cache:
        assert cache.verify().bad == ()
        assert temp_files(folder) == []
        assert cache.stats().bytes_disk == tree_bytes(folder)


class Optimist(FaultyFiles):
    """Says that there is room, so that the file system itself must say there is none."""

    def free_bytes(self, path: str) -> tuple[int, int]:
        return 1 << 40, 1 << 41


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path | None]:
    """A file system of 512 KiB, or None where this user may not mount one."""
    folder = tmp_path / "small"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=512k", "tmpfs", str(folder)]
    try:
        mounted = subprocess.run(mount, capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        mounted = False
    yield folder if mounted else None
    if mounted:
        subprocess.run(["umount", str(folder)], check=True)


def fill_up(path: Path) -> None:
    def write_on() -> None:
        while os.write(fd, b"x" * 4096):
            pass

    fd = os.open(path, os.O_CREAT | os.O_WRONLY)
    with pytest.raises(OSError, match="No space left"):
        write_on()
    os.close(fd)


def test_a_really_full_disk_is_survived(small_disk: Path | None, tmp_path: Path) -> None:
    """On a mounted small file system; where that is not permitted, under a limit of file size, which always works."""
    if small_disk is None:
        survive_a_file_size_limit(tmp_path)
        return
    ballast = small_disk / "ballast"
    files = Optimist()
    with Cache.open(settings(small_disk, ram_bytes=0), files=files) as cache:
        offer_all(cache, OLD, n_bytes=8 * KIB)
        cache.flush()
        fill_up(ballast)
        offer_all(cache, NEW, n_bytes=100 * KIB)
        assert cache.flush(30)
        assert cache.stats().saves_dropped > 0
        assert "disk write ENOSPC" in cache.stats().errors_by_code
        ballast.unlink()
        offer_all(cache, LAST, n_bytes=8 * KIB)
        cache.flush()
        assert check(cache, cache.longest(space(), LAST), LAST, 8 * KIB) == len(LAST)
        assert temp_files(small_disk) == []


def test_a_tier_never_takes_the_last_share_of_a_file_system(small_disk: Path | None, tmp_path: Path) -> None:
    if small_disk is None:
        survive_a_file_size_limit(tmp_path)
        return
    with Cache.open(settings(small_disk, ram_bytes=0, free_share=0.5)) as cache:
        for seed in range(60):
            offer_all(cache, [seed] * BLOCK, n_bytes=16 * KIB)
        cache.flush()
        free, total = cache._store.tiers["disk"].files.free_bytes(str(small_disk))
        assert free >= total // 2
        assert cache.stats().evictions > 0


LIMITED = """
import resource, sys
from pathlib import Path
from kvasir.cache import Cache
from tests.unit.cache.rig import BLOCK, check, offer_all, settings, space
resource.setrlimit(resource.RLIMIT_FSIZE, (64 << 10, resource.RLIM_INFINITY))
with Cache.open(settings(Path(sys.argv[1]), ram_bytes=0)) as cache:
    offer_all(cache, [1] * BLOCK, n_bytes=128 << 10)
    cache.flush()
    assert cache.stats().saves_dropped == 1
    assert cache.stats().errors_by_code == {"disk write EFBIG": 1}
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    offer_all(cache, [1] * BLOCK, n_bytes=128 << 10)
    cache.flush()
    assert check(cache, cache.longest(space(), [1] * BLOCK), [1] * BLOCK, 128 << 10) == BLOCK
"""


def survive_a_file_size_limit(folder: Path) -> None:
    run = subprocess.run(
        [sys.executable, "-c", LIMITED, str(folder)], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    assert temp_files(folder) == []


def test_a_limit_on_file_size_is_survived(tmp_path: Path) -> None:
    survive_a_file_size_limit(tmp_path)


def test_a_folder_deleted_while_running_is_made_again(tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    with Cache.open(settings(folder, ram_bytes=0)) as cache:
        offer_all(cache, OLD)
        cache.flush()
        shutil.rmtree(folder)
        assert found(cache, OLD) == 0
        assert cache.stats().vanished > 0
        offer_all(cache, OLD)
        offer_all(cache, NEW)
        cache.flush()
        assert found(cache, OLD) == len(OLD)
        assert found(cache, NEW) == len(NEW)
        assert cache.stats().bytes_disk == tree_bytes(folder), "and its count starts anew"


def test_a_folder_deleted_again_and_again_under_load_breaks_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    with Cache.open(settings(folder, writer_threads=2, ram_bytes=16 * KIB)) as cache:
        for seed in range(60):
            offer_all(cache, [seed] * (2 * BLOCK))
            check(cache, cache.longest(space(), [seed] * (2 * BLOCK)), [seed] * (2 * BLOCK))
            if seed % 10 == 5:
                shutil.rmtree(folder, ignore_errors=True)
        cache.flush()
        offer_all(cache, OLD)
        cache.flush()
        assert found(cache, OLD) == len(OLD)
    after_a_restart(folder)


def test_a_slow_disk_never_slows_an_offer(tmp_path: Path) -> None:
    files = FaultyFiles()
    with Cache.open(settings(tmp_path, writer_queue_bytes=32 * KIB), files=files) as cache:
        files.delay_s |= {"fsync": 0.1, "write": 0.05}
        slowest = 0.0
        for seed in range(40):
            begun = time.perf_counter()
            offer_all(cache, [seed] * BLOCK)
            slowest = max(slowest, time.perf_counter() - begun)
            assert check(cache, cache.longest(space(), [seed] * BLOCK), [seed] * BLOCK) == BLOCK
        assert slowest < 0.1, "an offer waited for the disk"
        assert cache.stats().saves_dropped > 0
        assert cache.stats().queued_bytes <= 32 * KIB
        files.heal()
        cache.flush(30)


def test_a_writer_that_comes_back_too_late_does_not_publish(tmp_path: Path) -> None:
    files = FaultyFiles()
    with Cache.open(settings(tmp_path, ram_bytes=0, reservation_ttl_s=0.2), files=files) as cache:
        files.delay_s["fsync"] = 0.5
        offer_all(cache, OLD[:BLOCK])
        cache.flush(30)
        assert cache.stats().lost_tickets == 1
        assert row_files(tmp_path) == []
        files.heal()
        offer_all(cache, OLD[:BLOCK])
        cache.flush(30)
        assert found(cache, OLD[:BLOCK]) == BLOCK
