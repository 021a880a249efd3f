"""A slow publish: every stage renews the right to it, here and in the eyes of other processes."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from kvasir.cache import Cache
from kvasir.cache.files import Files
from kvasir.cache.index import Index
from kvasir.cache.owner import Owner
from kvasir.cache.recovery import Recovered, sweep
from kvasir.cache.tickets import Tickets
from kvasir.cache.tiers import FileTier
from tests.unit.cache.rig import BLOCK, MIB, Clock, check, offer_all, row_files, settings, space, temp_files

TTL_S = 60.0
TOKENS = list(range(BLOCK))


class SlowFiles(Files):
    """A medium that takes its time, on a clock of its own, while another process looks for dead writers' files."""

    def __init__(self, root: Path, clock: Clock, step_s: float) -> None:
        self.clock = clock
        self.step_s = step_s
        self.swept = Recovered()
        self._sibling = FileTier("disk", str(root), MIB, block_tokens=BLOCK, files=Files())

    def _pass(self, seconds: float) -> None:
        self.clock.now += seconds
        with self._sibling.ledger.held():
            found = sweep(self._sibling, Index(), ttl_s=TTL_S, now=self.clock.now)
        self.swept = self.swept.plus(found)

    def write(self, fd: int, data: bytes) -> None:
        super().write(fd, data)
        self._pass(self.step_s / 2)  # twice: a header and one part

    def fsync(self, fd: int) -> None:
        super().fsync(fd)
        self._pass(self.step_s)

    def link(self, source: str, target: str) -> None:
        self._pass(self.step_s)
        super().link(source, target)

    def close_sibling(self) -> None:
        self._sibling.close()


@pytest.fixture
def clock() -> Clock:
    return Clock(time.time())


def publish(folder: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch, *, step_s: float) -> tuple[Cache, SlowFiles]:
    """Publish one row slowly, as a process of another host: only the age of its temporary says that it lives."""
    monkeypatch.setattr("kvasir.cache.publish.me", lambda: Owner("elsewhere", 1, 1))
    files = SlowFiles(folder, clock, step_s)
    cache = Cache.open(settings(folder, ram_bytes=0, reservation_ttl_s=TTL_S), clock=clock, files=files)
    cache._store.tickets = Tickets(TTL_S, clock)
    offer_all(cache, TOKENS)
    assert cache.flush(30)
    files.close_sibling()
    return cache, files


def test_stages_shorter_than_a_tickets_life_may_take_longer_in_all(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    began = clock.now
    cache, files = publish(tmp_path, clock, monkeypatch, step_s=0.8 * TTL_S)
    with cache:
        assert clock.now - began > 2 * TTL_S
        assert cache.stats().lost_tickets == cache.stats().saves_dropped == 0
        assert files.swept == Recovered()
        assert check(cache, cache.longest(space(), TOKENS), TOKENS) == BLOCK
    assert len(row_files(tmp_path)) == 1
    assert temp_files(tmp_path) == []


def test_one_stage_longer_than_a_tickets_life_loses_it(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache, files = publish(tmp_path, clock, monkeypatch, step_s=1.2 * TTL_S)
    with cache:
        assert cache.stats().lost_tickets == cache.stats().saves_dropped == 1
        assert files.swept.swept == 1
        assert cache.longest(space(), TOKENS).n_tokens == 0
    assert row_files(tmp_path) == temp_files(tmp_path) == []


@pytest.mark.parametrize("gone", ["ticket", "temporary"])
@pytest.mark.parametrize("stage", ["created", "written", "synced"])
def test_what_is_lost_is_noticed_at_the_stage_where_it_is_lost(tmp_path: Path, stage: str, gone: str) -> None:
    reached: list[str] = []

    def at(name: str) -> None:
        reached.append(name)
        if name == stage and gone == "ticket":
            cache._store.tickets._out.clear()
        elif name == stage:
            for path in temp_files(tmp_path):
                path.unlink()

    with Cache.open(settings(tmp_path, ram_bytes=0), stage=at) as cache:
        offer_all(cache, TOKENS)
        assert cache.flush(30)
        assert cache.stats().lost_tickets == 1
    assert reached[-1] == stage
    assert row_files(tmp_path) == temp_files(tmp_path) == []
