"""A session: a list of tokens that grows by input and by replies, pinned to one worker.

Owns the ledger: every token that was read or said, in order. The KV belongs to the worker's engine, which keeps it in
a slot or in the cache; whoever sends the ledger again pays only for what is new. So a session that nobody uses costs
its list of tokens and nothing else, and there may be any number of them.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from dataclasses import replace
from typing import TYPE_CHECKING, Unpack

from kvasir.errors import (
    BadOption,
    Closed,
    KvasirError,
    SessionBusy,
    SessionNotFound,
)
from kvasir.service import checks, snapshot
from kvasir.service.chunks import Done
from kvasir.service.generation import Generation
from kvasir.service.ledger import Ledger, check_goes_on, check_room, same_choice
from kvasir.service.options import SamplingOptions
from kvasir.service.run import Pump, Run, start
from kvasir.service.snapshot import Snapshot
from kvasir.service.stream import Stream
from kvasir.types import FinishReason, Sampling

if TYPE_CHECKING:
    from kvasir.service.model import Model
    from kvasir.service.sessions import Service


class Session:
    """A text that stays in memory. `append_input` adds to it, `generate_stream` lets the model go on.

    Comes from `Service.create_session`; use it in a `with` block, or `end()` it. All calls may come from any thread and
    from asyncio. `id` is what the calls of the service take, `worker` the number of the worker it is pinned to.
    """

    def __init__(
        self,
        service: Service,
        model: Model,
        pump: Pump,
        *,
        id: str,  # noqa: A002 - what it is called everywhere
        worker: int,
        sampling: Sampling,
        scope: str | None,
        priority: int,
        ledger: Ledger,
    ) -> None:
        self.id = id
        self.worker = worker
        self._service = service
        self._model = model
        self._pump = pump
        self._sampling = sampling
        self._scope = scope
        self._priority = priority
        self._ledger = ledger
        self._lock = threading.RLock()
        self._run: Run | None = None
        self._reading: Stream | None = None
        self._over = False

    # What users call

    @property
    def tokens(self) -> list[int]:
        """Every token of it: read, said, and appended but not read yet. A reply counts once it has ended.

        Waits for a reply that was cancelled or left, a tick at most; so do the others that look.
        """
        self._settled()
        return self._ledger.all

    @property
    def n_tokens(self) -> int:
        """How many tokens it has."""
        return len(self.tokens)

    @property
    def text(self) -> str:
        """All of it as text, special tokens by their names."""
        return self._model.detokenize(self.tokens, special=True)

    @property
    def busy(self) -> bool:
        """Whether a reply is being generated."""
        run = self._run
        return run is not None and not run.ended.done()

    def append_input(self, text: str | bytes) -> None:
        """Add text: only what is new, never the whole history. Nothing is computed yet.

        Tokenized as it is given: names of special tokens are read as those, and nothing is put before it, not even the
        token that the vocabulary begins texts with. May be called many times, and while a reply is generated: it then
        comes after the reply. Raises `ContextFull` where it does not fit.
        """
        self._check_open()
        tokens = self._model.tokenize(text, add_special=False, parse_special=True)
        with self._lock:
            self._check_open()
            check_room(self.id, len(self._ledger.all) + len(tokens), self._model.limit)
            self._ledger = self._ledger._replace(pending=self._ledger.pending + tuple(tokens))

    def generate_stream(self, max_new_tokens: int | None = None, **overrides: Unpack[SamplingOptions]) -> Generation:
        """Read what was appended and go on from there; the stream gives out chunks as they come.

        `overrides` change the session's sampling for this reply. Without new input, a reply that ended at its length or
        was cancelled goes on as if it had not been. Raises `SessionBusy` while another reply is generated (one that was
        cancelled is waited for, a tick at most), `BadRequest` where there is nothing to go on from, `ContextFull` where
        no token fits any more, `QueueFull`.
        """
        self._settled()
        return self._start(max_new_tokens, overrides)

    def cancel_generate(self) -> None:
        """Stop the reply that is generated, if one is; returns at once. What was made counts and stays in memory."""
        self._check_open()
        if (run := self._run) is not None:
            run.cancel()

    def end(self) -> None:
        """End the session: its id is not known any more, and a reply that is generated is cancelled."""
        self._service.end_session(self.id)

    def snapshot(self) -> bytes:
        """Return the session as bytes, which `Service.restore_session` takes, in another process too.

        They hold tokens, not KV: that comes from the cache, or the tokens are read again. Raises `SessionBusy` while a
        reply is generated.
        """
        self._settled()
        with self._lock:
            self._check_idle()
            ledger, same = self._ledger, same_choice(self._ledger.said_with, self._sampling)
            return snapshot.pack(
                Snapshot(
                    vocab=self._service._vocab,
                    tokens=list(ledger.tokens),
                    pending=list(ledger.pending),
                    sampling=snapshot.sampling_changes(self._sampling),
                    scope=self._scope,
                    priority=self._priority,
                    n_said=ledger.n_said if same else 0,
                    is_complete=ledger.is_complete,
                )
            )

    def fork(self) -> Session:
        """Return a second session with the same past, on the same worker, where that is in memory.

        From here on they differ. Raises `SessionBusy` while a reply is generated.
        """
        self._settled()
        with self._lock:
            self._check_idle()
            return self._service._adopt(
                self._ledger, self._sampling, scope=self._scope, priority=self._priority, worker=self.worker
            )

    # The same in asyncio

    async def aappend_input(self, text: str | bytes) -> None:
        """`append_input` in asyncio; tokenizing runs in a thread."""
        await asyncio.to_thread(self.append_input, text)

    async def agenerate_stream(
        self, max_new_tokens: int | None = None, **overrides: Unpack[SamplingOptions]
    ) -> Generation:
        """`generate_stream` in asyncio: `async for chunk in await session.agenerate_stream()`."""
        if (run := self._run) is not None and run.cancelled:
            await asyncio.shield(asyncio.wrap_future(run.ended))
        return await asyncio.to_thread(self._start, max_new_tokens, overrides)

    async def acancel_generate(self) -> None:
        """`cancel_generate` in asyncio; waits until the reply has ended."""
        self.cancel_generate()
        if (run := self._run) is not None:
            await asyncio.shield(asyncio.wrap_future(run.ended))

    async def aend(self) -> None:
        """`end` in asyncio."""
        self.end()

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *exc: object) -> None:
        with contextlib.suppress(SessionNotFound, Closed):  # it was ended inside, or the whole service was
            self.end()

    async def __aenter__(self) -> Session:
        return self

    async def __aexit__(self, *exc: object) -> None:
        self.__exit__()

    def __repr__(self) -> str:
        return f"<kvasir session {self.id} on worker {self.worker}, {self.n_tokens} tokens>"

    # What its runs call

    def _keep(self, run: Run) -> int:
        """Note what a run that has ended said; return the length of the session."""
        with self._lock:
            if self._run is run:
                self._settle(run)
            return len(self._ledger.tokens)

    def _cut(self, run: Run) -> None:
        """Note that the consumer of a run that has ended left before it was told so."""
        with self._lock:
            if self._run is run and run.outcome is not None:
                self._settle(run)

    # How it works

    def _start(self, max_new_tokens: int | None, overrides: SamplingOptions) -> Generation:
        with self._lock:
            self._check_idle()
            sampling = self._chosen(max_new_tokens, overrides)
            ledger, limit = self._ledger, self._model.limit
            n_tokens = len(ledger.all)
            check_goes_on(self.id, ledger)
            check_room(self.id, n_tokens, limit)
            sampling = replace(sampling, max_tokens=min(sampling.max_tokens, limit - n_tokens))
            self._reading = None  # what it was to read, the reply reads
            run = start(
                self._model,
                self._pump,
                self,
                ledger.all,
                sampling,
                n_resumed=ledger.n_resumed(sampling),
                scope=self._scope,
                priority=self._priority,
            )
            # Its first event may be on the way; whoever brings it waits for the lock.
            self._run, self._ledger = run, ledger.reading(sampling)
            return Generation(run, owner=self._service)

    def _settle(self, run: Run) -> None:
        """Make the ledger what was read and said, and have the rest of it read."""
        done = run.outcome if isinstance(run.outcome, Done) else None
        is_complete = done is not None and done.reason is FinishReason.STOP and not run.was_left
        ledger = self._ledger
        self._ledger = ledger.said(run.prompt, run.said(), n_resumed=run.n_resumed, is_complete=is_complete)
        if done is not None and not self._over and (not is_complete or done.completion.stop is not None):
            self._read()

    def _read(self) -> None:
        """Read the ledger to its last token, behind everybody's replies: the token sampled last has not run yet."""
        tokens, priority = list(self._ledger.tokens), self._priority - 1
        with contextlib.suppress(KvasirError):  # it is only warmth: the next reply reads what is missing
            self._reading = self._model._read(tokens, scope=self._scope, priority=priority)

    def _settled(self) -> None:
        """Wait for a reply that was cancelled or left: what it said counts."""
        if (run := self._run) is not None and run.cancelled:
            run.ended.result()

    def _end(self) -> None:
        with self._lock:
            self._over = True
            self._reading = None
            run = self._run
        if run is not None:
            run.cancel()

    def _chosen(self, max_new_tokens: int | None, overrides: SamplingOptions) -> Sampling:
        if "max_tokens" in overrides:
            raise BadOption("max_tokens is called max_new_tokens here.")
        if max_new_tokens is None:
            return self._model._sampling(self._sampling, overrides)
        overrides = {**overrides, "max_tokens": checks.whole("max_new_tokens", max_new_tokens, least=1)}
        return self._model._sampling(self._sampling, overrides)

    def _check_open(self) -> None:
        self._service._check_open()
        if self._over:
            raise SessionNotFound(f"session {self.id!r} has ended; create another one.", id=self.id)

    def _check_idle(self) -> None:
        self._check_open()
        if self.busy:
            raise SessionBusy(
                f"session {self.id!r} is generating; read its stream to the end, or cancel it.", id=self.id
            )
