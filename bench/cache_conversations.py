"""Many conversations over few slots: what they wait for a first token, and how much is computed twice.

One driver for both sides: turns in a fixed order, as many at a time as there are slots, each prompt the whole
conversation as token ids with the side's own replies in it. llama-server is spoken to in plain HTTP.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import Any

import cache_rig
import harness
import llama_server
from cache_rig import MIB, Setup
from harness import Figures, Prompts, Unable

import kvasir

BATCH = 512


@dataclass(frozen=True, slots=True)
class Load:
    """The work, and the limits that both sides have."""

    n_conversations: int = 64
    n_turns: int = 10
    n_first: int = 96  # tokens of a conversation's first message
    n_next: int = 16  # and of every later one
    n_out: int = 8
    slots: int = 8
    context: int = 3072
    ram_mib: int = 1024

    @property
    def longest(self) -> int:
        return self.n_first + (self.n_turns - 1) * self.n_next + self.n_turns * self.n_out

    @property
    def perfect(self) -> int:
        """Tokens to prefill if nothing is computed twice: what is new, and the reply's last token, which never ran."""
        return self.n_conversations * (self.n_first + (self.n_turns - 1) * (self.n_next + 1))

    def message(self, words: Prompts, conversation: int, turn: int) -> list[int]:
        n_tokens = self.n_next if turn else self.n_first
        return words.of(n_tokens, seed=("conversation", conversation, turn))


QUICK = Load(n_conversations=8, n_turns=3, n_first=48, slots=2, context=256)


@dataclass(frozen=True, slots=True)
class Answer:
    """One turn as its client saw it."""

    first_s: float
    n_prefilled: int
    tokens: list[int]
    n_lost: int = 0  # ids of a character in parts, which llama-server's stream leaves out


Ask = Callable[[list[int]], Awaitable[Answer]]


def kvasir_side(load: Load, setup: Setup, layout: str) -> Figures:
    """Kvasir as it comes, disk tier included, but for the limits."""
    options: dict[str, Any] = {"slots": load.slots, "context_size": load.context, "layout": layout}
    options |= {"batch": BATCH, "ubatch": BATCH}
    with (
        cache_rig.disk_folder() as folder,
        cache_rig.open_cache(disk=folder, ram_bytes=load.ram_mib * MIB) as cache,
        cache_rig.open_model(setup, cache, **options) as model,
    ):

        async def ask(prompt: list[int]) -> Answer:
            return await ask_kvasir(model, prompt, load.n_out)

        return measured(load, setup, ask)


async def ask_kvasir(model: kvasir.Model, prompt: list[int], n_out: int) -> Answer:
    started, first = time.perf_counter(), None
    stream = model.stream(prompt, **cache_rig.greedy(n_out))
    async for _ in stream:
        first = first or time.perf_counter()
    done = await stream
    n_prefilled = done.usage.prompt_tokens - done.usage.cached_tokens
    return Answer((first or time.perf_counter()) - started, n_prefilled, list(done.tokens))


def server_side(load: Load, setup: Setup, layout: str) -> Figures:
    """llama-server with its prompt cache, under the same limits."""
    with (
        environment("LLAMA_ARG_CACHE_RAM", str(load.ram_mib)),  # the variable of --cache-ram
        llama_server.serving(
            setup.path,
            threads=setup.threads,
            context=load.context,
            batch=BATCH,
            ubatch=BATCH,
            slots=load.slots,
            unified=layout == "unified",
        ) as port,
    ):
        warm_up = setup.words.of(cache_rig.WARM_UP_TOKENS, seed="warm up")
        llama_server.stream_all(port, [warm_up], n_tokens=2)

        async def ask(prompt: list[int]) -> Answer:
            return await ask_server(port, prompt, load.n_out)

        return measured(load, setup, ask)


@contextlib.contextmanager
def environment(name: str, value: str) -> Iterator[None]:
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


async def ask_server(port: int, prompt: list[int], n_out: int) -> Answer:
    wanted = {"prompt": prompt, "n_predict": n_out, "temperature": 0, "ignore_eos": True, "stream": True}
    body = json.dumps(wanted).encode()
    head = "POST /completion HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nConnection: close\r\n"
    started, first = time.perf_counter(), None
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=MIB)
    try:
        writer.write(head.encode() + f"Content-Length: {len(body)}\r\n\r\n".encode() + body)
        tokens: list[int] = []
        async for line in reader:
            if not line.startswith(b"data: {"):
                continue
            event: dict[str, Any] = json.loads(line[6:])
            tokens += event["tokens"]
            first = first or (time.perf_counter() if event["content"] else None)
            if event["stop"]:
                n_lost = n_out - len(tokens)
                # Its place is kept, so that both sides have prompts of the same length.
                tokens += tokens[-1:] * n_lost
                took = (first or time.perf_counter()) - started
                return Answer(took, event["timings"]["prompt_n"], tokens, n_lost)
        raise Unable("llama-server ended a reply early; is the context large enough?")
    finally:
        writer.close()


def measured(load: Load, setup: Setup, ask: Ask) -> Figures:
    """Hold all conversations, and say what they cost."""
    started = time.perf_counter()
    answers = asyncio.run(converse(load, setup, ask))
    wall_s = time.perf_counter() - started
    figures = {
        "first token p50 s": harness.percentile((answer.first_s for answer in answers), 0.5),
        "first token p95 s": harness.percentile((answer.first_s for answer in answers), 0.95),
        "tokens prefilled": sum(answer.n_prefilled for answer in answers),
        "of a perfect cache": sum(answer.n_prefilled for answer in answers) / load.perfect,
        "wall s": wall_s,
    }
    n_lost = sum(answer.n_lost for answer in answers)
    return {**figures, "token ids lost": n_lost} if n_lost else figures


async def converse(load: Load, setup: Setup, ask: Ask) -> list[Answer]:
    """Every conversation's first turn, then every second one: each has left the slots when its next turn comes."""
    turns = iter([(c, t) for t in range(load.n_turns) for c in range(load.n_conversations)])
    said: list[list[int]] = [[] for _ in range(load.n_conversations)]
    in_order = [asyncio.Lock() for _ in said]
    answers: list[Answer] = []

    async def client() -> None:
        for conversation, turn in turns:
            async with in_order[conversation]:
                prompt = said[conversation] + load.message(setup.words, conversation, turn)
                answer = await ask(prompt)
                assert len(answer.tokens) == load.n_out, f"wanted {load.n_out} tokens, got {len(answer.tokens)}"
                said[conversation] = prompt + answer.tokens
                answers.append(answer)

    await asyncio.gather(*(client() for _ in range(load.slots)))
    return answers
