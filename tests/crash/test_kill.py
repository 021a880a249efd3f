"""kill -9 at any instant: what was announced is there, what is there is whole, nothing else stays."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kvasir.cache import Cache
from kvasir.cache.publish import STAGES
from tests.crash.child import conversation
from tests.unit.cache.rig import check, row_files, settings, space, temp_files, tree_bytes

ROOT = Path(__file__).parents[2]
AFTER_LINK = STAGES[STAGES.index("linked") :]


def child(folder: Path, seed: int = 0, stage: str = "-", times: int = 1) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tests.crash.child", str(folder), str(seed), stage, str(times)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT)


def announced(process: subprocess.Popen[str]) -> set[int]:
    """What the child had announced before it died; its last line may be cut short."""
    out, _ = process.communicate(timeout=120)
    assert process.returncode == -signal.SIGKILL
    return {int(line) for line in out.splitlines(keepends=True) if line.endswith("\n")}


def check_after(folder: Path, numbers: set[int]) -> int:
    """What every restart must find; returns how many rows there are."""
    with Cache.open(settings(folder)) as cache:
        assert temp_files(folder) == [], "a temporary file stayed"
        report = cache.verify()
        assert report.bad == (), "a visible row does not verify"
        assert report.rows == len(row_files(folder))
        assert cache.stats().bytes_disk == tree_bytes(folder), "the count is off"
        for number in numbers:
            tokens = conversation(number)
            assert check(cache, cache.longest(space(), tokens), tokens) == len(tokens), "an announced row is gone"
        return report.rows


@pytest.mark.parametrize("stage", STAGES)
def test_a_writer_killed_at_a_stage_leaves_only_whole_rows(tmp_path: Path, stage: str) -> None:
    known: set[int] = set()
    for times in (1, 4):
        before = len(row_files(tmp_path))
        known |= announced(child(tmp_path, seed=times, stage=stage, times=times))
        left = len(temp_files(tmp_path))
        if stage in ("created", "written", "synced", "checked", "linked", "folder_synced"):
            assert left >= 1, "the kill came at another moment than it should"
        if times == 1 and stage in AFTER_LINK:
            assert len(row_files(tmp_path)) > before
        check_after(tmp_path, known)


@pytest.mark.parametrize(("stage", "adopts"), [("synced", False), ("linked", True), ("folder_synced", True)])
def test_a_running_process_clears_up_after_a_dead_sibling(tmp_path: Path, stage: str, adopts: bool) -> None:
    with Cache.open(settings(tmp_path)) as cache:
        announced(child(tmp_path, stage=stage))
        n_left = len(temp_files(tmp_path))
        assert n_left >= 1
        cache.sweep()
        assert temp_files(tmp_path) == []
        stats = cache.stats()
        assert stats.swept == n_left
        assert (stats.adopted > 0) == adopts
        assert stats.tiers["disk"].rows == stats.adopted
        assert stats.bytes_disk == tree_bytes(tmp_path)
        assert cache.verify().bad == ()


def kill_at_random(folder: Path, n_kills: int) -> None:
    order = random.Random(20_260_000 + n_kills)
    known: set[int] = set()
    for kill in range(n_kills):
        process = child(folder, seed=kill)
        assert process.stdout is not None
        first = process.stdout.readline()  # it is at work: imports done, cache recovered
        time.sleep(order.uniform(0, 0.25))
        process.send_signal(signal.SIGKILL)
        known |= announced(process) | ({int(first)} if first else set())
        check_after(folder, known)
    assert len(known) > n_kills
    assert check_after(folder, known) > n_kills


def test_twenty_kills_at_random_instants_lose_nothing_announced(tmp_path: Path) -> None:
    kill_at_random(tmp_path, 20)


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_two_hundred_kills_at_random_instants_lose_nothing_announced(tmp_path: Path) -> None:
    kill_at_random(tmp_path, 200)
