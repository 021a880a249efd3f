"""llama-server as a peer: started for one measurement, spoken to over loopback, timed to the byte.

The client is one thread that only receives and stamps; replies are read after the run. ggml's threads spin on the same
cores, so a client that parsed JSON beside them would slow the very thing it measures.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import re
import selectors
import socket
import subprocess
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import harness
from harness import Unable

START_S = 120.0
REPLY_S = 600.0


@dataclass(slots=True)
class Trace:
    """When a request began and when each piece of its reply came, in seconds of `perf_counter`."""

    started: float
    times: list[float] = field(default_factory=list)
    n_tokens: int = 0

    @property
    def first_s(self) -> float:
        return self.times[0] - self.started

    @property
    def gaps(self) -> list[tuple[float, float]]:
        """The beginning and end of each wait between two pieces."""
        return list(zip(self.times, self.times[1:], strict=False))


@contextlib.contextmanager
def serving(
    path: Path, *, threads: int, context: int, batch: int, ubatch: int, slots: int, unified: bool
) -> Iterator[int]:
    """A llama-server that is ready; gives its port. Everything not named is its own default."""
    port = _free_port()
    command: list[object] = [harness.peer("llama-server"), "-m", path, "--host", "127.0.0.1", "--port", port]
    command += ["-t", threads, "-tb", threads, "-c", context, "-b", batch, "-ub", ubatch, "-np", slots]
    command += ["--kv-unified" if unified else "--no-kv-unified", "--no-webui"]
    with subprocess.Popen(
        [str(part) for part in command], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as process:
        try:
            _wait_ready(process, port)
            yield port
        finally:
            process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _wait_ready(process: subprocess.Popen[bytes], port: int) -> None:
    until = time.monotonic() + START_S
    while time.monotonic() < until:
        if process.poll() is not None:
            raise Unable(f"llama-server ended with {process.returncode} before it was ready")
        with contextlib.suppress(OSError, http.client.HTTPException):
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
            connection.request("GET", "/health")
            if connection.getresponse().status == 200:
                connection.close()
                return
        time.sleep(0.1)
    raise Unable(f"llama-server was not ready after {START_S:.0f} s")


class _Reply:
    """One connection: what was received, and when."""

    def __init__(self, port: int, request: bytes) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port))
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.started = time.perf_counter()
        self.socket.sendall(request)
        self.parts: list[bytes] = []
        self.stamps: list[float] = []
        self.n_events = 0
        self.ended = False

    def receive(self) -> None:
        part = self.socket.recv(1 << 16)
        self.parts.append(part)
        self.stamps.append(time.perf_counter())
        self.n_events += part.count(b"data: ")
        # The stream closes by itself; its last chunk, of no length, comes first.
        self.ended = not part or part.endswith(b"0\r\n\r\n")

    def trace(self) -> Trace:
        raw = b"".join(self.parts)
        if b" 200 OK" not in raw[:64]:
            raise Unable(f"llama-server answered: {raw[:300].decode(errors='replace')}")
        ends = _ends(self.parts)
        trace = Trace(self.started)
        for found in re.finditer(rb"data: (\{.*?\})\r?\n\r?\n", raw, flags=re.DOTALL):
            event: dict[str, Any] = json.loads(found[1])
            trace.n_tokens += len(event.get("tokens", []))
            if event.get("content"):
                trace.times.append(self.stamps[bisect_left(ends, found.end())])
            if event.get("stop"):
                trace.n_tokens = event["tokens_predicted"]
        return trace


def _ends(parts: list[bytes]) -> list[int]:
    ends, total = [], 0
    for part in parts:
        total += len(part)
        ends.append(total)
    return ends


def stream_all(
    port: int, prompts: list[list[int]], *, n_tokens: int, late: list[int] | None = None, late_after: int = 0
) -> list[Trace]:
    """Send all prompts at once and read every reply.

    `late` is a prompt sent when every other reply has `late_after` events; its trace comes last, and when it has
    ended the others are hung up on.
    """
    with contextlib.ExitStack() as stack, selectors.DefaultSelector() as selector:

        def send(prompt: list[int], n: int) -> _Reply:
            reply = _Reply(port, _request(prompt, n))
            stack.callback(reply.socket.close)
            selector.register(reply.socket, selectors.EVENT_READ, reply)
            return reply

        replies = [send(prompt, n_tokens) for prompt in prompts]
        if late is not None:
            _read_until(selector, lambda: all(reply.n_events >= late_after for reply in replies))
            replies.append(send(late, late_after))
            _read_until(selector, lambda: replies[-1].ended)
        else:
            _read_until(selector, lambda: all(reply.ended for reply in replies))
        return [reply.trace() for reply in replies]


def _request(prompt: list[int], n_tokens: int) -> bytes:
    body = json.dumps(
        {"prompt": prompt, "n_predict": n_tokens, "temperature": 0, "ignore_eos": True, "stream": True}
    ).encode()
    head = (
        f"POST /completion HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
    )
    return head.encode() + b"\r\nConnection: close\r\n\r\n" + body


def _read_until(selector: selectors.BaseSelector, done: Callable[[], bool]) -> None:
    while not done():
        ready = selector.select(REPLY_S)
        if not ready:
            raise Unable(f"llama-server sent nothing for {REPLY_S:.0f} s")
        for key, _ in ready:
            reply: _Reply = key.data
            reply.receive()
            if reply.ended:
                selector.unregister(reply.socket)
