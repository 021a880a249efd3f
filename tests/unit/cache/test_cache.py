"""The cache as the engine uses it: search, read, save, and what the counters say about it."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest

from kvasir.cache import Cache, Needs, Reason, Space, Why
from tests.unit.cache.rig import (
    BLOCK,
    KIB,
    Clock,
    FaultyFiles,
    GatedFiles,
    check,
    offer_all,
    payload,
    row_files,
    settings,
    space,
    temp_files,
    tree_bytes,
)

PROMPT = list(range(100, 100 + 5 * BLOCK + 7))


@pytest.fixture
def cache(tmp_path: Path) -> Cache:
    return Cache.open(settings(tmp_path))


def found(cache: Cache, tokens: list[int], needs: Needs = Needs(), most: int | None = None) -> int:  # noqa: B008
    return check(cache, cache.longest(space(), tokens, needs=needs, most=most), PROMPT)


def test_what_was_offered_is_found_to_its_last_token(cache: Cache) -> None:
    with cache:
        offer_all(cache, PROMPT)
        assert found(cache, PROMPT) == len(PROMPT)
        assert found(cache, [*PROMPT, 1, 2, 3]) == len(PROMPT)
        assert cache.stats().hits_exact == 1
        assert cache.stats().hits_longest_prefix == 1
        assert cache.stats().saves_cold == 6


def test_never_more_than_asked_for(cache: Cache) -> None:
    with cache:
        offer_all(cache, PROMPT)
        assert found(cache, PROMPT, most=len(PROMPT) - 1) == 5 * BLOCK
        assert found(cache, PROMPT, most=5 * BLOCK - 1) == 4 * BLOCK
        assert found(cache, PROMPT, most=0) == 0


def test_an_engine_that_can_trim_gets_the_beginning_of_a_longer_row(cache: Cache) -> None:
    with cache:
        offer_all(cache, PROMPT)
        with cache.longest(space(), PROMPT, needs=Needs(trim=True), most=len(PROMPT) - 1) as match:
            assert match.n_tokens == len(PROMPT) - 1
            assert match.rows[-1].end == len(PROMPT)
            assert match.why is None
        other = [*PROMPT[: 2 * BLOCK + 5], 7, 7, 7, *PROMPT]
        with cache.longest(space(), other, needs=Needs(trim=True)) as match:
            assert match.n_tokens == 2 * BLOCK + 5
            assert match.rows[-1].end == 3 * BLOCK
            assert match.why is not None
            assert match.why.token == 2 * BLOCK + 5


def test_two_prompts_share_what_they_share(tmp_path: Path) -> None:
    one = list(range(4096))
    two = [*one[:3000], *range(10_000, 11_096)]
    with Cache.open(settings(tmp_path, block_tokens=256)) as cache:
        offer_all(cache, one, n_bytes=1000)
        cache.flush()
        alone = tree_bytes(tmp_path)
        with cache.longest(space(), two) as match:
            assert match.n_tokens == 3000 // 256 * 256
            assert match.why is not None
            assert (match.why.why, match.why.token) == (Why.DIFFERS, 3000)
        offer_all(cache, two, n_bytes=1000, n_saved=2816)
        cache.flush()
        assert tree_bytes(tmp_path) < 1.34 * alone


def test_a_miss_says_why(cache: Cache) -> None:
    with cache:
        offer_all(cache, PROMPT)
        cases = {
            Why.ABSENT: (space(), [*PROMPT, 1]),
            Why.DIFFERS: (space(), [9, 9, 9, *PROMPT]),
            Why.SCOPE: (space("another tenant"), PROMPT),
            Why.TOO_SHORT: (space(), PROMPT[:3]),
        }
        for why, (where, tokens) in cases.items():
            with cache.longest(where, tokens) as match:
                assert match.why is not None
                assert match.why.why == why
        assert cache.stats().misses_by_reason == {"differs": 1, "scope": 1, "too_short": 1}
        assert cache.stats().short_by_reason == {"absent": 1}


def test_prompts_below_the_minimum_are_not_looked_for(tmp_path: Path) -> None:
    with Cache.open(settings(tmp_path)) as cache:
        offer_all(cache, PROMPT)
        match = cache.longest(space(), PROMPT[:31], min_tokens=32)
        assert match.why is not None
        assert match.why.why == Why.TOO_SHORT
        assert cache.stats().misses == 1
        with cache.longest(space(), PROMPT[:31], min_tokens=31) as match:
            assert match.n_tokens == BLOCK


def test_another_space_never_hits(cache: Cache) -> None:
    with cache:
        offer_all(cache, PROMPT)
        for other in ("another tenant", "another model"):
            assert cache.longest(space(other), PROMPT).n_tokens == 0


def test_a_second_offer_is_dropped_and_counted(cache: Cache) -> None:
    with cache:
        offer_all(cache, PROMPT)
        offer_all(cache, PROMPT)
        cache.flush()
        offer_all(cache, PROMPT)
        assert cache.stats().duplicate_dropped == 12
        assert cache.stats().saves_cold == 6


def test_rows_survive_a_restart(tmp_path: Path) -> None:
    with Cache.open(settings(tmp_path)) as cache:
        offer_all(cache, PROMPT, reason=Reason.SHUTDOWN)
    with Cache.open(settings(tmp_path)) as cache:
        assert cache.stats().adopted == 6
        match = cache.longest(space(), PROMPT)
        assert match.tier == "disk"
        assert match.bytes_to_read > 0
        assert check(cache, match, PROMPT) == len(PROMPT)
        assert cache.stats().promotions == 6
        again = cache.longest(space(), PROMPT)
        assert again.tier == "ram"
        assert again.bytes_to_read == 0
        assert check(cache, again, PROMPT) == len(PROMPT)
        assert all(row.reason == "shutdown" for row in cache.ls())


def test_rows_of_a_running_sibling_are_found(tmp_path: Path) -> None:
    with Cache.open(settings(tmp_path)) as one, Cache.open(settings(tmp_path)) as two:
        offer_all(one, PROMPT)
        one.flush()
        assert two.stats().adopted == 0
        assert check(two, two.longest(space(), PROMPT), PROMPT) == len(PROMPT)
        assert two.stats().adopted == 6


def test_ram_gives_up_its_least_worth_and_moves_it_down(tmp_path: Path) -> None:
    files = FaultyFiles()
    plain = settings(tmp_path, ram_bytes=16 * KIB, writer_queue_bytes=4 * KIB)
    with Cache.open(plain, files=files) as cache:
        files.delay_s["fsync"] = 0.2
        first = offer_all(cache, PROMPT[:BLOCK])
        second = offer_all(cache, [1] * BLOCK)
        assert cache.stats().saves_dropped == 1, "the queue holds one row"
        assert cache.flush(5)
        files.heal()
        for seed in range(2, 8):
            offer_all(cache, [seed] * BLOCK)
            assert cache.stats().bytes_ram <= 16 * KIB
            assert cache.flush(5)
        stats = cache.stats()
        assert stats.evictions > 0
        assert stats.demotions > 0
        assert check(cache, cache.longest(space(), [1] * BLOCK), [1] * BLOCK) == BLOCK
        assert cache.has(first[0])
        assert cache.has(second[0])


def test_tmpfs_stands_between_ram_and_disk(tmp_path: Path) -> None:
    places = settings(
        tmp_path / "disk", tmpfs_dir=tmp_path / "shm", tmpfs_bytes=24 * KIB, ram_bytes=16 * KIB, block_tokens=BLOCK
    )
    with Cache.open(places) as cache:
        for seed in range(12):
            offer_all(cache, [seed] * BLOCK)
            cache.flush()
        stats = cache.stats()
        assert stats.demotions > 0
        assert 0 < stats.bytes_ramfile <= 24 * KIB
        assert stats.tiers["disk"].rows == 12
        for seed in range(12):
            assert check(cache, cache.longest(space(), [seed] * BLOCK), [seed] * BLOCK) == BLOCK
        assert cache.stats().promotions > 0


def test_tmpfs_alone_demotes_nothing_and_keeps_its_quota(tmp_path: Path) -> None:
    places = settings(None, tmpfs_dir=tmp_path / "shm", tmpfs_bytes=20 * KIB, ram_bytes=0)
    with Cache.open(places) as cache:
        for seed in range(12):
            offer_all(cache, [seed] * BLOCK)
            cache.flush()
            assert tree_bytes(tmp_path) <= 20 * KIB
        assert cache.stats().evictions >= 7


class WeighedFiles(FaultyFiles):
    """Weighs the folder whenever a file has got its length: never is it heavier, and nobody else makes files then."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder
        self.heaviest = 0
        self.most_temps = 0

    def allocate(self, fd: int, n_bytes: int) -> None:
        super().allocate(fd, n_bytes)
        temps = temp_files(self.folder)
        files = {path.stat().st_ino: path.stat().st_size for path in (*row_files(self.folder), *temps)}
        self.heaviest = max(self.heaviest, sum(files.values()))  # a row whose temporary name is still there counts once
        self.most_temps = max(self.most_temps, len(temps))


def test_the_disk_quota_holds_at_all_times_for_rows_and_temporaries(tmp_path: Path) -> None:
    quota = 64 * KIB
    files = WeighedFiles(tmp_path)
    files.delay_s["fsync"] = 0.003
    with Cache.open(settings(tmp_path, disk_bytes=quota, ram_bytes=0, writer_threads=3), files=files) as cache:
        for seed in range(80):
            offer_all(cache, [seed] * (3 * BLOCK))
            assert cache.stats().bytes_disk <= quota
        assert cache.flush(60)
        assert cache.stats().evictions > 0
        assert cache.stats().write_errors == 0
        assert cache.stats().bytes_disk == tree_bytes(tmp_path)
    assert files.most_temps > 1
    assert quota - 8 * KIB < files.heaviest <= quota


def test_leased_rows_survive_an_eviction_storm(tmp_path: Path) -> None:
    small = settings(tmp_path, disk_bytes=64 * KIB, ram_bytes=32 * KIB)
    with Cache.open(small) as cache:
        offer_all(cache, PROMPT)
        cache.flush()
        with cache.longest(space(), PROMPT) as match:
            for seed in range(200):
                offer_all(cache, [seed] * (2 * BLOCK))
                if seed % 20 == 0:
                    cache.flush()
            cache.prune(keep_bytes=0)
            cache.clear()
            assert cache.stats().evictions > 50
            assert len(cache.read(match).result(10)) == 6
            assert all(cache.has(row.key) for row in match.rows)
        cache.prune(keep_bytes=0)
        assert cache.stats().bytes_ram == 0


def test_a_parent_key_waits_for_a_save_in_flight(tmp_path: Path) -> None:
    files = FaultyFiles()
    with Cache.open(settings(tmp_path, ram_bytes=0), files=files) as cache:
        files.delay_s["fsync"] = 0.15
        [key] = offer_all(cache, PROMPT[:BLOCK])
        assert cache.longest(space(), PROMPT).n_tokens == 0, "without the key nobody waits"
        match = cache.longest(space(), PROMPT, parent_key=key)
        assert check(cache, match, PROMPT) == BLOCK
        assert cache.stats().hits_resume == 1


def test_a_parent_key_of_another_prompt_falls_through(cache: Cache) -> None:
    with cache:
        offer_all(cache, PROMPT)
        [other] = offer_all(cache, [5] * BLOCK)
        match = cache.longest(space(), PROMPT, parent_key=other, most=len(PROMPT) - 1)
        assert check(cache, match, PROMPT) == 5 * BLOCK
        assert cache.stats().hits_longest_prefix == 1


def test_a_wait_for_a_parent_key_ends(tmp_path: Path) -> None:
    files = GatedFiles()
    with Cache.open(settings(tmp_path, ram_bytes=0), files=files) as cache:
        files.shut()
        [key] = offer_all(cache, PROMPT[:BLOCK])
        assert cache.longest(space(), PROMPT, parent_key=key, session_resume_wait_ms=50).n_tokens == 0
        files.open_gate()


WINDOW = Needs(window_tokens=2 * BLOCK)
HYBRID = Needs(state=True)
RECURRENT = Needs(chain=False, state=True)


def test_a_window_is_read_only_near_the_end(tmp_path: Path) -> None:
    with Cache.open(settings(tmp_path)) as cache:
        offer_all(cache, PROMPT, parts=("base", "window"))
    with Cache.open(settings(tmp_path)) as cache:
        with cache.longest(space(), PROMPT, needs=WINDOW) as match:
            got = cache.read(match).result(10)
            assert [sorted(parts) for parts in got] == [["base"]] * 3 + [["base", "window"]] * 3
        assert check(cache, cache.longest(space(), PROMPT, needs=WINDOW), PROMPT) == len(PROMPT)
        shorter = [*PROMPT[: 3 * BLOCK], 1, 1]
        assert check(cache, cache.longest(space(), shorter, needs=WINDOW), PROMPT) == 3 * BLOCK


def test_a_chain_without_its_window_is_refused(cache: Cache) -> None:
    with cache:
        offer_all(cache, PROMPT)
        match = cache.longest(space(), PROMPT, needs=WINDOW)
        assert match.n_tokens == 0
        assert match.why is not None
        assert match.why.why == Why.NEEDS
        assert cache.stats().refused_needs == 1


def test_a_hybrid_is_restored_where_a_state_is(tmp_path: Path) -> None:
    turn = PROMPT[: 2 * BLOCK + 5]
    with Cache.open(settings(tmp_path)) as cache:
        for start, end in ((0, BLOCK), (BLOCK, 2 * BLOCK), (2 * BLOCK, 3 * BLOCK)):
            parts = {"base": payload(PROMPT, start, end)}
            cache.offer(space(), PROMPT, start=start, end=end, parts=parts, reason=Reason.COLD)
        both = {part: payload(turn, 2 * BLOCK, len(turn), part=part) for part in ("base", "state")}
        cache.offer(space(), turn, start=2 * BLOCK, end=len(turn), parts=both, reason=Reason.FINISH)
    with Cache.open(settings(tmp_path)) as cache:
        match = cache.longest(space(), PROMPT, needs=HYBRID)
        assert [row.end for row in match.rows] == [BLOCK, 2 * BLOCK, len(turn)]
        assert sorted(cache.read(match).result(10)[-1]) == ["base", "state"]
        assert match.why is not None
        assert match.why.why == Why.NEEDS


def test_a_recurrent_state_needs_no_chain(tmp_path: Path) -> None:
    with Cache.open(settings(tmp_path)) as cache:
        for end in (BLOCK, 2 * BLOCK + 5):
            start = (end - 1) // BLOCK * BLOCK
            parts = {"state": payload(PROMPT, start, end, part="state")}
            cache.offer(space(), PROMPT, start=start, end=end, parts=parts, reason=Reason.FINISH)
        parts = {"state": payload(PROMPT, 0, 3 * BLOCK + 1, part="state")}
        cache.offer(space(), PROMPT, start=0, end=3 * BLOCK + 1, parts=parts, reason=Reason.COLD)
    with Cache.open(settings(tmp_path)) as cache:
        for most, wanted in ((len(PROMPT), 3 * BLOCK + 1), (3 * BLOCK, 2 * BLOCK + 5), (2 * BLOCK, BLOCK), (5, 0)):
            match = cache.longest(space(), PROMPT, needs=RECURRENT, most=most)
            assert len(match.rows) == (1 if wanted else 0)
            assert check(cache, match, PROMPT) == wanted


def test_a_slow_tier_is_refused_until_it_is_fast_again(tmp_path: Path) -> None:
    clock, files = Clock(time.time()), FaultyFiles()
    big = 256 * KIB
    with Cache.open(settings(tmp_path)) as cache:
        offer_all(cache, PROMPT, n_bytes=big)
    with Cache.open(settings(tmp_path, ram_bytes=0), clock=clock, files=files) as cache:
        cache.computed(space(), 1000, 1.0)
        files.delay_s["pread"] = 0.1
        assert check(cache, cache.longest(space(), PROMPT), PROMPT, big) == len(PROMPT), "unmeasured: tried"
        match = cache.longest(space(), PROMPT)
        assert match.n_tokens == 0
        assert match.why is not None
        assert match.why.why == Why.SLOWER
        assert cache.stats().refused_slower == 1
        files.heal()
        clock.now += 60
        assert check(cache, cache.longest(space(), PROMPT), PROMPT, big) == len(PROMPT), "tried again later"
        assert check(cache, cache.longest(space(), PROMPT), PROMPT, big) == len(PROMPT)
        assert cache.stats().prefill_saved_s > 0


def test_only_the_rows_that_pay_are_read(tmp_path: Path) -> None:
    with Cache.open(settings(tmp_path)) as cache:
        offer_all(cache, PROMPT)
        cache.flush()
        ram_only = [row.key for row in cache._store.index.rows("ram")][:3]
        for key in ram_only:
            row = cache._store.index.get(key)
            assert row is not None
            cache._store.forget(row.name, "disk")
        for row in cache._store.index.rows("disk"):
            cache._store.forget(row.name, "ram")
        cache.computed(space(), 1000, 1.0)
        cache._store.cost.read("disk", 1 << 20, 1000.0)
        match = cache.longest(space(), PROMPT)
        assert match.n_tokens == 3 * BLOCK
        assert match.tier == "ram"


def test_closing_saves_what_only_ram_has(tmp_path: Path) -> None:
    files = FaultyFiles()
    cache = Cache.open(settings(tmp_path, writer_queue_bytes=64 * KIB), files=files)
    files.fail("fsync", 5)
    offer_all(cache, PROMPT)
    cache.flush()
    assert row_files(tmp_path) == []
    files.heal()
    cache.close()
    cache.close()
    assert len(row_files(tmp_path)) == 6


def test_closing_ends_though_a_disk_does_not_answer(tmp_path: Path) -> None:
    files = GatedFiles()
    before = set(threading.enumerate())
    cache = Cache.open(settings(tmp_path), files=files)
    [writer] = started_since(before, "cache-writer")
    files.shut()
    offer_all(cache, PROMPT)
    assert files.waits.wait(30)
    cache.close(drain_s=0.2)
    assert writer.is_alive(), "it still waits for the first row; the others are dropped"
    assert cache.stats().saves_dropped == 5
    assert row_files(tmp_path) == []
    files.open_gate()
    writer.join(30)
    assert len(row_files(tmp_path)) == 1, "what was begun is whole"
    assert temp_files(tmp_path) == []
    assert cache.stats().saves_dropped == 5
    cache.close(drain_s=0)  # the late row opened the shared count again
    with Cache.open(settings(tmp_path)) as again:
        assert again.verify().bad == ()
        assert check(again, again.longest(space(), PROMPT), PROMPT) == BLOCK


def started_since(before: set[threading.Thread], name: str) -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread not in before and name in thread.name]


def test_a_cache_without_files_is_a_ram_cache() -> None:
    with Cache.open(settings(None, ram_bytes=20 * KIB)) as cache:
        for seed in range(8):
            offer_all(cache, [seed] * BLOCK)
        assert cache.stats().evictions == 3
        assert cache.stats().bytes_ram <= 20 * KIB
        assert check(cache, cache.longest(space(), [7] * BLOCK), [7] * BLOCK) == BLOCK


def test_no_tiers_at_all_drop_and_count() -> None:
    with Cache.open(settings(None, ram_bytes=0)) as cache:
        offer_all(cache, PROMPT)
        assert cache.stats().saves_dropped == 6
        assert cache.longest(space(), PROMPT).n_tokens == 0


def test_the_tree_shows_parents_before_children(cache: Cache) -> None:
    with cache:
        offer_all(cache, PROMPT)
        cache.flush()
        listed = cache.ls()
        assert [row.depth for row in listed] == list(range(6))
        assert all(Path(row.path or "").exists() for row in listed)
        assert {row.status for row in listed} == {"available"}
        with cache.longest(space(), PROMPT):
            assert {row.leases for row in cache.ls()} == {1}


def n_found(cache: Cache, where: Space) -> int:
    with cache.longest(where, PROMPT) as match:
        return match.n_tokens


def test_pruning_by_age_and_size_and_clearing_a_space(tmp_path: Path) -> None:
    clock = Clock(time.time())
    with Cache.open(settings(tmp_path), clock=clock) as cache:
        offer_all(cache, PROMPT)
        cache.flush()
        clock.now += 1000
        offer_all(cache, PROMPT, where=space("other"))
        cache.flush()
        assert cache.prune(older_than_s=500) > 0
        assert n_found(cache, space()) == 0
        assert n_found(cache, space("other")) == len(PROMPT)
        cache.prune(keep_bytes=3 * 4096 + 2000)
        assert 0 < n_found(cache, space("other")) < len(PROMPT)
        offer_all(cache, PROMPT)
        cache.flush()
    with Cache.open(settings(tmp_path)) as cache:
        cache.clear(space("other"))
        assert n_found(cache, space("other")) == 0
        assert n_found(cache, space()) == len(PROMPT)
        cache.clear()
        assert row_files(tmp_path) == []
        assert cache.stats().bytes_disk == 0


def test_other_versions_are_cleaned_up_at_a_start(tmp_path: Path) -> None:
    (tmp_path / "v0-256" / "x").mkdir(parents=True)
    (tmp_path / "v0-256" / "x" / "y.row").write_bytes(b"old")
    with Cache.open(settings(tmp_path)) as cache:
        assert cache.stats().swept == 1
        assert cache.stats().bytes_disk == 0
    assert not (tmp_path / "v0-256").exists()


def test_another_block_size_is_left_to_its_user_and_goes_once_it_has_none(tmp_path: Path) -> None:
    with Cache.open(settings(tmp_path)) as cache:
        offer_all(cache, PROMPT)
    with Cache.open(settings(tmp_path, block_tokens=2 * BLOCK)) as cache:
        assert cache.longest(space(), PROMPT).n_tokens == 0
        assert cache.stats().swept == 0
        assert cache.stats().bytes_disk > 0  # counted: the quota is the folder's
    for path in row_files(tmp_path):
        os.utime(path, (0, 0))
    with Cache.open(settings(tmp_path, block_tokens=2 * BLOCK)) as cache:
        assert cache.stats().swept == 1
    assert row_files(tmp_path) == []


def test_four_models_save_in_parallel_under_one_cap_of_writers(tmp_path: Path) -> None:
    before = set(threading.enumerate())
    with Cache.open(settings(tmp_path, writer_threads=2)) as cache:
        names = [f"model {n}" for n in range(4)]
        threads = [
            threading.Thread(target=lambda name=name: [offer_all(cache, PROMPT, where=space(name)) for _ in range(5)])
            for name in names
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert cache.flush(30)
        assert len(started_since(before, "cache-writer")) == 2
        for name in names:
            assert check(cache, cache.longest(space(name), PROMPT), PROMPT) == len(PROMPT)
        assert cache.stats().saves_cold == 24


def test_a_read_that_nobody_waits_for_stops(tmp_path: Path) -> None:
    with Cache.open(settings(tmp_path)) as first:
        offer_all(first, PROMPT)
    files = FaultyFiles()
    with Cache.open(settings(tmp_path, ram_bytes=0, reader_threads=1), files=files) as cache:
        with cache.longest(space(), PROMPT) as match:
            assert len(match.rows) == 6
            files.delay_s["open"], n_opened = 0.05, files.calls["open"]
            loading = cache.read(match)
            while not loading.n_ready:
                time.sleep(0.001)
            loading.stop()
            n_read = len(loading.result(0))
            assert 1 <= n_read < 6
        assert cache._readers.flush(10)
        assert files.calls["open"] - n_opened <= n_read + 1  # the one under way
        assert cache.stats().tokens_restored == n_read * BLOCK
        loading.stop()
        assert len(loading.result(0)) == n_read


def test_a_bad_row_that_several_read_at_once_is_counted_once(tmp_path: Path) -> None:
    with Cache.open(settings(tmp_path)) as first:
        offer_all(first, PROMPT[:BLOCK])
    [path] = row_files(tmp_path)
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    files = FaultyFiles()
    with Cache.open(settings(tmp_path, ram_bytes=0), files=files) as cache:
        matches = [cache.longest(space(), PROMPT) for _ in range(4)]
        files.delay_s["pread"] = 0.05  # all four have the file open before one of them has read it
        loadings = [cache.read(match) for match in matches]
        assert [loading.result(10) for loading in loadings] == [[]] * 4
        for match in matches:
            match.release()
        assert cache.stats().corrupt_files == 1
        assert not path.exists()


# Logits


def test_logits_are_found_by_exactly_their_prompt_and_by_other_processes(tmp_path: Path) -> None:
    with Cache.open(settings(tmp_path)) as other, Cache.open(settings(tmp_path)) as cache:
        cache.offer_logits(space(), PROMPT, b"said" * 100)
        cache.offer_logits(space(), PROMPT, b"other" * 100)  # what is there stays
        assert cache.logits(space(), PROMPT) == b"said" * 100
        assert cache.stats().saves_cold == 1
        cache.flush()
        assert other.logits(space(), PROMPT) == b"said" * 100
        assert other.stats().adopted == other.stats().promotions == 1
        for tokens in (PROMPT[:-1], [*PROMPT, 1], [*PROMPT[:-1], 1]):
            assert other.logits(space(), tokens) is None
        assert other.logits(space("another"), PROMPT) is None


def test_logits_are_no_kv(tmp_path: Path) -> None:
    """Nor a sign of it: a search of the same prompt finds nothing, and does not say that somebody else has it."""
    with Cache.open(settings(tmp_path)) as cache:
        for n_tokens in (2, BLOCK, BLOCK + 1, len(PROMPT)):
            cache.offer_logits(space(), PROMPT[:n_tokens], bytes(400))
        with cache.longest(space(), PROMPT) as match:
            assert (match.rows, match.why.why if match.why else None) == ([], Why.ABSENT)
        offer_all(cache, PROMPT)
        assert check(cache, cache.longest(space(), PROMPT), PROMPT) == len(PROMPT)
        assert {row.holds for row in cache.ls()} == {"kv", "logits"}
        cache.flush()
        cache.clear(space())
        assert cache.ls() == []


@pytest.mark.parametrize("at", [3, 60, 160, -1])
def test_logits_that_do_not_verify_are_removed(tmp_path: Path, at: int) -> None:
    with Cache.open(settings(tmp_path)) as first:
        first.offer_logits(space(), PROMPT, b"said" * 100)
        first.offer_logits(space(), PROMPT[:-1], b"more" * 100)
    spoiled, whole = sorted(row_files(tmp_path), key=lambda path: f"-{len(PROMPT)}.row" not in path.name)
    data = bytearray(spoiled.read_bytes())
    data[at] ^= 4
    spoiled.write_bytes(data)
    with Cache.open(settings(tmp_path, ram_bytes=0)) as cache:
        assert cache.logits(space(), PROMPT) is None
        assert cache.logits(space(), PROMPT[:-1]) == b"more" * 100
        stats = cache.stats()
        assert stats.corrupt_files + stats.swept == 1
        assert row_files(tmp_path) == [whole]


def test_logits_swapped_for_anothers_are_not_served(tmp_path: Path) -> None:
    with Cache.open(settings(tmp_path)) as first:
        first.offer_logits(space(), PROMPT, b"said" * 100)
        first.offer_logits(space(), [*PROMPT[:-1], 1], b"more" * 100)
    one, other = row_files(tmp_path)
    data = one.read_bytes()
    one.write_bytes(other.read_bytes())
    other.write_bytes(data)
    with Cache.open(settings(tmp_path)) as cache:
        assert cache.logits(space(), PROMPT) is None
        assert cache.logits(space(), [*PROMPT[:-1], 1]) is None
        assert cache.stats().corrupt_files == 2
        assert row_files(tmp_path) == []
