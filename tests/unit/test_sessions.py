"""Sessions over workers, on the fake core: the ledger, leaving and cancelling, refusals, threads and tasks."""

from __future__ import annotations

import asyncio
import gc
import random
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvasir import errors
from kvasir.config import load_settings
from kvasir.model.tokenizer import Tokenizer
from kvasir.native import fake
from kvasir.service.chunks import Chunk, Done, Error, Text
from kvasir.service.generation import Generation
from kvasir.service.run import tokens_of
from kvasir.service.session import Session
from kvasir.service.sessions import Service
from kvasir.types import FinishReason

GREEDY: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True}


def open_fake(kind: str = "plain", *, workers: int = 1, **options: Any) -> Service:
    settings = load_settings({"context_size": 512, **options}, environ={})
    return Service.open(Path(f"fake:{kind}"), settings, workers=workers, core=fake)


@pytest.fixture
def service() -> Iterator[Service]:
    with open_fake(workers=2) as opened:
        yield opened


def slow_down(service: Service, seconds: float = 0.005) -> None:
    """Let every decode take a while, so that there is time to do something to a stream."""
    for worker in range(service.n_workers):
        service._workers[worker]._running_engine()._loop.context.step_delay_s = seconds  # type: ignore[attr-defined]


def until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not is_so():
        assert time.monotonic() < deadline, "it did not come to be in time"
        time.sleep(0.001)


def rest(service: Service) -> None:
    """Wait until no worker has anything to do."""
    until(lambda: all(stats.requests_open == 0 for stats in service.stats()))


def alone(text: str, n_tokens: int, kind: str = "plain") -> list[int]:
    """What one reply gives in a service of its own."""
    with open_fake(kind) as service, service.create_session(**GREEDY) as session:
        session.append_input(text)
        return list(session.generate_stream(n_tokens).result().completion.tokens)


def text_of(chunks: list[Chunk]) -> str:
    return "".join(chunk.text for chunk in chunks if isinstance(chunk, Text))


def started(service: Service, text: str = "abc", **options: Any) -> Session:
    session = service.create_session(**(GREEDY | options))
    session.append_input(text)
    return session


# The ledger


def test_input_is_queued_and_nothing_is_computed(service: Service) -> None:
    session = service.create_session()
    service.append_input(session.id, "one ")
    session.append_input(b"two")
    assert session.text == "one two"
    assert sum(stats.rows_decoded for stats in service.stats()) == 0


def test_input_is_tokenized_as_given() -> None:
    with open_fake("plain?add_bos=1") as service, service.create_session() as session:
        session.append_input("a<|im_end|>")
        assert len(session.tokens) == 2  # no beginning token; the special one is one token


@pytest.mark.parametrize("kind", ["plain", "window", "recurrent", "hybrid"])
def test_many_turns_are_one_text(kind: str) -> None:
    with open_fake(kind) as service, service.create_session(**GREEDY) as session:
        prompt: list[int] = []
        for turn in range(4):
            session.append_input(f"turn {turn} ")
            prompt = session.tokens
            said = session.generate_stream(7).result().completion.tokens
            assert session.tokens == prompt + list(said)
            with service.create_session(**GREEDY) as other:
                other._ledger = other._ledger._replace(pending=tuple(prompt))
                assert other.generate_stream(7).result().completion.tokens == said


def test_a_turn_computes_only_its_own_tokens(service: Service) -> None:
    session = started(service, "a beginning of some length")
    session.generate_stream(8).result()
    rest(service)
    session.append_input("more")
    usage = session.generate_stream(8).result().usage
    assert usage.prompt_tokens - usage.cached_tokens == len("more")


def test_the_token_sampled_last_is_in_memory_after_a_length_stop(service: Service) -> None:
    session = started(service)
    session.generate_stream(8).result()
    rest(service)
    engine = service._workers[session.worker]._running_engine()
    held = engine.call(lambda: [resident.tokens[: resident.n_live] for resident in engine._loop.residents]).result()
    assert session.tokens in [list(tokens) for tokens in held]


def test_a_reply_that_ended_at_its_length_goes_on_as_if_it_had_not(service: Service) -> None:
    session = started(service)
    made = [session.generate_stream(n).result().completion.tokens for n in (3, 1, 6)]
    assert [token for part in made for token in part] == alone("abc", 10)


def test_a_drawn_reply_with_a_seed_goes_on_too(service: Service) -> None:
    options: dict[str, Any] = {"temperature": 1.0, "seed": 5}
    whole = started(service, **options).generate_stream(20).result().completion.tokens
    session = started(service, **options)
    made = [session.generate_stream(n).result().completion.tokens for n in (9, 11)]
    assert made[0] + made[1] == whole


def test_a_grammar_goes_on_where_it_was_and_begins_anew_with_new_input(service: Service) -> None:
    session = started(service, grammar='root ::= "the cat sat"', ignore_eos=False)
    assert session.generate_stream(2).result().reason is FinishReason.LENGTH
    second = session.generate_stream(50).result()
    assert session.text == "abcthe cat sat"
    assert second.reason is FinishReason.STOP
    session.append_input(" and ")
    session.generate_stream(50).result()
    assert session.text == "abcthe cat sat and the cat sat"


def test_input_that_comes_during_a_reply_follows_it(service: Service) -> None:
    slow_down(service)
    session = started(service)
    stream = session.generate_stream(20)
    session.append_input(" then this")
    said = stream.result().completion.text
    assert session.text == f"abc{said} then this"


# Leaving and cancelling


@pytest.mark.parametrize("n_read", [1, 3, 7])
def test_who_leaves_the_loop_keeps_what_was_read(service: Service, n_read: int) -> None:
    session = started(service)
    seen = ""
    for chunk in session.generate_stream(300):
        assert isinstance(chunk, Text)
        seen += chunk.text
        if len(seen) >= n_read:
            break
    assert session.text == "abc" + seen
    session.generate_stream(8).result()
    assert session.tokens[3:] == alone("abc", session.n_tokens - 3)


def test_who_leaves_after_the_reply_has_ended_keeps_only_what_was_read(service: Service) -> None:
    session = started(service)
    stream = session.generate_stream(30)
    until(lambda: not session.busy)
    with stream:
        first = next(iter(stream))
    assert isinstance(first, Text)
    assert session.text == "abc" + first.text


def test_a_stream_that_is_dropped_is_left(service: Service) -> None:
    slow_down(service)
    session = started(service)
    session.generate_stream(400)
    gc.collect()
    assert session.text == "abc"
    assert not session.busy


def test_an_error_in_the_loop_leaves_it(service: Service) -> None:
    slow_down(service)
    session = started(service)

    def read() -> None:
        for _ in session.generate_stream(400):
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        read()
    until(lambda: not session.busy)


def test_after_cancel_all_that_was_made_can_be_read_and_counts(service: Service) -> None:
    slow_down(service)
    session = started(service)
    chunks: list[Chunk] = []
    for chunk in session.generate_stream(400):
        chunks.append(chunk)
        if len(chunks) == 3:
            session.cancel_generate()
    assert isinstance(chunks[-1], Done)
    assert chunks[-1].reason is FinishReason.CANCELLED
    assert session.text == "abc" + text_of(chunks)
    made = list(chunks[-1].completion.tokens)
    more = list(session.generate_stream(8).result().completion.tokens)
    assert made + more == alone("abc", len(made) + 8)


def test_a_lone_cancelled_stream_ends(service: Service) -> None:
    slow_down(service)
    session = started(service)
    stream = service.generate_stream(session.id, 400)
    threading.Timer(0.05, service.cancel_generate, [session.id]).start()
    assert stream.result().reason is FinishReason.CANCELLED


def test_cancelling_nothing_is_harmless(service: Service) -> None:
    session = started(service)
    session.cancel_generate()
    session.generate_stream(3).result()
    session.cancel_generate()
    assert session.generate_stream(3).result().reason is FinishReason.LENGTH


def test_a_consumer_that_does_not_read_stalls_nobody(service: Service) -> None:
    unread = [started(service, f"unread {i} ") for i in range(4)]
    streams = [session.generate_stream(200) for session in unread]
    done = started(service, "read").generate_stream(100).result()
    assert len(done.completion.tokens) == 100
    until(lambda: not any(session.busy for session in unread))
    assert len(text_of(list(streams[0]))) >= 200  # it is all still there


# Stop strings


def test_a_stop_string_ends_the_turn_and_the_ledger_before_it(service: Service) -> None:
    whole = service._workers[0].detokenize(alone("abc", 40))
    stop = whole[12:15]
    session = started(service, stop=[stop])
    chunks = list(session.generate_stream(40))
    shown = whole[: whole.index(stop)]
    assert text_of(chunks) == shown
    assert isinstance(chunks[-1], Done)
    assert (chunks[-1].reason, chunks[-1].completion.stop) == (FinishReason.STOP, stop)
    assert session.text == "abc" + shown
    rest(service)
    session.append_input("!")
    usage = session.generate_stream(4).result().usage
    assert usage.prompt_tokens - usage.cached_tokens == 1


VOCAB = fake.Model.load("fake:plain").vocab


@given(st.lists(st.integers(32, 126) | st.integers(256, 258), max_size=12), st.data())
def test_any_beginning_of_a_text_has_tokens_of_exactly_that_text(tokens: list[int], data: st.DataObject) -> None:
    tokenizer = Tokenizer(VOCAB)  # type: ignore[arg-type]
    whole = tokenizer.decode(tokens)
    text = whole[: data.draw(st.integers(0, len(whole)))]
    found = tokens_of(tokenizer, tokens, text)
    assert tokenizer.decode(found) == text
    if text == whole:
        assert found == tokens


def test_tokens_inside_a_character_are_kept_whole_or_not_at_all() -> None:
    tokenizer = Tokenizer(VOCAB)  # type: ignore[arg-type]
    tokens = tokenizer.encode("aé🦙b")
    assert tokens_of(tokenizer, tokens, "a") == tokens[:1]
    assert tokens_of(tokenizer, tokens, "aé") == tokens[:3]
    assert tokens_of(tokenizer, tokens, "aé🦙") == tokens[:7]


# Workers


def test_sessions_go_round_robin_and_stay_where_they_are(service: Service) -> None:
    sessions = [started(service, f"session {i} ") for i in range(6)]
    assert [session.worker for session in sessions] == [0, 1, 0, 1, 0, 1]
    with ThreadPoolExecutor(6) as pool:
        made = list(pool.map(lambda each: list(each.generate_stream(12).result().completion.tokens), sessions))
    assert made == [alone(f"session {i} ", 12) for i in range(6)]
    rest(service)
    assert [stats.counters.queued > 0 for stats in service.stats()] == [True, True]
    before = [stats.rows_decoded for stats in service.stats()]
    sessions[0].append_input("more")
    sessions[0].generate_stream(3).result()
    rest(service)
    after = [stats.rows_decoded for stats in service.stats()]
    assert (after[0] > before[0], after[1] == before[1]) == (True, True)


def test_there_may_be_far_more_sessions_than_slots() -> None:
    with open_fake(slots=2, max_queue=200) as service:
        sessions = [started(service, f"{i} ") for i in range(50)]
        for _ in range(2):
            streams = [session.generate_stream(4) for session in sessions]
            for stream in streams:
                stream.result()
        assert [session.tokens[-8:] for session in sessions] == [alone(f"{i} ", 8) for i in range(50)]


def test_sessions_come_and_go_a_thousand_times(service: Service) -> None:
    ids = set()
    for i in range(1000):
        with started(service, f"{i % 7}") as session:
            ids.add(session.id)
            assert session.generate_stream(2).result().n_tokens == 3
    assert len(ids) == 1000
    assert service.sessions == []
    rest(service)
    assert all(stats.slots_used == 0 and stats.counters.ledger_faults == 0 for stats in service.stats())


@pytest.mark.parametrize("workers", [0, -1, True, 1.5, "2", None])
def test_a_wrong_number_of_workers_is_refused(workers: Any) -> None:
    with pytest.raises(errors.InvalidWorkerCount, match="workers must be a whole number"):
        open_fake(workers=workers)
    with pytest.raises(errors.InvalidWorkerCount):
        Service.load("no such model", workers=workers)


def test_weights_are_loaded_once_and_closed_last() -> None:
    with open_fake(workers=3) as service:
        models = [service._workers[i] for i in range(3)]
        assert len({id(model._weights.native) for model in models}) == 1
        assert len({id(model._engine) for model in models}) == 3
    assert all(model.closed for model in models)
    service.close()


def test_a_worker_that_died_is_passed_over_and_its_sessions_can_move(service: Service) -> None:
    session, other = started(service, "here "), started(service, "there ")
    session.generate_stream(4).result()
    stream = session.generate_stream(4)
    stream.result()
    engine = service._workers[session.worker]._running_engine()
    engine.close()
    session.append_input("more")
    with pytest.raises(errors.WorkerStopped, match="worker stopped"):
        session.generate_stream(4)
    moved = service.restore_session(session.snapshot())
    assert moved.worker == other.worker == 1
    assert moved.tokens == session.tokens
    assert len(moved.generate_stream(4).result().completion.tokens) == 4
    assert service.create_session().worker == 1


# Refusals


def test_an_unknown_id_is_named(service: Service) -> None:
    calls: list[Callable[[str], object]] = [
        lambda name: service.append_input(name, "x"),
        service.generate_stream,
        service.cancel_generate,
        service.end_session,
        service.session,
    ]
    ended = started(service)
    ended.end()
    for call in calls:
        for name in ("9999", ended.id):
            with pytest.raises(errors.SessionNotFound, match=name) as caught:
                call(name)
            assert caught.value.id == name
    with pytest.raises(errors.SessionNotFound):
        ended.append_input("x")


def test_a_second_reply_at_the_same_time_is_refused(service: Service) -> None:
    slow_down(service)
    session = started(service)
    with session.generate_stream(400):
        for call in (session.generate_stream, session.snapshot, session.fork):
            with pytest.raises(errors.SessionBusy, match=session.id) as caught:
                call()
            assert caught.value.id == session.id
        assert started(service, "other").generate_stream(3).result().reason is FinishReason.LENGTH


def test_nothing_to_read_is_an_error_and_not_a_hang(service: Service) -> None:
    session = service.create_session(temperature=0, ignore_eos=False, grammar='root ::= "done"')
    with pytest.raises(errors.BadRequest, match="append input"):
        session.generate_stream(4)
    session.append_input("")
    with pytest.raises(errors.BadRequest, match="append input"):
        session.generate_stream(4)
    session.append_input("x")
    assert session.generate_stream(20).result().reason is FinishReason.STOP
    with pytest.raises(errors.BadRequest, match="nothing new to read"):
        session.generate_stream(4)
    session.append_input("y")
    assert session.generate_stream(20).result().completion.text == "done"


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens"),
        ({"max_new_tokens": -3}, "max_new_tokens"),
        ({"max_new_tokens": True}, "max_new_tokens"),
        ({"max_tokens": 3}, "max_new_tokens"),
        ({"temprature": 1}, "temperature"),
        ({"context_size": 1}, "load option"),
    ],
)
def test_bad_options_are_named_and_change_nothing(service: Service, options: dict[str, Any], named: str) -> None:
    session = started(service)
    with pytest.raises(errors.BadOption, match=named):
        session.generate_stream(**options)
    assert session.tokens == [97, 98, 99]
    assert session.generate_stream(2).result().n_tokens == 5


def test_a_broken_grammar_touches_nobody_else(service: Service) -> None:
    slow_down(service)
    session, other = started(service), started(service)
    stream = other.generate_stream(20)
    with pytest.raises(errors.BadGrammar):
        session.generate_stream(4, grammar="root ::= (")
    assert len(stream.result().completion.tokens) == 20
    assert len(session.generate_stream(4).result().completion.tokens) == 4


def test_a_full_context_is_told_with_numbers_before_anything_is_computed() -> None:
    with open_fake(slots=1, context_size=64) as service:
        session = started(service, "x" * 40)
        with pytest.raises(errors.ContextFull, match="64") as caught:
            session.append_input("y" * 30)
        assert (caught.value.n_tokens, caught.value.limit) == (70, 64)
        assert session.text == "x" * 40
        assert service.stats()[0].rows_decoded == 0
        done = session.generate_stream(1000).result()
        assert (done.reason, done.n_tokens) == (FinishReason.LENGTH, 64)
        rest(service)
        rows = service.stats()[0].rows_decoded
        with pytest.raises(errors.ContextFull):
            session.generate_stream(1)
        assert service.stats()[0].rows_decoded == rows


def test_a_failed_reply_is_an_error_chunk_and_the_session_goes_on() -> None:
    with open_fake() as service:
        session, other = started(service), started(service, "other")
        context: Any = service._workers[0]._running_engine()._loop.context
        step, broken = context.step, True
        context.step = lambda rows: fake.Step("failed", [], [], []) if broken else step(rows)
        chunks = list(session.generate_stream(5))
        assert isinstance(chunks[-1], Error)
        assert isinstance(chunks[-1].error, errors.ModelError)
        broken = False
        assert session.text == "abc"
        assert len(session.generate_stream(5).result().completion.tokens) == 5
        assert len(other.generate_stream(5).result().completion.tokens) == 5


# Snapshots and forks


def test_a_snapshot_goes_on_where_it_was_taken(service: Service) -> None:
    session = started(service, stop=["\0"], logit_bias={5: -1.0})
    session.generate_stream(6).result()
    session.append_input("more")
    data = session.snapshot()
    with open_fake() as elsewhere:
        twin = elsewhere.restore_session(data)
        assert twin.tokens == session.tokens
        assert twin._sampling == session._sampling
        assert list(twin.generate_stream(8)) != []
        session.generate_stream(8).result()
        assert twin.tokens == session.tokens


def test_a_snapshot_that_is_damaged_or_of_another_vocabulary_is_refused(service: Service) -> None:
    data = started(service).snapshot()
    for broken in (b"", b"nonsense", data[:-1], data[:-1] + bytes([data[-1] ^ 1]), "text"):
        with pytest.raises(errors.BadRequest, match="snapshot"):
            service.restore_session(broken)  # type: ignore[arg-type]
    with open_fake("plain?n_vocab=300") as other, pytest.raises(errors.BadRequest, match="vocabulary"):
        other.restore_session(data)


def test_a_fork_has_the_same_past_and_another_future(service: Service) -> None:
    session = started(service)
    session.generate_stream(5).result()
    rest(service)
    past = session.tokens
    twin = session.fork()
    assert (twin.tokens, twin.worker) == (past, session.worker)
    assert twin.id != session.id
    twin.append_input("one")
    session.append_input("two")
    usage = twin.generate_stream(4).result().usage
    assert usage.cached_tokens >= len(past) - 1
    session.generate_stream(4).result()
    assert session.tokens[: len(past)] == twin.tokens[: len(past)] == past
    assert "two" in session.text
    assert "one" in twin.text


# Whatever is done to them


class Mirror:
    """A session beside the text it must hold."""

    def __init__(self, session: Session, text: str = "", *, is_complete: bool = False) -> None:
        self.session = session
        self.text = text
        self.is_complete = is_complete

    def append(self, dice: random.Random) -> None:
        text = dice.choice(["the cat", " a", "é🦙", "<|im_end|>", "x" * 9])
        self.session.append_input(text)
        self.text += text
        self.is_complete = False

    def generate(self, dice: random.Random) -> None:
        """Read some of a reply or all of it, and leave, cancel or end."""
        if not self.text or self.is_complete:
            with pytest.raises(errors.BadRequest):
                self.session.generate_stream(3)
            return
        n_read, how = dice.randrange(1, 30), dice.choice(["leave", "cancel", "read"])
        stop = dice.choice([(), ("e",), ("th",)])
        seen, last = "", None
        for chunk in self.session.generate_stream(dice.randrange(1, 40), stop=stop, seed=dice.randrange(9)):
            if isinstance(chunk, Text):
                seen += chunk.text
            else:
                last = chunk
            if len(seen) >= n_read and how == "leave":
                break
            if len(seen) >= n_read and how == "cancel":
                self.session.cancel_generate()
        self.text += seen
        self.is_complete = isinstance(last, Done) and last.reason is FinishReason.STOP

    def check(self) -> None:
        tokenizer = self.session._model._weights.tokenizer
        assert tokenizer.decode(self.session.tokens, special=True) == self.text


@pytest.mark.parametrize("seed", range(8))
def test_whatever_is_done_to_sessions_they_hold_what_was_shown(seed: int) -> None:
    dice = random.Random(seed)
    with open_fake(workers=2, slots=2, context_size=4096) as service:
        slow_down(service, 0.0002 * (seed % 2))
        letters = {token: float("-inf") for token in range(128, 256)}  # no characters cut in the middle
        mirrors = [Mirror(service.create_session(logit_bias=letters)) for _ in range(3)]
        for _ in range(60):
            mirror = dice.choice(mirrors)
            act = dice.choice(["append", "generate", "generate", "fork", "restore", "end"])
            if act in ("append", "generate"):
                getattr(mirror, act)(dice)
            elif act == "fork":
                mirrors.append(Mirror(mirror.session.fork(), mirror.text, is_complete=mirror.is_complete))
            elif act == "restore":
                restored = service.restore_session(mirror.session.snapshot())
                mirrors.append(Mirror(restored, mirror.text, is_complete=mirror.is_complete))
            elif len(mirrors) > 3:
                mirror.session.end()
                mirrors.remove(mirror)
            for each in mirrors:
                each.check()
        rest(service)
        assert all(stats.counters.ledger_faults == 0 for stats in service.stats())


# asyncio, closing, current


def test_every_call_in_asyncio() -> None:
    async def turn(service: Service, name: str) -> tuple[str, str]:
        async with await service.acreate_session(**GREEDY) as session:
            await service.aappend_input(session.id, name)
            text = ""
            async for chunk in await service.agenerate_stream(session.id, 300):
                assert isinstance(chunk, Text)
                text += chunk.text
                if len(text) >= 4:
                    break
            done = await (await session.agenerate_stream(5))
            return session.text, name + text + done.completion.text

    async def cancelled(service: Service) -> FinishReason:
        session = await service.acreate_session(**GREEDY)
        await session.aappend_input("x")
        stream = await session.agenerate_stream(400)
        await service.acancel_generate(session.id)
        reason = (await stream).reason
        again = await service.arestore_session(session.snapshot())
        await service.aend_session(again.id)
        await session.aend()
        return reason

    async def run() -> None:
        async with open_fake(workers=2) as service:
            slow_down(service, 0.001)
            pairs = await asyncio.gather(*(turn(service, f"task {i} ") for i in range(8)))
            assert all(held == shown for held, shown in pairs)
            assert await cancelled(service) is FinishReason.CANCELLED
            assert service.sessions == []

    asyncio.run(run())


def test_a_cancelled_task_leaves_its_stream(service: Service) -> None:
    slow_down(service)
    session = started(service)

    async def run() -> None:
        task = asyncio.ensure_future(session.generate_stream(400)._aresult())
        await asyncio.sleep(0.03)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(run())
    until(lambda: not session.busy)


def test_closing_ends_open_streams_in_an_error() -> None:
    service = open_fake(workers=2)
    slow_down(service)
    sessions = [started(service) for _ in range(2)]
    streams: list[Generation] = [session.generate_stream(400) for session in sessions]
    service.close()
    for stream in streams:
        *_, last = stream
        assert isinstance(last, Error)
        assert isinstance(last.error, errors.WorkerStopped)
    with pytest.raises(errors.Closed, match="load it again"):
        service.create_session()
    with pytest.raises(errors.Closed):
        sessions[0].append_input("x")


def test_current_is_the_last_one_loaded() -> None:
    with open_fake() as first:
        assert Service.current() is first
        with open_fake() as second:
            assert Service.current() is second
        with pytest.raises(errors.ModelNotLoaded, match=r"Service\.load"):
            Service.current()


def test_a_service_whose_workers_cannot_generate_is_refused() -> None:
    with pytest.raises(errors.Unsupported):
        open_fake("embed")
