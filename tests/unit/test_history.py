"""Counters outlive their process, are added up once, and never stand in the way."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from kvasir.cache import CacheSettings, CacheStats, Reason, Space, TierStats
from kvasir.cache.owner import me
from kvasir.service import history
from kvasir.service.cache_view import OpenCache
from kvasir.service.history import MOST_SPEEDS, Counted, History, _joined, plus

RAM = {"ram": TierStats(rows=2, bytes=100, quota=1000)}
ONE = CacheStats(hits_exact=1, misses=2, misses_by_reason={"absent": 2}, prefill_saved_s=1.5, tiers=RAM, bytes_ram=100)


def files(folder: Path) -> set[str]:
    return {path.name for path in (folder / "stats").iterdir()}


def test_what_ended_is_in_the_total_and_leaves_no_other_file(tmp_path: Path) -> None:
    for _ in range(3):
        History(tmp_path).end(ONE, {"aa": 1})
    seen = History(tmp_path).others()
    assert (seen.stats.hits_exact, seen.stats.misses, seen.stats.prefill_saved_s) == (3, 6, 4.5)
    assert seen.stats.misses_by_reason == {"absent": 6}
    assert seen.hits == {"aa": 3}
    assert seen.stats.bytes_ram == 0
    assert files(tmp_path) == {"LOCK", "total.json"}


def test_what_runs_is_seen_by_others_and_not_by_itself(tmp_path: Path) -> None:
    running = History(tmp_path)
    running.note(ONE)
    running.note(ONE)
    seen = History(tmp_path).others().stats
    assert (seen.misses, seen.bytes_ram, seen.tiers["ram"].rows) == (2, 100, 2)
    assert running.others().stats.misses == 0
    running.end(ONE, {})
    assert History(tmp_path).others().stats.misses == 2


def test_what_a_killed_process_noted_is_added_by_the_next_that_ends(tmp_path: Path) -> None:
    code = (
        "import os, pathlib, sys\nfrom kvasir.cache import CacheStats\nfrom kvasir.service.history import History\n"
        "History(pathlib.Path(sys.argv[1])).note(CacheStats(misses=5))\nos.kill(os.getpid(), 9)"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False, timeout=60)
    assert len(files(tmp_path)) == 1
    assert History(tmp_path).others().stats.misses == 5
    History(tmp_path).end(ONE, {})
    assert files(tmp_path) == {"LOCK", "total.json"}
    assert History(tmp_path).others().stats.misses == 7


def test_a_process_killed_while_adding_up_is_not_counted_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def killed(self: Path, missing_ok: bool = False) -> None:
        raise OSError("killed before the file was removed")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", killed)
        History(tmp_path).end(ONE, {})
    assert len(files(tmp_path)) == 3
    assert History(tmp_path).others().stats.misses == 2
    History(tmp_path).end(ONE, {})
    assert files(tmp_path) == {"LOCK", "total.json"}
    assert History(tmp_path).others().stats.misses == 4


def test_a_process_of_another_host_is_over_when_it_was_silent_for_long(tmp_path: Path) -> None:
    History(tmp_path).note(ONE)
    [own] = (tmp_path / "stats").iterdir()
    foreign = own.rename(own.with_name("00000000-1-1-ab.json"))
    History(tmp_path).end(CacheStats(), {})
    assert foreign.exists()
    os.utime(foreign, (time.time() - 2 * history.SILENT_S,) * 2)
    History(tmp_path).end(CacheStats(), {})
    assert not foreign.exists()
    assert History(tmp_path).others().stats.misses == 2


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"stats": 3}', b"\xff\xfe"])
def test_files_that_make_no_sense_count_nothing(tmp_path: Path, content: bytes) -> None:
    folder = tmp_path / "stats"
    folder.mkdir()
    (folder / "total.json").write_bytes(content)
    (folder / f"{me()}-ff.json").write_bytes(content)
    assert History(tmp_path).others().stats.misses == 0
    History(tmp_path).end(ONE, {})
    assert History(tmp_path).others().stats.misses == 2


def test_counts_of_a_later_version_are_read_as_far_as_they_are_known(tmp_path: Path) -> None:
    folder = tmp_path / "stats"
    folder.mkdir()
    (folder / "total.json").write_bytes(b'{"stats": {"misses": 4, "wonders": 1}, "moon": 2}')
    assert History(tmp_path).others().stats.misses == 4


def test_a_folder_that_cannot_be_written_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "stats").write_text("in the way")
    one = History(tmp_path)
    one.note(ONE)
    one.end(ONE, {"aa": 1})
    assert one.others().stats.misses == 0


def test_a_held_lock_leaves_the_sum_to_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history, "LOCK_WAIT_S", 0.05)
    (tmp_path / "stats").mkdir()
    with (tmp_path / "stats" / "LOCK").open("ab") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        History(tmp_path).end(ONE, {})
        assert "total.json" not in files(tmp_path)
    assert History(tmp_path).others().stats.misses == 2


def test_many_that_end_at_once_are_all_counted(tmp_path: Path) -> None:
    threads = [threading.Thread(target=lambda: History(tmp_path).end(ONE, {"aa": 1})) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    seen = History(tmp_path).others()
    assert (seen.stats.misses, seen.hits) == (32, {"aa": 16})


def test_only_the_rows_hit_last_are_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history, "MOST_HITS", 3)
    History(tmp_path).end(ONE, {"a": 1, "b": 1, "c": 1})
    History(tmp_path).end(ONE, {"a": 1, "d": 1})
    assert History(tmp_path).others().hits == {"c": 1, "a": 2, "d": 1}


def test_memory_is_added_and_shared_files_are_not() -> None:
    disk = {"disk": TierStats(rows=7, bytes=700, quota=9000)}
    both = plus(
        CacheStats(tiers=RAM | disk, bytes_ram=100, bytes_disk=700), CacheStats(tiers=RAM | disk, bytes_ram=100)
    )
    assert both.tiers["ram"] == TierStats(rows=4, bytes=200, quota=2000)
    assert both.tiers["disk"].bytes == both.bytes_disk == 700
    assert both.bytes_ram == 200


def test_speeds_are_remembered_the_latest_first() -> None:
    one = Counted(speeds={f"{n:064x}": 1.0 for n in range(MOST_SPEEDS)})
    both = _joined(one, Counted(speeds={f"{0:064x}": 2.0, "ff" * 32: 3.0}))
    assert len(both.speeds) == MOST_SPEEDS
    assert both.speeds["ff" * 32] == 3.0
    assert both.speeds[f"{0:064x}"] == 2.0
    assert f"{1:064x}" not in both.speeds


def test_a_later_process_knows_what_computing_costs(tmp_path: Path) -> None:
    """So it can tell what a restore spared, though it has computed nothing itself."""
    settings = CacheSettings(disk_dir=tmp_path, ram_bytes=1 << 20, block_tokens=16)
    space = Space(bytes(32), 1, 1, bytes(32))
    tokens = list(range(40))
    with OpenCache.open(settings) as first:
        first.cache.offer(space, tokens, start=0, end=16, parts={"base": b"kv"}, reason=Reason.COLD)
        first.cache.computed(space, 1000, 2.0)
    with OpenCache.open(settings) as second:
        assert second.cache.prefill_speeds() == {space.root.hex(): 500.0}
        with second.cache.longest(space, tokens) as match:
            second.cache.read(match).result(10)
        second.cache.spared(space, 10)
        assert second.cache.stats().prefill_saved_s == pytest.approx(16 / 500 + 10 / 500)
    total = tmp_path / "stats" / "total.json"
    total.write_text(total.read_text().replace(space.root.hex(), "no key"))
    with OpenCache.open(settings) as third:
        assert third.cache.prefill_speeds() == {}
