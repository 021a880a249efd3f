"""A running request as users hold it: `for`, `async for`, `with`, `await`, `result()`, `cancel()`.

Owns the hand-over from the engine's thread to one reader, a thread or an asyncio task, and the promise that work
nobody waits for is cancelled: on leaving the loop or the `with`, on an exception, on garbage collection. What the
events mean is `completion.py`'s to say.
"""

from __future__ import annotations

import asyncio
import contextlib
import weakref
from collections.abc import AsyncIterator, Callable, Generator, Iterator
from queue import Empty, SimpleQueue
from typing import Any, Generic, TypeVar

from kvasir.engine import Event
from kvasir.errors import BadOption
from kvasir.service.completion import Reply
from kvasir.types import Completion

T = TypeVar("T")


class Post(Generic[T]):
    """Values on their way to one reader: `put` never blocks; the reader takes them, blocking or awaiting."""

    def __init__(self) -> None:
        self._events: SimpleQueue[T] = SimpleQueue()
        self._wake: Callable[[], None] | None = None

    def put(self, event: T) -> None:
        """Called on the sender's thread."""
        self._events.put(event)
        if (wake := self._wake) is not None:
            wake()

    def get(self) -> T:
        """Wait on this thread; Ctrl-C interrupts the wait."""
        return self._events.get()

    async def aget(self) -> T:
        """Wait in this task, without a thread."""
        while True:
            try:
                return self._events.get_nowait()
            except Empty:
                await self._arrival()

    async def _arrival(self) -> None:
        if self._wake is not None:
            raise BadOption("this stream is already awaited by another task; give each task a stream of its own.")
        loop = asyncio.get_running_loop()
        arrived = asyncio.Event()

        def wake() -> None:
            with contextlib.suppress(RuntimeError):  # the loop was closed; nobody waits any more
                loop.call_soon_threadsafe(arrived.set)

        self._wake = wake
        try:
            # An event put before `_wake` was set has woken nobody: look once more before waiting.
            if self._events.empty():
                await arrived.wait()
        finally:
            self._wake = None


class Mailbox(Post[Event]):
    """The engine's sink for one stream."""


class Stream:
    """The pieces of one completion, as they are generated.

    >>> for piece in model.stream("Once upon a time"):
    ...     print(piece, end="", flush=True)

    Pieces are whole characters and never hold part of a stop string. `async for` works the same in asyncio.
    `result()`, or `await stream`, runs to the end and returns the `Completion`. Leaving the loop or a `with` block,
    and dropping the stream, cancel the request; `cancel()` does so from any thread. One reader at a time.
    """

    def __init__(self, reply: Reply, mail: Mailbox, *, cancel: Callable[[], None], owner: object) -> None:
        self._reply = reply
        self._mail = mail
        self._owner = owner  # a model dropped while its stream runs would close under it
        # Runs `cancel` once at most: on cancel(), or when the stream is collected. `cancel` must not refer to self.
        self._cancel = weakref.finalize(self, cancel)
        self._cancel.atexit = False  # the model's own finaliser ends everything then

    def cancel(self) -> None:
        """Stop the work, from any thread; harmless when it has ended. The result is then what came until now."""
        self._cancel()

    def result(self) -> Completion:
        """Read to the end and return the whole completion. Ctrl-C cancels the request."""
        with self:
            while self._pull() is not None:
                pass
            return self._reply.outcome()

    def __await__(self) -> Generator[Any, None, Completion]:
        return self._aresult().__await__()

    def __iter__(self) -> Iterator[str]:
        with self:
            while (piece := self._pull()) is not None:
                yield piece

    async def __aiter__(self) -> AsyncIterator[str]:
        with self:
            while (piece := await self._apull()) is not None:
                yield piece

    def __next__(self) -> str:
        if (piece := self._pull()) is None:
            raise StopIteration
        return piece

    async def __anext__(self) -> str:
        if (piece := await self._apull()) is None:
            raise StopAsyncIteration
        return piece

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *exc: object) -> None:
        self.cancel()

    async def __aenter__(self) -> Stream:
        return self

    async def __aexit__(self, *exc: object) -> None:
        self.cancel()

    async def _aresult(self) -> Completion:
        with self:
            while await self._apull() is not None:
                pass
            return self._reply.outcome()

    def _pull(self) -> str | None:
        while not self._reply.ended:
            if piece := self._take(self._mail.get()):
                return piece
        self._reply.outcome()  # raises where the request failed
        return None

    async def _apull(self) -> str | None:
        while not self._reply.ended:
            if piece := self._take(await self._mail.aget()):
                return piece
        self._reply.outcome()  # raises where the request failed
        return None

    def _take(self, event: Event) -> str:
        piece = self._reply.take(event)
        if self._reply.stopped:
            self.cancel()
        if self._reply.ended:
            self._cancel.detach()
        return piece
