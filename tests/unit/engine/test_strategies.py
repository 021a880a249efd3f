"""No plan exceeds its budget, and nobody starves, whoever wrote the strategy."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvasir.engine import Budget, Plan, PlannedRow, RequestId, SeqView, View
from kvasir.engine.strategies import STARVED_TICKS, STRATEGIES, fault_of, feed_starved, strategy_of
from kvasir.errors import BadOption
from tests.unit.engine.rig import Rig, expected, prompt


@st.composite
def views(draw: st.DrawFn) -> View:
    sequences = []
    for i in range(draw(st.integers(0, 20))):
        decoding = draw(st.booleans())
        n_left = 1 if decoding else draw(st.integers(1, 3000))
        skipped = draw(st.integers(0, 2 * STARVED_TICKS))
        sequences.append(SeqView(RequestId(i), decoding, n_left, draw(st.integers(-2, 2)), skipped))
    return View(tuple(sequences), draw(st.integers(0, 5)))


budgets = st.builds(Budget, n_rows=st.integers(1, 600), n_prefill=st.integers(1, 600))


@pytest.mark.parametrize("name", STRATEGIES)
@settings(deadline=None)
@given(view=views(), budget=budgets)
def test_no_plan_exceeds_its_budget_and_every_plan_runs_something(name: str, view: View, budget: Budget) -> None:
    plan = STRATEGIES[name].plan(view, budget)
    assert fault_of(plan, view, budget) is None
    assert plan.rows or not view.sequences


@pytest.mark.parametrize("name", STRATEGIES)
@settings(deadline=None)
@given(view=views(), budget=budgets)
def test_feeding_the_starved_keeps_the_budget(name: str, view: View, budget: Budget) -> None:
    fed = feed_starved(STRATEGIES[name].plan(view, budget), view, budget)
    assert fault_of(fed, view, budget) is None
    starved = {seq.id for seq in view.sequences if seq.n_skipped >= STARVED_TICKS}
    planned = {row.id for row in fed.rows}
    assert starved <= planned or len(planned & starved) == budget.n_rows


def test_decode_maximal_gives_every_stream_its_row() -> None:
    view = View((SeqView(RequestId(1), False, 500, 0, 0), SeqView(RequestId(2), True, 1, 0, 0)), 0)
    plan = STRATEGIES["DecodeMaximal"].plan(view, Budget(512, 128))
    assert set(plan.rows) == {PlannedRow(RequestId(2), 1), PlannedRow(RequestId(1), 128)}


def test_prefill_priority_gives_prompts_all_they_can_use() -> None:
    view = View((SeqView(RequestId(1), False, 600, 0, 0), SeqView(RequestId(2), True, 1, 0, 0)), 0)
    plan = STRATEGIES["PrefillPriority"].plan(view, Budget(512, 128))
    assert plan.rows == (PlannedRow(RequestId(1), 512),)


def test_balanced_divides_its_half_among_the_prompts() -> None:
    prompts = tuple(SeqView(RequestId(i), False, n, 0, 0) for i, n in ((1, 900), (2, 20), (3, 900)))
    view = View((*prompts, SeqView(RequestId(4), True, 1, 0, 0)), 0)
    plan = STRATEGIES["Balanced"].plan(view, Budget(200, 128))
    assert dict(plan.rows) == {4: 1, 2: 20, 1: 40, 3: 40}


def test_a_strategy_is_found_by_either_spelling_and_a_wrong_name_gets_a_suggestion() -> None:
    assert strategy_of("decode_maximal") is strategy_of("DecodeMaximal")
    with pytest.raises(BadOption, match="Did you mean 'Balanced'"):
        strategy_of("Balance")
    with pytest.raises(BadOption, match="plan"):
        strategy_of(42)


class OneAtATime:
    """A user's strategy: whole prompts, one after the other, and only then streams."""

    def plan(self, view: View, budget: Budget) -> Plan:
        first = min(view.sequences, key=lambda seq: (seq.decoding, seq.id))
        return Plan((PlannedRow(first.id, min(first.n_left, budget.n_rows)),))


def test_a_users_strategy_runs_and_may_not_starve_anybody() -> None:
    rig = Rig(strategy=OneAtATime())
    sinks = [rig.submit(prompt(20, salt=i), max_tokens=30, stop_tokens=frozenset()) for i in range(3)]
    rig.tick(3 * STARVED_TICKS)
    assert all(len(sink.tokens) >= 2 for sink in sinks)
    assert rig.loop.meter.counters.rows_forced > 0
    rig.drain()
    for i, sink in enumerate(sinks):
        made, _ = expected("fake:plain", prompt(20, salt=i), max_tokens=30, stop_tokens=frozenset())
        assert sink.tokens == made


class Broken:
    def __init__(self, how: str) -> None:
        self.how = how

    def plan(self, view: View, budget: Budget) -> Plan:
        first = view.sequences[0]
        if self.how == "raises":
            raise RuntimeError("no idea")
        if self.how == "none":
            return None  # type: ignore[return-value]
        if self.how == "unknown":
            return Plan((PlannedRow(RequestId(999), 1),))
        if self.how == "twice":
            return Plan((PlannedRow(first.id, 1), PlannedRow(first.id, 1)))
        return Plan((PlannedRow(first.id, budget.n_rows + 1),))


@pytest.mark.parametrize("how", ["raises", "none", "unknown", "twice", "too much"])
def test_a_broken_strategy_is_replaced_by_the_default_and_named_once(
    how: str, caplog: pytest.LogCaptureFixture
) -> None:
    rig = Rig(strategy=Broken(how))
    sink = rig.submit(prompt(100), max_tokens=5)
    rig.drain()
    assert sink.tokens == expected("fake:plain", prompt(100), max_tokens=5)[0]
    assert rig.loop.meter.counters.plans_refused > 1
    assert sum("is wrong" in record.message for record in caplog.records) == 1


def test_prefill_priority_does_not_silence_a_stream_for_ever() -> None:
    rig = Rig(strategy="PrefillPriority", context_size=4096, slots=3, batch=8, ubatch=8, chunk_tokens=8)
    stream = rig.submit(prompt(3), max_tokens=50, stop_tokens=frozenset())
    rig.tick()
    rig.submit(prompt(1500), max_tokens=1)
    before = len(stream.tokens)
    rig.tick(4 * STARVED_TICKS)
    assert len(stream.tokens) >= before + 3
    assert rig.loop.meter.counters.rows_forced >= 3
