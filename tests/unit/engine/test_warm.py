"""Stored prefixes come back exactly, whatever kind of memory the model has, and what is computed is offered."""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvasir.cache import Cache, CacheSettings, SaveRules, Space
from kvasir.engine import Binding
from kvasir.engine.events import Admitted
from kvasir.engine.sequence import State
from kvasir.errors import EngineStopped
from kvasir.types import FinishReason
from tests.unit.engine.rig import Collected, Rig, await_rows, expected, imported_per_tick, prompt

BLOCK = 16
KINDS = ("fake:plain", "fake:window", "fake:recurrent", "fake:hybrid")
LONG = prompt(150, salt=2)


def space(scope: str | None, n_ctx_seq: int) -> Space:
    return Space(hashlib.sha256(repr(scope).encode()).digest(), 1, 1, bytes(32))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "kv"


def settings(folder: Path | None, **options: Any) -> CacheSettings:
    return CacheSettings(disk_dir=folder, block_tokens=BLOCK, **({"ram_bytes": 64 << 20} | options))


@pytest.fixture
def cache(folder: Path) -> Iterator[Cache]:
    opened = Cache.open(settings(folder))
    yield opened
    opened.close()


def rig_of(cache: Cache, path: str = "fake:plain", rules: SaveRules | None = None, **options: Any) -> Rig:
    wanted = rules or SaveRules(
        min_tokens=4, cold_min_tokens=4, continued_interval=BLOCK, boundary_trim_tokens=4, boundary_align_tokens=BLOCK
    )
    return Rig(path, cache=Binding(cache, wanted, space), **({"context_size": 1024, "debug": True} | options))


def ask(rig: Rig, tokens: tuple[int, ...], **options: Any) -> Collected:
    sink = rig.submit(tokens, **({"max_tokens": 6, "stop_tokens": frozenset()} | options))
    rig.drain()
    return sink


def exact(rig: Rig, sink: Collected, tokens: tuple[int, ...], n: int = 6) -> None:
    assert sink.tokens == expected(rig.path, tokens, max_tokens=n, stop_tokens=frozenset())[0]


@pytest.mark.parametrize("layout", ["unified", "split"])
@pytest.mark.parametrize("path", KINDS)
def test_a_fresh_engine_restores_what_another_left(folder: Path, path: str, layout: str) -> None:
    first_cache = Cache.open(settings(folder))
    first = rig_of(first_cache, path, layout=layout)
    said = ask(first, LONG)
    first_cache.close()

    second_cache = Cache.open(settings(folder))
    second = rig_of(second_cache, path, layout="split" if layout == "unified" else "unified")
    turn = LONG + tuple(said.tokens) + prompt(20, salt=8)
    sink = ask(second, turn)
    exact(second, sink, turn)
    assert sink.done.usage.cached_tokens >= len(LONG) - 1
    assert second.loop.meter.counters.restored == 1
    assert second.context.n_rows_decoded == len(turn) - sink.done.usage.cached_tokens + 5
    second_cache.close()


@pytest.mark.parametrize("path", KINDS)
def test_the_same_prompt_again_is_restored_to_its_last_token_but_one(folder: Path, path: str) -> None:
    cache = Cache.open(settings(folder))
    ask(rig_of(cache, path), LONG)
    again = rig_of(cache, path)
    sink = ask(again, LONG)
    exact(again, sink, LONG)
    whole_blocks = (len(LONG) - 1) // BLOCK * BLOCK
    assert sink.done.usage.cached_tokens >= whole_blocks
    cache.close()


def test_a_prompt_that_parts_in_the_middle_reuses_all_whole_blocks_before(cache: Cache) -> None:
    ask(rig_of(cache), LONG)
    branch = (*LONG[:100], 100, *prompt(40, salt=9))
    assert branch[100] != LONG[100]
    rig = rig_of(cache)
    sink = ask(rig, branch)
    exact(rig, sink, branch)
    assert sink.done.usage.cached_tokens == 100  # whole blocks, and the beginning of the one in which they part


def test_what_is_live_is_shared_and_only_the_rest_is_restored(cache: Cache) -> None:
    ask(rig_of(cache), LONG)
    rig = rig_of(cache)
    ask(rig, LONG[:40] + prompt(9, salt=7))
    sink = ask(rig, LONG)
    exact(rig, sink, LONG)
    assert sink.done.usage.cached_tokens >= (len(LONG) - 1) // BLOCK * BLOCK
    assert rig.loop.meter.counters.restored >= 1


def test_followers_share_what_a_restore_brings(cache: Cache) -> None:
    ask(rig_of(cache), LONG)
    rig = rig_of(cache)
    sinks = [rig.submit(LONG + prompt(10, salt=50 + i), max_tokens=3, stop_tokens=frozenset()) for i in range(4)]
    rig.drain()
    for i, sink in enumerate(sinks):
        assert (
            sink.tokens == expected(rig.path, LONG + prompt(10, salt=50 + i), max_tokens=3, stop_tokens=frozenset())[0]
        )
        assert sink.done.usage.cached_tokens >= (len(LONG) - 1) // BLOCK * BLOCK
    assert rig.loop.meter.counters.restored == 1


def test_scopes_never_meet(cache: Cache) -> None:
    ask(rig_of(cache), LONG, scope="a")
    rig = rig_of(cache)
    assert ask(rig, LONG, scope="b").done.usage.cached_tokens == 0
    assert ask(rig_of(cache), LONG, scope="a").done.usage.cached_tokens > 0


def test_cache_false_neither_searches_nor_leaves_anything(cache: Cache) -> None:
    assert ask(rig_of(cache), LONG, cache=False).done.key is None
    assert cache.stats().saves_finish == cache.stats().saves_cold == 0
    ask(rig_of(cache), LONG)
    assert ask(rig_of(cache), LONG, cache=False).done.usage.cached_tokens == 0


def test_the_key_of_a_turn_is_the_parent_of_the_next(cache: Cache) -> None:
    said = ask(rig_of(cache), LONG)
    assert said.done.key is not None
    turn = LONG + tuple(said.tokens) + prompt(12, salt=6)
    rig = rig_of(cache)
    sink = ask(rig, turn, parent_key=said.done.key)
    exact(rig, sink, turn)
    assert sink.done.usage.cached_tokens == len(LONG) + 5
    assert cache.stats().hits_resume == 1


def test_a_preempted_request_comes_back_from_the_cache(cache: Cache) -> None:
    rig = rig_of(cache, slots=4, context_size=256)
    prompts = [prompt(50, salt=30 + i) for i in range(4)]
    sinks = [rig.submit(tokens, max_tokens=60, stop_tokens=frozenset()) for tokens in prompts]
    rig.drain()
    for sink, tokens in zip(sinks, prompts, strict=True):
        exact(rig, sink, tokens, 60)
    assert rig.loop.meter.counters.preempted > 0
    assert rig.loop.meter.counters.restored > 0
    assert cache.stats().saves_evict > 0


def test_a_long_restore_is_bounded_per_tick_beside_streams(cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvasir.engine.loop.IMPORT_TOKENS", 2 * BLOCK)
    ask(rig_of(cache), LONG)
    rig = rig_of(cache)
    stream = rig.submit(prompt(5, salt=1), max_tokens=60, stop_tokens=frozenset())
    rig.tick(3)
    late = rig.submit(LONG, max_tokens=3, stop_tokens=frozenset())
    rig.tick()
    n_before, n_ticks = len(stream.tokens), 0
    while rig.sequence(late).state in (State.WAITING, State.LOADING):
        await_rows(rig.loop)
        rig.tick()
        n_ticks += 1
    assert n_ticks >= 4
    assert len(stream.tokens) - n_before >= n_ticks - 1
    rig.drain()
    exact(rig, late, LONG, 3)


@pytest.mark.parametrize("layout", ["unified", "split"])
@pytest.mark.parametrize("n_late", [1, 2])
@pytest.mark.parametrize("path", KINDS)
def test_no_tick_imports_more_than_its_share(
    cache: Cache, path: str, n_late: int, layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the memory is made of, and however many restores there are; nothing of it counts before all is there."""
    most = 2 * BLOCK
    monkeypatch.setattr("kvasir.engine.loop.IMPORT_TOKENS", most)
    prompts = [prompt(150, salt=2 + i) for i in range(n_late)]
    for tokens in prompts:
        ask(rig_of(cache, path), tokens)
    rig = rig_of(cache, path, layout=layout)
    stream = rig.submit(prompt(5, salt=1), max_tokens=80, stop_tokens=frozenset(), cache=False)
    rig.tick(3)
    late = [rig.submit(tokens, max_tokens=3, stop_tokens=frozenset()) for tokens in prompts]
    imported = imported_per_tick(rig, stream, late)
    assert max(imported) <= most
    n_rows = (len(LONG) - 1) // BLOCK * BLOCK
    n_window = 2 * BLOCK if path == "fake:window" else 0
    assert sum(imported) >= (0 if path == "fake:recurrent" else n_late * (n_rows + n_window))
    rig.drain()
    for sink, tokens in zip(late, prompts, strict=True):
        exact(rig, sink, tokens, 3)
        assert sink.done.usage.cached_tokens >= n_rows
    assert stream.tokens == expected(path, prompt(5, salt=1), max_tokens=80, stop_tokens=frozenset())[0]


@pytest.mark.parametrize("path", ["fake:window", "fake:hybrid"])
@pytest.mark.parametrize("how", ["cancel", "no room", "clear", "shut"])
def test_a_restore_that_ends_half_way_leaves_nothing(
    cache: Cache, path: str, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvasir.engine.loop.IMPORT_TOKENS", BLOCK)
    ask(rig_of(cache, path), LONG)
    n_rows = len(cache.ls())
    rig = rig_of(cache, path)
    rig.submit(prompt(5, salt=1), max_tokens=40, stop_tokens=frozenset(), cache=False)
    rig.tick(3)
    late = rig.submit(LONG, max_tokens=3, stop_tokens=frozenset())
    rig.tick()
    while rig.sequence(late).n_loaded < 3 * BLOCK:
        await_rows(rig.loop)
        rig.tick()
    assert rig.sequence(late).n_decoded == 0
    if how == "cancel":
        rig.cancel(late)
    elif how == "no room":
        monkeypatch.setattr(rig.loop.context.memory, "import_span", lambda *_: False)
    elif how == "clear":
        rig.context.fail_next("failed")  # costs a hybrid all of its memory
    else:
        rig.loop.stop()
        rig.loop.shut()
        assert isinstance(late.error, EngineStopped)
        assert len(cache.ls()) == n_rows
        return
    rig.drain()
    assert late.done.reason is (FinishReason.CANCELLED if how == "cancel" else FinishReason.LENGTH)
    if how != "cancel":
        exact(rig, late, LONG, 3)
    rig.check_idle()


def test_cancel_while_loading_frees_the_slot(cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvasir.engine.loop.IMPORT_TOKENS", BLOCK)
    ask(rig_of(cache), LONG)
    rig = rig_of(cache)
    stream = rig.submit(prompt(5, salt=1), max_tokens=30, stop_tokens=frozenset())
    rig.tick(3)
    late = rig.submit(LONG, max_tokens=3)
    rig.tick()
    while rig.sequence(late).state is not State.LOADING or rig.sequence(late).n_decoded == 0:
        await_rows(rig.loop)
        rig.tick()
    rig.cancel(late)
    rig.drain()
    assert late.done.reason is FinishReason.CANCELLED
    assert len(stream.tokens) == 30
    rig.check_idle()


# Memory that cannot rewind

SYSTEM = prompt(50, salt=20)
STATES = pytest.mark.parametrize("path", ["fake:recurrent", "fake:hybrid"])


@STATES
def test_a_state_is_kept_where_prompts_are_said_to_part(cache: Cache, path: str) -> None:
    one, other = (SYSTEM + prompt(120, salt=salt) for salt in (21, 22))
    ask(rig_of(cache, path), one, checkpoint=len(SYSTEM))
    rig = rig_of(cache, path)
    sink = ask(rig, other, checkpoint=len(SYSTEM))
    assert sink.done.usage.cached_tokens == len(SYSTEM)
    exact(rig, sink, other)
    again = rig_of(cache, path)
    sink = ask(again, other, checkpoint=len(SYSTEM))  # what began in the middle left its own snapshots behind it
    assert sink.done.usage.cached_tokens == len(other) - 1
    exact(again, sink, other)


@STATES
def test_a_state_is_kept_at_the_end_of_a_block_that_is_stored_without_one(cache: Cache, path: str) -> None:
    at = 3 * BLOCK
    ask(rig_of(cache, path), SYSTEM[:at] + prompt(120, salt=20))
    ask(rig_of(cache, path), SYSTEM[:at] + prompt(120, salt=21), checkpoint=at)
    rig = rig_of(cache, path)
    sink = ask(rig, SYSTEM[:at] + prompt(120, salt=22), checkpoint=at)
    assert sink.done.usage.cached_tokens == at - (path == "fake:hybrid")
    exact(rig, sink, SYSTEM[:at] + prompt(120, salt=22))


@STATES
def test_what_is_short_is_not_kept(cache: Cache, path: str) -> None:
    rules = SaveRules(
        min_tokens=60, cold_min_tokens=60, continued_interval=BLOCK, boundary_trim_tokens=4, boundary_align_tokens=BLOCK
    )
    for salt in (21, 22):
        tokens = SYSTEM + prompt(120, salt=salt)
        sink = ask(rig_of(cache, path, rules), tokens, checkpoint=len(SYSTEM))
        assert sink.done.usage.cached_tokens == 0


# KV that was cut is nobody else's

CUT = (40, 90)
LEFT = LONG[: CUT[0]] + LONG[CUT[1] :]


def cut_up(cache: Cache, **options: Any) -> Rig:
    """An engine with a conversation of owner "me" whose middle was cut out of memory."""
    assert LONG[CUT[0]] != LONG[CUT[1]]
    rig = rig_of(cache, **options)
    ask(rig, LONG, sampler=None, max_tokens=0, owner="me")
    assert rig.loop.shift("me", list(LONG), *CUT)
    return rig


def found_of_cut(cache: Cache, tokens: tuple[int, ...]) -> int:
    """What a fresh engine finds of them; what it says is right."""
    rig = rig_of(cache)
    sink = ask(rig, tokens)
    exact(rig, sink, tokens)
    return sink.done.usage.cached_tokens


def test_a_finished_turn_on_cut_kv_is_not_kept(cache: Cache) -> None:
    rig = cut_up(cache)
    turn = LEFT + prompt(40, salt=6)
    sink = ask(rig, turn, owner="me", max_tokens=40)
    assert sink.done.usage.cached_tokens == len(LEFT)
    assert sink.done.key is None
    assert sink.tokens != expected(rig.path, turn, max_tokens=40, stop_tokens=frozenset())[0]
    ask(rig, (*turn, *sink.tokens, 99), owner="me")
    assert found_of_cut(cache, (*turn, *sink.tokens, 99)) == CUT[0]


def test_a_shorter_turn_on_cut_kv_is_not_kept_though_a_slot_is_free(cache: Cache) -> None:
    """It goes on where the cut one is: in another slot, nobody would know what it stands on."""
    rig = cut_up(cache)
    turn = LEFT[:90] + prompt(20, salt=6)
    assert turn[90] != LEFT[90]
    sink = ask(rig, turn, owner="me")
    assert sink.done.usage.cached_tokens == 90
    assert sink.done.key is None
    assert sink.tokens != expected(rig.path, turn, max_tokens=6, stop_tokens=frozenset())[0]
    assert found_of_cut(cache, turn) == CUT[0]
    stranger = ask(rig, turn)
    exact(rig, stranger, turn)


def test_a_turn_on_cut_kv_that_is_preempted_is_not_kept(cache: Cache) -> None:
    rig = cut_up(cache, slots=2, context_size=256, layout="unified")
    mine = rig.submit((*LEFT, 97), owner="me", max_tokens=100, priority=-1, stop_tokens=frozenset())
    rig.tick(20)
    so_far = (*LEFT, 97, *mine.tokens)
    other = rig.submit(prompt(90, salt=9), max_tokens=100, priority=5, stop_tokens=frozenset())
    while not rig.loop.meter.counters.preempted:
        rig.tick()
    assert rig.sequence(mine).n_preempted == 1
    assert found_of_cut(cache, so_far) == CUT[0]
    rig.drain()
    exact(rig, other, prompt(90, salt=9), 100)
    assert mine.done.usage.completion_tokens == 100


@pytest.mark.parametrize("runs", [True, False])
def test_cut_kv_is_not_kept_at_the_end(folder: Path, runs: bool) -> None:
    with Cache.open(settings(folder)) as cache:
        rig = cut_up(cache)
        if runs:
            rig.submit((*LEFT, 97), owner="me", max_tokens=300, stop_tokens=frozenset())
            rig.tick(60)
        rig.loop.stop()
        rig.loop.shut()
    with Cache.open(settings(folder)) as cache:
        assert found_of_cut(cache, (*LEFT, 97)) == CUT[0]


def test_shutdown_saves_every_live_sequence(folder: Path) -> None:
    cache = Cache.open(settings(folder))
    rig = rig_of(cache)
    rig.submit(LONG, max_tokens=500, stop_tokens=frozenset())
    rig.tick(30)
    rig.loop.stop()
    rig.loop.shut()
    assert cache.stats().saves_shutdown > 0
    cache.close()
    again = Cache.open(settings(folder))
    assert ask(rig_of(again), LONG).done.usage.cached_tokens > 100
    again.close()


def test_admission_says_that_it_came_from_the_cache(cache: Cache) -> None:
    ask(rig_of(cache), LONG)
    seen: list[Any] = []
    rig = rig_of(cache, observe=seen.append)
    ask(rig, LONG)
    (admitted,) = [event for event in seen if isinstance(event, Admitted)]
    assert admitted.source == "stored"
    assert admitted.n_reused > 0


def test_a_restore_that_takes_the_slot_of_its_own_source(cache: Cache) -> None:
    """A prompt could follow a leader, so any slot was good, its source's too; then the cache has still more of it."""
    ask(rig_of(cache), LONG)
    rig = rig_of(cache, slots=2, chunk_tokens=8, prefill_budget=8)
    ask(rig, LONG[:40] + prompt(9, salt=7))
    leader = rig.submit(LONG[:80] + prompt(90, salt=9), max_tokens=3, stop_tokens=frozenset())
    rig.tick(6)
    assert rig.sequence(leader).state is State.PREFILL
    sink = rig.submit(LONG, max_tokens=3, stop_tokens=frozenset())
    rig.drain()
    exact(rig, sink, LONG, 3)
    assert sink.done.usage.cached_tokens >= (len(LONG) - 1) // BLOCK * BLOCK


def test_every_request_is_answered_when_an_admission_fails(cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the fault of ours is: nobody waits for ever."""
    rig = rig_of(cache)
    monkeypatch.setattr(rig.loop.residents, "occupy", lambda _: 1 // 0)
    sinks = [rig.submit(LONG, max_tokens=3), rig.submit(LONG[:60], max_tokens=3)]
    rig.loop.run()
    assert all(isinstance(sink.error, EngineStopped) for sink in sinks)


def test_a_search_that_fails_costs_a_hit_and_no_answer(cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    ask(rig_of(cache), LONG)
    rig = rig_of(cache)
    monkeypatch.setattr(cache, "longest", lambda *_, **__: 1 // 0)
    sink = ask(rig, LONG)
    exact(rig, sink, LONG)
    assert sink.done.usage.cached_tokens == 0


class SlowSearch:
    """A search that takes until it is let go."""

    def __init__(self, cache: Cache, patch: pytest.MonkeyPatch) -> None:
        self.go = threading.Event()
        self._longest = cache.longest
        patch.setattr(cache, "longest", self)

    def __call__(self, *args: Any, **options: Any) -> Any:
        assert self.go.wait(30)
        return self._longest(*args, **options)


@pytest.mark.parametrize("path", KINDS)
@pytest.mark.parametrize("layout", ["unified", "split"])
def test_nobody_waits_for_a_slow_search(cache: Cache, path: str, layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Streams go on meanwhile; what was live is cut back to whole rows once the rest is found."""
    ask(rig_of(cache, path), LONG)
    rig = rig_of(cache, path, layout=layout)
    ask(rig, LONG[:40] + prompt(9, salt=7), cache=True)
    slow = SlowSearch(cache, monkeypatch)
    stream = rig.submit(prompt(5, salt=1), max_tokens=40, stop_tokens=frozenset(), cache=False)
    rig.tick(3)
    late = rig.submit(LONG, max_tokens=3, stop_tokens=frozenset())
    n_before = len(stream.tokens)
    rig.tick(10)
    assert len(stream.tokens) == n_before + 10
    assert rig.sequence(late).state is State.LOADING
    slow.go.set()
    rig.drain()
    exact(rig, late, LONG, 3)
    assert late.done.usage.cached_tokens >= (len(LONG) - 1) // BLOCK * BLOCK
    assert rig.loop.meter.counters.restored >= 1


def test_a_slow_search_for_nothing(cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    """It then goes on with what is live, or follows whoever computes the same."""
    rig = rig_of(cache, slots=4, chunk_tokens=8, prefill_budget=8)
    slow = SlowSearch(cache, monkeypatch)
    prompts = [prompt(150, salt=70), prompt(150, salt=70)[:120] + prompt(20, salt=71), prompt(90, salt=72)]
    sinks = [rig.submit(tokens, max_tokens=3, stop_tokens=frozenset()) for tokens in prompts]
    rig.tick(2)
    slow.go.set()
    await_rows(rig.loop)
    rig.drain()
    for sink, tokens in zip(sinks, prompts, strict=True):
        exact(rig, sink, tokens, 3)
    assert rig.loop.meter.counters.coalesced == 1
    assert sinks[1].done.usage.cached_tokens == 120


def test_what_came_to_be_live_during_a_slow_search_is_shared(cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever computed the same is no leader any more, but has it all."""
    rig = rig_of(cache)
    first = rig.submit(LONG + prompt(5, salt=60), max_tokens=60, stop_tokens=frozenset())
    rig.tick()
    slow = SlowSearch(cache, monkeypatch)
    late = rig.submit(LONG + prompt(5, salt=61), max_tokens=3, stop_tokens=frozenset())
    while not first.tokens:
        rig.tick()
    assert rig.sequence(first).state is State.DECODE
    assert rig.sequence(late).state is State.LOADING
    slow.go.set()
    rig.drain()
    exact(rig, late, LONG + prompt(5, salt=61), 3)
    assert late.done.usage.cached_tokens >= len(LONG)


def test_a_cancel_during_a_slow_search_holds_no_row(cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    ask(rig_of(cache), LONG)
    rig = rig_of(cache)
    slow = SlowSearch(cache, monkeypatch)
    sink = rig.submit(LONG, max_tokens=3, stop_tokens=frozenset())
    rig.tick(2)
    rig.cancel(sink)
    rig.drain()
    assert sink.done.reason is FinishReason.CANCELLED
    slow.go.set()
    rig.loop.shut()
    deadline = time.monotonic() + 10
    while any(row.leases for row in cache.ls()) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not any(row.leases for row in cache.ls())


def test_the_last_token_of_a_restored_prompt_is_no_measure_of_prefill(
    cache: Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[int] = []
    monkeypatch.setattr(cache, "computed", lambda _, n_tokens, __: told.append(n_tokens))
    ask(rig_of(cache), LONG)
    n_told = len(told)
    assert n_told > 0
    assert ask(rig_of(cache), LONG).done.usage.cached_tokens == len(LONG) - 1
    assert len(told) == n_told
