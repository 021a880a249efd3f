"""The guide to strategies does what it says: its code is run as it stands, in 20 lines, and an engine runs on it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings

from kvasir.engine import Budget, Strategy, View
from kvasir.engine.strategies import fault_of
from tests.unit.engine.rig import Rig, expected, prompt
from tests.unit.engine.test_strategies import budgets, views

GUIDE = Path(__file__).parents[3] / "docs" / "strategies.md"
SNIPPETS = re.findall(r"^```python\n(.*?)^```", GUIDE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


def names_of_the_guide() -> dict[str, Any]:
    """Run every snippet, one after the other, as a reader would."""
    names: dict[str, Any] = {}
    for snippet in SNIPPETS:
        exec(snippet, names)
    return names


def watched_first() -> Strategy:
    made: Strategy = names_of_the_guide()["WatchedFirst"]()
    return made


def test_the_strategy_of_the_guide_has_20_lines() -> None:
    body = SNIPPETS[0].split("class ", 1)[1]
    assert len([line for line in body.splitlines() if line.strip()]) <= 20


@settings(deadline=None)
@given(view=views(), budget=budgets)
def test_its_plans_keep_every_rule(view: View, budget: Budget) -> None:
    assert fault_of(watched_first().plan(view, budget), view, budget) is None


@pytest.mark.parametrize("layout", ["unified", "split"])
def test_an_engine_runs_on_it(layout: str) -> None:
    rig = Rig(strategy=watched_first(), layout=layout, prefill_budget=16, context_size=1024)
    job = rig.submit(prompt(100, salt=1), max_tokens=8, stop_tokens=frozenset(), priority=-1)
    chats = [rig.submit(prompt(40, salt=2 + i), max_tokens=8, stop_tokens=frozenset()) for i in range(2)]
    rig.drain()
    rig.check_idle()
    assert rig.loop.meter.counters.plans_refused == 0
    for sink, tokens in zip([job, *chats], [prompt(100, salt=1), prompt(40, salt=2), prompt(40, salt=3)], strict=True):
        assert sink.tokens == expected(rig.path, tokens, max_tokens=8, stop_tokens=frozenset())[0]
