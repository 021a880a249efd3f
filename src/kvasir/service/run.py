"""One reply of a session at work: from engine events to chunks, and how much of it counts.

A run takes its events on the service's own thread, the pump, so it comes to its end whether or not anybody reads: a
consumer that does not read stalls nobody, and its session is right all the same. What users loop over is
`generation.py`'s.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Protocol

from kvasir.engine import Event, Failed
from kvasir.errors import EngineStopped, KvasirError, WorkerStopped
from kvasir.model.tokenizer import Detokenizer, Tokenizer
from kvasir.service.chunks import Chunk, Done, Error, Text
from kvasir.service.completion import Reply
from kvasir.service.stream import Post
from kvasir.types import Sampling

if TYPE_CHECKING:
    from kvasir.service.model import Model

log = logging.getLogger(__name__)


class Keeper(Protocol):
    """Who keeps what a run said: its session."""

    def _keep(self, run: Run) -> int:
        """Note what a run that has ended said; return the length of the session."""

    def _cut(self, run: Run) -> None:
        """Note that the consumer of a run has left."""


class Run:
    """A reply in the making. `take` is for the pump's thread, the rest for any."""

    def __init__(
        self, keeper: Keeper, tokenizer: Tokenizer, prompt: list[int], reply: Reply, *, n_resumed: int = 0
    ) -> None:
        self.prompt = prompt
        self.n_resumed = n_resumed  # tokens at the end of the prompt that an earlier part of this reply said
        self.chunks: Post[Chunk] = Post()
        self.ended: Future[None] = Future()
        self.outcome: Done | Error | None = None
        self.cancelled = False
        self._keeper = keeper
        self._tokenizer = tokenizer
        self._reply = reply
        self._lock = threading.RLock()
        self._stop: Callable[[], None] | None = None
        self._n_seen: int | None = None  # characters the consumer had when it left; None: it did not leave

    def started(self, stop: Callable[[], None]) -> None:
        """Note how the work is stopped, and stop it if somebody asked for that already."""
        with self._lock:
            self._stop = stop
            wanted = self.cancelled
        if wanted:
            stop()

    def cancel(self) -> None:
        """Stop the work by the next tick. What was made until then counts and can be read."""
        with self._lock:
            self.cancelled = True
            stop = self._stop
        if stop is not None:
            stop()

    def leave(self, n_seen: int) -> None:
        """Stop, and count only the characters that were seen: the consumer reads no further."""
        self._n_seen = n_seen
        self.cancel()
        self._keeper._cut(self)

    @property
    def was_left(self) -> bool:
        """Whether the consumer left before it was told of the end."""
        return self._n_seen is not None

    def said(self) -> list[int]:
        """The tokens that count: those of the text that was, or will be, read."""
        text, tokens = self._reply.text, self._reply.tokens
        seen = text[: self._n_seen]
        if len(seen) < len(text) or self._reply.stopped:
            return tokens_of(self._tokenizer, tokens, seen)
        return tokens

    def take(self, event: Event) -> None:
        """Absorb an event of the engine: give out text; at the end tell the session, then the consumer."""
        if self.ended.done():
            return
        piece = self._reply.take(Failed(_translated(event.error)) if isinstance(event, Failed) else event)
        if piece:
            self.chunks.put(Text(piece))
        if self._reply.ended:
            self._end()
        elif self._reply.stopped:
            self.cancel()

    def fail(self, error: KvasirError) -> None:
        """End in an error that is a fault of ours: nothing is asked of the session, whose fault it may be."""
        if not self.ended.done():
            self._close(Error(error))

    def _end(self) -> None:
        try:
            completion = self._reply.outcome()
        except KvasirError as error:
            self._finish(Error(error))
        else:
            self._finish(Done(completion.finish_reason, completion.usage, 0, completion))

    def _finish(self, outcome: Done | Error) -> None:
        self.outcome = outcome
        n_tokens = self._keeper._keep(self)
        if isinstance(outcome, Done):
            outcome = replace(outcome, n_tokens=n_tokens)
        self._close(outcome)

    def _close(self, outcome: Done | Error) -> None:
        self.outcome = outcome
        self.ended.set_result(None)
        self.chunks.put(outcome)


class Pump:
    """The thread that turns engine events into chunks, for all sessions of a service."""

    def __init__(self) -> None:
        self._mail: SimpleQueue[tuple[Run, Event] | None] = SimpleQueue()
        self._thread = threading.Thread(target=_pump, args=(self._mail,), name="kvasir-sessions", daemon=True)
        self._thread.start()

    def sink(self, run: Run) -> Sink:
        """Return what the engine delivers a run's events to."""
        return Sink(self._mail, run)

    def close(self) -> None:
        """Take what has come, then end the thread. Idempotent."""
        self._mail.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join()


class Sink:
    """Where the engine's thread puts the events of one run; never blocks."""

    def __init__(self, mail: SimpleQueue[tuple[Run, Event] | None], run: Run) -> None:
        self._mail = mail
        self._run = run

    def put(self, event: Event) -> None:
        """Hand an event to the pump."""
        self._mail.put((self._run, event))


def start(
    model: Model, pump: Pump, keeper: Keeper, tokens: list[int], sampling: Sampling, *, n_resumed: int, **options: Any
) -> Run:
    """Send a request to a worker and return its run; `options` are fields of `Request`."""
    try:
        engine = model._running_engine()
        request, reply = model._request(tokens, sampling, n_resumed=n_resumed, **options)
        run = Run(keeper, model._weights.tokenizer, tokens, reply, n_resumed=n_resumed)
        run.started(partial(engine.cancel, engine.submit(request, pump.sink(run))))
    except EngineStopped as error:
        raise _translated(error) from None
    return run


def tokens_of(tokenizer: Tokenizer, tokens: list[int], text: str) -> list[int]:
    """Tokens whose text is exactly `text`, the beginning of what `tokens` say: as many of them as end within it.

    Where it ends inside a token, as before a stop string, the rest is tokenized anew.
    """
    detokenizer, shown = Detokenizer(tokenizer.vocab), 0
    n_kept, n_shown = 0, 0
    for i, token in enumerate(tokens):
        shown += len(detokenizer.feed(token))
        if shown > len(text):
            break
        if detokenizer.is_whole:
            n_kept, n_shown = i + 1, shown
    rest = text[n_shown:]
    return tokens[:n_kept] + (tokenizer.encode(rest, add_special=False) if rest else [])


def _pump(mail: SimpleQueue[tuple[Run, Event] | None]) -> None:
    while (letter := mail.get()) is not None:
        run, event = letter
        try:
            run.take(event)
        except Exception as error:  # a fault of ours costs one reply, never the thread that serves all
            log.exception("a reply failed because of an error that is a fault of ours")
            run.cancel()
            run.fail(KvasirError(f"the reply failed: {type(error).__name__}: {error}."))
        del letter, run, event  # a stream that is dropped must not be held until the next event


def _translated(error: KvasirError) -> KvasirError:
    if isinstance(error, EngineStopped):
        return WorkerStopped(
            f"the session's worker stopped: {error.message} Restore a snapshot, or begin a new session."
        )
    return error
