"""Several processes on one folder: the same rows at once, one quota for all."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from kvasir.cache import Cache
from tests.crash.twin import N_BYTES, tokens_of
from tests.unit.cache.rig import BLOCK, KIB, check, offer_all, row_files, settings, space, temp_files, tree_bytes

ROOT = Path(__file__).parents[2]


def race(folder: Path, n_rows: int) -> None:
    command = [sys.executable, "-m", "tests.crash.twin", str(folder), str(n_rows)]
    twins = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT) for _ in range(2)
    ]
    for twin in twins:
        assert twin.stdout is not None
        assert twin.stdout.readline() == "ready\n"
    for twin in twins:
        assert twin.stdin is not None
        twin.stdin.write("go\n")
        twin.stdin.flush()
    counts = [[int(word) for word in twin.communicate(timeout=3000)[0].split()] for twin in twins]
    assert all(twin.returncode == 0 for twin in twins)
    assert sum(published for published, _ in counts) == n_rows, "each row was published exactly once"
    assert sum(adopted for _, adopted in counts) > 0, "the twins never met"
    check_after(folder, n_rows)


def check_after(folder: Path, n_rows: int) -> None:
    assert len(row_files(folder)) == n_rows
    assert temp_files(folder) == []
    with Cache.open(settings(folder)) as cache:
        assert cache.verify().bad == ()
        assert cache.stats().bytes_disk == tree_bytes(folder)
        for number in range(0, n_rows, 7):
            tokens = tokens_of(number)
            assert check(cache, cache.longest(space(), tokens), tokens, N_BYTES) == BLOCK


def test_two_processes_publish_the_same_thousand_rows_at_once(tmp_path: Path) -> None:
    race(tmp_path, 1000)


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_two_processes_publish_the_same_ten_thousand_rows_at_once(tmp_path: Path) -> None:
    race(tmp_path, 10_000)


def test_one_quota_holds_for_two_caches(tmp_path: Path) -> None:
    small = settings(tmp_path, ram_bytes=0, disk_bytes=64 * KIB)
    with Cache.open(small) as one, Cache.open(small) as two:
        for seed in range(60):
            offer_all(one, [seed] * BLOCK)
            offer_all(two, [1000 + seed] * BLOCK)
            one.flush()
            two.flush()
            assert tree_bytes(tmp_path) <= 64 * KIB
        assert one.stats().bytes_disk == two.stats().bytes_disk == tree_bytes(tmp_path)
        assert one.stats().evictions > 0
        assert two.stats().evictions > 0


def test_a_newcomer_evicts_what_others_filled_the_tier_with(tmp_path: Path) -> None:
    small = settings(tmp_path, ram_bytes=0, disk_bytes=64 * KIB)
    with Cache.open(small) as late, Cache.open(small) as early:
        for seed in range(14):
            offer_all(early, [seed] * BLOCK)
        early.flush()
        late._store._scanned.clear()
        offer_all(late, [99] * BLOCK)
        offer_all(late, [98] * BLOCK)
        late.flush()
        assert late.stats().evictions > 0
        assert check(late, late.longest(space(), [98] * BLOCK), [98] * BLOCK) == BLOCK


def test_a_row_a_sibling_evicted_is_a_miss_not_an_error(tmp_path: Path) -> None:
    with Cache.open(settings(tmp_path, ram_bytes=0)) as one, Cache.open(settings(tmp_path, ram_bytes=0)) as two:
        offer_all(one, [1] * BLOCK)
        one.flush()
        with two.longest(space(), [1] * BLOCK) as match:
            assert match.n_tokens == BLOCK
            one.clear()
            assert two.read(match).result(10) == []
        assert two.stats().vanished == 1
