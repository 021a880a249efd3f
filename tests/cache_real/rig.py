"""Engines on real llama.cpp with a real cache, joined as the service joins them.

`opened` gives an engine that is ticked by hand and keeps every logit; closing it closes its cache too, so that what a
later one finds came from disk. `running` gives an engine with its thread and the wall clock. Blocks are small here, so
that prompts of a few hundred tokens have several.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from kvasir import native
from kvasir.cache import Cache
from kvasir.cache.files import Files
from kvasir.config import LoadSettings, StoreSettings, load_settings
from kvasir.engine import Binding, Done, Engine, EngineSettings, Event, Failed, Tokens
from kvasir.model.weights import Weights
from kvasir.service.caching import bind, cache_settings
from kvasir.service.settings import engine_settings
from tests.engine_real.rig import Rig, Taken, request
from tests.engine_real.test_bits import OneRow

BLOCK = 32
SMALL_BLOCKS: dict[str, Any] = {
    "block_tokens": BLOCK, "min_tokens": 8, "cold_min_tokens": 8, "continued_interval": BLOCK,
    "boundary_trim_tokens": 4, "boundary_align_tokens": BLOCK,
}  # fmt: skip
# Every step one row, V in BF16, one thread: nothing is left that may round differently (tests/engine_real/test_bits).
EXACT: dict[str, Any] = {"strategy": OneRow(), "type_v": "bf16"}


class Opened(NamedTuple):
    """An engine ticked by hand, and its cache."""

    rig: Rig
    cache: Cache

    def ask(self, tokens: tuple[int, ...], **options: Any) -> Taken:
        return self.rig.run(tokens, **({"max_tokens": 6} | options))


@dataclass
class Place:
    """A folder that caches live in, one after the other or several at once."""

    folder: Path
    files: Files | None = None
    clock: Callable[[], float] = time.time

    @contextmanager
    def cache(self, settings: LoadSettings, **changes: Any) -> Iterator[Cache]:
        made = cache_settings(settings, StoreSettings(home=self.folder))
        values = {name: getattr(made, name) for name in made.__struct_fields__}
        values |= {"free_share": 0.0, "disk_dir": self.folder / "kv"}
        opened = Cache.open(type(made)(**(values | changes)), files=self.files, clock=self.clock)
        try:
            yield opened
        finally:
            opened.close()

    def bind(self, cache: Cache, weights: Weights, settings: LoadSettings) -> Binding:
        return bind(cache, weights, settings, StoreSettings(home=self.folder), core=native)

    @contextmanager
    def opened(self, path: Path, **options: Any) -> Iterator[Opened]:
        """An engine with the cache of this folder, all of its own."""
        settings = load_settings(SMALL_BLOCKS | {"cache_ram_bytes": 0} | options)
        with weights_of(path, settings) as weights, self.cache(settings) as cache:
            engine = ticked_by_hand(settings, weights)
            with Rig(weights.native, cache=self.bind(cache, weights, settings), **engine) as rig:
                yield Opened(rig, cache)

    def rows(self) -> list[Path]:
        return sorted(self.folder.rglob("*.row"))

    def temps(self) -> list[Path]:
        return sorted(self.folder.rglob("*.tmp"))

    @property
    def n_bytes(self) -> int:
        return sum(path.stat().st_size for path in self.rows())


@contextmanager
def weights_of(path: Path, settings: LoadSettings) -> Iterator[Weights]:
    weights = Weights.open(path, settings, core=native)
    try:
        yield weights
    finally:
        weights.close()


def alone(path: Path, tokens: tuple[int, ...], **options: Any) -> Taken:
    """Run one request on an engine that has no cache and nothing else to do."""
    asked = {name: options.pop(name) for name in ("max_tokens", "temperature", "seed") if name in options}
    settings = load_settings({"slots": 1} | options)
    with weights_of(path, settings) as weights, Rig(weights.native, **ticked_by_hand(settings, weights)) as rig:
        return rig.run(tokens, **({"max_tokens": 6} | asked))


def ticked_by_hand(settings: LoadSettings, weights: Weights) -> dict[str, Any]:
    """The service's engine settings as keyword arguments of `Rig`, which has its own defaults for some."""
    made = engine_settings(settings, weights.adapters)
    own = {"debug": True, "threads": made.threads or 1, "context_size": made.context_size or 1024}
    names = ("slots", "layout", "strategy", "chunk_tokens", "prefill_budget", "max_queue", "batch", "ubatch", "context")
    return {name: getattr(made, name) for name in names} | own


# With a thread


@dataclass(eq=False)
class Watched:
    """A sink that notes when tokens came, and can be waited for."""

    tokens: list[int] = field(default_factory=list)
    at: list[float] = field(default_factory=list)
    end: Done | Failed | None = None
    _over: threading.Event = field(default_factory=threading.Event)

    def put(self, event: Event) -> None:
        if isinstance(event, Tokens):
            self.tokens.extend(event.ids)
            self.at.append(time.perf_counter())
        else:
            self.end = event
            self._over.set()

    def done(self, timeout_s: float = 60.0) -> Done:
        assert self._over.wait(timeout_s), "no end came"
        assert isinstance(self.end, Done), self.end
        return self.end

    def wait_for(self, n_tokens: int, timeout_s: float = 60.0) -> None:
        deadline = time.perf_counter() + timeout_s
        while len(self.tokens) < n_tokens:
            assert time.perf_counter() < deadline, "tokens do not come"
            time.sleep(0.002)

    def gaps(self, since: float, until: float) -> list[float]:
        """Seconds between neighbouring tokens that came in this time."""
        times = [at for at in self.at if since <= at <= until]
        return [later - at for at, later in pairwise(times)]


@dataclass
class Running:
    """An engine with its thread."""

    engine: Engine
    weights: Weights
    cache: Cache | None
    events: list[Any]

    def submit(self, tokens: tuple[int, ...], **options: Any) -> Watched:
        sink = Watched()
        self.engine.submit(request(self.weights.native, tokens, **({"max_tokens": 6} | options)), sink)
        return sink

    def ask(self, tokens: tuple[int, ...], **options: Any) -> tuple[list[int], int]:
        """Tokens made, and tokens that came from somewhere."""
        sink = self.submit(tokens, **options)
        done = sink.done()
        return sink.tokens, done.usage.cached_tokens

    def settle(self) -> None:
        """Wait until everything that ended is kept and written: the engine does that after it has said `Done`."""
        assert self.cache is not None
        self.engine.call(lambda: None).result(30)
        assert self.cache.flush(30)


@contextmanager
def running(path: Path, *, place: Place | None = None, cache: Cache | None = None, **options: Any) -> Iterator[Running]:
    """An engine on a cache of its own in `place`, or on a `cache` that others share, or on none."""
    changes = options.pop("changes", {})
    settings = load_settings(SMALL_BLOCKS | {"cache_ram_bytes": 0, "threads": 1, "context_size": 1024} | options)
    events: list[Any] = []
    with weights_of(path, settings) as weights:
        made = replace(engine_settings(settings, weights.adapters), observe=events.append)
        if cache is not None:
            assert place is not None
            binding = place.bind(cache, weights, settings)
            with _engine(weights, made, binding) as engine:
                yield Running(engine, weights, cache, events)
        elif place is not None:
            with ExitStack() as stack:
                own = stack.enter_context(place.cache(settings, **changes))
                engine = stack.enter_context(_engine(weights, made, place.bind(own, weights, settings)))
                yield Running(engine, weights, own, events)
        else:
            with _engine(weights, made, None) as engine:
                yield Running(engine, weights, None, events)


def _engine(weights: Weights, settings: EngineSettings, binding: Binding | None) -> Engine:
    return Engine.open(weights.native, settings, cache=binding)
