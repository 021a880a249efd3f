"""Conversations on the fake core: spans, reuse by counter, eviction in every mode, and every way to leave a reply."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import Future
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from kvasir.chat.events import Done, Evicted, Text
from kvasir.errors import BadOption, BadRequest, ContextFull, NotFound
from kvasir.service.conversation import Conversation
from kvasir.service.model import Model
from kvasir.types import FinishReason
from tests.unit.test_service import open_fake

GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 8, "ignore_eos": True}
LAYOUTS = pytest.mark.parametrize("layout", ["unified", "split"])


@pytest.fixture(params=["unified", "split"])
def model(request: pytest.FixtureRequest) -> Iterator[Model]:
    with open_fake(context_size=4096, slots=4, layout=request.param, cache=False) as opened:
        yield opened


@pytest.fixture
def small() -> Iterator[Model]:
    """512 tokens a conversation."""
    with open_fake(context_size=1024, slots=2, layout="split", cache=False) as opened:
        assert opened.limit == 512
        yield opened


def begin(model: Model, **options: Any) -> Conversation:
    return model.conversation(system="Be brief.", **{**GREEDY, **options})


def rows(model: Model) -> int:
    return model.stats().rows_decoded


def settled(chat: Conversation) -> Conversation:
    """Whatever it says last is in memory; checked against the engine's books."""
    spans = chat.spans
    assert [span.start for span in spans] == [0, *[span.end for span in spans[:-1]]]
    assert sum(span.end - span.start for span in spans) == chat.n_tokens
    return chat


def test_a_reply_is_text_and_a_message(model: Model) -> None:
    chat = begin(model)
    pieces = list(chat.say("hello"))
    assert "".join(pieces) == chat.messages[-1]["content"]
    assert [message["role"] for message in chat.messages] == ["system", "user", "assistant"]
    settled(chat)


def test_what_is_counted_is_what_is_in_memory(model: Model) -> None:
    chat = begin(model)
    for text in ("hello", "and now", "more"):
        chat.say(text).result()
        assert settled(chat).n_tokens == model.stats().cells_used


def test_a_turn_costs_only_its_own_tokens(model: Model) -> None:
    chat = begin(model)
    chat.say("hello there, this is a longer message to begin with").result()
    n_tokens = chat.n_tokens  # waits until all of it is in memory
    before = rows(model)
    reply = chat.say("more").result()
    assert reply.usage.cached_tokens == n_tokens
    assert settled(chat).n_tokens - n_tokens == rows(model) - before


def test_events_tell_everything_and_end_in_done(model: Model) -> None:
    events = list(begin(model).say("hello").events())
    assert isinstance(events[-1], Done)
    assert "".join(event.text for event in events if isinstance(event, Text)) == events[-1].reply.content


def test_leaving_the_loop_keeps_what_was_said(model: Model) -> None:
    chat = begin(model, max_tokens=200)
    said = ""
    for piece in chat.say("hello"):
        said += piece
        if len(said) >= 3:
            break
    assert chat.messages[-1]["content"] == said
    assert settled(chat).say("go on").result().usage.cached_tokens > 0


def test_a_callback_can_stop_a_reply(model: Model) -> None:
    chat = begin(model, max_tokens=200)
    heard: list[str] = []

    def listen(piece: str) -> bool:
        heard.append(piece)
        return len(heard) < 3

    reply = chat.say("hello", callback=listen).result()
    assert reply.finish_reason is FinishReason.CANCELLED
    assert len(heard) == 3
    assert chat.messages[-1]["content"] == "".join(heard) == reply.content


def test_a_reply_that_nobody_read_is_settled_by_what_comes_next(model: Model) -> None:
    chat = begin(model, max_tokens=200)
    chat.say("hello")
    assert [message["role"] for message in chat.messages][:2] == ["system", "user"]
    assert chat.say("again").result().content


def test_an_added_message_is_read_at_once(model: Model) -> None:
    chat = begin(model)
    chat.add("a question that takes a while to read")
    n_read = chat.n_tokens
    assert rows(model) == n_read
    assert chat.reply().result().usage.cached_tokens == n_read


def test_a_tool_result_is_added_and_answered(model: Model) -> None:
    chat = begin(model)
    chat.say("hello").result()
    chat.add({"role": "tool", "tool_call_id": "call_1", "name": "weather", "content": "21 C"})
    assert chat.reply().result().content
    with pytest.raises(BadOption, match="role 'assistant'"):
        chat.add({"role": "assistant", "content": "no"})


def test_nothing_to_reply_to_is_an_error(model: Model) -> None:
    chat = begin(model)
    with pytest.raises(BadRequest, match="nothing to reply to"):
        chat.reply()
    with pytest.raises(BadRequest, match="nothing has been said"):
        chat.undo()


def test_undo_forgets_a_turn_and_reuses_the_rest(model: Model) -> None:
    chat = begin(model)
    chat.say("one").result()
    n_tokens = chat.n_tokens
    chat.say("two").result()
    forgotten = chat.undo()
    assert [message["role"] for message in forgotten] == ["user", "assistant"]
    assert settled(chat).n_tokens == n_tokens
    assert chat.say("other").result().usage.cached_tokens >= n_tokens - 1


def test_regenerate_reads_nothing_again(model: Model) -> None:
    chat = begin(model)
    first = chat.say("one").result()
    again = chat.regenerate().result()
    assert again.content == first.content
    assert again.usage.cached_tokens == again.usage.prompt_tokens - 1
    assert len(chat.messages) == 3


def test_an_edited_message_is_answered_anew(model: Model) -> None:
    chat = begin(model)
    chat.say("one").result()
    end = chat.spans[-1].end
    chat.say("two").result()
    chat.edit(3, "three")
    assert [message["content"] for message in chat.messages if message["role"] == "user"] == ["one", "three"]
    assert chat.reply().result().usage.cached_tokens >= end
    with pytest.raises(BadOption, match="messages 0 to"):
        chat.edit(9, "x")


def test_a_fork_shares_the_past_and_goes_its_own_way(model: Model) -> None:
    chat = begin(model)
    chat.say("one").result()
    n_tokens = chat.n_tokens
    twin = chat.fork()
    assert twin.say("left").result().usage.cached_tokens >= n_tokens
    assert chat.say("right").result().usage.cached_tokens >= n_tokens
    assert chat.messages[:3] == twin.messages[:3]
    assert chat.messages[3]["content"] != twin.messages[3]["content"]


def test_a_saved_conversation_goes_on_elsewhere(model: Model, tmp_path: Path) -> None:
    chat = begin(model)
    chat.say("one").result()
    chat.save(tmp_path / "chat.json")
    other = model.conversation(resume=tmp_path / "chat.json", **GREEDY)
    assert other.messages == chat.messages
    assert settled(other).n_tokens == chat.n_tokens
    assert other.say("two").result().content == chat.say("two").result().content


def test_bad_files_are_refused_in_one_sentence(model: Model, tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="cannot be read"):
        model.conversation(resume=tmp_path / "missing.json")
    (tmp_path / "bad.json").write_text("no json")
    with pytest.raises(BadRequest, match="not a saved conversation"):
        model.conversation(resume=tmp_path / "bad.json")
    (tmp_path / "other.json").write_text('{"version": 99, "messages": []}')
    with pytest.raises(BadRequest, match="this version"):
        model.conversation(resume=tmp_path / "other.json")
    with pytest.raises(BadRequest, match="cannot be written"):
        begin(model).save(tmp_path / "no" / "such" / "folder.json")


# When it does not fit any more


def fill(chat: Conversation, part: float, *, text: str = "word " * 5) -> None:
    while chat.n_tokens + 60 < part * chat.limit:
        chat.say(text).result()


def filled(model: Model, part: float, last: str) -> Conversation:
    """A conversation that fills so much of the context once its last message is said; options are the defaults."""
    before = [{"role": "system", "content": "Be brief."}]
    for i in range(3):
        before += [{"role": "user", "content": f"question {i}"}, {"role": "assistant", "content": f"answer {i}"}]
    n_lacking = int(part * model.limit) - model.count_tokens([*before, {"role": "user", "content": last}])
    before[1]["content"] += "x" * n_lacking
    assert model.count_tokens([*before, {"role": "user", "content": last}]) == int(part * model.limit)
    return model.conversation(messages=before)


def test_seventy_per_cent_full_gives_up_nothing(small: Model) -> None:
    """With the new message in it, and room for a reply as long as it is by default."""
    chat = filled(small, 0.7, "and what now?")
    reply = chat.say("and what now?").result()
    assert reply.usage.prompt_tokens == int(0.7 * 512)
    assert chat.evicted == []
    assert len(chat.messages) == 9


def test_eighty_per_cent_full_gives_up_the_oldest_turn(small: Model) -> None:
    chat = filled(small, 0.8, "and what now?")
    chat.say("and what now?").result()
    assert [message["role"] for message in chat.evicted] == ["user", "assistant"]


def test_over_full_gives_up_the_oldest_turns_and_says_so(small: Model) -> None:
    chat = begin(small)
    first = list(chat.say("the very first thing said").events())
    assert isinstance(first[-1], Done)
    told: list[Evicted] = []
    n_said = 0
    while not told and n_said < 50:
        told = [event for event in chat.say(f"message number {n_said} of many").events() if isinstance(event, Evicted)]
        n_said += 1
    assert told[0].messages[0]["content"] == "the very first thing said"
    assert told[0].n_tokens > 0
    assert chat.evicted[0]["content"] == "the very first thing said"
    assert chat.messages[0]["role"] == "system"
    assert chat.messages[-2]["content"] == f"message number {n_said - 1} of many"
    assert settled(chat).n_tokens <= chat.limit


def test_after_a_cut_only_the_new_turn_is_computed(small: Model) -> None:
    chat = begin(small)
    while True:
        n_kept, before = chat.n_tokens, rows(small)
        reply = chat.say("another message of some length").result()
        if chat.evicted:
            break
    assert small.stats().counters.shifted > 0
    n_dropped = n_kept - reply.usage.cached_tokens
    assert n_dropped > 0
    n_new = reply.usage.prompt_tokens - reply.usage.cached_tokens
    n_after = chat.n_tokens
    assert rows(small) - before == n_after - reply.usage.cached_tokens
    assert n_new < 60


def exchange(name: str, n_letters: int) -> list[dict[str, Any]]:
    """A call and its result."""
    call = {"id": name, "type": "function", "function": {"name": "look", "arguments": "{}"}}
    result = {"role": "tool", "tool_call_id": name, "name": "look", "content": "x" * n_letters}
    return [{"role": "assistant", "content": "", "tool_calls": [call]}, result]


def test_the_oldest_tool_exchanges_of_the_turn_go_when_no_old_turn_is_left(small: Model) -> None:
    asked = {"role": "user", "content": "look three times"}
    *before, last = [*exchange("one", 50), *exchange("two", 50), *exchange("three", 50)]
    chat = begin(small, messages=[asked, *before])
    chat.add(last)
    assert chat.evicted == []  # all of it fits; the room for a reply is what lacks
    before_rows = rows(small)
    events = list(chat.reply(max_tokens=100).events())
    evicted = next(event for event in events if isinstance(event, Evicted))
    assert [message.get("tool_call_id") for message in evicted.messages if message["role"] == "tool"] == ["one"]
    kept = [message.get("tool_call_id") for message in chat.messages if message["role"] == "tool"]
    assert kept == ["two", "three"]
    assert chat.messages[1] == asked
    assert rows(small) - before_rows < 120  # what was kept was not read again
    settled(chat)


def test_reading_anew_is_exactly_a_new_conversation(small: Model) -> None:
    chat = begin(small, evict="reprefill")
    while not chat.evicted:
        chat.say("another message of some length").result()
    assert small.stats().counters.shifted == 0
    fresh = small.conversation(messages=chat.messages, evict="reprefill", **GREEDY)
    assert fresh.say("and now?").result().content == chat.say("and now?").result().content


def test_refusing_raises_with_both_numbers_and_loses_nothing(small: Model) -> None:
    chat = begin(small, evict="refuse")
    with pytest.raises(ContextFull) as full:
        fill(chat, 2)
    assert full.value.limit == 512
    assert full.value.n_tokens is not None
    assert full.value.n_tokens > 300
    assert chat.evicted == []
    assert chat.messages[-1]["role"] == "assistant"


def test_a_message_that_can_never_fit_is_refused_and_the_rest_stays(small: Model) -> None:
    chat = begin(small)
    chat.say("hello").result()
    with pytest.raises(ContextFull, match="512"):
        chat.say("x" * 2000)
    assert [message["role"] for message in chat.messages] == ["system", "user", "assistant"]
    assert chat.say("still here?").result().content


def overfill(chat: Conversation) -> None:
    while not chat.evicted:
        chat.say("another message of some length").result()


@pytest.mark.parametrize("kind", ["recurrent", "hybrid", "window"])
def test_memory_that_cannot_be_cut_is_read_anew(kind: str) -> None:
    """A window that keeps no more than it needs cannot be cut either."""
    with open_fake(kind, context_size=1024, slots=2, layout="split", cache=False, swa_full=False) as model:
        chat = begin(model)
        overfill(chat)
        assert model.stats().counters.shifted == 0
        assert settled(chat).n_tokens <= chat.limit
        fresh = model.conversation(messages=chat.messages, **GREEDY)
        assert fresh.n_tokens == chat.n_tokens
        assert chat.say("and now?").result().content == fresh.say("and now?").result().content


def test_a_window_that_is_kept_whole_can_be_cut() -> None:
    with open_fake("window", context_size=1024, slots=2, layout="split", cache=False) as model:
        overfill(begin(model))
        assert model.stats().counters.shifted > 0


# After something was given up


@pytest.fixture
def cut(small: Model) -> Conversation:
    """A conversation whose memory was cut, with room for another turn."""
    chat = begin(small)
    overfill(chat)
    assert small.stats().counters.shifted == 1
    chat.undo()
    return settled(chat)


def test_after_a_cut_a_turn_can_be_undone(small: Model, cut: Conversation) -> None:
    before, n_tokens = cut.messages[:-2], cut.spans[-2].start
    assert [message["role"] for message in cut.undo()] == ["user", "assistant"]
    assert cut.messages == before
    assert settled(cut).n_tokens == n_tokens
    n_rows = rows(small)
    reply = cut.say("another one").result()
    assert reply.usage.cached_tokens >= n_tokens - 1
    assert settled(cut).n_tokens - reply.usage.cached_tokens == rows(small) - n_rows
    assert small.stats().counters.shifted == 1


def test_after_a_cut_a_fork_is_a_new_conversation_of_what_is_left(small: Model, cut: Conversation) -> None:
    """The memory that was cut belongs to the other one."""
    twin = cut.fork()
    assert (twin.messages, twin.evicted) == (cut.messages, cut.evicted)
    assert settled(twin).n_tokens == cut.n_tokens
    fresh = small.conversation(messages=cut.messages, **GREEDY)
    assert twin.say("and now?").result().content == fresh.say("and now?").result().content
    assert small.stats().counters.shifted == 1
    cut.say("still here?").result()
    assert settled(cut).messages[:-2] == twin.messages[:-2]


def test_after_a_cut_what_was_saved_is_a_new_conversation_of_what_is_left(
    small: Model, cut: Conversation, tmp_path: Path
) -> None:
    cut.save(tmp_path / "chat.json")
    again = small.conversation(resume=tmp_path / "chat.json", **GREEDY)
    assert (again.messages, again.evicted) == (cut.messages, cut.evicted)
    assert settled(again).spans == cut.spans
    fresh = small.conversation(messages=cut.messages, **GREEDY)
    assert again.say("and now?").result().content == fresh.say("and now?").result().content
    assert small.stats().counters.shifted == 1


def test_a_thousand_tiny_messages(small: Model) -> None:
    chat = begin(small, max_tokens=2)
    for i in range(500):
        chat.say(str(i)).result()
    assert settled(chat).n_tokens <= chat.limit
    assert len(chat.evicted) + len(chat.messages) == 1001


def test_many_conversations_over_few_slots() -> None:
    with open_fake(context_size=2048, slots=2, layout="split", cache=False) as model:
        chats = [model.conversation(system=f"You are number {i}.", **GREEDY) for i in range(8)]
        alone = []
        for i, chat in enumerate(chats):
            for turn in range(2):
                chat.say(f"{i} says {turn}").result()
            alone.append([message["content"] for message in chat.messages])
        for i in range(8):
            again = model.conversation(system=f"You are number {i}.", **GREEDY)
            for turn in range(2):
                again.say(f"{i} says {turn}").result()
            assert [message["content"] for message in again.messages] == alone[i]


def test_asyncio_talks_too(model: Model) -> None:
    async def talk() -> tuple[str, str]:
        chat = begin(model)
        pieces = [piece async for piece in chat.say("hello")]
        reply = await chat.say("more")
        assert len(chat.messages) == 5
        return "".join(pieces), reply.content

    first, second = asyncio.run(talk())
    assert first
    assert second


# The event loop goes on while a conversation waits


class Held:
    """An engine that stands still until a task on the event loop has had its turn ten times."""

    def __init__(self, model: Model) -> None:
        self.n_turns = 0
        self._go = threading.Event()
        # Without an end, a loop that is blocked would block for ever: the engine could not go on.
        self._went: Future[bool] = model._running_engine().call(lambda: self._go.wait(20))

    async def turns(self) -> None:
        while True:
            self.n_turns += 1
            if self.n_turns == 10:
                self._go.set()
            await asyncio.sleep(0)

    def check(self) -> None:
        assert self._went.result(), "the event loop stood still"
        assert self.n_turns >= 10


@asynccontextmanager
async def held(model: Model) -> AsyncIterator[None]:
    engine = Held(model)
    task = asyncio.create_task(engine.turns())
    try:
        yield
        engine.check()
    finally:
        task.cancel()


def test_a_turn_that_waits_for_what_was_said_before_blocks_no_event_loop(model: Model) -> None:
    async def talk() -> str:
        chat = begin(model)
        await chat.say("hello")
        async with held(model):
            reply = await chat.say("more")
        assert reply.usage.cached_tokens > 0
        return reply.content

    assert asyncio.run(talk())


def test_a_turn_that_is_cancelled_blocks_no_event_loop(model: Model) -> None:
    async def talk() -> None:
        chat = begin(model, max_tokens=2000)
        turn = chat.say("hello")
        pieces = aiter(turn)
        heard = await anext(pieces)
        async with held(model):
            turn.cancel()
            assert [piece async for piece in pieces] == []
        assert chat.messages[-1]["content"] == heard
        assert (await turn).finish_reason is FinishReason.CANCELLED

    asyncio.run(talk())


def test_a_turn_that_was_left_is_ended_by_the_next_and_blocks_no_event_loop(model: Model) -> None:
    async def talk() -> None:
        chat = begin(model, max_tokens=2000)
        heard = ""
        async for piece in chat.say("hello"):
            heard += piece
            if len(heard) >= 3:
                break
        async with held(model):
            await chat.say("again", max_tokens=4)
        assert [message["role"] for message in chat.messages] == ["system", "user", "assistant", "user", "assistant"]
        assert chat.messages[2]["content"] == heard

    asyncio.run(talk())


def test_a_turn_that_was_left_can_be_read_on(model: Model) -> None:
    async def talk() -> None:
        chat = begin(model)
        turn = chat.say("hello")
        async for _ in turn:
            break
        reply = await turn
        assert chat.messages[-1]["content"] == reply.content != ""

    asyncio.run(talk())


def test_a_message_is_added_in_asyncio(model: Model) -> None:
    async def talk() -> None:
        chat = begin(model)
        async with held(model):
            await chat.aadd("a question that takes a while to read")
        n_tokens = model.stats().cells_used
        reply = await chat.reply()
        assert reply.usage.cached_tokens == n_tokens
        assert len(chat.messages) == 3

    asyncio.run(talk())


def test_room_is_made_without_blocking_the_event_loop(small: Model) -> None:
    async def talk() -> None:
        chat = begin(small)
        while not chat.evicted:
            async with held(small):
                await chat.say("another message of some length")
        assert small.stats().counters.shifted > 0
        assert settled(chat).n_tokens <= chat.limit

    asyncio.run(talk())


def test_in_asyncio_nothing_is_said_before_a_turn_is_read(model: Model) -> None:
    async def talk() -> None:
        chat = begin(model)
        unread = chat.say("never said")
        await chat.say("hello")
        unread.close()
        async with chat.say("more", max_tokens=2000):
            pass
        said = [message["content"] for message in chat.messages if message["role"] == "user"]
        assert said == ["hello", "more"]

    asyncio.run(talk())


def test_many_conversations_in_one_event_loop(model: Model) -> None:
    async def talk() -> list[str]:
        chats = [model.conversation(system=f"You are number {i}.", **GREEDY) for i in range(12)]
        await asyncio.gather(*(chat.say("hello") for chat in chats))
        return [reply.content for reply in await asyncio.gather(*(chat.say("more") for chat in chats))]

    alone = []
    for i in range(12):
        chat = model.conversation(system=f"You are number {i}.", **GREEDY)
        chat.say("hello").result()
        alone.append(chat.say("more").result().content)
    assert asyncio.run(talk()) == alone


def test_options_are_checked(model: Model) -> None:
    with pytest.raises(BadOption, match="evict"):
        model.conversation(evict="newest")
    with pytest.raises(BadOption, match="tempreature"):
        model.conversation(tempreature=1)


def test_after_a_cancel_nothing_more_is_heard(model: Model) -> None:
    chat = begin(model, max_tokens=200)
    turn = chat.say("hello")
    heard = []
    for piece in turn:
        heard.append(piece)
        if len(heard) == 3:
            turn.cancel()
    assert len(heard) == 3
    assert chat.messages[-1]["content"] == "".join(heard)
    assert turn.result().finish_reason is FinishReason.CANCELLED
