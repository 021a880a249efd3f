"""Half the tick for streams, half for prompts.

Streams may use what prompts leave; prompts never take the streams' half while a stream runs, which bounds the stutter.
Prompts share their half evenly, so that a short prompt behind a long one is not held up by it.
"""

from __future__ import annotations

from kvasir.engine.plan import Budget, Plan, PlannedRow, View, take_decodes

NAME = "Balanced"


def plan(view: View, budget: Budget) -> Plan:
    """Give streams and prompts a half each."""
    half = budget.n_rows // 2
    n_wanted = sum(seq.n_left for seq in view.sequences if not seq.decoding)
    decodes = take_decodes(view, max(half, budget.n_rows - n_wanted))
    streams = any(seq.decoding for seq in view.sequences)
    share = budget.n_rows - (max(half, len(decodes)) if streams else 0)
    return Plan((*decodes, *_even_prefills(view, share)))


def _even_prefills(view: View, n_rows: int) -> list[PlannedRow]:
    """Divide the rows evenly, shortest prompt first, so that what it leaves over goes to the longer ones."""
    prompts = sorted((seq for seq in view.sequences if not seq.decoding), key=lambda seq: seq.n_left)
    rows = []
    for n_behind, seq in zip(range(len(prompts), 0, -1), prompts, strict=True):
        n_tokens = min(seq.n_left, -(-n_rows // n_behind))
        if n_tokens > 0:
            rows.append(PlannedRow(seq.id, n_tokens))
            n_rows -= n_tokens
    return rows
