"""Windows, recurrent states and hybrids on real llama.cpp: exact or cold, never approximate."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engine_real.subject import Subject
from tests.engine_real.trial import Bench, Trial


def test_turn_after_turn(odd_trial: Trial) -> None:
    """Each turn continues the parked one: that every kind of memory can do."""
    tokens = odd_trial.subject.prompt(70, salt=3)
    sinks, prompts = [], []
    with odd_trial.rig() as rig:
        for i in range(4):
            prompts.append(tokens)
            sinks.append(rig.run(tokens, max_tokens=12))
            tokens += (*sinks[-1].tokens, *odd_trial.subject.own(i, 20))
        assert rig.counters.shared_parked == 3
        for before, sink in zip(prompts, sinks[1:], strict=False):
            assert sink.done.usage.cached_tokens == len(before) + 11  # the last token of a turn never ran
    odd_trial.check(sinks, prompts)


def test_branches_of_a_conversation(odd_trial: Trial) -> None:
    common = odd_trial.subject.prompt(96, salt=3)
    with odd_trial.rig() as rig:
        first = rig.run(common)
        prompts = [common, common[:50] + odd_trial.subject.own(3), common + odd_trial.subject.own(4), common]
        sinks = [first, *(rig.run(tokens) for tokens in prompts[1:])]
        reused = [sink.done.usage.cached_tokens for sink in sinks]
        if odd_trial.subject.name == "gemma3":  # its window is kept whole, so it can be cut anywhere
            assert reused == [0, 50, 96, 95]
        else:  # a state holds all it has read, or nothing
            assert reused == [0, 0, 0, 0]
    odd_trial.check(sinks, prompts)


def test_many_at_once_with_a_common_prefix(odd_trial: Trial) -> None:
    common = odd_trial.subject.prompt(80, salt=3)
    prompts = [common + odd_trial.subject.own(i) for i in range(6)]
    with odd_trial.rig(slots=4, context_size=2048) as rig:
        sinks = [rig.submit(tokens) for tokens in prompts]
        rig.drain()
        assert any(len(step) == 4 for step in rig.context.steps)
    odd_trial.check(sinks, prompts)


def test_cancelled_and_preempted_ones_go_on_exactly(odd_trial: Trial) -> None:
    prompts = [odd_trial.subject.prompt(60, salt=i) for i in range(3)]
    with odd_trial.rig(chunk_tokens=32, prefill_budget=32) as rig:
        sinks = [rig.submit(tokens) for tokens in prompts]
        while len(sinks[1].tokens) < 4 or len(sinks[2].tokens) < 4:
            rig.tick()
        rig.loop._preempt(rig.sequences[sinks[1].id])
        rig.cancel(sinks[2])
        rig.drain()
        again = rig.run(prompts[2] + tuple(sinks[2].tokens), max_tokens=8)
        assert again.done.usage.cached_tokens == 60 + len(sinks[2].tokens) - 1
        assert rig.counters.preempted == 1
        assert rig.counters.rows_again > 0
    odd_trial.check([*sinks, again], [*prompts, prompts[2] + tuple(sinks[2].tokens)], holes=True)


@pytest.fixture(scope="session")
def window_bench(tiny_gemma3: Path, type_v: str) -> Bench:
    return Bench.of(Subject("gemma3", tiny_gemma3), type_v)


def test_a_window_that_has_slid_on_is_never_taken_for_whole(window_bench: Bench, layout: str) -> None:
    """With swa_full=False cells behind the window are reused: a branch back there must run cold."""
    trial = Trial(window_bench, layout)
    common = trial.subject.prompt(500, salt=3)
    prompts = [common, common[:60] + trial.subject.own(3), common + trial.subject.own(4)]
    with trial.rig(context={"swa_full": False}, context_size=4096, batch=64, ubatch=64) as rig:
        sinks = [rig.run(tokens) for tokens in prompts]
        assert rig.counters.shares_refused > 0
        assert sinks[1].done.usage.cached_tokens == 0
        together = [rig.submit(tokens) for tokens in prompts]
        rig.drain()
    trial.check(sinks + together, prompts * 2)
