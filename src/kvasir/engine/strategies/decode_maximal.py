"""Streams first: every decoding sequence gets its row, prompts share what the settings leave them."""

from __future__ import annotations

from kvasir.engine.plan import Budget, Plan, View, take_decodes, take_prefills

NAME = "DecodeMaximal"


def plan(view: View, budget: Budget) -> Plan:
    """Give every stream its row, then prompts theirs."""
    decodes = take_decodes(view, budget.n_rows)
    if len(decodes) == len(view.sequences):
        return Plan(tuple(decodes))
    prefills = take_prefills(view, min(budget.n_prefill, budget.n_rows - len(decodes)))
    return Plan((*decodes, *prefills))
