"""One reply of a conversation on its way: text, events, the end, and every way to leave it early.

Owns the hand-over of what was said: whatever ends a turn, its conversation is told once.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
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
    and nothing that the model had written ahead of its reader.
    """

    def __init__(
        self,
        conversation: Conversation,
        stream: ChatStream,
        *,
        news: list[Event],
        callback: Callable[[str], object] | None,
    ) -> None:
        self._conversation = conversation
        self._stream = stream
        self._news = news
        self._callback = callback
        self._reply: ChatReply | None = None
        self._heard: list[Event] = []
        self._over = False
        self._cancelled = False

    def __iter__(self) -> Iterator[str]:
        for event in self.events():
            if isinstance(event, Text):
                yield event.text

    def events(self) -> Iterator[Event]:
        """Every event: text, reasoning, tool calls, what was given up, and at the end `Done`."""
        try:
            yield from self._take_news()
            for event in self._stream:
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
        self._stream.cancel()

    def close(self) -> None:
        """Stop the reply if it still runs, and keep what was said. Harmless when it has ended."""
        if self._over:
            return
        self._over = True
        if self._reply is None:
            self._stream.cancel()
            try:
                self._reply = self._as_heard(self._stream.result())
            except KvasirError:
                self._conversation._failed()
                raise
        self._conversation._replied(self._reply)

    async def __aiter__(self) -> AsyncIterator[str]:
        async for event in self.aevents():
            if isinstance(event, Text):
                yield event.text

    async def aevents(self) -> AsyncIterator[Event]:
        """`events()` in asyncio."""
        try:
            for event in self._take_news():
                yield event
            async for event in self._stream:
                self._note(event)
                yield event
                if self._reply is None and self._cancelled:
                    break
        finally:
            self.close()
        if self._reply is not None and not (self._heard and isinstance(self._heard[-1], Done)):
            yield Done(self._reply)

    def __await__(self) -> Any:
        return self._aresult().__await__()

    async def _aresult(self) -> ChatReply:
        async for _ in self.aevents():
            pass
        assert self._reply is not None
        return self._reply

    def __enter__(self) -> Turn:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _take_news(self) -> list[Event]:
        news, self._news = self._news, []
        return news

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
