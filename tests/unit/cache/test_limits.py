"""A space may use some tiers and not others: nothing of it is ever written elsewhere."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvasir.cache import Cache
from tests.unit.cache.rig import MIB, check, offer_all, row_files, settings, space

TOKENS = list(range(1, 65))
OTHERS = list(range(1, 65))


def test_rows_of_a_space_that_may_not_use_files_never_get_there(tmp_path: Path) -> None:
    with Cache.open(settings(tmp_path)) as cache:
        cache.limit(space("private"), ["ram"])
        offer_all(cache, TOKENS, where=space("private"))
        offer_all(cache, OTHERS, where=space("plain"))
        cache.flush()
        assert len(row_files(tmp_path)) == 4
        assert check(cache, cache.longest(space("private"), TOKENS), TOKENS) == 64
    assert len(row_files(tmp_path)) == 4  # closing saves what only memory has, but not these
    with Cache.open(settings(tmp_path)) as again:
        assert again.longest(space("private"), TOKENS).n_tokens == 0
        assert again.longest(space("plain"), OTHERS).n_tokens == 64


def test_rows_pressed_out_of_memory_are_lost_rather_than_written(tmp_path: Path) -> None:
    with Cache.open(settings(tmp_path, ram_bytes=MIB)) as cache:
        cache.limit(space("private"), ["ram"])
        offer_all(cache, TOKENS, where=space("private"), n_bytes=200_000)
        offer_all(cache, OTHERS, where=space("plain"), n_bytes=200_000)
        cache.flush()
        assert len(row_files(tmp_path)) == 4
        assert cache.stats().evictions > 0


@pytest.mark.parametrize("tiers", [["disk"], ["disk", "tmpfs"]])
def test_rows_of_a_space_that_may_not_use_memory_are_read_from_files(tmp_path: Path, tiers: list[str]) -> None:
    with Cache.open(settings(tmp_path)) as cache:
        cache.limit(space(), tiers)
        offer_all(cache, TOKENS)
        cache.flush()
        assert cache.stats().tiers["ram"].rows == 0
        assert check(cache, cache.longest(space(), TOKENS), TOKENS) == 64
        assert cache.stats().tiers["ram"].rows == 0  # a hit does not bring it there either
