"""Sessions on real llama.cpp, through the public API only: LlamaService's five tests by name, then what it got wrong.

No figure depends here on where cells lie or on how many rows a tick has: one thread, V in BF16.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import kvasir
from kvasir import errors
from kvasir.service.chunks import Chunk, Done, Text

STEADY: dict[str, Any] = {"context_size": 2048, "threads": 1, "type_v": "bf16"}
GREEDY: dict[str, Any] = {"temperature": 0, "ignore_eos": True}
QUESTION = "The old ship left the harbour in the morning, and nobody on board knew where the captain wanted to go. "


@pytest.fixture(scope="module")
def service(any_path: Path) -> Iterator[kvasir.Service]:
    with kvasir.Service.load(any_path, workers=2, slots=2, **STEADY) as opened:
        yield opened


@pytest.fixture(scope="module")
def plain(any_path: Path) -> Iterator[kvasir.Model]:
    """The same model, one request at a time, nothing reused."""
    with kvasir.load(any_path, slots=1, cache=False, **STEADY) as opened:
        yield opened


def said(plain: kvasir.Model, tokens: list[int], n_tokens: int) -> list[int]:
    """What a single request over these tokens gives."""
    return list(plain.generate(tokens, max_tokens=n_tokens, cache=False, **GREEDY).tokens)


def text_of(chunks: list[Chunk]) -> str:
    return "".join(chunk.text for chunk in chunks if isinstance(chunk, Text))


def rest(service: kvasir.Service) -> None:
    """Wait until no worker has anything to do."""
    deadline = time.monotonic() + 30
    while any(stats.requests_open for stats in service.stats()):
        assert time.monotonic() < deadline
        time.sleep(0.002)


def n_new(done: Done) -> int:
    """Prompt tokens that had to be computed."""
    return done.usage.prompt_tokens - done.usage.cached_tokens


# LlamaService's own


def test_current_and_reload(any_path: Path) -> None:
    first = kvasir.Service.load(any_path, context_size=512, threads=1)
    assert kvasir.Service.current() is first
    second = kvasir.Service.reload(any_path, context_size=512, threads=1)
    try:
        assert second is not first
        assert kvasir.Service.current() is second
        assert first.closed
        with pytest.raises(errors.ModelNotFound):
            kvasir.Service.reload("no/such/model.gguf")
        assert kvasir.Service.current() is second  # a load that failed changes nothing
        with second.create_session() as session:
            session.append_input("Hello")
            assert session.generate_stream(2).result().n_tokens > 2
    finally:
        second.close()
    with pytest.raises(errors.ModelNotLoaded):
        kvasir.Service.current()


def test_basic_generation(service: kvasir.Service) -> None:
    session = service.create_session()
    service.append_input(session.id, "Hello, my name is")
    *pieces, last = service.generate_stream(session.id, max_new_tokens=32)
    assert text_of(pieces)
    assert isinstance(last, Done)
    assert last.usage.completion_tokens <= 32
    service.end_session(session.id)
    with pytest.raises(errors.SessionNotFound):
        service.end_session(session.id)


def test_kv_reuse_multiturn(service: kvasir.Service) -> None:
    """Not only does a second turn come: it costs its own tokens and no others."""
    with service.create_session(**GREEDY) as session:
        service.append_input(session.id, QUESTION)
        n_first = session.n_tokens
        first = service.generate_stream(session.id, max_new_tokens=16).result()
        assert len(first.completion.tokens) == 16
        rest(service)
        service.append_input(session.id, " And what is 2+2?")
        n_second = session.n_tokens - n_first - 16
        second = service.generate_stream(session.id, max_new_tokens=16).result()
        assert second.completion.text
        assert n_new(second) == n_second


def test_cancel_and_resume(service: kvasir.Service) -> None:
    with service.create_session(**GREEDY) as session:
        service.append_input(session.id, QUESTION)
        chunks: list[Chunk] = []
        for chunk in service.generate_stream(session.id, max_new_tokens=512):
            chunks.append(chunk)
            if len(chunks) == 3:
                service.cancel_generate(session.id)
        assert isinstance(chunks[-1], Done)
        assert chunks[-1].reason == "cancelled"
        service.append_input(session.id, " Just say done.")
        assert text_of(list(service.generate_stream(session.id, max_new_tokens=8)))


def test_seq_id_reuse(service: kvasir.Service) -> None:
    """A thousand sessions over four slots, one after the other and all of them right."""
    n_times = 1000 if service.info.n_params < 1_000_000 else 20
    expected: set[tuple[int, ...]] = set()
    for _ in range(n_times):
        session = service.create_session(**GREEDY)
        session.append_input("Once more")
        expected.add(session.generate_stream(2).result().completion.tokens)
        session.end()
    assert len(expected) == 1
    assert not service.sessions


# It must be right


def test_many_turns_equal_one_request_over_all_their_tokens(service: kvasir.Service, plain: kvasir.Model) -> None:
    with service.create_session(**GREEDY) as session:
        for turn in ("Once upon a time", " and then the", " So they all"):
            session.append_input(turn)
            before = session.tokens
            reply = session.generate_stream(12).result().completion.tokens
            assert session.tokens == before + list(reply)
            assert list(reply) == said(plain, before, 12)


def test_cancelled_after_three_tokens_and_resumed_equals_uncancelled(
    service: kvasir.Service, plain: kvasir.Model
) -> None:
    for leaves in (True, False):
        with service.create_session(**GREEDY) as session:
            session.append_input(QUESTION)
            prompt = session.tokens
            for i, _ in enumerate(session.generate_stream(512)):
                if i == 2 and leaves:
                    break
                if i == 2:
                    session.cancel_generate()
            n_said = session.n_tokens - len(prompt)
            assert n_said >= 3
            session.generate_stream(8).result()
            assert session.tokens == prompt + said(plain, prompt, n_said + 8)


def test_who_leaves_the_loop_has_exactly_the_text_that_was_read(service: kvasir.Service) -> None:
    with service.create_session(**GREEDY) as session:
        session.append_input("Read ")
        seen = ""
        for chunk in session.generate_stream(200):
            assert isinstance(chunk, Text)
            seen += chunk.text
            if len(seen) > 20:
                break
        assert session.text == "Read " + seen


def test_a_lone_cancelled_stream_ends(service: kvasir.Service) -> None:
    with service.create_session(**GREEDY) as session:
        session.append_input(QUESTION)
        stream = session.generate_stream(1500)
        timer = threading.Timer(0.05, session.cancel_generate)
        timer.start()
        done = stream.result()
        assert done.reason == "cancelled"
        assert done.n_tokens < 1500


def test_nothing_new_to_read_is_an_error_and_not_a_hang(service: kvasir.Service) -> None:
    with service.create_session(grammar='root ::= "yes"') as session:
        with pytest.raises(errors.BadRequest, match="append input"):
            session.generate_stream(4)
        session.append_input("Well?")
        assert session.generate_stream(16).result().reason == "stop"
        with pytest.raises(errors.BadRequest, match="nothing new to read"):
            session.generate_stream(4)
        with pytest.raises(errors.BadOption, match="max_new_tokens"):
            session.generate_stream(0)


def test_the_last_sampled_token_is_in_memory_after_a_length_stop(service: kvasir.Service, plain: kvasir.Model) -> None:
    with service.create_session(**GREEDY) as session:
        session.append_input(QUESTION)
        session.generate_stream(9).result()
        rest(service)
        before = session.tokens
        session.append_input("x")
        n_appended = session.n_tokens - len(before)
        done = session.generate_stream(6).result()
        assert n_new(done) == n_appended
        assert list(done.completion.tokens) == said(plain, session.tokens[: len(before) + n_appended], 6)


def test_a_stop_string_ends_the_turn_and_the_session_goes_on_warm(service: kvasir.Service, plain: kvasir.Model) -> None:
    with service.create_session(**GREEDY) as session:
        session.append_input(QUESTION)
        prompt = session.tokens
        whole = plain.detokenize(said(plain, prompt, 60))
        stop = whole[20:24]
        chunks = list(session.generate_stream(60, stop=[stop]))
        shown = whole[: whole.index(stop)]
        assert text_of(chunks) == shown
        assert session.text.endswith(shown)
        assert plain.detokenize(session.tokens) == plain.detokenize(prompt) + shown
        rest(service)
        session.append_input(" Next:")
        n_appended = len(plain.tokenize(" Next:", add_special=False))
        before = session.tokens
        done = session.generate_stream(8).result()
        assert n_new(done) == n_appended
        assert list(done.completion.tokens) == said(plain, before, 8)


def test_four_sessions_over_two_workers_are_right_and_pinned(service: kvasir.Service, plain: kvasir.Model) -> None:
    sessions = [service.create_session(**GREEDY) for _ in range(4)]
    workers = [session.worker for session in sessions]
    assert sorted(workers) == [0, 0, 1, 1]
    assert workers[0] != workers[1]
    for turn in range(2):
        for i, session in enumerate(sessions):
            session.append_input(f"Session {i} says in turn {turn}: ")
        before = [session.tokens for session in sessions]
        with ThreadPoolExecutor(4) as pool:
            made = list(pool.map(lambda each: each.generate_stream(16).result().completion.tokens, sessions))
        assert [list(tokens) for tokens in made] == [said(plain, tokens, 16) for tokens in before]
    assert [session.worker for session in sessions] == workers
    for session in sessions:
        session.end()


def test_a_consumer_that_does_not_read_stalls_nobody(service: kvasir.Service) -> None:
    silent = [service.create_session(**GREEDY) for _ in range(3)]
    for session in silent:
        session.append_input("Nobody reads this: ")
    streams = [session.generate_stream(120) for session in silent]
    with service.create_session(**GREEDY) as session:
        session.append_input("Somebody reads this: ")
        assert len(session.generate_stream(40).result().completion.tokens) == 40
    rest(service)
    assert [len(stream.result().completion.tokens) for stream in streams] == [120] * 3
    for session in silent:
        session.end()


def test_more_sessions_than_slots_come_and_go_and_come_back(any_path: Path, plain: kvasir.Model) -> None:
    with kvasir.Service.load(any_path, workers=1, slots=2, **STEADY) as service:
        sessions = [service.create_session(**GREEDY) for _ in range(7)]
        for i, session in enumerate(sessions):
            session.append_input(f"{i} is the number of this one. {QUESTION}")
            session.generate_stream(6).result()
        rest(service)
        for session in sessions:  # only two of them can still be in a slot
            before = session.tokens
            session.append_input("And")
            prompt = session.tokens
            done = session.generate_stream(6).result()
            assert done.usage.cached_tokens >= len(before) - 1
            assert list(done.completion.tokens) == said(plain, prompt, 6)


def test_a_grammar_holds_over_two_turns(service: kvasir.Service) -> None:
    with service.create_session(grammar='root ::= "a" [0-9] "b"') as session:
        for _ in range(2):
            session.append_input(" next ")
            text = session.generate_stream(16).result().completion.text
            assert (len(text), text[0], text[2]) == (3, "a", "b")


def test_a_snapshot_goes_on_in_another_service_from_the_disk(any_path: Path, plain: kvasir.Model) -> None:
    with kvasir.Service.load(any_path, **STEADY) as service:
        session = service.create_session(**GREEDY)
        session.append_input(QUESTION * 2)
        session.generate_stream(10).result()
        rest(service)
        data, before = session.snapshot(), session.tokens
    assert len(data) < 10_000  # tokens, not KV
    with kvasir.Service.load(any_path, **STEADY) as again:
        session = again.restore_session(data)
        assert session.tokens == before
        session.append_input(" Go on.")
        prompt = session.tokens
        done = session.generate_stream(10).result()
        assert done.usage.cached_tokens >= len(before) - 1
        assert list(done.completion.tokens) == said(plain, prompt, 10)


def test_a_fork_shares_the_past(service: kvasir.Service, plain: kvasir.Model) -> None:
    with service.create_session(**GREEDY) as session:
        session.append_input(QUESTION)
        session.generate_stream(8).result()
        rest(service)
        with session.fork() as twin:
            for each, text in ((session, " One way."), (twin, " Another.")):
                before = each.tokens
                each.append_input(text)
                prompt = each.tokens
                done = each.generate_stream(8).result()
                assert done.usage.cached_tokens >= len(before) - 1
                assert list(done.completion.tokens) == said(plain, prompt, 8)


def test_a_full_session_says_so_and_touches_no_other(any_path: Path) -> None:
    with kvasir.Service.load(any_path, context_size=512, slots=2, layout="split", threads=1) as service:
        assert service.limit == 256
        full, other = service.create_session(**GREEDY), service.create_session(**GREEDY)
        other.append_input("Other")
        stream = other.generate_stream(100)
        with pytest.raises(errors.ContextFull) as caught:
            full.append_input("word " * 300)
        assert caught.value.limit == 256
        full.append_input("word " * 20)
        done = full.generate_stream(1000).result()
        assert (done.reason, done.n_tokens) == ("length", 256)
        with pytest.raises(errors.ContextFull):
            full.generate_stream(1)
        assert len(stream.result().completion.tokens) == 100


def test_sessions_in_asyncio(service: kvasir.Service) -> None:
    async def talk(i: int) -> str:
        async with await service.acreate_session(**GREEDY) as session:
            await session.aappend_input(f"Task {i}: ")
            text = ""
            async for chunk in await session.agenerate_stream(12):
                text += chunk.text if isinstance(chunk, Text) else ""
            assert session.text == f"Task {i}: {text}"
            return text

    async def run() -> list[str]:
        return await asyncio.gather(*(talk(i) for i in range(6)))

    assert all(asyncio.run(run()))


def test_more_workers_are_not_more_compute_threads(tiny_llama: Path) -> None:
    done = run_python(
        """
        import os, sys, kvasir

        for workers in (1, 4):
            options = {"threads": 64, "slots": 1, "context_size": 256, "cache": False}
            with kvasir.Service.load(sys.argv[1], workers=workers, **options):
                print(len(os.listdir("/proc/self/task")))
        """,
        tiny_llama,
    )
    with_one, with_four = map(int, done.split())
    assert with_four - with_one == 3  # the thread of each engine, and none of those that compute


def run_python(script: str, *args: object) -> str:
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script), *map(str, args)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env=dict(os.environ),
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_script_that_closes_nothing_ends_cleanly(tiny_llama: Path) -> None:
    out = run_python(
        """
        import sys, kvasir
        service = kvasir.Service.load(sys.argv[1], workers=2, context_size=512)
        session = service.create_session(ignore_eos=True)
        session.append_input("Once")
        stream = session.generate_stream(400)
        print(type(next(iter(stream))).__name__)
        """,
        tiny_llama,
    )
    assert out.strip() == "Text"
