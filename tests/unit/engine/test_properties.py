"""Random arrivals, cancels, sizes, failures and memories: every invariant holds after every tick."""

from __future__ import annotations

import random
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvasir.cache import Cache, CacheSettings, SaveRules
from kvasir.engine import Binding, Failed, offers
from kvasir.errors import ContextFull, DeadlineExceeded, ModelError, QueueFull
from kvasir.types import FinishReason
from tests.unit.engine.rig import Collected, Rig, expected, prompt
from tests.unit.engine.test_warm import space

rigs = st.fixed_dictionaries(
    {
        "path": st.sampled_from(["fake:plain", "fake:window", "fake:recurrent", "fake:hybrid"]),
        "layout": st.sampled_from(["unified", "split"]),
        "slots": st.integers(1, 6),
        "context_size": st.integers(60, 400),
        "batch": st.sampled_from([8, 16, 64]),
        "chunk_tokens": st.integers(1, 64),
        "prefill_budget": st.integers(1, 16),
        "max_queue": st.integers(0, 8),
        "strategy": st.sampled_from(["DecodeMaximal", "PrefillPriority", "Balanced"]),
        "aging_s": st.sampled_from([0.02, 5.0]),
    }
)
arrivals = st.fixed_dictionaries(
    {
        "n_prompt": st.integers(1, 60),
        "max_tokens": st.integers(1, 30),
        "priority": st.integers(-1, 2),
        "deadline_s": st.none() | st.floats(0.0, 0.5),
        "salt": st.integers(0, 3),
        "scope": st.sampled_from([None, "a"]),
        "cache": st.sampled_from([True, True, True, False]),
        "owner": st.sampled_from([None, None, "me"]),
    }
)
acts = st.one_of(
    st.tuples(st.just("submit"), arrivals),
    st.tuples(st.just("read"), arrivals),
    st.tuples(st.just("shift"), st.tuples(st.integers(0, 5), st.integers(0, 40), st.integers(1, 20))),
    st.tuples(st.just("resume"), st.tuples(st.integers(0, 5), st.integers(1, 60), arrivals)),
    st.tuples(st.just("cancel"), st.integers(0, 30)),
    st.tuples(st.just("tick"), st.integers(1, 6)),
    st.tuples(st.just("fail"), st.sampled_from(["no_room", "failed", "bad_batch", "aborted"])),
)


@settings(max_examples=200, deadline=None)
@given(options=rigs, script=st.lists(acts, max_size=30))
def test_whatever_happens_everybody_is_answered_once_and_exactly(
    options: dict[str, Any], script: list[tuple[str, Any]]
) -> None:
    run(Rig(ubatch=options["batch"], **options), script)


@settings(max_examples=150, deadline=None)
@given(options=rigs, script=st.lists(acts, max_size=30), ram_bytes=st.sampled_from([0, 3000, 1 << 20]))
def test_the_same_with_a_cache(options: dict[str, Any], script: list[tuple[str, Any]], ram_bytes: int) -> None:
    """Rows and logits come and go; whatever is restored, the answers are those of a run without it."""
    rules = SaveRules(
        min_tokens=2, cold_min_tokens=2, continued_interval=8, boundary_trim_tokens=1, boundary_align_tokens=8
    )
    with (
        pytest.MonkeyPatch.context() as patch,
        tempfile.TemporaryDirectory() as folder,
        Cache.open(CacheSettings(ram_bytes=ram_bytes, disk_dir=Path(folder), block_tokens=8)) as cache,
    ):
        patch.setattr(offers, "LOGITS_SHARE", 0)
        rig = Rig(ubatch=options["batch"], cache=Binding(cache, rules, space), **options)
        run(rig, script)
        rig.loop.shut()
        assert not any(row.leases for row in cache.ls())
        # A second engine finds what the first one left, and takes it.
        run(Rig(cache=Binding(cache, rules, space), path=options["path"]), script)


def run(rig: Rig, script: list[tuple[str, Any]]) -> None:
    """Play a script and see that everybody got what a request alone would have got."""
    wanted: list[tuple[Collected, dict[str, Any]]] = []
    for act, value in script:
        play(rig, act, value, wanted)
    rig.context.fail_next("no_room")
    rig.drain()
    rig.check_idle()
    for sink, arrival in wanted:
        if arrival["owner"] is None or not rig.loop.meter.counters.shifted:  # cut KV stands for another text
            check_answer(rig, sink, arrival)
    assert rig.loop.stats().rows_decoded == rig.context.n_rows_decoded


def play(rig: Rig, act: str, value: Any, wanted: list[tuple[Collected, dict[str, Any]]]) -> None:
    limit = rig.loop.scheduler.limits.n_seq_tokens
    if act == "resume" and rig.loop.residents.parked:
        at, n_kept, arrival = value
        parked = rig.loop.residents.parked[at % len(rig.loop.residents.parked)]
        tokens = (*parked.tokens[:n_kept], *prompt(arrival["n_prompt"] % 8 + 1, salt=arrival["salt"]))[:limit]
        asked = {name: arrival[name] for name in arrival if name not in ("n_prompt", "salt")}
        with suppress(QueueFull):
            wanted.append((rig.submit(tokens, **asked), {"tokens": tokens, **asked}))
    elif act == "submit":
        arrival = dict(value)
        tokens = prompt(min(arrival.pop("n_prompt"), limit), salt=arrival.pop("salt"))
        try:
            wanted.append((rig.submit(tokens, **arrival), {"tokens": tokens, **arrival}))
        except QueueFull:
            assert rig.loop.gate.n_open == rig.settings.slots + rig.settings.max_queue
    elif act == "read":
        arrival = {**value, "max_tokens": 0, "sampler": None}
        tokens = prompt(min(arrival.pop("n_prompt"), limit), salt=arrival.pop("salt"))
        with suppress(QueueFull):
            rig.submit(tokens, **arrival)
    elif act == "shift" and rig.loop.residents.parked:
        at, start, n_tokens = value
        resident = rig.loop.residents.parked[at % len(rig.loop.residents.parked)]
        end = min(start + n_tokens, resident.n_live)
        if start < end:
            owner = resident.editor or "me"
            rig.loop.shift(owner, resident.tokens[: resident.n_live], start, end, scope=resident.scope)
    elif act == "cancel" and rig.sinks:
        rig.cancel(rig.sinks[value % len(rig.sinks)])
    elif act == "tick":
        rig.tick(value)
    elif act == "fail":
        rig.context.fail_next(value)


def check_answer(rig: Rig, sink: Collected, arrival: dict[str, Any]) -> None:
    """What came is what the request alone would have got, up to where it ended."""
    (end,) = sink.ends
    made, stop = expected(rig.path, arrival["tokens"], max_tokens=arrival["max_tokens"])
    assert sink.tokens == made[: len(sink.tokens)]
    if isinstance(end, Failed):
        # A lone row of one token cannot be halved, so an injected failure may end it.
        late = isinstance(end.error, DeadlineExceeded) and arrival["deadline_s"] is not None
        assert late or (isinstance(end.error, ContextFull | ModelError) and rig.loop.runner.n_rows_lost == 0)
        return
    assert end.usage.completion_tokens == len(sink.tokens)
    if end.reason is FinishReason.STOP:
        assert (sink.tokens, end.stop_token) == (made, stop)
    elif end.reason is FinishReason.LENGTH:
        full = len(arrival["tokens"]) + len(sink.tokens) > rig.loop.scheduler.limits.n_seq_tokens
        assert len(sink.tokens) == arrival["max_tokens"] or full


def test_a_long_random_run_meets_every_kind_of_end() -> None:
    """The same on a fixed seed, so that what the property is about is known to have happened."""
    dice = random.Random(7)
    rig = Rig("fake:plain?eog_every=16", slots=3, context_size=200, batch=16, ubatch=16, prefill_budget=4, aging_s=0.05)
    wanted: list[tuple[Collected, dict[str, Any]]] = []
    for _ in range(400):
        arrival = {
            "n_prompt": dice.randint(1, 60), "max_tokens": dice.randint(1, 30), "priority": dice.randint(0, 1),
            "deadline_s": dice.choice([None, None, 1.0]), "salt": dice.randint(0, 50), "owner": None,
        }  # fmt: skip
        play(rig, "submit", arrival, wanted)
        play(rig, "tick", dice.randint(0, 8), wanted)
        if dice.random() < 0.2:
            play(rig, "cancel", len(rig.sinks) - dice.randint(1, 3), wanted)
        if dice.random() < 0.05:
            play(rig, "fail", "no_room", wanted)
    rig.drain()
    rig.check_idle()
    for sink, arrival in wanted:
        check_answer(rig, sink, arrival)
    counters = rig.loop.meter.counters
    assert all(counters.ended[how] > 0 for how in ("stop", "length", "cancelled", "DeadlineExceeded"))
    assert counters.retries > 0
    assert counters.aged > 0


def test_a_long_random_run_over_few_cells_shares_coalesces_evicts_and_preempts() -> None:
    dice = random.Random(11)
    rig = Rig(slots=5, context_size=160, batch=16, ubatch=16, prefill_budget=6, max_queue=64)
    wanted: list[tuple[Collected, dict[str, Any]]] = []
    for _ in range(300):
        arrival = {
            "n_prompt": dice.choice([20, 50, 60]), "max_tokens": dice.randint(1, 60), "priority": dice.randint(0, 1),
            "deadline_s": None, "salt": dice.randint(0, 4), "scope": dice.choice([None, "a"]),
        }  # fmt: skip
        play(rig, "submit", arrival, wanted)
        play(rig, "tick", dice.randint(0, 6), wanted)
        if dice.random() < 0.1:
            play(rig, "cancel", len(rig.sinks) - dice.randint(1, 3), wanted)
    rig.drain()
    for sink, arrival in wanted:
        check_answer(rig, sink, arrival)
    counters = rig.loop.meter.counters
    for name in ("shared_live", "shared_parked", "coalesced", "parked", "evicted", "preempted", "rows_again"):
        assert getattr(counters, name) > 0, name
    check_rows(rig)
    rig.check_idle()


def check_rows(rig: Rig) -> None:
    """Every row the core decoded is in the books."""
    events = rig.loop.stats().counters
    assert events.prefill_rows + events.decode_rows == rig.context.n_rows_decoded
    assert rig.loop.runner.n_rows == rig.context.n_rows_decoded - rig.loop.runner.n_rows_lost
