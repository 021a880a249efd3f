"""What a session's stream gives out: text as it comes, then exactly one `Done` or `Error`. Values only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from kvasir.errors import KvasirError
from kvasir.types import Completion, FinishReason, Usage


@dataclass(frozen=True, slots=True)
class Text:
    """A piece of the reply: whole characters, never part of a stop string."""

    text: str


@dataclass(frozen=True, slots=True)
class Done:
    """The reply ended. `n_tokens` is the length of the session now; `completion` holds the whole reply."""

    reason: FinishReason
    usage: Usage
    n_tokens: int
    completion: Completion


@dataclass(frozen=True, slots=True)
class Error:
    """The reply failed; the session keeps what was given out and may go on. No other session is touched."""

    error: KvasirError


Chunk: TypeAlias = Text | Done | Error
