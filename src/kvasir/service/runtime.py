"""Several models at once, over one cache.

Owns which models are loaded, by id, and the cache they share: one quota of memory, one writer, one set of files, which
stays while models come and go. What a model saves, and in which tiers, each one says for itself when it is loaded.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
import weakref
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any

from kvasir import native
from kvasir.config import LOAD_OPTIONS, LoadSettings, load_settings, store_settings
from kvasir.errors import BadOption, Closed, ModelNotLoaded, suggest
from kvasir.model.store import resolve
from kvasir.model.weights import Progress
from kvasir.service.cache_view import CacheView, OpenCache
from kvasir.service.caching import cache_settings
from kvasir.service.model import Model

RUNTIME_OPTIONS = (
    "cache_dir", "cache_disk_bytes", "cache_ram_bytes", "cache_tmpfs_dir", "cache_tmpfs_bytes", "cache_pressure",
    "cache_pressure_high", "cache_pressure_low", "block_tokens",
)  # fmt: skip
"""Options of the shared cache: they are the runtime's, not a model's."""

# A request on a model that is being replaced may go on for so long; most end sooner.
DRAIN_S = 30.0


class Runtime:
    """Models that share one cache. Use it in a `with` block, or `close()` it.

    >>> with kvasir.Runtime(cache_ram_bytes=1 << 30) as runtime:
    ...     tiny = runtime.load("smollm2", id="tiny")
    ...     print(runtime.models["tiny"].generate("Once upon a time", max_tokens=16).text)

    Options are those of `kvasir.load` that describe the cache: its folders, its sizes, its block size. Any thread may
    call anything. A model loaded again finds what it left: the cache outlives its models.
    """

    def __init__(self, **options: Any) -> None:
        for name in options:
            if name in LOAD_OPTIONS and name not in RUNTIME_OPTIONS:
                raise BadOption(f"{name!r} is a model's option; give it to Runtime.load().")
            if name not in RUNTIME_OPTIONS:
                raise BadOption(f"unknown option {name!r}.{suggest(name, RUNTIME_OPTIONS)}")
        self._opened = OpenCache.open(cache_settings(load_settings(options), store_settings()))
        self._lock = threading.Lock()
        self._models: dict[str, Model] = {}
        self._ends: list[weakref.finalize[Any, Model]] = []  # of every model that is not closed, replaced ones too
        self._finalizer = weakref.finalize(self, _shut, self._ends, self._opened)

    def load(
        self,
        ref: str | os.PathLike[str] | None = None,
        *,
        id: str | None = None,  # noqa: A002 - what it is called everywhere
        progress: Progress | None = None,
        drain_s: float = DRAIN_S,
        **options: Any,
    ) -> Model:
        """Open a model, as `kvasir.load` does, under an id; without one, under the name of its file.

        Where the id is in use the new model takes its place: it is loaded first, so that a failure changes nothing;
        then new requests get it, while those that run on the old one may go on for `drain_s` seconds before that is
        closed. Other models notice nothing. Returns when the old one is gone.
        """
        for name in options:
            if name in RUNTIME_OPTIONS:
                raise BadOption(f"{name!r} is an option of the shared cache; give it to kvasir.Runtime().")
        settings = load_settings(options)
        path = resolve(ref, model_dir=settings.model_dir)
        return self.open(path, settings, id=id, progress=progress, drain_s=drain_s)

    def open(
        self,
        path: Path,
        settings: LoadSettings,
        *,
        id: str | None = None,  # noqa: A002
        core: ModuleType = native,
        progress: Progress | None = None,
        drain_s: float = DRAIN_S,
    ) -> Model:
        """Open a file with settings already made; `core` replaces the native core, as tests do."""
        name = _checked_id(id if id is not None else path.stem)
        self._check_open()
        model = Model.open(path, settings, core=core, progress=progress, cache=self._opened)
        model._holds = self  # a runtime dropped while its model is held would close under it
        with self._lock:
            if self.closed:
                model.close()
            self._check_open()
            old = self._models.get(name)
            self._models[name] = model
            self._ends.append(model._finalizer)
        if old is not None:
            self._end(old, drain_s)
        return model

    async def aload(self, ref: str | os.PathLike[str] | None = None, **options: Any) -> Model:
        """`load` in asyncio; the work runs in a thread."""
        return await asyncio.to_thread(partial(self.load, ref, **options))

    @property
    def models(self) -> Mapping[str, Model]:
        """The models loaded now, by id: a view of this moment."""
        self._check_open()
        with self._lock:
            return MappingProxyType({name: model for name, model in self._models.items() if not model.closed})

    def model(self, id: str) -> Model:  # noqa: A002
        """Return the model with this id; `ModelNotLoaded` where there is none."""
        models = self.models
        if id not in models:
            raise _not_loaded(id, models)
        return models[id]

    def unload(self, id: str, *, drain_s: float = 0.0) -> None:  # noqa: A002
        """Close a model; what it computed stays in the cache. Requests that run may go on for `drain_s` seconds."""
        model = self.model(id)
        with self._lock:
            if self._models.get(id) is not model:
                raise _not_loaded(id, self._models)
            del self._models[id]
        self._end(model, drain_s)

    async def aunload(self, id: str, *, drain_s: float = 0.0) -> None:  # noqa: A002
        """`unload` in asyncio; the work runs in a thread."""
        await asyncio.to_thread(partial(self.unload, id, drain_s=drain_s))

    @property
    def cache(self) -> CacheView:
        """The cache all models share: look at it, make it smaller."""
        self._check_open()
        return CacheView(self._opened)

    @property
    def closed(self) -> bool:
        """Whether the runtime was closed."""
        return not self._finalizer.alive

    def close(self) -> None:
        """Close every model, then the cache. Idempotent."""
        self._finalizer()
        self._models.clear()

    def __enter__(self) -> Runtime:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    async def __aenter__(self) -> Runtime:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await asyncio.to_thread(self.close)

    def __repr__(self) -> str:
        if self.closed:
            return "<closed kvasir.Runtime>"
        return f"<kvasir.Runtime with {', '.join(self.models) or 'no models'}>"

    def _end(self, model: Model, drain_s: float) -> None:
        _drain(model, drain_s)
        model.close()
        with self._lock:
            self._ends[:] = [end for end in self._ends if end.alive]

    def _check_open(self) -> None:
        if self.closed:
            raise Closed("the runtime is closed; make another one.")


def _checked_id(name: object) -> str:
    if not isinstance(name, str) or not name:
        raise BadOption(f"id must be a text that is not empty, got {name!r}.")
    return name


def _not_loaded(name: object, models: Mapping[str, Model]) -> ModelNotLoaded:
    known = f"loaded are {', '.join(map(repr, models))}" if models else "none is"
    return ModelNotLoaded(f"no model {name!r} is loaded; {known}.{suggest(str(name), models)}")


def _drain(model: Model, seconds: float) -> None:
    """Wait until nothing runs on a model, for so long at most."""
    deadline = time.monotonic() + seconds
    engine = model._engine
    while engine is not None and engine.stats().requests_open and time.monotonic() < deadline:
        time.sleep(0.005)


def _shut(ends: list[weakref.finalize[Any, Model]], opened: OpenCache) -> None:
    """Close the models, which save into the cache what lives, then the cache."""
    for end in list(ends):
        end()
    opened.close()
