"""docs/caching.md names what exists, under the names that users give."""

from __future__ import annotations

import re
from pathlib import Path

from kvasir.cache import CacheStats, Why
from kvasir.config import LOAD_OPTIONS

PAGE = (Path(__file__).parents[3] / "docs" / "caching.md").read_text(encoding="utf-8")


def test_every_name_on_the_page_is_an_option_a_counter_or_a_reason() -> None:
    known = {*LOAD_OPTIONS, *dir(CacheStats), *Why, "parent_key"}
    assert set(re.findall(r"`([a-z]+(?:_[a-z]+)+)`", PAGE)) <= known


def test_every_option_of_the_cache_is_on_the_page() -> None:
    for name in LOAD_OPTIONS:
        assert not name.startswith("cache_") or f"`{name}`" in PAGE, name
