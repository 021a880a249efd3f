"""Damaged rows are never served; they are counted and removed."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvasir.cache import Cache, Needs, Reason, Why
from kvasir.cache.codec import VERSION
from tests.unit.cache.rig import BLOCK, check, offer_all, row_files, settings, space

PROMPT = list(range(3 * BLOCK + 5))
N_BYTES = 1024


@pytest.fixture
def cache(tmp_path: Path) -> Iterator[Cache]:
    """A cache whose rows are only on disk, two parts each."""
    with Cache.open(settings(tmp_path)) as first:
        offer_all(first, PROMPT, n_bytes=N_BYTES, parts=("base", "window"))
    with Cache.open(settings(tmp_path, ram_bytes=0)) as cache:
        yield cache


def found(cache: Cache) -> int:
    """Read everything, every part of every row; wrong bytes fail in `check`."""
    return check(cache, cache.longest(space(), PROMPT, needs=Needs(window_tokens=1)), PROMPT, N_BYTES)


def found_plain(cache: Cache) -> int:
    return check(cache, cache.longest(space(), PROMPT), PROMPT, N_BYTES)


def removed(cache: Cache) -> int:
    return cache.stats().corrupt_files + cache.stats().swept


def test_five_hundred_flipped_bits_are_never_served(cache: Cache, tmp_path: Path) -> None:
    order = random.Random(500)
    files = row_files(tmp_path)
    good = {path: path.read_bytes() for path in files}
    for n_done in range(500):
        path = order.choice(files)
        bad = bytearray(good[path])
        bad[order.randrange(len(bad))] ^= 1 << order.randrange(8)
        path.write_bytes(bad)
        assert found_plain(cache) <= len(PROMPT)
        assert cache.verify().bad or removed(cache) == n_done + 1
        assert removed(cache) == n_done + 1, "a flipped bit went unnoticed"
        assert not path.exists(), "a bad file stayed"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(good[path])
    assert found_plain(cache) == len(PROMPT)
    assert cache.stats().corrupt_files > 450


def test_truncation_at_every_percent_is_never_served(cache: Cache, tmp_path: Path) -> None:
    for path in row_files(tmp_path)[:2]:
        good = path.read_bytes()
        for percent in range(100):
            before = removed(cache)
            path.write_bytes(good[: len(good) * percent // 100])
            found_plain(cache)
            cache.verify()
            assert removed(cache) == before + 1
            assert not path.exists()
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(good)
    assert found_plain(cache) == len(PROMPT)


def test_a_file_too_short_for_its_name_is_removed_at_the_start(cache: Cache, tmp_path: Path) -> None:
    cache.close()
    path = row_files(tmp_path)[0]
    path.write_bytes(b"KVSR")
    with Cache.open(settings(tmp_path)) as again:
        assert again.stats().corrupt_files == 1
        assert not path.exists()


def test_a_row_swapped_for_anothers_file_is_never_served(cache: Cache, tmp_path: Path) -> None:
    one, two, *_ = row_files(tmp_path)
    first, second = one.read_bytes(), two.read_bytes()
    one.write_bytes(second)
    two.write_bytes(first)
    found_plain(cache)
    assert len(cache.verify().bad) + cache.stats().corrupt_files >= 2
    assert cache.stats().corrupt_files == 2
    assert not one.exists()
    assert not two.exists()


def test_a_row_written_by_another_model_is_never_served(cache: Cache, tmp_path: Path) -> None:
    mine = set(row_files(tmp_path))
    offer_all(cache, PROMPT, where=space("another model"), n_bytes=N_BYTES, parts=("base", "window"))
    cache.flush()
    [theirs] = [path for path in row_files(tmp_path) if path not in mine and "-0-16.row" in path.name]
    [path] = [path for path in mine if "-0-16.row" in path.name]
    path.write_bytes(theirs.read_bytes())
    assert found_plain(cache) == 0
    assert cache.stats().corrupt_files == 1
    assert not path.exists()
    match = cache.longest(space(), PROMPT)
    assert match.why is not None
    assert match.why.why == Why.CORRUPT


def test_a_row_of_another_version_is_ignored_and_cleaned_up(cache: Cache, tmp_path: Path) -> None:
    [path] = [path for path in row_files(tmp_path) if "-0-16.row" in path.name]
    data = bytearray(path.read_bytes())
    data[4] = VERSION + 1
    path.write_bytes(data)
    assert found_plain(cache) == 0
    assert cache.stats().corrupt_files == 0
    assert cache.stats().swept == 1
    assert not path.exists()


def test_a_bad_row_in_the_middle_costs_only_what_follows_it(cache: Cache, tmp_path: Path) -> None:
    [path] = [path for path in row_files(tmp_path) if f"-{2 * BLOCK}-{3 * BLOCK}.row" in path.name]
    data = bytearray(path.read_bytes())
    data[-2 * N_BYTES] ^= 1  # the first byte of its base
    path.write_bytes(data)
    assert found(cache) == 0, "a restore that needs a window is all or nothing"
    assert found_plain(cache) == 2 * BLOCK
    offer_all(cache, PROMPT, n_bytes=N_BYTES, parts=("base", "window"), reason=Reason.FINISH)
    cache.flush()
    assert found_plain(cache) == len(PROMPT), "computing it again heals the chain"


def test_a_damaged_file_in_the_way_of_a_publish_is_replaced(tmp_path: Path) -> None:
    with Cache.open(settings(tmp_path, ram_bytes=0)) as one, Cache.open(settings(tmp_path, ram_bytes=0)) as two:
        offer_all(one, PROMPT, n_bytes=N_BYTES)
        one.flush()
        path = row_files(tmp_path)[0]
        path.write_bytes(path.read_bytes()[:-1] + b"?")
        offer_all(two, PROMPT, n_bytes=N_BYTES)
        two.flush()
        assert two.verify().bad == ()
        assert two.stats().adopted == 3
        assert check(two, two.longest(space(), PROMPT), PROMPT, N_BYTES) == len(PROMPT)
        assert two.stats().bytes_disk == sum(path.stat().st_size for path in row_files(tmp_path))
