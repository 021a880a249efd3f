"""What goes into the engine and what comes out: a request, its events and the sink that takes them.

Owns these values. A request carries tokens and a ready sampler, never text: tokenising, detokenising and stop strings
belong to the caller, who does them on its own thread while the next tick decodes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, NewType, Protocol, TypeAlias

from kvasir.engine.core import Logprobs
from kvasir.errors import KvasirError
from kvasir.types import FinishReason, Sampling, Timings, Usage

RequestId = NewType("RequestId", int)


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt to continue, or with `max_tokens` 0 and no sampler, only to read into memory.

    `sampler` is built by the caller, off the engine thread, with the prompt already accepted; from `submit` on it
    belongs to the engine. A sampled token of `stop_tokens` ends the request and is not sent. `priority`: higher goes
    first. `deadline_s` counts from `submit`. `cache=False` neither reuses KV nor leaves any behind. KV is shared only
    within one `scope`. `parent_key` is the `Done.key` of the request this one continues. `owner` names whose edited KV
    it may continue: what `Engine.shift` cut belongs to its owner alone. `checkpoint` is the position where other
    prompts are likely to part from this one: memory that cannot rewind is kept there too.
    """

    tokens: tuple[int, ...]
    sampling: Sampling
    sampler: object
    stop_tokens: frozenset[int]
    max_tokens: int
    priority: int = 0
    deadline_s: float | None = None
    cache: bool = True
    scope: str | None = None
    parent_key: bytes | None = None
    owner: str | None = None
    checkpoint: int | None = None


class Tokens(NamedTuple):
    """Tokens of one tick, in order, with as many log probabilities (None where not asked for)."""

    ids: tuple[int, ...]
    logprobs: tuple[Logprobs | None, ...]


@dataclass(frozen=True, slots=True)
class Done:
    """The request ended as it should, or was cancelled. `stop_token` is the one that ended it, if one did.

    `key` names what it left in the cache: the `parent_key` of a request that continues it.
    """

    reason: FinishReason
    stop_token: int | None
    usage: Usage
    timings: Timings
    key: bytes | None = None


@dataclass(frozen=True, slots=True)
class Failed:
    """The request ended in an error; no other request is touched by it."""

    error: KvasirError


Event: TypeAlias = Tokens | Done | Failed


class Sink(Protocol):
    """Takes the events of one request: any number of `Tokens`, then exactly one `Done` or `Failed`.

    Called on the engine thread, once or twice a tick; must not block. A sink that raises has its request cancelled.
    """

    def put(self, event: Event, /) -> None:
        """Take the next event."""
