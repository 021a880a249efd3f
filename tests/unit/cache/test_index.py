"""The index: order of eviction, leases, chains, tickets."""

from __future__ import annotations

import threading

from hypothesis import given
from hypothesis import strategies as st

from kvasir.cache.index import Index
from kvasir.cache.key import Key
from kvasir.cache.row import RowName
from kvasir.cache.tickets import Tickets
from tests.unit.cache.rig import BLOCK, Clock, space


def chain(n_rows: int, seed: int = 0) -> list[RowName]:
    tokens = [seed] * BLOCK * n_rows
    keys = [space().root, *space().boundaries(tokens, BLOCK)]
    return [RowName(space().root, keys[i + 1], keys[i], i * BLOCK, (i + 1) * BLOCK) for i in range(n_rows)]


def fill(index: Index, names: list[RowName], tier: str = "disk", last_used: float = 0.0) -> None:
    for name in names:
        assert index.add(name, tier, 100, last_used=last_used)


def test_children_go_before_parents_so_a_chain_never_breaks_in_the_middle() -> None:
    index, names = Index(), chain(10)
    fill(index, names)
    for n_left in range(9, -1, -1):
        [victim] = index.take_victims("disk", 1)
        assert victim.name == names[n_left]
        assert index.run(names) == n_left


def test_the_row_used_longest_ago_goes_first() -> None:
    index = Index()
    rows = [chain(1, seed)[0] for seed in range(5)]
    for age, name in enumerate(rows):
        index.add(name, "disk", 100, last_used=age * 1e6)
    index.touch([rows[0].key], 9e6)
    assert [victim.name for victim in index.take_victims("disk", 500)] == [*rows[1:], rows[0]]


def test_logits_go_with_the_kv_of_their_time() -> None:
    """Whatever they weigh: bytes per token say nothing of them, and without KV they are of no use."""
    for n_bytes in (100, 10_000, 1_000_000):
        index, outputs = Index(), space().outputs
        kv = [chain(1, seed)[0] for seed in range(4)]
        logits = [RowName.of_logits(outputs.root, outputs.key([seed] * 40), 40) for seed in range(4)]
        assert all(name.is_logits for name in logits)
        assert not any(name.is_logits for name in kv)
        for age, (row, said) in enumerate(zip(kv, logits, strict=True)):
            index.add(row, "disk", 100, last_used=age * 60.0)
            index.add(said, "disk", n_bytes, last_used=age * 60.0 + 30)
        order = [victim.name for victim in index.take_victims("disk", 10**9)]
        assert order == [name for pair in zip(kv, logits, strict=True) for name in pair]


def test_leased_rows_stay_until_released() -> None:
    index, names = Index(), chain(4)
    fill(index, names)
    held = index.lease(name.key for name in names)
    index.lease(held[:1])
    assert index.take_victims("disk", 10**9) == []
    index.release(held)
    assert [victim.name for victim in index.take_victims("disk", 10**9)] == names[:0:-1]
    index.release(held[:1])
    assert len(index.take_victims("disk", 10**9)) == 1


def test_a_lease_outlives_a_row_that_is_lost_and_comes_back() -> None:
    index, [name] = Index(), chain(1)
    fill(index, [name])
    held = index.lease([name.key])
    index.remove(name.key, "disk")
    fill(index, [name])
    assert index.take_victims("disk", 1) == []
    index.release(held)
    assert len(index.take_victims("disk", 1)) == 1


def test_a_parent_with_another_copy_may_leave_ram_before_its_child_leaves_the_disk() -> None:
    index, names = Index(), chain(2)
    fill(index, names[:1], "ram")
    fill(index, names, "disk")
    assert [victim.name for victim in index.take_victims("ram", 1)] == names[:1]


def test_the_last_copy_of_a_parent_stays_while_a_child_is_anywhere() -> None:
    index, names = Index(), chain(2)
    fill(index, names[:1], "ram")
    fill(index, names[1:], "disk")
    assert index.take_victims("ram", 1) == []
    fill(index, names[:1], "disk")
    assert len(index.take_victims("ram", 1)) == 1


def test_one_key_has_one_span() -> None:
    index, names = Index(), chain(2)
    fill(index, names)
    assert not index.add(names[1]._replace(start=0, parent=space().root), "disk", 1, last_used=0)
    assert index.get(names[1].key) is not None


def test_counts_and_bytes_follow_every_change() -> None:
    index, names = Index(), chain(3)
    fill(index, names, "ram")
    index.add(names[0], "ram", 40, last_used=0)
    assert index.used("ram") == (3, 240)
    index.remove(names[2].key, "ram")
    assert index.used("ram") == (2, 140)
    assert not index.remove(names[2].key, "ram")


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 6)), min_size=1, max_size=8), st.integers(1, 3000))
def test_victims_free_enough_or_all_there_is(shapes: list[tuple[int, int]], need: int) -> None:
    index = Index()
    known: set[Key] = set()
    for seed, length in shapes:
        fill(index, chain(length, seed))
        known |= {name.key for name in chain(length, seed)}
    victims = index.take_victims("disk", need)
    freed = sum(victim.n_bytes for victim in victims)
    assert freed >= need or len(victims) == len(known)
    assert freed - 100 < need
    for row in index.rows():
        assert row.start == 0 or index.has(row.parent), "a chain broke in the middle"


def test_a_ticket_is_one_writers_until_it_lapses() -> None:
    clock = Clock()
    tickets = Tickets(60, clock)
    key = space().root
    first = tickets.reserve(key, "disk")
    assert first is not None
    assert tickets.reserve(key, "disk") is None
    clock.now += 50
    assert first.still_mine()
    clock.now += 50
    assert first.still_mine(), "renewed fifty seconds ago"
    clock.now += 61
    second = tickets.reserve(key, "disk")
    assert second is not None
    assert not first.still_mine()
    first.close()
    assert second.still_mine()


def test_waiting_for_a_save_ends_when_it_settles() -> None:
    tickets = Tickets(60)
    key = space().root
    tickets.begin(key)
    assert not tickets.wait(key, 0.01)
    threading.Timer(0.05, tickets.settle, [key]).start()
    assert tickets.wait(key, 5)
