"""One reply of a conversation on its way: text, events, the end, and every way to leave it early.

Owns the hand-over of what was said: whatever ends a turn, its conversation is told once.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Generator, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from kvasir.chat.events import ChatReply, Done, Event, Reasoning, Text, ToolCallDone
from kvasir.errors import KvasirError
from kvasir.service.chat_stream import ChatStream
from kvasir.types import FinishReason

if TYPE_CHECKING:
    from kvasir.service.conversation import Conversation


class Turn:
    """One reply of a conversation, as it comes.

    Iterate (`for` or `async for`) for pieces of text; `events()` and `aevents()` give everything, `result()` or `await`
    the whole reply. Leaving the loop, `cancel()` and a `with` block stop it; what was heard stays in the conversation,
    and nothing that the model had written ahead of its reader. In asyncio it begins when it is first read.
    """

    def __init__(
        self, conversation: Conversation, start: Callable[[], ChatStream], *, callback: Callable[[str], object] | None
    ) -> None:
        self._conversation = conversation
        self._start = start
        self._stream: ChatStream | None = None  # None: not begun
        self._callback = callback
        self._lock = threading.Lock()  # begun once and ended once, by whichever thread
        self._reply: ChatReply | None = None
        self._heard: list[Event] = []
        self._over = False
        self._cancelled = False
        self._reader: object = None  # the loop in asyncio that reads now
        self._leaving = False  # a thread is about to end it

    def begin(self) -> ChatStream:
        """Add what is said to the conversation and start the reply, unless that was done. Blocks while it must wait."""
        with self._lock:
            if self._stream is None:
                self._stream = self._start()
                self._conversation._turn = self
                if self._cancelled:
                    self._stream.cancel()
            return self._stream

    def __iter__(self) -> Iterator[str]:
        for event in self.events():
            if isinstance(event, Text):
                yield event.text

    def events(self) -> Iterator[Event]:
        """Every event: text, reasoning, tool calls, what was given up, and at the end `Done`."""
        try:
            stream = self.begin()
            yield from self._take_news()
            for event in stream:
                self._note(event)
                yield event
                if self._reply is None and self._cancelled:
                    break
        finally:
            self.close()
        if self._reply is not None and not (self._heard and isinstance(self._heard[-1], Done)):
            yield Done(self._reply)

    def result(self) -> ChatReply:
        """Read to the end and return the whole reply."""
        for _ in self.events():
            pass
        assert self._reply is not None
        return self._reply

    def cancel(self) -> None:
        """Stop the reply, from any thread; its reader hears nothing more, though the model may have written ahead."""
        self._cancelled = True
        if self._stream is not None:
            self._stream.cancel()

    def close(self) -> None:
        """Stop the reply if it still runs, and keep what was said. Harmless before it began and when it has ended."""
        with self._lock:
            if self._over or self._stream is None:
                return
            if self._reply is None:
                self._stream.cancel()
                try:
                    self._reply = self._as_heard(self._stream.result())
                except KvasirError:
                    self._over = True
                    self._conversation._failed()
                    raise
            self._over = True
            self._conversation._replied(self._reply)

    async def aclose(self) -> None:
        """`close()` in asyncio. A task that is cancelled meanwhile leaves it to a thread to end it."""
        self._leaving = self._stream is not None
        await asyncio.to_thread(self.close)

    async def __aiter__(self) -> AsyncIterator[str]:
        async for event in self.aevents():
            if isinstance(event, Text):
                yield event.text

    async def aevents(self) -> AsyncIterator[Event]:
        """`events()` in asyncio."""
        reader = self._reader = object()
        try:
            stream = await self._abegin()
            if self._leaving:
                await self.aclose()
            for event in self._take_news():
                yield event
            async for event in stream:
                self._note(event)
                yield event
                if self._reply is None and self._cancelled:
                    break
        finally:
            if self._reader is reader:  # else another reads on: asyncio ends a loop that was left some time later
                await self.aclose()
        if self._reply is not None and not (self._heard and isinstance(self._heard[-1], Done)):
            yield Done(self._reply)

    def __await__(self) -> Generator[Any, None, ChatReply]:
        return self._aresult().__await__()

    async def _aresult(self) -> ChatReply:
        async for _ in self.aevents():
            pass
        assert self._reply is not None
        return self._reply

    async def _abegin(self) -> ChatStream:
        # What takes long is awaited here, for there are few threads.
        if self._stream is None:
            await self._conversation._asettle()
        return await asyncio.to_thread(self.begin)

    def __enter__(self) -> Turn:
        self.begin()
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    async def __aenter__(self) -> Turn:
        await self._abegin()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.aclose()

    def _take_news(self) -> list[Event]:
        """What the conversation gave up; a turn that is over leaves it to the next."""
        return [] if self._over else self._conversation._take_news()

    def _note(self, event: Event) -> None:
        """Keep what the reader gets now, and ask its callback whether it wants more."""
        self._heard.append(event)
        if isinstance(event, Done):
            self._reply = event.reply
        elif isinstance(event, Text) and self._callback is not None and self._callback(event.text) is False:
            self.cancel()

    def _as_heard(self, reply: ChatReply) -> ChatReply:
        """The reply cut to what its reader got."""
        return replace(
            reply,
            content="".join(event.text for event in self._heard if isinstance(event, Text)),
            reasoning="".join(event.text for event in self._heard if isinstance(event, Reasoning)),
            tool_calls=tuple(event.call for event in self._heard if isinstance(event, ToolCallDone)),
            finish_reason=FinishReason.CANCELLED,
        )
