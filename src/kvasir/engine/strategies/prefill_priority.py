"""Prompts first: they may fill the whole tick, streams take what is left. For throughput, not for smooth streams."""

from __future__ import annotations

from kvasir.engine.plan import Budget, Plan, View, take_decodes, take_prefills

NAME = "PrefillPriority"


def plan(view: View, budget: Budget) -> Plan:
    """Give prompts all they can use, then streams the rest."""
    prefills = take_prefills(view, budget.n_rows)
    left = budget.n_rows - sum(row.n_tokens for row in prefills)
    return Plan((*prefills, *take_decodes(view, left)))
