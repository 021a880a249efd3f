"""A prompt that was computed before says its first token at once: from the logits kept beside its KV."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvasir.cache import Cache
from kvasir.engine import Event, offers
from kvasir.engine.events import Admitted, Ended, FirstToken
from kvasir.errors import BadGrammar
from kvasir.types import FinishReason, Sampling
from tests.unit.engine.rig import Collected, Rig, prompt
from tests.unit.engine.test_warm import BLOCK, KINDS, LONG, ask, exact, rig_of, settings, space

OUTPUTS = space(None, 0).outputs


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "kv"


@pytest.fixture
def cache(folder: Path) -> Iterator[Cache]:
    with Cache.open(settings(folder)) as opened:
        yield opened


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits are kept with every prompt; beside the fake's KV, a few bytes a token, they never would be."""
    monkeypatch.setattr(offers, "LOGITS_SHARE", 0)


def until_first(rig: Rig, sink: Collected) -> None:
    for _ in range(500):
        if sink.tokens or sink.ends:
            return
        rig.tick()
    raise AssertionError("no token came")


def again(cache: Cache, path: str = "fake:plain", **options: Any) -> tuple[Rig, Collected]:
    """A fresh engine that was asked the long prompt."""
    rig = rig_of(cache, path)
    return rig, rig.submit(LONG, **({"max_tokens": 6, "stop_tokens": frozenset()} | options))


@pytest.mark.usefixtures("kept")
@pytest.mark.parametrize("path", KINDS)
def test_the_first_token_waits_for_no_decode(folder: Path, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with Cache.open(settings(folder)) as first:
        ask(rig_of(first, path), LONG)
    with Cache.open(settings(folder)) as second:  # all that it has is on disk
        rig, sink = again(second, path)
        n_rows: list[int] = []
        put = sink.put

        def noted(event: Event) -> None:
            n_rows.append(rig.context.n_rows_decoded)
            put(event)

        monkeypatch.setattr(sink, "put", noted)
        rig.drain()
        assert n_rows[0] == 0
        exact(rig, sink, LONG)
        assert sink.done.usage.cached_tokens >= (len(LONG) - 1) // BLOCK * BLOCK
        assert rig.context.n_rows_decoded == len(LONG) - sink.done.usage.cached_tokens + 5
        assert rig.loop.meter.counters.first_tokens_stored == second.stats().hits_logits == 1
        rig.check_idle()


@pytest.mark.usefixtures("kept")
@pytest.mark.parametrize("path", KINDS)
def test_one_token_needs_no_kv(cache: Cache, path: str) -> None:
    said = ask(rig_of(cache, path), LONG, max_tokens=1)
    rig, sink = again(cache, path, max_tokens=1)
    rig.drain()
    assert sink.tokens == said.tokens
    assert sink.done.reason is FinishReason.LENGTH
    assert sink.done.usage.cached_tokens == len(LONG)
    assert rig.context.n_rows_decoded == 0
    assert not any(row.leases for row in cache.ls())
    assert cache.stats().tokens_restored == 0
    # It leaves behind what was there, under the same name: the next turn goes on from it.
    assert sink.done.key == said.done.key is not None
    turn = LONG + tuple(sink.tokens) + prompt(20, salt=8)
    late, free = (ask(rig_of(cache, path), turn, parent_key=key) for key in (sink.done.key, None))
    exact(rig, late, turn)
    assert late.done.usage.cached_tokens >= len(LONG) - 1
    assert free.tokens == late.tokens


@pytest.mark.usefixtures("kept")
@pytest.mark.parametrize("options", [{"temperature": 0.9, "seed": 7}, {"sampling": Sampling(logprobs=3)}])
def test_sampled_as_it_would_have_been(cache: Cache, options: dict[str, Any]) -> None:
    ask(rig_of(cache), LONG)
    plain = ask(rig_of(cache), LONG, cache=False, **options)
    rig, sink = again(cache, **options)
    rig.drain()
    assert sink.tokens == plain.tokens
    assert [repr(event) for event in sink.events[:-1]] == [repr(event) for event in plain.events[:-1]]
    assert rig.loop.meter.counters.first_tokens_stored == 1


@pytest.mark.usefixtures("kept")
def test_a_first_token_that_ends_it(cache: Cache) -> None:
    said = ask(rig_of(cache), LONG)
    rig, sink = again(cache, stop_tokens=frozenset(said.tokens[:1]))
    rig.drain()
    assert sink.tokens == []
    assert sink.done.reason is FinishReason.STOP
    assert sink.done.usage.cached_tokens == len(LONG)
    assert rig.context.n_rows_decoded == 0
    rig.check_idle()


@pytest.mark.usefixtures("kept")
def test_a_grammar_that_admits_nothing_fails_that_request_alone(cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    ask(rig_of(cache), LONG)
    rig, sink = again(cache)
    sampler = rig.loop.mailbox._letters[-1].sequence.sampler  # type: ignore[union-attr]

    def choose(_: object) -> int:
        from kvasir.native.fake_sampler import GrammarDead

        raise GrammarDead("the grammar admits no token here")

    monkeypatch.setattr(sampler, "choose", choose)
    other = rig.submit(LONG, max_tokens=6, stop_tokens=frozenset())
    rig.drain()
    assert isinstance(sink.error, BadGrammar)
    exact(rig, other, LONG)


@pytest.mark.usefixtures("kept")
@pytest.mark.parametrize("part", ["logits", "kv"])
def test_what_does_not_verify_is_computed(folder: Path, part: str) -> None:
    with Cache.open(settings(folder)) as first:
        ask(rig_of(first), LONG)
    rows = [path for path in folder.rglob("*.row") if (OUTPUTS.root.hex() in str(path)) == (part == "logits")]
    assert rows
    for path in rows:
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)
    with Cache.open(settings(folder, ram_bytes=0)) as second:
        rig, sink = again(second)
        rig.drain()
        exact(rig, sink, LONG)
        assert second.stats().corrupt_files > 0
        # With bad KV behind a good first token, that token stands and everything else is computed.
        assert rig.loop.meter.counters.first_tokens_stored == (part == "kv")
        assert sink.done.usage.cached_tokens == (0 if part == "kv" else len(LONG) - 1)


@pytest.mark.usefixtures("kept")
def test_a_cancel_between_first_token_and_rows(cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    ask(rig_of(cache), LONG)
    rig = rig_of(cache)
    assert rig.loop.warm is not None
    monkeypatch.setattr(rig.loop.warm, "advance", lambda seq, *, most_tokens: None)
    sink = rig.submit(LONG, max_tokens=6, stop_tokens=frozenset())
    until_first(rig, sink)
    rig.cancel(sink)
    rig.drain()
    assert sink.done.reason is FinishReason.CANCELLED
    assert len(sink.tokens) == 1
    assert not any(row.leases for row in cache.ls())
    rig.check_idle()


@pytest.mark.parametrize("path", KINDS)
def test_they_are_kept_where_they_are_small_or_wanted_again(cache: Cache, path: str) -> None:
    ask(rig_of(cache, path), LONG)
    assert not cache.has(OUTPUTS.key(LONG))  # 1 KB beside a few bytes a token
    ask(rig_of(cache, path), LONG[:-5] + prompt(5, salt=9))
    assert not cache.has(OUTPUTS.key(LONG[:-5] + prompt(5, salt=9)))  # another end came once, though most was found
    second = ask(rig_of(cache, path), LONG)
    assert second.done.usage.cached_tokens >= (len(LONG) - 1) // BLOCK * BLOCK
    assert cache.stats().hits_logits == 0
    assert cache.has(OUTPUTS.key(LONG))  # what came twice may come again
    third = ask(rig_of(cache, path), LONG)
    assert cache.stats().hits_logits == 1
    assert third.tokens == second.tokens


def test_a_prompt_that_was_read_in_advance_came_only_once(cache: Cache) -> None:
    rig = rig_of(cache)
    ask(rig, LONG[:-1], max_tokens=0, sampler=None)
    assert ask(rig, LONG).done.usage.cached_tokens == len(LONG) - 1
    assert not cache.has(OUTPUTS.key(LONG))


@pytest.mark.usefixtures("kept")
def test_a_prompt_that_is_only_read_keeps_them_and_takes_none(cache: Cache) -> None:
    ask(rig_of(cache), LONG, max_tokens=0)
    assert cache.has(OUTPUTS.key(LONG))
    assert ask(rig_of(cache), LONG, max_tokens=0).done.usage.cached_tokens == len(LONG) - 1
    assert cache.stats().hits_logits == 0
    rig, sink = again(cache)
    rig.drain()
    exact(rig, sink, LONG)
    assert cache.stats().hits_logits == 1


@pytest.mark.usefixtures("kept")
def test_nobody_elses_and_nobody_without_a_cache(cache: Cache) -> None:
    ask(rig_of(cache), LONG, cache=False)
    ask(rig_of(cache), LONG, scope="a")
    assert ask(rig_of(cache), LONG, scope="b").done.usage.cached_tokens == 0
    ask(rig_of(cache), LONG, scope="a", cache=False)
    assert cache.stats().hits_logits == 0
    assert ask(rig_of(cache), LONG, scope="a").done.usage.cached_tokens == len(LONG)
    assert cache.stats().hits_logits == 1


@pytest.mark.usefixtures("kept")
def test_cleared_with_their_space(cache: Cache) -> None:
    ask(rig_of(cache), LONG)
    assert cache.flush(10)
    cache.clear(space(None, 0))
    assert cache.ls() == []


@pytest.mark.usefixtures("kept")
def test_a_tier_slower_than_computing_is_not_asked(folder: Path) -> None:
    with Cache.open(settings(folder)) as first:
        ask(rig_of(first), LONG)
    with Cache.open(settings(folder, ram_bytes=0)) as second:
        second.computed(space(None, 0), 1000, 1e-6)
        second._store.cost.read("disk", 1 << 20, 1000.0)
        rig, sink = again(second)
        rig.drain()
        exact(rig, sink, LONG)
        assert sink.done.usage.cached_tokens == second.stats().hits_logits == 0


@pytest.mark.usefixtures("kept")
def test_preempted_before_its_rows_came(cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    """It goes on with the token it has said."""
    ask(rig_of(cache), LONG)
    rig = rig_of(cache)
    assert rig.loop.warm is not None
    with monkeypatch.context() as stalled:
        stalled.setattr(rig.loop.warm, "advance", lambda seq, *, most_tokens: None)
        sink = rig.submit(LONG, max_tokens=6, stop_tokens=frozenset())
        until_first(rig, sink)
    rig.loop._preempt(rig.sequence(sink))
    rig.drain()
    exact(rig, sink, LONG)
    assert rig.loop.meter.counters.preempted == rig.loop.meter.counters.first_tokens_stored == 1
    assert sink.done.usage.cached_tokens == len(LONG)
    rig.check_idle()


@pytest.mark.usefixtures("kept")
@pytest.mark.parametrize("path", KINDS)
@pytest.mark.parametrize("n_requests", [3, 7])
def test_followers_of_one_that_needed_no_kv_find_their_own(cache: Cache, path: str, n_requests: int) -> None:
    """Nobody computes what is stored because the one before it was content with one token."""
    ask(rig_of(cache, path), LONG)
    rig = rig_of(cache, path)
    sinks = [rig.submit(LONG, max_tokens=1, stop_tokens=frozenset()) for _ in range(n_requests)]
    longer = LONG + prompt(12, salt=8)
    sinks.append(rig.submit(longer, max_tokens=1, stop_tokens=frozenset()))
    rig.drain()
    for sink, tokens in zip(sinks, [*[LONG] * n_requests, longer], strict=True):
        exact(rig, sink, tokens, 1)
        assert sink.done.usage.cached_tokens >= len(LONG) // BLOCK * BLOCK
    assert rig.context.n_rows_decoded < 2 * BLOCK + len(longer) - len(LONG)
    rig.check_idle()


@pytest.mark.usefixtures("kept")
@pytest.mark.parametrize("max_tokens", [1, 6])
def test_its_events_come_in_order(cache: Cache, max_tokens: int) -> None:
    ask(rig_of(cache), LONG)
    seen: list[Any] = []
    rig = rig_of(cache, observe=seen.append)
    ask(rig, LONG, max_tokens=max_tokens)
    told: list[Any] = [event for event in seen if isinstance(event, Admitted | FirstToken | Ended)]
    assert [type(event) for event in told] == [Admitted, FirstToken, Ended]
    assert (told[0].source, told[0].n_reused) == ("stored", len(LONG))
    assert told[2].n_cached == len(LONG)


@pytest.mark.usefixtures("kept")
def test_logits_of_another_vocabulary_are_no_logits(cache: Cache) -> None:
    """A fingerprint that does not look at the whole file may lie."""
    cache.offer_logits(space(None, 0), LONG, bytes(400))
    ask(rig_of(cache), LONG)
    rig, sink = again(cache)
    rig.drain()
    exact(rig, sink, LONG)
    assert sink.done.usage.cached_tokens == len(LONG) - 1
    assert cache.stats().hits_logits == 0


@pytest.mark.usefixtures("kept")
def test_a_small_read_is_no_measure_of_a_tier(folder: Path) -> None:
    """Opening a file takes most of the time of so short a read; the rows behind it may come much faster."""
    with Cache.open(settings(folder)) as first:
        ask(rig_of(first), LONG)
    with Cache.open(settings(folder)) as second:
        assert second.logits(space(None, 0), LONG) is not None
        assert second.logits(space(None, 0), LONG[:-1]) is None
        assert dict(second._store.cost.read_speeds()) == {}


@pytest.mark.usefixtures("kept")
def test_where_all_else_is_gone_they_are_of_no_use_and_not_counted(cache: Cache) -> None:
    ask(rig_of(cache), LONG)
    assert cache.flush(10)
    for row in cache.ls()[::-1]:
        if row.holds == "kv":
            found = cache._store.index.get(bytes.fromhex(row.key))  # type: ignore[arg-type]
            assert found is not None
            for tier in found.tiers:
                cache._store.forget(found.name, tier)
    assert [row.holds for row in cache.ls()] == ["logits"]
    rig, sink = again(cache)
    rig.drain()
    exact(rig, sink, LONG)
    assert (
        sink.done.usage.cached_tokens == cache.stats().hits_logits == rig.loop.meter.counters.first_tokens_stored == 0
    )
