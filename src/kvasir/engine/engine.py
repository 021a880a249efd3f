"""The engine as its users hold it: open, submit, cancel, stats, close.

Owns the thread's beginning and end. Checks a request before it is queued, on the caller's thread; everything else is
a letter to the loop. An engine that nobody closes is closed when it is collected or when the interpreter ends.
"""

from __future__ import annotations

import importlib
import itertools
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from types import TracebackType
from typing import Any, TypeVar, cast

import psutil

from kvasir.engine.core import Core
from kvasir.engine.events import EngineStats
from kvasir.engine.loop import Loop
from kvasir.engine.mailbox import Call, Cancel, Submit
from kvasir.engine.offers import Binding
from kvasir.engine.request import Request, RequestId, Sink
from kvasir.engine.sequence import Sequence
from kvasir.engine.settings import EngineSettings, check_memory, default_threads, layout_of, sequence_limit
from kvasir.engine.warm import Warm
from kvasir.errors import BadOption, EngineStopped, PromptTooLong, Unsupported

T = TypeVar("T")


class Engine:
    """Makes tokens for many requests at once, on a thread of its own. All methods may be called from any thread."""

    def __init__(self, loop: Loop, *, n_vocab: int) -> None:
        """Start the thread of a loop; use `open`."""
        self._loop = loop
        self._limit = loop.scheduler.limits.n_seq_tokens
        self._n_vocab = n_vocab
        self._can_shift = bool(loop.context.memory.can_shift)
        self._ids = itertools.count(1)
        # A daemon, so that a script which never closes can end; the finaliser still joins it then, because a thread
        # inside native code must not meet the interpreter's end.
        self._thread = threading.Thread(target=loop.run, name="kvasir-engine", daemon=True)
        self._finalizer = weakref.finalize(self, _stop, loop, self._thread)
        self._thread.start()

    @classmethod
    def open(
        cls, model: Any, settings: EngineSettings, *, core: Core | None = None, cache: Binding | None = None
    ) -> Engine:
        """Make the context and the thread that owns it.

        `core` is the module the model comes from: `kvasir.native` unless a test brings the fake. `cache` is where
        prefixes are kept beyond the slots; it outlives the engine.
        """
        loop = open_loop(core or _native(), model, settings, cache=cache)
        return cls(loop, n_vocab=model.vocab.n_tokens)

    @property
    def limit(self) -> int:
        """Tokens one request may have, prompt and completion together."""
        return self._limit

    @property
    def can_shift(self) -> bool:
        """Whether tokens can be cut out of this model's memory exactly."""
        return self._can_shift

    @property
    def stopped(self) -> bool:
        """Whether it was closed or died, and answers nobody any more."""
        return self._loop.mailbox.closed

    def submit(self, request: Request, sink: Sink) -> RequestId:
        """Queue a request; returns at once.

        Raises `PromptTooLong`, `BadOption`, `QueueFull` or `EngineStopped`; after that, and only then, the sink gets
        nothing.
        """
        self._check(request)
        loop = self._loop
        if loop.mailbox.closed:
            raise EngineStopped(loop.mailbox.why_closed)
        loop.gate.enter()
        request_id = RequestId(next(self._ids))
        try:
            loop.mailbox.post(Submit(Sequence(request_id, request, sink, now=loop.clock())))
        except EngineStopped:
            loop.gate.leave(now=loop.clock())
            raise
        return request_id

    def cancel(self, request_id: RequestId) -> None:
        """End a request by the next tick; its sink gets `Done(CANCELLED)`. Harmless if it has ended already."""
        try:
            self._loop.mailbox.post(Cancel(request_id))
        except EngineStopped:
            return  # it was answered when the engine stopped

    def call(self, do: Callable[[], T]) -> Future[T]:
        """Run a function on the engine thread between two ticks, where the context may be touched."""
        future: Future[T] = Future()
        self._loop.mailbox.post(Call(do, future))
        return future

    def shift(self, owner: str, tokens: list[int], start: int, end: int, *, scope: str | None = None) -> Future[bool]:
        """Cut tokens [start, end) out of the KV that a request with exactly these tokens left, and close the gap.

        What is left belongs to `owner`: only requests with this `Request.owner` go on from it, and it never enters the
        cache. False where that KV is gone or its memory cannot be shifted: then the tokens must be read again.
        """
        return self.call(lambda: self._loop.shift(owner, tokens, start, end, scope=scope))

    def stats(self) -> EngineStats:
        """Take a snapshot of slots, queue, cells, counters and times; does not wait for the tick."""
        return self._loop.stats()

    def close(self) -> None:
        """Stop, answer open requests with `EngineStopped` and wait for the thread. Idempotent."""
        self._finalizer()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _check(self, request: Request) -> None:
        tokens = request.tokens
        if not tokens:
            raise BadOption("the prompt is empty; give at least one token.")
        if request.max_tokens < (request.sampler is not None):
            raise BadOption(f"max_tokens must be at least 1, got {request.max_tokens}.")
        if min(tokens) < 0 or max(tokens) >= self._n_vocab:
            wrong = next(token for token in tokens if not 0 <= token < self._n_vocab)
            raise BadOption(f"token id {wrong} is not in the vocabulary, which has ids 0 to {self._n_vocab - 1}.")
        if len(tokens) > self._limit:
            raise PromptTooLong(
                f"the prompt is {len(tokens):,} tokens; this engine takes {self._limit:,}. Shorten it, or load with a "
                "larger context_size.",
                n_tokens=len(tokens),
                limit=self._limit,
            )


def open_loop(
    core: Core, model: Any, settings: EngineSettings, *, cache: Binding | None = None, **options: Any
) -> Loop:
    """Make a context and a loop on it, without a thread: tests tick it by hand."""
    if not model.has_decoder or model.memory_kind == "none":
        why = "it is an encoder, for embeddings"
        raise Unsupported(f"this model cannot generate: {why}.", what="generate", why=why)
    threads = settings.threads or default_threads()
    on_gpu = sum(device.memory_free for device in core.devices() if device.kind == "gpu")
    available = psutil.virtual_memory().available + on_gpu
    unified, n_ctx = layout_of(settings, model, available=available)
    check_memory(model, n_ctx, settings.context, available=available)
    context = core.Context(
        model,
        n_ctx=n_ctx,
        n_batch=settings.batch,
        n_ubatch=min(settings.ubatch, settings.batch),
        n_seq_max=settings.slots,
        kv_unified=unified,
        # About two milliseconds of spinning: over the gap between two ticks, and no longer. Threads that spin on take
        # the cores from whoever reads the streams; docs/performance.md has the figures.
        poll=1,
        **{"threads": threads, "threads_batch": threads, **settings.context},
    )
    limit = sequence_limit(settings, n_ctx_seq=context.n_ctx_seq, n_ctx_train=model.n_ctx_train)
    warm = Warm(cache, context) if cache is not None else None
    return Loop(core, context, settings, n_seq_tokens=limit, warm=warm, **options)


def _native() -> Core:
    # Not imported at the top: with the fake, the engine runs where the extension was never built.
    return cast(Core, importlib.import_module("kvasir.native"))


def _stop(loop: Loop, thread: threading.Thread) -> None:
    loop.stop()
    if threading.current_thread() is not thread:
        thread.join()
