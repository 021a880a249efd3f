"""The table of strategies, and the check every plan passes, whoever wrote the strategy.

Owns the names. A strategy is a module or any object with `plan(view, budget) -> Plan`; none knows another.
"""

from __future__ import annotations

from typing import Any, cast

from kvasir.engine.plan import Budget, Plan, PlannedRow, Strategy, View
from kvasir.engine.strategies import balanced, decode_maximal, prefill_priority
from kvasir.errors import BadOption, suggest

STRATEGIES: dict[str, Strategy] = {
    decode_maximal.NAME: decode_maximal,
    prefill_priority.NAME: prefill_priority,
    balanced.NAME: balanced,
}
DEFAULT: Strategy = decode_maximal


def strategy_of(wanted: object) -> Strategy:
    """Return the strategy of that name ("DecodeMaximal", "decode_maximal"), or the object itself if it can plan."""
    if isinstance(wanted, str):
        found = {_folded(name): strategy for name, strategy in STRATEGIES.items()}.get(_folded(wanted))
        if found is None:
            names = ", ".join(STRATEGIES)
            raise BadOption(f"no strategy is called {wanted!r}; there are {names}.{suggest(wanted, STRATEGIES)}")
        return found
    if not callable(getattr(wanted, "plan", None)):
        raise BadOption(f"strategy must be a name or an object with plan(view, budget), got {wanted!r}.")
    return cast(Strategy, wanted)


def fault_of(plan: Any, view: View, budget: Budget) -> str | None:
    """Say what is wrong with a plan: None if it keeps to its budget and names each runnable sequence at most once."""
    rows = getattr(plan, "rows", None)
    if not isinstance(rows, tuple | list):
        return f"it returned {plan!r}, wanted a Plan"
    lefts = {seq.id: seq.n_left for seq in view.sequences}
    n_tokens = 0
    for row in rows:
        n_left = lefts.pop(row.id, None)
        if n_left is None:
            return f"it planned sequence {row.id}, which cannot run or was planned already"
        if not 0 < row.n_tokens <= n_left:
            return f"it planned {row.n_tokens} tokens of sequence {row.id}, which has {n_left} left"
        n_tokens += row.n_tokens
    if n_tokens > budget.n_rows:
        return f"it planned {n_tokens} rows, the budget has {budget.n_rows}"
    return None


# A prompt behind a long one, or a stream under PrefillPriority, waits this many ticks at most. Sixteen ticks of 512
# rows are seconds on a CPU: long enough to leave a strategy its will, short enough that nobody gives up.
STARVED_TICKS = 16
# What a starved prompt is given: a sixteenth of a usual tick, so that forcing hardly disturbs the plan.
STARVED_CHUNK = 32


def feed_starved(plan: Plan, view: View, budget: Budget) -> Plan:
    """Return the plan with a row for every sequence that was skipped too often; rows at the plan's end make room."""
    starved = [seq for seq in view.sequences if seq.n_skipped >= STARVED_TICKS]
    if not starved:
        return plan
    planned = dict(plan.rows)
    starved.sort(key=lambda seq: -seq.n_skipped)
    chunk = min(STARVED_CHUNK, budget.n_prefill)  # who wants smaller chunks than that has asked for short gaps
    first = [PlannedRow(seq.id, planned.pop(seq.id, min(seq.n_left, chunk))) for seq in starved]
    others = [PlannedRow(*row) for row in planned.items()]
    return Plan(tuple(_fitted([*first, *others], budget.n_rows, n_kept=len(first))))


def _fitted(rows: list[PlannedRow], n_rows: int, *, n_kept: int) -> list[PlannedRow]:
    """Shorten rows from the end until all fit; the first `n_kept` keep a token each, as long as there is room."""
    excess = sum(row.n_tokens for row in rows) - n_rows
    for at in reversed(range(len(rows))):
        if excess <= 0:
            break
        cut = min(excess, rows[at].n_tokens - (at < n_kept))
        rows[at] = PlannedRow(rows[at].id, rows[at].n_tokens - cut)
        excess -= cut
    return [row for row in rows if row.n_tokens][:n_rows]


def _folded(name: str) -> str:
    return name.replace("_", "").replace("-", "").casefold()
