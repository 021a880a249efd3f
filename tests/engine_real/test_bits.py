"""Bit for bit: where shapes, cells and threads are the same, or V is BF16 and every row runs by itself.

A strategy that runs one token of one sequence a tick gives every token the same batch shape, whatever else is going on.
With one thread and V in BF16 nothing is then left that may round differently, so sharing, waiting, preempting and
cancelling must not show in a single bit. A wrong cell, position or order would.
"""

from __future__ import annotations

from typing import Any

import pytest

from kvasir.engine import Budget, Plan, PlannedRow, View
from tests.engine_real.noise import check_bits, largest_move
from tests.engine_real.rig import Rig, Taken
from tests.engine_real.subject import Subject

# More than another order of the same F32 sums moves a logit by; any wrong cell moves it by 0.05 or more.
ORDER = 1e-3


class OneRow:
    """One token of the sequence that waited longest."""

    def plan(self, view: View, budget: Budget) -> Plan:
        chosen = max(view.sequences, key=lambda seq: (seq.n_skipped, -seq.id))
        return Plan((PlannedRow(chosen.id, 1),))


def exact(subject: Subject, **settings: Any) -> Rig:
    """An engine in which every step is one row."""
    return Rig(subject.model, strategy=OneRow(), context={"type_v": "bf16"}, **settings)


def alone(subject: Subject, tokens: tuple[int, ...], **options: Any) -> Taken:
    with exact(subject, slots=1) as rig:
        return rig.run(tokens, **options)


@pytest.mark.parametrize("threads", [1, 2])
def test_the_same_again_is_the_same_to_the_last_bit(tiny: Subject, layout: str, threads: int) -> None:
    """Default types, the default strategy, many at once: same shapes, cells and threads."""
    runs = []
    for _ in range(2):
        with Rig(tiny.model, layout=layout, threads=threads) as rig:
            sinks = [rig.submit(tiny.prompt(20 + 30 * i, salt=i), max_tokens=6) for i in range(4)]
            rig.drain()
            runs.append(sinks)
    for one, other in zip(*runs, strict=True):
        check_bits(one, other)


def test_the_layout_shows_in_no_bit(tiny: Subject) -> None:
    """One sequence at a time: the streams of the split layout then hold what the unified cells hold."""
    runs = []
    for layout in ("unified", "split"):
        with Rig(tiny.model, layout=layout, context={"type_v": "bf16"}) as rig:
            runs.append([rig.run(tiny.own(i, 60)) for i in range(3)])
    for one, other in zip(*runs, strict=True):
        check_bits(one, other)


def test_other_requests_show_in_no_bit(subject: Subject, layout: str) -> None:
    prompts = [subject.prompt(5 + 7 * i, salt=i) for i in range(8)]
    with exact(subject, layout=layout, slots=8, context_size=2048) as rig:
        sinks = [rig.submit(tokens, max_tokens=8) for tokens in prompts]
        rig.drain()
        assert {len(step) for step in rig.context.steps} == {1}
    for sink, tokens in zip(sinks, prompts, strict=True):
        check_bits(sink, alone(subject, tokens, max_tokens=8))


def test_sharing_shows_in_no_bit(subject: Subject, layout: str) -> None:
    """Coalesced, live and parked, in one run."""
    common = subject.prompt(48, salt=3)
    prompts = [common + subject.own(i, 8) for i in range(4)]
    with exact(subject, layout=layout, slots=6, context_size=2048) as rig:
        rig.run(subject.own(9, 80), max_tokens=1)  # whoever shares from the wrong slot finds this
        sinks = [rig.submit(tokens, max_tokens=8) for tokens in prompts]
        while not sinks[0].tokens:
            rig.tick()
        prompts.append((*prompts[0], sinks[0].tokens[0], *subject.own(5, 8)))
        sinks.append(rig.submit(prompts[-1], max_tokens=8))
        rig.drain()
        prompts.append((*prompts[0], *sinks[0].tokens, *subject.own(6, 8)))
        sinks.append(rig.run(prompts[-1], max_tokens=8))
        counters = rig.counters
        assert min(counters.coalesced, counters.shared_live, counters.shared_parked) > 0
        assert all(sink.done.usage.cached_tokens >= len(common) for sink in sinks[1:])
    for sink, tokens in zip(sinks, prompts, strict=True):
        check_bits(sink, alone(subject, tokens, max_tokens=8))


def preempted(subject: Subject, layout: str) -> list[tuple[Taken, Taken]]:
    """Draw for three requests, of which one loses its slot in prefill and twice in decode; pair each with it alone."""
    prompts = [subject.prompt(30, salt=i) for i in range(3)]
    options = [{"max_tokens": 10, "temperature": 0.9, "seed": i} for i in range(3)]
    with exact(subject, layout=layout, context_size=1024) as rig:
        sinks = [rig.submit(tokens, **each) for tokens, each in zip(prompts, options, strict=True)]
        victim = rig.sequences[sinks[1].id]
        for n_tokens in (0, 3, 7):
            while victim.n_decoded < 10 or victim.n_generated < n_tokens:
                rig.tick()
            rig.loop._preempt(victim)
            rig.tick(2)
        rig.drain()
        assert rig.counters.preempted == 3
        assert rig.counters.rows_again > 0
    return [(sink, alone(subject, tokens, **each)) for sink, tokens, each in zip(sinks, prompts, options, strict=True)]


def test_preemption_shows_in_no_bit_and_in_no_draw(subject: Subject) -> None:
    for got, wanted in preempted(subject, "split"):
        check_bits(got, wanted)


def test_preemption_among_shared_cells_shows_in_their_order_alone(tiny: Subject) -> None:
    """Cells that a preemption frees are filled by others, and attention sums in the order of cells."""
    for got, wanted in preempted(tiny, "unified"):
        assert got.tokens == wanted.tokens
        assert largest_move(got.logits, wanted.logits) <= ORDER


def test_four_draws_of_one_prompt_are_four_requests_to_the_last_bit(subject: Subject, layout: str) -> None:
    tokens = subject.prompt(40, salt=4)
    with exact(subject, layout=layout) as rig:
        sinks = [rig.submit(tokens, max_tokens=12, temperature=0.9, seed=i) for i in range(4)]
        rig.drain()
        assert rig.counters.coalesced == 3
        assert rig.counters.prefill_rows == len(tokens) + 3
    for i, sink in enumerate(sinks):
        check_bits(sink, alone(subject, tokens, max_tokens=12, temperature=0.9, seed=i))


def test_a_cancel_shows_in_no_bit(subject: Subject, layout: str) -> None:
    tokens = subject.prompt(40, salt=2)
    with exact(subject, layout=layout) as rig:
        first = rig.submit(tokens, max_tokens=12)
        other = rig.submit(subject.prompt(30, salt=8), max_tokens=12)
        while len(first.tokens) < 5:
            rig.tick()
        rig.cancel(first)
        rig.tick()
        n_said = len(first.tokens)
        rest = rig.submit(tokens + tuple(first.tokens), max_tokens=12 - n_said)
        rig.drain()
        assert rest.done.usage.cached_tokens == len(tokens) + n_said - 1
    whole = Taken(first.events[:-1] + rest.events, first.logits[:n_said] + rest.logits)
    check_bits(whole, alone(subject, tokens, max_tokens=12))
    check_bits(other, alone(subject, subject.prompt(30, salt=8), max_tokens=12))
