"""Which messages a conversation gives up when its next turn would not fit.

Pure: messages with their sizes in, indexes out. A turn is a user message and all that answers it. Whole turns go first,
oldest first; then, of the turn that is being answered, the oldest tool exchanges (a message with calls and their
results). The system prompt, the user message being answered and the last reply are never given up, nor is a tool
result that has not been answered.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

FIXED_ROLES = ("system", "developer")


class Sized(NamedTuple):
    """A message as eviction sees it."""

    role: str
    n_tokens: int
    has_calls: bool = False


def choose(messages: Sequence[Sized], n_over: int) -> list[int] | None:
    """Return the indexes to give up so that `n_over` tokens become free, ascending; None where that is not enough."""
    chosen: list[int] = []
    n_freed = 0
    for group in _groups(messages):
        if n_freed >= n_over:
            break
        chosen += group
        n_freed += sum(messages[index].n_tokens for index in group)
    return sorted(chosen) if n_freed >= n_over else None


def _groups(messages: Sequence[Sized]) -> list[list[int]]:
    """What may go, in the order in which it goes."""
    turns = _turns(messages)
    if not turns:
        return []
    last_reply = max((i for i, message in enumerate(messages) if _is_reply(message)), default=-1)
    *complete, current = turns
    if messages[current[0]].role != "user":  # nobody has asked anything yet
        return []
    return [turn for turn in complete if last_reply not in turn] + _exchanges(messages, current)


def _turns(messages: Sequence[Sized]) -> list[list[int]]:
    turns: list[list[int]] = []
    for index, message in enumerate(messages):
        if message.role in FIXED_ROLES:
            continue
        if message.role == "user" or not turns:
            turns.append([])
        turns[-1].append(index)
    return turns


def _exchanges(messages: Sequence[Sized], turn: list[int]) -> list[list[int]]:
    exchanges: list[list[int]] = []
    for index in turn:
        if messages[index].has_calls:
            exchanges.append([index])
        elif messages[index].role == "tool" and exchanges:
            exchanges[-1].append(index)
    is_open = bool(exchanges) and exchanges[-1][-1] == turn[-1]
    return exchanges[:-1] if is_open else exchanges


def _is_reply(message: Sized) -> bool:
    return message.role == "assistant" and not message.has_calls
