"""The service: sessions over a few workers of one model.

Owns the sessions by id and which worker each one has. Every call that names a session finds it here and leaves the
rest to it. `Service.current()` is the one thing here that belongs to the whole process.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import weakref
from functools import cached_property, partial
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar, Unpack

from kvasir import native
from kvasir.config import LoadSettings, load_settings
from kvasir.engine import EngineStats
from kvasir.errors import Closed, ModelNotLoaded, SessionNotFound
from kvasir.model.store import resolve
from kvasir.model.weights import ModelInfo, Progress
from kvasir.service import checks, snapshot
from kvasir.service.generation import Generation
from kvasir.service.ledger import Ledger
from kvasir.service.options import SamplingOptions
from kvasir.service.run import Pump
from kvasir.service.session import Session
from kvasir.service.workers import Workers, check_count
from kvasir.types import Sampling


class Service:
    """Stateful sessions over one model. `load` it; use it in a `with` block, or `close()` it.

    >>> service = kvasir.Service.load("smollm2", workers=2)
    >>> with service.create_session(temperature=0.7) as session:
    ...     service.append_input(session.id, "Once upon a time")
    ...     for chunk in service.generate_stream(session.id, max_new_tokens=64):
    ...         print(chunk)

    Any thread may call anything. Calls that take an id raise `SessionNotFound` for one that is unknown or has ended.
    """

    _loaded: ClassVar[Service | None] = None  # the last one loaded, until it is closed

    def __init__(self, workers: Workers) -> None:
        self._workers = workers
        self._pump = Pump()
        self._sessions: dict[str, Session] = {}
        self._finalizer = weakref.finalize(self, _shut, workers, self._pump)

    # Opening and closing

    @classmethod
    def load(
        cls,
        ref: str | os.PathLike[str] | None = None,
        *,
        workers: int = 1,
        progress: Progress | None = None,
        **options: Any,
    ) -> Service:
        """Open a model, as `kvasir.load` does, with so many workers; it becomes `Service.current()`.

        Each worker has a context of its own: `context_size` and `slots` are each worker's. The weights and the cache
        they share. Raises `InvalidWorkerCount`, and what `kvasir.load` raises.
        """
        check_count(workers)
        settings = load_settings(options)
        path = resolve(ref, model_dir=settings.model_dir)
        return cls.open(path, settings, workers=workers, progress=progress)

    @classmethod
    def open(
        cls,
        path: Path,
        settings: LoadSettings,
        *,
        workers: int = 1,
        core: ModuleType = native,
        progress: Progress | None = None,
    ) -> Service:
        """Open a file with settings already made; `core` replaces the native core, as tests do."""
        service = cls(Workers.open(path, settings, workers, core=core, progress=progress))
        Service._loaded = service
        return service

    @classmethod
    def current(cls) -> Service:
        """Return the service that was loaded last; `ModelNotLoaded` where there is none, or it was closed."""
        service = Service._loaded
        if service is None or service.closed:
            raise ModelNotLoaded("no service is loaded; call kvasir.Service.load() first.")
        return service

    @classmethod
    def reload(
        cls, ref: str | os.PathLike[str] | None = None, *, workers: int | None = None, **options: Any
    ) -> Service:
        """Load another model in place of the current one, and return the new service.

        The old one serves until the new one is ready, and is then closed: its streams end in an `Error`. Where loading
        fails it stays. Both are in memory for a moment; close the old one first where that is too much. `workers` is by
        default what the old one has. A snapshot takes a session over, if the vocabulary is the same.
        """
        old = Service._loaded if Service._loaded is not None and not Service._loaded.closed else None
        n_workers = workers if workers is not None else old.n_workers if old is not None else 1
        service = cls.load(ref, workers=n_workers, **options)
        if old is not None:
            old.close()
        return service

    def close(self) -> None:
        """End all sessions and free the memory; streams still open end in an `Error`. Idempotent."""
        self._finalizer()
        self._sessions.clear()
        if Service._loaded is self:
            Service._loaded = None

    @property
    def closed(self) -> bool:
        """Whether the service was closed."""
        return not self._finalizer.alive

    # Sessions

    def create_session(
        self,
        *,
        sampling: Sampling | None = None,
        scope: str | None = None,
        priority: int = 0,
        **options: Unpack[SamplingOptions],
    ) -> Session:
        """Begin an empty session; it belongs to the next worker in turn, for life.

        `options` are the fields of `kvasir.Sampling`, for all replies of the session. Sessions of one `scope` share
        what they have computed, and no others; higher `priority` goes first.
        """
        self._check_open()
        chosen = self._workers[0]._sampling(sampling, options)
        priority = checks.whole("priority", priority)
        return self._adopt(Ledger(), chosen, scope=scope, priority=priority, worker=self._workers.next())

    def append_input(self, id: str, text: str | bytes) -> None:  # noqa: A002 - what it is called everywhere
        """Add text to a session: `Session.append_input`."""
        self.session(id).append_input(text)

    def generate_stream(
        self,
        id: str,  # noqa: A002
        max_new_tokens: int | None = None,
        **overrides: Unpack[SamplingOptions],
    ) -> Generation:
        """Let a session go on: `Session.generate_stream`."""
        return self.session(id).generate_stream(max_new_tokens, **overrides)

    def cancel_generate(self, id: str) -> None:  # noqa: A002
        """Stop a session's reply and keep what was made: `Session.cancel_generate`."""
        self.session(id).cancel_generate()

    def end_session(self, id: str) -> None:  # noqa: A002
        """End a session; a reply that is generated is cancelled. What it computed others may still reuse."""
        session = self.session(id)
        if self._sessions.pop(session.id, None) is None:
            raise self._unknown(id)
        session._end()

    def restore_session(self, data: bytes) -> Session:
        """Begin a session where a snapshot stood: `Session.snapshot` gave the bytes, here or in another process."""
        self._check_open()
        saved = snapshot.unpack(data, vocab=self._vocab)
        sampling = Sampling.of(None, **saved.sampling)
        ledger = Ledger(tuple(saved.tokens), tuple(saved.pending), saved.n_said, sampling, saved.is_complete)
        return self._adopt(ledger, sampling, scope=saved.scope, priority=saved.priority, worker=self._workers.next())

    def session(self, id: str) -> Session:  # noqa: A002
        """Return the session with this id."""
        self._check_open()
        session = self._sessions.get(str(id))
        if session is None:
            raise self._unknown(id)
        return session

    @property
    def sessions(self) -> list[str]:
        """The ids of all sessions, oldest first."""
        return list(self._sessions)

    # The same in asyncio

    @classmethod
    async def aload(cls, ref: str | os.PathLike[str] | None = None, *, workers: int = 1, **options: Any) -> Service:
        """`load` in asyncio; the work runs in a thread."""
        return await asyncio.to_thread(partial(cls.load, ref, workers=workers, **options))

    @classmethod
    async def areload(
        cls, ref: str | os.PathLike[str] | None = None, *, workers: int | None = None, **options: Any
    ) -> Service:
        """`reload` in asyncio; the work runs in a thread."""
        return await asyncio.to_thread(partial(cls.reload, ref, workers=workers, **options))

    async def acreate_session(
        self,
        *,
        sampling: Sampling | None = None,
        scope: str | None = None,
        priority: int = 0,
        **options: Unpack[SamplingOptions],
    ) -> Session:
        """`create_session` in asyncio."""
        return self.create_session(sampling=sampling, scope=scope, priority=priority, **options)

    async def aappend_input(self, id: str, text: str | bytes) -> None:  # noqa: A002
        """`append_input` in asyncio."""
        await self.session(id).aappend_input(text)

    async def agenerate_stream(
        self,
        id: str,  # noqa: A002
        max_new_tokens: int | None = None,
        **overrides: Unpack[SamplingOptions],
    ) -> Generation:
        """`generate_stream` in asyncio: `async for chunk in await service.agenerate_stream(id)`."""
        return await self.session(id).agenerate_stream(max_new_tokens, **overrides)

    async def acancel_generate(self, id: str) -> None:  # noqa: A002
        """`cancel_generate` in asyncio; waits until the reply has ended."""
        await self.session(id).acancel_generate()

    async def aend_session(self, id: str) -> None:  # noqa: A002
        """`end_session` in asyncio."""
        self.end_session(id)

    async def arestore_session(self, data: bytes) -> Session:
        """`restore_session` in asyncio; the work runs in a thread."""
        return await asyncio.to_thread(self.restore_session, data)

    # Looking

    @property
    def info(self) -> ModelInfo:
        """The facts of the model file."""
        return self._workers[0].info

    @property
    def limit(self) -> int:
        """Tokens one session may have."""
        return self._workers[0].limit

    @property
    def n_workers(self) -> int:
        """How many workers there are."""
        return len(self._workers)

    def stats(self) -> list[EngineStats]:
        """Return what each worker's engine counted."""
        self._check_open()
        return [self._workers[worker].stats() for worker in range(len(self._workers))]

    def __enter__(self) -> Service:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    async def __aenter__(self) -> Service:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await asyncio.to_thread(self.close)

    def __repr__(self) -> str:
        kind = "closed kvasir.Service" if self.closed else "kvasir.Service"
        return f"<{kind} {self.info.description!r}, {self.n_workers} workers, {len(self._sessions)} sessions>"

    @cached_property
    def _vocab(self) -> bytes:
        return snapshot.vocab_hash(self._workers[0]._weights.native.vocab)

    def _adopt(self, ledger: Ledger, sampling: Sampling, *, scope: str | None, priority: int, worker: int) -> Session:
        session = Session(
            self,
            self._workers[worker],
            self._pump,
            # Random, so that an id of a service that was replaced never names another's session.
            id=secrets.token_hex(8),
            worker=worker,
            sampling=sampling,
            scope=scope,
            priority=priority,
            ledger=ledger,
        )
        self._sessions[session.id] = session
        return session

    def _check_open(self) -> None:
        if self.closed:
            raise Closed("the service is closed; load it again.")

    def _unknown(self, id: object) -> SessionNotFound:  # noqa: A002
        return SessionNotFound(f"there is no session {id!r}; create one with create_session().", id=str(id))


def _shut(workers: Workers, pump: Pump) -> None:
    """Stop the engines, which answer every open request, then give those answers out."""
    workers.close()
    pump.close()
