"""The engine's two doors: letters in from any thread, events out to the sinks.

Owns the lock and the waiting. Inside the engine nothing else is shared between threads. A closed mailbox refuses
letters, so that no request can slip in behind the last tick and never be answered.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from threading import Condition
from typing import Any, TypeAlias

from kvasir.engine.request import Event, RequestId
from kvasir.engine.sequence import Sequence
from kvasir.errors import EngineStopped

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Submit:
    """A new request, as the sequence it becomes."""

    sequence: Sequence


@dataclass(frozen=True, slots=True)
class Cancel:
    """A request nobody waits for any more."""

    id: RequestId


@dataclass(frozen=True, slots=True)
class Call:
    """Run `do` on the engine thread between two ticks, where the context may be touched."""

    do: Callable[[], Any]
    future: Future[Any]


Letter: TypeAlias = Submit | Cancel | Call


class Mailbox:
    """Letters to the engine, in order of arrival."""

    def __init__(self) -> None:
        self._changed = Condition()
        self._letters: list[Letter] = []
        self._closed: str | None = None

    def post(self, letter: Letter) -> None:
        """Leave a letter and wake the engine. Any thread; raises `EngineStopped` once closed."""
        with self._changed:
            if self._closed is not None:
                raise EngineStopped(self._closed)
            self._letters.append(letter)
            self._changed.notify()

    def take(self) -> list[Letter]:
        """Empty the box. Engine thread only."""
        if not self._letters:  # the usual tick: no lock for an empty box
            return []
        with self._changed:
            letters, self._letters = self._letters, []
        return letters

    def wait(self, timeout_s: float | None = None) -> None:
        """Sleep until a letter is there or the box is closed. Engine thread only."""
        with self._changed:
            self._changed.wait_for(lambda: self._letters or self._closed is not None, timeout_s)

    @property
    def closed(self) -> bool:
        """Whether letters are refused."""
        return self._closed is not None

    def close(self, why: str) -> None:
        """Refuse letters from now on and wake the engine; the first reason given is kept."""
        with self._changed:
            if self._closed is None:
                self._closed = why
            self._changed.notify_all()

    @property
    def why_closed(self) -> str:
        """The first reason given to `close`; empty while open."""
        return self._closed or ""


class Outbox:
    """Events of one tick, delivered together after the decode, in order."""

    def __init__(self) -> None:
        self._events: list[tuple[Sequence, Event]] = []

    def put(self, sequence: Sequence, event: Event) -> None:
        """Keep an event for the next `flush`."""
        self._events.append((sequence, event))

    def flush(self) -> list[Sequence]:
        """Hand every event to its sink; return the sequences whose sink raised."""
        if not self._events:
            return []
        events, self._events = self._events, []
        broken = []
        for sequence, event in events:
            try:
                sequence.sink.put(event)
            except Exception:
                log.exception("the sink of request %d raised; the request is cancelled", sequence.id)
                broken.append(sequence)
        return broken
