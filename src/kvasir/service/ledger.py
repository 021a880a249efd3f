"""A session's ledger: every token it has read and said, and what is still to be read. Pure values."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from kvasir.errors import BadRequest, ContextFull
from kvasir.types import Sampling


class Ledger(NamedTuple):
    """What a session is made of. Replaced as a whole, so that a copy is another session with the same past."""

    tokens: tuple[int, ...] = ()  # read or said, or being read
    pending: tuple[int, ...] = ()  # appended since: the next reply begins by reading them
    n_said: int = 0  # tokens at the end of `tokens` that the model said since the last input
    said_with: Sampling | None = None  # and how it chose them
    is_complete: bool = False  # its last reply ended by itself, so there is nothing to go on with

    @property
    def all(self) -> list[int]:
        """Every token, in order."""
        return [*self.tokens, *self.pending]

    def n_resumed(self, sampling: Sampling) -> int:
        """Tokens at the end that a reply chosen like this would have begun with: it goes on, it does not begin."""
        goes_on = not self.pending and same_choice(self.said_with, sampling)
        return min(self.n_said, len(self.tokens) - 1) if goes_on else 0

    def reading(self, sampling: Sampling) -> Ledger:
        """The ledger while a reply is made: what was pending is being read."""
        return Ledger(tuple(self.all), (), self.n_resumed(sampling), sampling)

    def said(self, prompt: list[int], tokens: list[int], *, n_resumed: int, is_complete: bool) -> Ledger:
        """The ledger after a reply to this prompt; what was appended meanwhile stays pending."""
        return self._replace(tokens=(*prompt, *tokens), n_said=n_resumed + len(tokens), is_complete=is_complete)


def same_choice(one: Sampling | None, other: Sampling) -> bool:
    """Whether two replies are chosen in the same way, however long they may be."""
    return one is not None and replace(one, max_tokens=1) == replace(other, max_tokens=1)


def check_goes_on(name: str, ledger: Ledger) -> None:
    """Raise `BadRequest` where a session has nothing to read and nothing to go on with."""
    if not ledger.all:
        raise BadRequest(f"session {name!r} is empty; append input before generating.")
    if ledger.is_complete and not ledger.pending:
        raise BadRequest(f"session {name!r} has nothing new to read, and its reply was complete; append input.")


def check_room(name: str, n_tokens: int, limit: int) -> None:
    """Raise `ContextFull` where a session of so many tokens leaves no room for one token of a reply."""
    if n_tokens >= limit:
        raise ContextFull(
            f"session {name!r} would have {n_tokens:,} tokens and must leave room for a reply; there is room for "
            f"{limit:,}. Begin a new session, or load with a larger context_size.",
            n_tokens=n_tokens,
            limit=limit,
        )
