"""A conversation that stays in memory: each turn costs only its own tokens.

Owns the messages, the tokens they are and where each one lies among them. The KV itself belongs to the engine: whoever
sends a token list that begins with what an earlier request left reuses it, from a slot or from the cache, so any number
of conversations share a few slots. Only where tokens were cut out of the middle does the KV belong to one conversation
alone (`Engine.shift`).
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import json
import logging
import os
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Unpack

from kvasir.chat.events import ChatReply, Event, Evicted
from kvasir.chat.eviction import Sized, choose
from kvasir.chat.messages import Message, normalise
from kvasir.engine.radix import common_prefix
from kvasir.errors import BadOption, BadRequest, ContextFull, KvasirError, NotFound
from kvasir.service import chat
from kvasir.service.chat import ChatOptions, ChatStream
from kvasir.service.options import SamplingOptions
from kvasir.service.stream import Stream
from kvasir.service.turn import Turn
from kvasir.types import Sampling

if TYPE_CHECKING:
    from kvasir.service.model import Model

log = logging.getLogger(__name__)

EVICT_MODES = ("oldest", "reprefill", "refuse")
VERSION = 1
# Tokens a template may put behind a reply; they must find room too.
CLOSING = 16


class Span(NamedTuple):
    """Tokens [start, end) of a conversation."""

    start: int
    end: int


class Conversation:
    """A chat that remembers. `say()` streams the reply; everything said stays in memory.

    >>> chat = model.conversation(system="You are brief.")
    >>> for piece in chat.say("Name a river."):
    ...     print(piece, end="", flush=True)

    When the next turn would not fit, the oldest turns are given up (`evict="oldest"`, told by an `Evicted` event and
    in `evicted`): cut out of memory where the model can, else read anew. `evict="reprefill"` always reads anew, which
    is exactly what a new conversation of the messages that are left would see. `evict="refuse"` raises `ContextFull`.
    Not for several threads or tasks at once; any number of conversations may run side by side.
    """

    def __init__(
        self,
        model: Model,
        messages: Sequence[Mapping[str, Any]],
        *,
        options: ChatOptions,
        sampling: Sampling,
        evict: str = "oldest",
        scope: str | None = None,
    ) -> None:
        if evict not in EVICT_MODES:
            raise BadOption(f"evict must be one of {', '.join(EVICT_MODES)}, got {evict!r}.")
        self._model = model
        self._options = options
        self._sampling = sampling
        self._evict_mode = evict
        self._scope = scope
        self._id = secrets.token_hex(8)
        self._messages: list[Message] = normalise(messages) if messages else []
        self._tokens: list[int] = []  # what is in KV, or being read into it
        self._ends: list[int] = []  # where each message ends among them
        self._turn: Turn | None = None
        self._reading: Stream | None = None
        self._news: list[Event] = []  # what the next turn has to tell first
        self.evicted: list[dict[str, Any]] = []
        """Messages that were given up, oldest first."""
        self._commit()

    # Talking

    def say(
        self, text: str, *, callback: Callable[[str], object] | None = None, **options: Unpack[SamplingOptions]
    ) -> Turn:
        """Add a user message and start the reply: iterate for its text, `.events()` for everything.

        `callback` gets each piece of text; returning False stops the reply. Leaving the loop stops it too, and what
        was said stays. Options are those of `generate`, for this reply alone. In asyncio nothing happens before the
        turn is awaited or iterated: what has to be waited for does not block the event loop.
        """
        said = {"role": "user", "content": text}
        return self._turn_after(partial(self._take, said), Sampling.of(self._sampling, **options), callback)

    def add(self, message: str | Mapping[str, Any]) -> None:
        """Add a message and read it at once: text is a user's; a mapping may be a tool's result.

        >>> chat.add({"role": "tool", "tool_call_id": call.id, "name": call.name, "content": "21 C"})

        `reply()` answers. Blocks until the message is read.
        """
        self._settle()
        self._add(message)
        self._settle()

    async def aadd(self, message: str | Mapping[str, Any]) -> None:
        """`add()` in asyncio."""
        await self._asettle()
        await asyncio.to_thread(self._add, message)
        await self._asettle()

    def reply(self, *, callback: Callable[[str], object] | None = None, **options: Unpack[SamplingOptions]) -> Turn:
        """Start a reply to what was added."""
        return self._turn_after(self._check_question, Sampling.of(self._sampling, **options), callback)

    def regenerate(
        self, *, callback: Callable[[str], object] | None = None, **options: Unpack[SamplingOptions]
    ) -> Turn:
        """Forget the last reply and start another one."""
        return self._turn_after(self._forget_reply, Sampling.of(self._sampling, **options), callback)

    def undo(self) -> list[dict[str, Any]]:
        """Forget the last turn, the user's message and all that answered it; return what was forgotten."""
        self._settle()
        return self._cut(self._last_question(role="user"))

    def edit(self, index: int, content: str) -> None:
        """Change an earlier message and forget all that came after it; `reply()` answers anew."""
        self._settle()
        if not 0 <= index < len(self._messages):
            raise BadOption(f"there are messages 0 to {len(self._messages) - 1}, not {index}.")
        changed = {**self._messages[index], "content": content}
        self._cut(index)
        self._messages += normalise([changed])
        self._commit()

    def fork(self) -> Conversation:
        """Return a second conversation with the same past; from here on they differ."""
        self._settle()
        twin = Conversation(
            self._model,
            (),
            options=self._options,
            sampling=self._sampling,
            evict=self._evict_mode,
            scope=self._scope,
        )
        twin._messages, twin._tokens = copy.deepcopy(self._messages), list(self._tokens)
        twin._ends, twin.evicted = list(self._ends), copy.deepcopy(self.evicted)
        return twin

    # Looking

    @property
    def messages(self) -> list[dict[str, Any]]:
        """All messages that are still part of it, as plain dicts of a chat API."""
        self._end_turn()
        return copy.deepcopy(self._messages)

    @property
    def n_tokens(self) -> int:
        """Tokens it has in memory."""
        self._settle()
        return len(self._tokens)

    @property
    def spans(self) -> list[Span]:
        """Where each message lies among the tokens; they follow one another without a gap."""
        self._settle()
        starts = [0, *self._ends[:-1]]
        return [Span(start, end) for start, end in zip(starts, self._ends, strict=True)]

    @property
    def limit(self) -> int:
        """Tokens it may have before something must go."""
        return self._model.limit

    # Keeping

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write it to a file; `model.conversation(resume=path)` goes on from there, also in another process."""
        self._settle()
        state = {
            "version": VERSION,
            "messages": self._messages,
            "tokens": self._tokens,
            "tools": self._options.tool_schemas(),
            "evicted": self.evicted,
        }
        target = Path(path)
        temporary = target.with_name(f".{target.name}.{secrets.token_hex(4)}")
        try:
            temporary.write_text(json.dumps(state, ensure_ascii=False), encoding="utf-8")
            temporary.replace(target)
        except OSError as error:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)
            raise BadRequest(f"the conversation cannot be written to {target}: {error.strerror}.") from None

    def resume(self, path: str | os.PathLike[str]) -> None:
        """Take the place of a saved conversation; its KV comes from the cache where that still has it."""
        state = _load(Path(path))
        self._settle()
        self._messages = normalise(state["messages"]) if state["messages"] else []
        self.evicted = state.get("evicted", [])
        if state.get("tools") and not self._options.tools:
            self._options = replace(self._options, tools=state["tools"])
        if self._messages:
            text = self._prepare(self._messages).text
            if self._model.detokenize(state["tokens"], special=True).endswith(text):
                self._model._recall.remember(text, state["tokens"], scope=self._scope)
        self._tokens, self._ends = [], []
        self._commit()

    # How it works

    def _turn_after(
        self, change: Callable[[Sampling], None], sampling: Sampling, callback: Callable[[str], object] | None
    ) -> Turn:
        """Return a turn that replies to the messages after a change of them; it begins now, in asyncio when read."""

        def start() -> ChatStream:
            self._settle()
            change(sampling)
            return self._start(sampling)

        turn = Turn(self, start, callback=callback)
        if not _in_asyncio():
            turn.begin()
        return turn

    def _add(self, message: str | Mapping[str, Any]) -> None:
        self._take({"role": "user", "content": message} if isinstance(message, str) else message, self._sampling)
        self._commit()

    def _check_question(self, sampling: Sampling) -> None:
        if not self._messages or self._messages[-1]["role"] not in ("user", "tool"):
            raise BadRequest("there is nothing to reply to; add a user message or a tool's result first.")
        self._fit(self._messages, sampling)

    def _forget_reply(self, sampling: Sampling) -> None:
        self._cut(self._last_question() + 1)
        self._settle()
        self._check_question(sampling)

    def _take(self, message: Mapping[str, Any], sampling: Sampling) -> None:
        """Append a message, once it is known to fit; if it does not, nothing has changed but what was given up."""
        (checked,) = normalise([message])
        if checked["role"] not in ("user", "tool"):
            raise BadOption(f"a user's or a tool's message can be added, got one of role {checked['role']!r}.")
        self._fit([*self._messages, checked], sampling)
        self._messages.append(checked)

    def _start(self, sampling: Sampling) -> ChatStream:
        prepared = self._prepare(self._messages, generation=True)
        n_left = max(self.limit - len(prepared.tokens) - CLOSING, 1)
        sampling = replace(sampling, max_tokens=min(sampling.max_tokens, n_left))
        return chat.start(self._model, prepared, self._options, sampling, owner=self._id, scope=self._scope)

    def _take_news(self) -> list[Event]:
        news, self._news = self._news, []
        return news

    def _replied(self, reply: ChatReply) -> None:
        """Keep what was said, whole or not."""
        self._turn = None
        message = reply.message()
        if message.get("content") or message.get("tool_calls") or message.get("reasoning_content"):
            self._messages += normalise([message])
        self._commit()

    def _failed(self) -> None:
        """Let go of a turn that came to nothing; what was asked stays asked."""
        self._turn = None

    def _settle(self) -> None:
        """End a turn that was left half read; wait until what was said is in memory."""
        self._end_turn()
        if (reading := self._take_reading()) is not None:
            with contextlib.suppress(KvasirError):  # it is only warmth: the next turn reads what is missing
                reading.result()

    async def _asettle(self) -> None:
        """`_settle()` in asyncio."""
        if self._turn is not None:
            await self._turn.aclose()
        if (reading := self._take_reading()) is not None:
            with contextlib.suppress(KvasirError):
                await reading

    def _end_turn(self) -> None:
        if self._turn is not None:
            self._turn.close()

    def _take_reading(self) -> Stream | None:
        reading, self._reading = self._reading, None
        return reading

    def _commit(self) -> None:
        """Read all messages into memory, and note where each one ends."""
        if not self._messages:
            self._tokens, self._ends = [], []
            return
        try:
            tokens = self._prepare(self._messages).tokens
        except BadRequest:
            if any(message["role"] == "user" for message in self._messages):
                raise
            tokens = []  # a template that wants a user's message; until then nothing can be read
        self._ends = self._measure(tokens)
        self._tokens = tokens
        if tokens and len(tokens) <= self.limit:  # else the next turn makes room first
            self._reading = self._model._read(tokens, owner=self._id, scope=self._scope)

    def _measure(self, tokens: list[int]) -> list[int]:
        """Where each message ends among the tokens. What is known of the messages before stays."""
        n_same = common_prefix(self._tokens, tokens)
        ends = [end for end in self._ends[: len(self._messages)] if end <= n_same]
        for n_messages in range(len(ends) + 1, len(self._messages)):
            try:
                part = self._prepare(self._messages[:n_messages]).tokens
            except BadRequest:  # some templates refuse a part; the next message takes its tokens
                ends.append(ends[-1] if ends else 0)
                continue
            ends.append(max(common_prefix(part, tokens), ends[-1] if ends else 0))
        return [*ends[: len(self._messages) - 1], len(tokens)]

    def _prepare(self, messages: list[Message], *, generation: bool = False) -> chat.Prepared:
        return chat.prepare(self._model, messages, self._options, add_generation_prompt=generation, scope=self._scope)

    # Making room

    def _fit(self, messages: list[Message], sampling: Sampling) -> None:
        """Give up old messages until these fit together with a reply. `messages` begins with what is in memory."""
        limit = self.limit
        room = min(sampling.max_tokens, limit // 4) + CLOSING
        n_new = len(messages) - len(self._messages)
        while True:
            n_tokens = len(self._prepare(messages, generation=True).tokens)
            if n_tokens + room <= limit:
                return
            chosen = choose(self._sized(messages, n_tokens), n_tokens + room - limit)
            if self._evict_mode == "refuse" or not chosen:
                raise ContextFull(
                    f"the conversation is {n_tokens:,} tokens and needs {room:,} for a reply; there is room for "
                    f"{limit:,}. Begin a new one, shorten the message, or load with a larger context_size.",
                    n_tokens=n_tokens,
                    limit=limit,
                )
            self._drop(chosen)
            messages = [*self._messages, *messages[len(messages) - n_new :]] if n_new else self._messages

    def _sized(self, messages: list[Message], n_tokens: int) -> list[Sized]:
        starts = [0, *self._ends]
        sizes = [end - start for start, end in zip(starts, self._ends, strict=False)]
        n_known = len(sizes)
        sizes += [max(n_tokens - len(self._tokens), 0)] * (len(messages) - n_known)
        return [
            Sized(message["role"], size, bool(message.get("tool_calls")))
            for message, size in zip(messages, sizes, strict=True)
        ]

    def _drop(self, indexes: list[int]) -> None:
        """Give up messages: cut them out of memory where the rest is the same text without them, else forget them."""
        spans = self.spans
        dropped = [self._messages[index] for index in indexes]
        kept = [message for index, message in enumerate(self._messages) if index not in indexes]
        cuts = _joined([spans[index] for index in indexes])
        left = list(self._tokens)
        for start, end in reversed(cuts):
            del left[start:end]
        expected = self._prepare(kept).tokens if kept else []
        if self._evict_mode == "oldest" and left == expected:
            self._shift(cuts)
        n_dropped = sum(end - start for start, end in cuts)
        sizes = [span.end - span.start for index, span in enumerate(spans) if index not in indexes]
        self._messages, self._tokens = kept, expected
        self._ends = [sum(sizes[: i + 1]) for i in range(len(sizes))] if left == expected else []
        if left != expected:
            self._ends = self._measure(expected) if kept else []
        self.evicted += copy.deepcopy(dropped)
        self._news.append(Evicted(tuple(copy.deepcopy(dropped)), n_dropped))
        log.info("%d messages, %d tokens, were given up to make room", len(dropped), n_dropped)

    def _shift(self, cuts: list[Span]) -> None:
        """Cut spans out of what is in memory, the last first; where that cannot be done, the next turn reads anew."""
        tokens = list(self._tokens)
        for start, end in reversed(cuts):
            if not self._model._shift(self._id, tokens, start, end, scope=self._scope):
                return
            del tokens[start:end]

    def _last_question(self, role: str | None = None) -> int:
        roles = ("user", "tool") if role is None else (role,)
        found = [index for index, message in enumerate(self._messages) if message["role"] in roles]
        if not found:
            raise BadRequest("nothing has been said yet.")
        return found[-1]

    def _cut(self, index: int) -> list[dict[str, Any]]:
        """Forget the messages from `index` on."""
        forgotten = self._messages[index:]
        del self._messages[index:]
        self._commit()
        return list(forgotten)


def _in_asyncio() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def _joined(spans: list[Span]) -> list[Span]:
    """Spans that touch become one; empty ones vanish."""
    joined: list[Span] = []
    for span in spans:
        if span.start == span.end:
            continue
        if joined and joined[-1].end == span.start:
            joined[-1] = Span(joined[-1].start, span.end)
        else:
            joined.append(span)
    return joined


def _load(path: Path) -> dict[str, Any]:
    try:
        state = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise NotFound(f"the conversation {path} cannot be read: {error.strerror}.") from None
    except ValueError:
        raise BadRequest(f"{path} is not a saved conversation.") from None
    if not isinstance(state, dict) or state.get("version") != VERSION or not isinstance(state.get("messages"), list):
        raise BadRequest(f"{path} is not a conversation saved by this version.")
    return state
