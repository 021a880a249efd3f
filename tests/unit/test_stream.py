"""A stream ends once, gives whole pieces, and cancels the work that nobody waits for."""

from __future__ import annotations

import asyncio
import gc
import threading
from typing import Any

import pytest

from kvasir.engine import Done, Event, Failed, Tokens
from kvasir.errors import BadOption, BadSchema, EngineStopped
from kvasir.model.tokenizer import Tokenizer
from kvasir.native import fake
from kvasir.service.completion import Reply
from kvasir.service.stream import Mailbox, Stream
from kvasir.types import FinishReason, Sampling, Timings, Usage

USAGE = Usage(prompt_tokens=3, cached_tokens=0, completion_tokens=5)
TIMINGS = Timings(queue_s=0.0, prefill_s=0.1, first_token_s=0.1, decode_s=0.5)


def done(reason: FinishReason = FinishReason.STOP) -> Done:
    return Done(reason, None, USAGE, TIMINGS)


class Scene:
    """A stream, its mailbox in the engine's place, and how often it was cancelled."""

    def __init__(self, **options: Any) -> None:
        self.n_cancelled = 0
        self.mail = Mailbox()
        vocab: Any = fake.Vocab()
        reply = Reply(Tokenizer(vocab), Sampling.of(**options), seed=7)
        self.stream: Any = Stream(reply, self.mail, cancel=self.cancelled, owner=None)

    def cancelled(self) -> None:
        self.n_cancelled += 1
        self.mail.put(done(FinishReason.CANCELLED))

    def say(self, *texts: str | bytes, end: Event | None = None) -> None:
        for text in texts:
            data = text.encode() if isinstance(text, str) else text
            self.mail.put(Tokens(tuple(data), (None,) * len(data)))
        if end is not None:
            self.mail.put(end)


def test_a_loop_gives_the_pieces_and_result_the_whole() -> None:
    scene = Scene()
    scene.say("Hello", ", world", end=done())
    assert list(scene.stream) == ["Hello", ", world"]
    completion = scene.stream.result()
    assert (completion.text, completion.finish_reason, completion.seed) == ("Hello, world", "stop", 7)
    assert completion.tokens == tuple(b"Hello, world")
    assert (completion.usage, completion.timings, completion.stop) == (USAGE, TIMINGS, None)
    assert scene.n_cancelled == 0


def test_characters_cut_by_tokens_come_out_whole() -> None:
    scene = Scene()
    llama = "🦙".encode()
    scene.say(b"a" + llama[:1], llama[1:3], llama[3:] + b"b", llama[:2], end=done(FinishReason.LENGTH))
    assert list(scene.stream) == ["a", "🦙b", "\ufffd"]


def test_a_stop_string_over_three_pieces_ends_the_work_and_is_reported() -> None:
    scene = Scene(stop=["END"])
    scene.say("one E", "N", "D two")
    assert list(scene.stream) == ["one "]
    completion = scene.stream.result()
    assert (completion.text, completion.stop, completion.finish_reason) == ("one ", "END", "stop")
    assert completion.tokens == tuple(b"one END")
    assert scene.n_cancelled == 1


def test_text_that_only_looked_like_a_stop_is_shown_at_the_end() -> None:
    scene = Scene(stop=["END"])
    scene.say("one EN", end=done())
    assert list(scene.stream) == ["one ", "EN"]
    assert scene.stream.result().stop is None


def test_leaving_the_loop_cancels() -> None:
    scene = Scene()
    scene.say("a", "b")
    for _ in scene.stream:
        break
    assert scene.n_cancelled == 1
    assert scene.stream.result().finish_reason is FinishReason.CANCELLED


def test_an_exception_in_the_loop_cancels() -> None:
    scene = Scene()
    scene.say("a", "b")

    def read() -> None:
        for _ in scene.stream:
            raise LookupError

    with pytest.raises(LookupError):
        read()
    assert scene.n_cancelled == 1


def test_leaving_a_with_block_cancels() -> None:
    scene = Scene()
    with scene.stream as stream:
        scene.say("a")
        assert next(stream) == "a"
        assert scene.n_cancelled == 0
    assert scene.n_cancelled == 1


def test_a_dropped_stream_cancels() -> None:
    scene = Scene()
    scene.say("a")
    scene.stream = None
    gc.collect()
    assert scene.n_cancelled == 1


def test_cancelling_twice_or_after_the_end_does_nothing() -> None:
    scene = Scene()
    scene.say("a", end=done())
    assert scene.stream.result().text == "a"
    scene.stream.cancel()
    scene.stream.cancel()
    assert scene.n_cancelled == 0


def test_another_thread_may_cancel() -> None:
    scene = Scene()
    scene.say("a")
    timer = threading.Timer(0.05, scene.stream.cancel)
    timer.start()
    assert scene.stream.result().finish_reason is FinishReason.CANCELLED
    timer.join()


def test_a_failed_request_raises_every_time_it_is_asked() -> None:
    scene = Scene()
    scene.say("a", end=Failed(EngineStopped("the engine was closed.")))
    with pytest.raises(EngineStopped):
        list(scene.stream)
    with pytest.raises(EngineStopped):
        scene.stream.result()


def test_logprobs_carry_the_texts_of_tokens() -> None:
    scene = Scene(logprobs=2)
    top = [(ord("a"), -0.5), (ord("b"), -1.5)]
    scene.mail.put(Tokens((ord("a"),), (fake.TokenLogprobs(-0.5, top),)))
    scene.mail.put(done())
    (only,) = scene.stream.result().logprobs
    assert (only.token, only.text, only.logprob) == (ord("a"), "a", -0.5)
    assert only.top == ((ord("a"), "a", -0.5), (ord("b"), "b", -1.5))


@pytest.mark.parametrize("reason", [FinishReason.LENGTH, FinishReason.CANCELLED])
def test_json_that_was_cut_off_parses_to_none(reason: FinishReason) -> None:
    scene = Scene(json_schema={"type": "object"})
    scene.say('{"a": 1', end=done(reason))
    assert scene.stream.result().parsed is None


def test_json_is_parsed() -> None:
    scene = Scene(json_schema={"type": "object"})
    scene.say('{"a": 1}', end=done())
    assert scene.stream.result().parsed == {"a": 1}


def test_a_reply_that_breaks_its_schema_is_an_error() -> None:
    scene = Scene(json_schema={"type": "object"})
    scene.say("no json", end=done())
    with pytest.raises(BadSchema):
        scene.stream.result()


# asyncio: the same stream, awaited


def say_later(scene: Scene, *texts: str, end: Event | None = None) -> threading.Timer:
    timer = threading.Timer(0.02, scene.say, texts, {"end": end})
    timer.start()
    return timer


def test_async_for_waits_without_blocking_the_loop() -> None:
    async def read() -> tuple[list[str], int]:
        scene = Scene()
        timer = say_later(scene, "a", "b", end=done())
        ticks = 0

        async def tick() -> None:
            nonlocal ticks
            while True:
                ticks += 1
                await asyncio.sleep(0.001)

        ticking = asyncio.create_task(tick())
        pieces = [piece async for piece in scene.stream]
        ticking.cancel()
        timer.join()
        return pieces, ticks

    pieces, ticks = asyncio.run(read())
    assert pieces == ["a", "b"]
    assert ticks > 2


def test_await_gives_the_completion() -> None:
    async def read() -> str:
        scene = Scene()
        timer = say_later(scene, "a", "b", end=done())
        completion = await scene.stream
        timer.join()
        return str(completion.text)

    assert asyncio.run(read()) == "ab"


def test_leaving_an_async_loop_cancels() -> None:
    async def read() -> int:
        scene = Scene()
        scene.say("a", "b")
        async for _ in scene.stream:
            break
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        return scene.n_cancelled

    assert asyncio.run(read()) == 1


def test_async_with_cancels() -> None:
    async def read() -> int:
        scene = Scene()
        scene.say("a", "b")
        async with scene.stream as stream:
            assert await anext(stream) == "a"
        return scene.n_cancelled

    assert asyncio.run(read()) == 1


def test_a_cancelled_task_cancels_the_work() -> None:
    async def read() -> int:
        scene = Scene()

        async def wait() -> None:
            await scene.stream

        task = asyncio.create_task(wait())
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return scene.n_cancelled

    assert asyncio.run(read()) == 1


def test_two_tasks_on_one_stream_are_refused() -> None:
    async def read() -> None:
        scene = Scene()
        first = asyncio.create_task(anext(scene.stream))
        await asyncio.sleep(0)
        with pytest.raises(BadOption, match="another task"):
            await anext(scene.stream)
        scene.say("a")
        assert await first == "a"

    asyncio.run(read())


def test_an_event_after_the_loop_closed_does_not_reach_the_engine_as_an_error() -> None:
    scene = Scene()

    async def start() -> None:
        task = asyncio.ensure_future(anext(scene.stream))
        await asyncio.sleep(0)
        wake = scene.mail._wake
        assert wake is not None
        wakes.append(wake)
        task.cancel()

    wakes: list[Any] = []
    asyncio.run(start())
    wakes[0]()
