"""What is saved and what goes first: bounds that hold for all values."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvasir.cache import CacheSettings, SaveRules, cold_end, continued_end, last_end, spans
from kvasir.cache.policy import HALF_LIFE_S, pressure_target, room_needed, worth
from kvasir.errors import BadOption

counts = st.integers(0, 100_000)
rules_of = st.builds(
    lambda least, more, trim, align, every: SaveRules(
        min_tokens=least,
        cold_min_tokens=least + more,
        boundary_trim_tokens=trim,
        boundary_align_tokens=align,
        continued_interval=every,
    ),
    st.integers(0, 600),
    st.integers(0, 600),
    st.integers(0, 600),
    st.integers(1, 3000),
    st.integers(1, 3000),
)


@given(counts, rules_of)
def test_a_cold_save_ends_at_a_boundary_before_the_trimmed_end(n: int, rules: SaveRules) -> None:
    end = cold_end(n, rules)
    assert end % rules.boundary_align_tokens == 0
    assert end == 0 or rules.min_tokens <= end <= n - rules.boundary_trim_tokens
    assert end == 0 or n >= rules.cold_min_tokens


def test_a_cold_save_stops_at_its_maximum() -> None:
    assert cold_end(10_000, SaveRules(cold_max_tokens=1000)) == 768
    assert cold_end(4096, SaveRules()) == 3840
    assert cold_end(200, SaveRules()) == 0


@given(counts, counts, rules_of, st.integers(1, 512))
def test_a_continued_save_is_full_blocks_and_new(n_live: int, n_saved: int, rules: SaveRules, block: int) -> None:
    end = continued_end(n_live, n_saved, rules, block_tokens=block)
    assert end == 0 or (end % block == 0 and n_saved < end <= n_live and n_live - n_saved >= rules.continued_interval)


@given(counts, counts, rules_of)
def test_a_last_save_is_everything_or_nothing(n_live: int, n_saved: int, rules: SaveRules) -> None:
    assert last_end(n_live, n_saved, rules) in (0, n_live)


@given(st.integers(0, 5000), st.integers(0, 5000), st.integers(1, 512))
def test_spans_cover_what_is_new_once(n_saved: int, end: int, block: int) -> None:
    rows = spans(n_saved, end, block)
    assert all(row.start % block == 0 and 0 < row.end - row.start <= block for row in rows)
    assert all(a.end == b.start for a, b in pairwise(rows))
    if rows:
        assert rows[0].start <= n_saved < rows[0].start + block
        assert rows[-1].end == end


uses = st.floats(0, 2e9)


@given(uses, uses, st.integers(0, 1000), st.integers(1, 4096), st.integers(1, 1 << 30))
def test_worth_grows_with_recency_hits_and_density(a: float, b: float, hits: int, n_tokens: int, n_bytes: int) -> None:
    def of(last_used: float = a, hits: int = hits, n_tokens: int = n_tokens, n_bytes: int = n_bytes) -> float:
        return worth(last_used=last_used, hits=hits, n_tokens=n_tokens, n_bytes=n_bytes)

    assert (of(last_used=a) <= of(last_used=b)) == (a / HALF_LIFE_S <= b / HALF_LIFE_S) or abs(a - b) < 1
    assert of(hits=hits + 1) > of()
    assert of(n_tokens=2 * n_tokens) > of() > of(n_bytes=2 * n_bytes)


def test_one_hit_outweighs_six_hours() -> None:
    old = worth(last_used=0.0, hits=1, n_tokens=1, n_bytes=1)
    assert old == pytest.approx(worth(last_used=HALF_LIFE_S, hits=0, n_tokens=1, n_bytes=1))


@given(st.integers(0, 1000), st.integers(0, 1000), st.integers(0, 1000))
def test_room_needed_is_enough_and_no_more(used: int, incoming: int, quota: int) -> None:
    need = room_needed(used=used, incoming=incoming, quota=quota)
    if need is None:
        assert incoming > quota
    else:
        assert need >= 0
        assert used + incoming - need <= quota or need == 0


@given(st.integers(0, 10**12), st.integers(0, 10**12))
def test_pressure_asks_only_above_the_high_mark(used: int, total: int) -> None:
    need = pressure_target(used=used, total=total, high=0.85, low=0.75)
    assert need >= 0
    assert (need > 0) == (total > 0 and used > 0.85 * total and used - 0.75 * total >= 1)


@pytest.mark.parametrize(
    "bad",
    [
        {"min_tokens": -1},
        {"continued_interval": 0},
        {"boundary_align_tokens": 0},
        {"cold_min_tokens": 1},
        {"cold_max_tokens": 8},
        {"min_tokens": True},
    ],
)
def test_rules_that_contradict_themselves_are_refused(bad: dict[str, Any]) -> None:
    with pytest.raises(BadOption):
        SaveRules(**bad)


@pytest.mark.parametrize(
    "bad",
    [
        {"ram_bytes": -1},
        {"block_tokens": 0},
        {"writer_threads": 0},
        {"reservation_ttl_s": 0},
        {"free_share": 1.0},
        {"pressure_low": 0.9},
        {"pressure_high": 1.1},
        {"pressure_low": 0.0},
        {"pressure": "callback"},
    ],
)
def test_settings_that_make_no_sense_are_refused(bad: dict[str, Any]) -> None:
    with pytest.raises(BadOption):
        CacheSettings(**bad)
