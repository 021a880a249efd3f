"""A running reply as users hold it: events by `for` and `async for`, the whole by `result()` and `await`.

Owns the join of two things: a `Stream`, which brings the reply's raw text, and a `ReplyParser`, which says what it
means. Waiting, cancelling and letting go are the stream's own.
"""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator, Callable, Generator, Iterator
from typing import Any

from kvasir.chat.events import ChatReply, ChatUsage, Done, Event, Text
from kvasir.chat.parser import ReplyParser
from kvasir.errors import BadGrammar, BadSchema
from kvasir.service.completion import Reply
from kvasir.service.stream import Stream
from kvasir.types import Completion, FinishReason


class Receiver:
    """Makes events of raw text.

    `parse` reads a constrained answer, which may come after thinking (`thinks`); `stops` are those the user gave.
    """

    def __init__(
        self,
        reply: Reply,
        parser: ReplyParser,
        *,
        parse: Callable[[str], object] | None = None,
        stops: tuple[str, ...] = (),
        thinks: bool = False,
    ) -> None:
        self._reply = reply
        self._parser = parser
        self._parse = parse
        self._stops = stops
        self._thinks = thinks
        self._n_before = 0  # tokens before the piece that is being read
        self._n_reasoning = 0

    def take(self, piece: str) -> list[Event]:
        """Absorb a piece of text; return what it makes certain."""
        return self._counted(self._parser.feed(piece))

    def end(self, completion: Completion) -> list[Event]:
        """Absorb the end; return the rest, and `Done` with the reply. Raises `BadSchema` for an answer that is none."""
        events = self._counted(self._parser.finish())
        return [*events, Done(self._reply_of(completion))]

    def _counted(self, events: list[Event]) -> list[Event]:
        """Tokens count as thinking until the answer begins."""
        if not self._parser.answering:
            self._n_reasoning = self._reply.n_tokens
        return events

    def _reply_of(self, completion: Completion) -> ChatReply:
        parser, usage = self._parser, completion.usage
        calls = parser.tool_calls
        reason = completion.finish_reason
        if calls and reason is FinishReason.STOP:
            reason = FinishReason.TOOL_CALLS
        return ChatReply(
            content=parser.content,
            reasoning=parser.reasoning,
            tool_calls=calls,
            parsed=self._parsed(completion),
            finish_reason=reason,
            usage=ChatUsage(
                usage.prompt_tokens,
                usage.cached_tokens,
                usage.completion_tokens,
                self._n_reasoning if parser.reasoning else 0,
            ),
            timings=completion.timings,
            seed=completion.seed,
            key=completion.key,
            stop=completion.stop if completion.stop in self._stops else None,
            logprobs=completion.logprobs,
        )

    def _parsed(self, completion: Completion) -> object:
        """The object the answer describes; None for one that was cut off before its end."""
        if self._parse is None:
            return None
        try:
            # What parts the answer from the thinking before it is not part of the answer.
            return self._parse(self._parser.content.lstrip() if self._thinks else self._parser.content)
        except (BadSchema, BadGrammar):
            if completion.finish_reason is FinishReason.STOP and completion.stop is None:
                raise
            return None


class ChatStream:
    """The events of one reply, as they come.

    >>> for event in model.chat_stream("Name a river."):
    ...     match event:
    ...         case Text(text):
    ...             print(text, end="", flush=True)
    ...         case ToolCallDone(index, call):
    ...             print(call.name, call.arguments)

    The last event is `Done`, with the whole reply. `text()` gives pieces of the answer alone. `async for` works the
    same in asyncio. `result()`, or `await stream`, runs to the end and returns the `ChatReply`. Leaving the loop or a
    `with` block, and dropping the stream, cancel the request; `cancel()` does so from any thread. One reader at a time.
    """

    def __init__(self, stream: Stream, receiver: Receiver) -> None:
        self._stream = stream
        self._receiver = receiver
        self._events: deque[Event] = deque()
        self._reply: ChatReply | None = None

    def cancel(self) -> None:
        """Stop the work, from any thread; harmless when it has ended. The reply is then what came until now."""
        self._stream.cancel()

    def result(self) -> ChatReply:
        """Read to the end and return the whole reply. Ctrl-C cancels the request."""
        with self:
            while self._pull() is not None:
                pass
        return self._whole()

    def text(self) -> Iterator[str]:
        """Iterate over pieces of the answer: no thinking, no calls."""
        for event in self:
            if isinstance(event, Text):
                yield event.text

    async def atext(self) -> AsyncIterator[str]:
        """`text()` in asyncio."""
        async for event in self:
            if isinstance(event, Text):
                yield event.text

    def __iter__(self) -> Iterator[Event]:
        with self:
            while (event := self._pull()) is not None:
                yield event

    async def __aiter__(self) -> AsyncIterator[Event]:
        with self:
            while (event := await self._apull()) is not None:
                yield event

    def __next__(self) -> Event:
        if (event := self._pull()) is None:
            raise StopIteration
        return event

    async def __anext__(self) -> Event:
        if (event := await self._apull()) is None:
            raise StopAsyncIteration
        return event

    def __await__(self) -> Generator[Any, None, ChatReply]:
        return self._aresult().__await__()

    def __enter__(self) -> ChatStream:
        return self

    def __exit__(self, *exc: object) -> None:
        self.cancel()

    async def __aenter__(self) -> ChatStream:
        return self

    async def __aexit__(self, *exc: object) -> None:
        self.cancel()

    async def _aresult(self) -> ChatReply:
        with self:
            while await self._apull() is not None:
                pass
        return self._whole()

    def _pull(self) -> Event | None:
        while not self._events:
            if self._reply is not None:
                return None
            self._take(next(self._stream, None))
        return self._events.popleft()

    async def _apull(self) -> Event | None:
        while not self._events:
            if self._reply is not None:
                return None
            self._take(await anext(self._stream, None))
        return self._events.popleft()

    def _take(self, piece: str | None) -> None:
        if piece is not None:
            self._events += self._receiver.take(piece)
            return
        events = self._receiver.end(self._stream.result())  # it has ended, so this does not wait
        done = events[-1]
        assert isinstance(done, Done)
        self._reply = done.reply
        self._events += events

    def _whole(self) -> ChatReply:
        assert self._reply is not None
        return self._reply
