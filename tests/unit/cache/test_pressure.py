"""Memory pressure: whoever tells of it, rows in memory go until it is below the low mark, and no further."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import psutil
import pytest

from kvasir.cache import Cache, CacheSettings
from kvasir.config import StoreSettings, load_settings
from kvasir.errors import BadOption
from kvasir.service.caching import cache_settings
from tests.unit.cache.rig import BLOCK, check, offer_all, settings, space

ROW = 4096
PROMPT = list(range(10 * BLOCK))
# Of 32 rows' worth of memory, 24 are the low mark and 28 the high one: with 30 in use, six rows must go.
TOTAL, LOW, HIGH = 32 * ROW, 0.75, 0.875
OTHERS = 20 * ROW
# Nobody but the test looks: not the keeper, on its own time.
BY_HAND: dict[str, Any] = {"pressure_interval_s": 3600.0, "reservation_ttl_s": 7200.0}


class Machine:
    """A machine whose memory holds what others took and what one cache has."""

    def __init__(self) -> None:
        self.others = 0
        self.caches: list[Cache] = []

    @property
    def used(self) -> int:
        return self.others + sum(cache.stats().bytes_ram for cache in self.caches)

    def sample(self) -> tuple[int, int]:
        return self.used, TOTAL


@pytest.fixture
def machine() -> Machine:
    return Machine()


def use_psutil(machine: Machine, patch: pytest.MonkeyPatch) -> str:
    patch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(total=TOTAL, available=TOTAL - machine.used))
    return "psutil"


def use_nvml(machine: Machine, patch: pytest.MonkeyPatch) -> str:
    """Two devices that have half of it each."""
    nvml: Any = ModuleType("pynvml")
    nvml.nvmlInit = lambda: None
    nvml.nvmlDeviceGetCount = lambda: 2
    nvml.nvmlDeviceGetHandleByIndex = lambda at: ("device", at)
    nvml.nvmlDeviceGetMemoryInfo = lambda _: SimpleNamespace(used=machine.used // 2, total=TOTAL // 2)
    patch.setitem(sys.modules, "pynvml", nvml)
    return "nvml"


def use_function(machine: Machine, _: pytest.MonkeyPatch) -> Callable[[], tuple[int, int]]:
    return machine.sample


def from_load_options(source: object, folder: Path) -> CacheSettings:
    """What `kvasir.load` with these options opens, tended by hand."""
    options = {"cache_pressure": source, "cache_pressure_high": HIGH, "cache_pressure_low": LOW, "cache_dir": folder}
    made = cache_settings(load_settings(options | {"block_tokens": BLOCK}, environ={}), StoreSettings(home=folder))
    values = {name: getattr(made, name) for name in made.__struct_fields__}
    return CacheSettings(**(values | BY_HAND | {"free_share": 0.0}))


@pytest.mark.parametrize("use", [use_psutil, use_nvml, use_function])
def test_rows_in_memory_go_until_the_low_mark(
    tmp_path: Path, machine: Machine, monkeypatch: pytest.MonkeyPatch, use: Callable[..., object]
) -> None:
    source = use(machine, monkeypatch)
    with Cache.open(from_load_options(source, tmp_path)) as cache:
        machine.caches = [cache]
        offer_all(cache, PROMPT)
        assert cache.flush(30)
        machine.others = 18 * ROW  # 28 in use: at the high mark, not above it
        cache.sweep()
        assert cache.stats().pressure_evictions == 0
        machine.others = OTHERS
        cache.sweep()
        assert cache.stats().pressure_evictions == 6
        assert machine.used == LOW * TOTAL
        cache.sweep()
        assert cache.stats().pressure_evictions == 6, "below the mark nothing goes"
        assert check(cache, cache.longest(space(), PROMPT), PROMPT) == len(PROMPT), "the disk still has it"


def test_tmpfs_is_memory_too_and_goes_after_ram(tmp_path: Path, machine: Machine) -> None:
    places = settings(
        tmp_path / "disk", tmpfs_dir=tmp_path / "shm", ram_bytes=4 * ROW, pressure=machine.sample, **BY_HAND
    )
    with Cache.open(places) as cache:
        for seed in range(8):
            offer_all(cache, [seed] * BLOCK)
            assert cache.flush(30)
        rows = {name: tier.rows for name, tier in cache.stats().tiers.items()}
        assert rows == {"ram": 4, "tmpfs": 4, "disk": 8}
        machine.others = 2 * TOTAL
        cache.sweep()
        assert cache.flush(30)
        stats = cache.stats()
        assert stats.pressure_evictions == 8
        rows = {name: tier.rows for name, tier in stats.tiers.items()}
        assert rows == {"ram": 0, "tmpfs": 0, "disk": 8}, "nothing went from one kind of memory to the other"


def test_the_keeper_looks_from_time_to_time(tmp_path: Path) -> None:
    full = [50]
    with Cache.open(settings(tmp_path, pressure=lambda: (full[0], 100), pressure_interval_s=0.02)) as cache:
        offer_all(cache, PROMPT)
        cache.flush()
        time.sleep(0.1)
        assert cache.stats().bytes_ram > 0
        full[0] = 99
        deadline = time.monotonic() + 30
        while cache.stats().pressure_evictions < 10 and time.monotonic() < deadline:
            time.sleep(0.02)
        assert cache.stats().bytes_ram == 0
        assert cache.stats().pressure_evictions == 10


def test_the_machines_own_memory_is_a_source() -> None:
    with Cache.open(settings(None, pressure="psutil", pressure_high=1.0, pressure_low=1.0)) as cache:
        cache.sweep()
        assert cache.stats().pressure_evictions == 0


def test_without_a_driver_nvml_is_refused_in_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with pytest.raises(BadOption, match=r"^cache_pressure='nvml' needs nvidia-ml-py"):
        Cache.open(settings(None, pressure="nvml"))


def test_a_source_that_fails_is_survived(caplog: pytest.LogCaptureFixture) -> None:
    def broken() -> tuple[int, int]:
        raise RuntimeError("no sensor")

    with caplog.at_level(logging.CRITICAL), Cache.open(settings(None, pressure=broken)) as cache:
        offer_all(cache, PROMPT)
        cache.sweep()
        assert check(cache, cache.longest(space(), PROMPT), PROMPT) == len(PROMPT)
