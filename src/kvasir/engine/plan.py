"""Values a strategy sees and returns: the view, the budget and the plan.

Owns nothing mutable. These are tuples, because one of each is made per sequence and tick.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

from kvasir.engine.request import RequestId


class SeqView(NamedTuple):
    """A sequence that can run in this tick."""

    id: RequestId
    decoding: bool  # one row makes its next token
    n_left: int  # rows until its next token: 1 when decoding, else what is left of the prompt
    priority: int
    n_skipped: int  # ticks in a row in which it was not planned


class View(NamedTuple):
    """Every sequence that can run, oldest admission first."""

    sequences: tuple[SeqView, ...]
    n_waiting: int  # requests that have no slot yet


class Budget(NamedTuple):
    """How much one tick may run.

    `n_rows` is a hard bound: more would be a second pass over the weights. `n_prefill` is the share the settings
    give to prompts (small beside streams that ran before them, which must not stutter); a strategy may weigh it
    otherwise.
    """

    n_rows: int
    n_prefill: int


class PlannedRow(NamedTuple):
    """Run the next `n_tokens` of a sequence."""

    id: RequestId
    n_tokens: int


class Plan(NamedTuple):
    """What a tick runs: at most one row per sequence, in any order."""

    rows: tuple[PlannedRow, ...]

    @property
    def n_tokens(self) -> int:
        """Rows this plan takes of the budget."""
        return sum(row.n_tokens for row in self.rows)


NOTHING = Plan(())


class Strategy(Protocol):
    """Decides what a tick runs. Pure: the same view and budget give the same plan."""

    def plan(self, view: View, budget: Budget, /) -> Plan:
        """Choose rows for this tick: within `budget.n_rows`, each sequence of the view at most once."""


def take_decodes(view: View, n_rows: int) -> list[PlannedRow]:
    """One row for each decoding sequence, the longest skipped first where not all fit."""
    decoding = [seq for seq in view.sequences if seq.decoding]
    if len(decoding) > n_rows:
        decoding.sort(key=lambda seq: -seq.n_skipped)
    return [PlannedRow(seq.id, 1) for seq in decoding[:n_rows]]


def take_prefills(view: View, n_rows: int) -> list[PlannedRow]:
    """Chunks for the prompts, higher priority and then older first, each as long as the rest allows."""
    rows = []
    prompts = [seq for seq in view.sequences if not seq.decoding]
    if len(prompts) > 1:
        prompts.sort(key=lambda seq: -seq.priority)
    for seq in prompts:
        if n_rows <= 0:
            break
        n_tokens = min(seq.n_left, n_rows)
        rows.append(PlannedRow(seq.id, n_tokens))
        n_rows -= n_tokens
    return rows
