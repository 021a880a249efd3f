"""However a request was scheduled, it gets the tokens it would have got alone, up to llama.cpp's own rounding."""

from __future__ import annotations

import numpy as np
import pytest

from kvasir.engine.sequence import State
from kvasir.types import FinishReason
from tests.engine_real.noise import check_drawn
from tests.engine_real.rig import Rig, Taken
from tests.engine_real.trial import Bench, Trial
from tests.models_e2e.table import chosen


def test_noise_is_far_below_what_a_fault_does(bench: Bench) -> None:
    """Else "equal" would be an empty word: a prompt of which half is another's must show; in BF16, one wrong token."""
    subject, tokens = bench.subject, bench.subject.prompt(100, salt=3)
    if not subject.is_tiny and not chosen()[0].makes_sense:
        pytest.skip("a model of no known sense may not care for one word")
    wrong = [subject.prompt(50, salt=9) + tokens[50:]]
    if bench.type_v == "bf16":
        wrong += [(*tokens[:at], subject.own(3)[0], *tokens[at + 1 :]) for at in (2, 40, 90)]
    for other in wrong:
        moved = moved_until_parted(bench.alone(tokens), bench.alone(other))
        assert moved > bench.noise.in_order.allowed, bench.noise
        assert moved > 0.05


def moved_until_parted(one: Taken, other: Taken) -> float:
    n_same = next((i for i, (a, b) in enumerate(zip(one.tokens, other.tokens, strict=True)) if a != b), len(one.tokens))
    pairs = zip(one.logits[: n_same + 1], other.logits[: n_same + 1], strict=True)
    return max(float(np.abs(a - b).max()) for a, b in pairs)


@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_a_chunked_prompt_equals_an_unchunked_one(trial: Trial, chunk: int) -> None:
    prompts = [trial.subject.prompt(100, salt=i) for i in range(3)]
    with trial.rig(chunk_tokens=chunk, prefill_budget=chunk) as rig:
        sinks = [rig.submit(tokens) for tokens in prompts]
        rig.drain()
        assert max(n for step in rig.context.steps for _, n in step) <= chunk
    trial.check(sinks, prompts)


def test_a_request_alone_equals_the_same_among_15_others(trial: Trial) -> None:
    prompts = [trial.subject.prompt(5 + 11 * i, salt=i) for i in range(16)]
    with trial.rig(slots=16, context_size=4096) as rig:
        sinks = [rig.submit(tokens, max_tokens=24) for tokens in prompts]
        rig.drain()
        assert any(len(step) == 16 for step in rig.context.steps)
    trial.check(sinks, prompts)


# Shared prefixes

BYSTANDER = 140


def add_bystander(rig: Rig, trial: Trial) -> None:
    """Leave a longer sequence of other tokens in memory: whoever shares from the wrong slot finds it."""
    rig.run(trial.subject.own(9, BYSTANDER), max_tokens=1)


def test_eight_that_wait_for_one_prefix_equal_eight_that_compute_it(trial: Trial) -> None:
    common = trial.subject.prompt(96, salt=3)
    prompts = [common + trial.subject.own(i) for i in range(8)]
    with trial.rig(slots=9, context_size=9 * 256) as rig:
        add_bystander(rig, trial)
        sinks = [rig.submit(tokens, max_tokens=12) for tokens in prompts]
        rig.drain()
        assert rig.counters.coalesced == 7
        assert rig.counters.prefill_rows == BYSTANDER + len(common) + 8 * 24
        assert [sink.done.usage.cached_tokens for sink in sinks] == [0] + 7 * [len(common)]
    trial.check(sinks, prompts)


def test_a_prefix_of_a_running_sequence_equals_a_computed_one(trial: Trial) -> None:
    common = trial.subject.prompt(96, salt=3)
    with trial.rig() as rig:
        add_bystander(rig, trial)
        first = rig.submit(common, max_tokens=32)
        rig.tick(12)
        turn = common + tuple(first.tokens[:6]) + trial.subject.own(1)
        second = rig.submit(turn)
        rig.drain()
        assert rig.counters.shared_live > 0
        assert second.done.usage.cached_tokens >= len(common) + 6
    trial.check([first, second], [common, turn])


def test_a_parked_sequence_continued_or_branched_equals_a_computed_one(trial: Trial) -> None:
    common = trial.subject.prompt(96, salt=3)
    with trial.rig() as rig:
        add_bystander(rig, trial)
        first = rig.run(common)
        turn = common + tuple(first.tokens) + trial.subject.own(2)
        branch = common[:80] + trial.subject.own(5)
        second = rig.run(turn)
        third = rig.run(branch)
        again = rig.run(turn)
        assert second.done.usage.cached_tokens >= len(common) + 15  # the last token of a turn never ran
        assert third.done.usage.cached_tokens >= 80
        assert again.done.usage.cached_tokens == len(turn) - 1
        assert rig.counters.shared_parked == 3
    trial.check([first, second, third, again], [common, turn, branch, turn])


# Lost and found again


def test_a_request_preempted_again_and_again_equals_an_uninterrupted_one(trial: Trial) -> None:
    """In prefill, in decode, beside others: by force, because split slots never take cells from one another."""
    prompts = [trial.subject.prompt(70, salt=i) for i in range(3)]
    with trial.rig(chunk_tokens=32, prefill_budget=32) as rig:
        sinks = [rig.submit(tokens) for tokens in prompts]
        victim = rig.sequences[sinks[1].id]
        met: set[State] = set()
        while rig.tick():
            if (
                victim.slot is not None
                and victim.n_decoded
                and victim.n_preempted < 4
                and victim.state is not State.DONE
            ):
                if victim.state in met and victim.n_generated < 3 * victim.n_preempted:
                    continue
                met.add(victim.state)
                rig.loop._preempt(victim)
        rig.check_idle()
        assert {State.PREFILL, State.DECODE} <= met
        assert rig.counters.preempted == 4
        assert rig.counters.rows_again > 0
    trial.check(sinks, prompts, holes=True)


def test_requests_that_fight_for_cells_equal_those_that_have_enough(bench: Bench) -> None:
    trial = Trial(bench, "unified")
    prompts = [trial.subject.prompt(50, salt=30 + i) for i in range(4)]
    with trial.rig(context_size=256) as rig:
        sinks = [rig.submit(tokens, max_tokens=60) for tokens in prompts]
        rig.drain()
        assert rig.counters.preempted > 0
        assert rig.counters.rows_again > 0
    trial.check(sinks, prompts, holes=True)


def test_a_request_that_took_the_place_of_a_parked_one_is_as_if_alone(trial: Trial) -> None:
    """Unified, the cells run out; split, the slots."""
    prompts = [trial.subject.own(i, 70) for i in range(3)]
    late = trial.subject.own(3, 180)
    cells = 256 if trial.layout == "unified" else 1024
    with trial.rig(slots=3, context_size=cells) as rig:
        sinks = [rig.run(tokens, max_tokens=4) for tokens in prompts]
        sinks.append(rig.run(late))
        assert rig.counters.evicted > 0
        assert rig.counters.preempted == 0
    trial.check(sinks, [*prompts, late], holes=True)


def test_a_cancelled_stream_goes_on_as_if_it_had_not_been(trial: Trial) -> None:
    tokens = trial.subject.prompt(96, salt=3)
    with trial.rig() as rig:
        first = rig.submit(tokens, max_tokens=32)
        other = rig.submit(trial.subject.prompt(40, salt=8), max_tokens=32)
        while len(first.tokens) < 7:
            rig.tick()
        rig.cancel(first)
        rig.tick()
        assert first.done.reason is FinishReason.CANCELLED
        n_said = len(first.tokens)
        rest = rig.submit(tokens + tuple(first.tokens), max_tokens=32 - n_said)
        rig.drain()
        assert rest.done.usage.cached_tokens == len(tokens) + n_said - 1
        assert rig.counters.shared_parked > 0
    whole = Taken(first.events[:-1] + rest.events, first.logits[:n_said] + rest.logits)
    trial.check([whole, other], [tokens, trial.subject.prompt(40, salt=8)])


def test_a_cancelled_prefill_stays_usable_and_is_not_lost(trial: Trial) -> None:
    tokens = trial.subject.prompt(96, salt=3)
    with trial.rig(chunk_tokens=16) as rig:
        first = rig.submit(tokens)
        rig.tick(2)
        rig.cancel(first)
        rig.tick()
        assert first.done.usage.completion_tokens == 0
        second = rig.run(tokens)
        assert second.done.usage.cached_tokens == 32
    trial.check([second], [tokens])


def test_four_draws_of_one_prompt_equal_four_requests(trial: Trial) -> None:
    tokens = trial.subject.prompt(60, salt=4)
    with trial.rig() as rig:
        sinks = [rig.submit(tokens, seed=i, temperature=0.8) for i in range(4)]
        rig.drain()
        assert rig.counters.coalesced == 3
        assert rig.counters.prefill_rows == len(tokens) + 3
    assert len({tuple(sink.tokens) for sink in sinks}) == 4
    for i, sink in enumerate(sinks):
        trial.check([sink], [tokens], how=check_drawn, seed=i, temperature=0.8)


def test_age_brings_a_low_priority_to_the_front_and_changes_nothing_else(trial: Trial) -> None:
    low = trial.subject.prompt(30, salt=9)
    with trial.rig(slots=1, aging_s=0.1) as rig:
        rig.submit(trial.subject.prompt(20), max_tokens=8, priority=2)
        patient = rig.submit(low, max_tokens=8, priority=0)
        others = []
        for i in range(8):
            others.append(rig.submit(trial.subject.prompt(20, salt=i), max_tokens=8, priority=2))
            rig.tick(8)
        rig.drain()
        assert rig.counters.aged > 0
    assert patient.id < others[0].id
    trial.check([patient], [low])
